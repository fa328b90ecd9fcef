"""The trainer: one recipe, one run directory, from the first step or the last checkpoint to the end.

It reads from top to bottom: set-up, data, model, checkpoint, step, evaluation, loop. The step is the only clock:
learning rate, samples, augmentation, dropout, evaluation and checkpoint times are functions of (recipe, seed, step).
"""

import contextlib
import fcntl
import json
import math
import platform
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import deepspeed
import torch
import xxhash
import yaml

import vitscale
from vitscale.checkpoint import CHECKPOINTS, DONE_FILE, RECIPE_FILE, CheckpointStore, Index
from vitscale.data import (
    LIBJPEG_TURBO_VERSION,
    ORDER_VERSION,
    Batch,
    Loader,
    Reading,
    on_device,
    to_model_input,
    train_transform,
)
from vitscale.durable import write_text
from vitscale.errors import CheckpointError, DataError, NonFiniteError, RecipeError
from vitscale.evaluation import ModelOutputs, evaluate
from vitscale.flops import accounting, hardware
from vitscale.flops.work import recipe_work
from vitscale.models import Model, build_model, initial_value
from vitscale.recipe import Recipe, differences, read_recipe
from vitscale.training import distributed, fragments
from vitscale.training.engine import Fp32Accumulation, build_engine, is_plain
from vitscale.training.metrics import METRICS_FILE, MetricsWriter
from vitscale.training.plan import Plan
from vitscale.training.progress import TrainingProgress

# ---- The run directory -----------------------------------------------------------------------------------------------


def check_run_dir(recipe: Recipe, run_dir: Path, *, may_resume: bool) -> str | None:
    """What a finished run says of itself, or None where there is something to train.

    Raises `RecipeError` where the directory belongs to a run of another recipe, or to any run when none may be resumed.
    """
    saved, done = run_dir / RECIPE_FILE, run_dir / DONE_FILE
    if not saved.exists():
        if any((run_dir / CHECKPOINTS).glob("step-*")):
            raise RecipeError(f"{run_dir} has checkpoints but no {RECIPE_FILE}: restore it, or use another --run-dir")
        return None
    if not may_resume:
        raise RecipeError(f"{run_dir} already holds a run; leave out --resume never to continue it")
    changed = differences(read_recipe(saved).dump(), recipe.dump())
    if changed:
        raise RecipeError(
            f"{run_dir} holds a run of another recipe:\n"
            + "\n".join(f"  {line}" for line in changed)
            + "\nUse another --run-dir, or the recipe that this run began with"
        )
    try:
        return done.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecipeError(f"{done} cannot be read: {error.strerror}") from None


class Trainer:
    """One run. Construct it on every rank, then `run`.

    Raises `RecipeError`, `DataError`, `CheckpointError` or `NonFiniteError` for what a person can mend.
    """

    # ---- Set-up ------------------------------------------------------------------------------------------------------

    def __init__(self, recipe: Recipe, plan: Plan, run_dir: Path, world: distributed.World) -> None:
        self.recipe = recipe
        self.plan = plan
        self.run_dir = run_dir
        self.world = world
        self.dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
        self.progress: TrainingProgress | None = None
        self.gradient_norm = math.nan
        self.bad_samples = 0  # of this rank since the last line of metrics
        for warning in plan.warnings:
            self._say(f"WARNING: {warning}")
        self._set_up_model()
        distributed.set_timeout_everywhere()
        self.lock: IO[str] | None = None
        distributed.on_main(self._claim_run_dir, run_dir)
        self._restore()

    def _claim_run_dir(self) -> None:
        """Take the run directory for this launch: two in one would overwrite each other's checkpoints."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.lock = (self.run_dir / ".lock").open("w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = f"{self.run_dir} is in use by another launch; wait for it, or use another --run-dir"
            raise RecipeError(what) from None
        except OSError:
            pass  # a file system without locks: nothing can be said there
        write_text(self.run_dir / RECIPE_FILE, yaml.safe_dump(self.recipe.dump(), sort_keys=False))

    def _say(self, message: str) -> None:
        if self.world.is_main:
            if self.progress is not None:
                self.progress.note(message)
            else:
                print(message, flush=True)

    # ---- Data --------------------------------------------------------------------------------------------------------

    def _open_loader(self, stop_step: int) -> Loader:
        data = self.recipe.data
        return Loader(
            self.plan.manifest,
            self.plan.order,
            image_size=data.image_size,
            transform=train_transform(data.crop, data.flip),
            rank=self.world.rank,
            world=self.world.size,
            seed=self.recipe.seed,
            reading=Reading.of(data, pinned=self.world.device.type == "cuda"),
            start_step=self.step,
            stop_step=stop_step,
            digest=self.recipe.logging.batch_digest,
        )

    # ---- Model -------------------------------------------------------------------------------------------------------

    def _set_up_model(self) -> None:
        if self.recipe.parallelism.zero_stage == 3:
            # Each parameter is divided among the ranks as it is made: no rank ever holds the whole model.
            with deepspeed.zero.Init(config_dict_or_path=self.plan.config):
                model = build_model(self.recipe, self.plan.num_classes)
        else:
            model = build_model(self.recipe, self.plan.num_classes).to(self.world.device, self.dtype)
        self.engine = build_engine(self.recipe, model, self.plan.config)
        if self.recipe.parallelism.zero_stage == 0 and self.recipe.precision == "bf16" and self.plan.accumulation > 1:
            Fp32Accumulation(self.engine)
        self.work = recipe_work(self.recipe, self.plan.num_classes)
        self.peak_flops = None
        if self.world.device.type == "cuda" and self.recipe.precision == "bf16":
            self.peak_flops = hardware.peak_flops(torch.cuda.get_device_name(), "bf16")

    # ---- Checkpoint --------------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Continue from the newest checkpoint that verifies, or begin with the initial weights."""
        self.store = CheckpointStore(self.run_dir / CHECKPOINTS, rank=self.world.rank, gather=distributed.gather)
        reader = self.store.newest(lambda problem: self._say(f"WARNING: {problem}"))
        self.selection: dict[str, Any] = {"best": None, "best_step": None, "without_better": 0}
        if reader is None:
            if (self.run_dir / METRICS_FILE).exists():
                self._say(f"WARNING: {self.run_dir} holds a run without a checkpoint: it begins again at step 0")
            whole = fragments.shapes(self.engine)
            fragments.load(self.engine, _InitialValues(self.engine.module, whole, self.recipe.seed), optimizer_steps=0)
            self.step = 0
            return
        self._check_same_data(reader.index)
        reader.check_shapes(fragments.shapes(self.engine))
        fragments.load(self.engine, reader.read, optimizer_steps=reader.index.optimizer_steps)
        self.step = reader.index.step
        self.selection = reader.index.selection
        decoder = reader.index.versions.get("libjpeg_turbo", LIBJPEG_TURBO_VERSION)
        if decoder != LIBJPEG_TURBO_VERSION:
            self._say(
                f"WARNING: images were decoded by libjpeg-turbo {decoder} so far, and are by {LIBJPEG_TURBO_VERSION} "
                f"from here on: pixels may differ in their last bits"
            )
        self._say(f"resumed from {reader.folder} at step {self.step:,} of {self.plan.total_steps:,}")

    def _data_identity(self) -> dict[str, Any]:
        return {
            "manifest_sha256": self.plan.manifest.sha256,
            "num_samples": self.plan.manifest.num_samples,
            "order_version": ORDER_VERSION,
            "segments": self.plan.order.segments,
            "class_names": list(self.plan.manifest.class_names),
        }

    def _check_same_data(self, index: Index) -> None:
        now = self._data_identity()
        changed = [key for key in now if index.data.get(key) != now[key]]
        if changed:
            raise CheckpointError(
                f"{self.store.root}: this run began on other data: {', '.join(changed)} of "
                f"{self.plan.manifest.where} differ from the checkpoint's. Point data.root at "
                f"the dataset that it began with, or start over in another --run-dir"
            ).on_all_ranks()

    def _save(self) -> None:
        index = Index(
            step=self.step,
            world_size=self.world.size,
            shapes=fragments.shapes(self.engine),
            kinds=["master", *fragments.moment_kinds(self.engine)],
            optimizer_steps=self.step,
            recipe=self.recipe.dump(),
            data=self._data_identity(),
            versions={
                "vitscale": vitscale.__version__,
                "torch": torch.__version__,
                "deepspeed": deepspeed.__version__,
                "python": platform.python_version(),
                "libjpeg_turbo": LIBJPEG_TURBO_VERSION,
            },
            selection=self.selection,
        )
        self.store.save(index, fragments.owned(self.engine, self.world.rank, self.world.size))
        self.store.retain(self.recipe.checkpoint.keep, best=self.selection["best_step"])

    # ---- Step --------------------------------------------------------------------------------------------------------

    def _train_step(self, batch: Batch) -> "_Step":
        """One update on one global batch."""
        self.plan.objective.check_labels(batch.labels, self.plan.num_classes)
        rate = self.plan.learning_rate(self.step)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        loss_sum = torch.zeros((), device=self.world.device)
        samples = self._valid_samples(batch)
        is_whole = bool(batch.mask.all())
        # DeepSpeed averages over ranks and micro-batches: with this factor the gradient is that of the global mean.
        scale = self.world.size * self.plan.accumulation / samples
        for micro_step in range(self.plan.accumulation):
            rows = slice(micro_step * self.plan.micro_batch, (micro_step + 1) * self.plan.micro_batch)
            labels = batch.labels[rows].to(self.world.device)
            self._seed_dropout(micro_step)
            logits = self.engine(to_model_input(batch.images[rows], self.world.device, self.dtype))
            losses = self.plan.objective.per_sample_loss(logits, labels)
            if not is_whole:
                losses = torch.where(batch.mask[rows].to(self.world.device), losses, 0.0)
            loss_sum += losses.detach().sum()
            self.engine.backward(losses.sum() * scale)
            if is_plain(self.recipe) and micro_step == self.plan.accumulation - 1:
                self._clip_plain(batch, loss_sum)
            self.engine.step()
        if not is_plain(self.recipe):
            self.gradient_norm = float(self.engine.get_global_grad_norm())
            # DeepSpeed skips an update with a non-finite gradient without a word.
            if self.engine.skipped_steps or not math.isfinite(self.gradient_norm):
                self._refuse_non_finite(batch, loss_sum)
        return _Step(loss_sum, samples, rate)

    def _valid_samples(self, batch: Batch) -> int:
        """Samples of the global batch that count: all, unless damaged ones are left out."""
        if self.recipe.data.bad_samples != "mask":
            return self.recipe.batch.global_size
        samples = distributed.sum_integers(self.world, int(batch.mask.sum()))
        if samples == 0:
            raise DataError(f"step {self.step + 1}: every sample of the batch is damaged").on_all_ranks()
        return samples

    def _clip_plain(self, batch: Batch, loss_sum: torch.Tensor) -> None:
        """Norm, check and clipping of the averaged gradients, where DeepSpeed has none: stage 0 in fp32."""
        limit = self.recipe.optimizer.clip_norm or math.inf
        self.gradient_norm = float(torch.nn.utils.clip_grad_norm_(self.engine.module.parameters(), limit))
        if not math.isfinite(self.gradient_norm):
            self._refuse_non_finite(batch, loss_sum)

    def _seed_dropout(self, micro_step: int) -> None:
        """Dropout is a function of (seed, step, rank, micro-step), so that it needs no state in a checkpoint."""
        if self.recipe.model.dropout:
            key = f"{self.recipe.seed}:{self.step}:{self.world.rank}:{micro_step}"
            torch.manual_seed(xxhash.xxh64_intdigest(key.encode()) >> 1)

    def _refuse_non_finite(self, batch: Batch, loss_sum: torch.Tensor) -> NoReturn:
        """All ranks come here together: the norm is that of the sum over the ranks."""
        outcomes = distributed.gather((math.isfinite(loss_sum.item()), batch.uids.tolist()))
        bad = {rank: uids for rank, (is_finite, uids) in enumerate(outcomes) if not is_finite}
        where = (
            "; ".join(f"rank {rank} (uids {uids[:8]} and {max(0, len(uids) - 8)} more)" for rank, uids in bad.items())
            or "none of the ranks, so it is the backward pass that overflows"
        )
        error = NonFiniteError(
            f"step {self.step + 1}: the gradient is not finite (norm {self.gradient_norm}, learning rate "
            f"{self.plan.learning_rate(self.step):.3g}). The loss is not finite on {where}. "
            f"Nothing of this step was saved: "
            f"the newest checkpoint is that of step {max(self.store.steps(), default=0)}. "
            f"Lower optimizer.lr or set optimizer.clip_norm"
        )
        raise error.on_all_ranks()

    # ---- Evaluation --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _predict(self, images: torch.Tensor) -> ModelOutputs:
        seen: dict[str, torch.Tensor] = {}
        logits = self.engine(to_model_input(images, self.world.device, self.dtype), intermediates=seen)
        return ModelOutputs(logits, seen["pre_logits"])

    def _evaluate(self) -> dict[str, float]:
        if not self.plan.evaluators:
            return {}
        self.engine.eval()
        values = evaluate(self.plan.evaluators, self._predict)
        self.engine.train()
        if self.world.is_main:
            self.metrics.evaluation(self.step, values)
            shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
            self._say(f"step {self.step:,}  {shown}")
        return values

    def _select(self, values: dict[str, float]) -> bool:
        """Note whether this is the best step so far; whether training should end for want of a better one."""
        rule = self.recipe.selection
        if rule is None:
            return False
        value, best = values[rule.metric], self.selection["best"]
        better = best is None or (value > best if rule.mode == "max" else value < best)
        self.selection = (
            {"best": value, "best_step": self.step, "without_better": 0}
            if better
            else {**self.selection, "without_better": self.selection["without_better"] + 1}
        )
        return rule.patience is not None and self.selection["without_better"] >= rule.patience

    def _amend_selection(self) -> None:
        """Note in the checkpoint just saved what the evaluation after it decided."""
        if self.recipe.selection is not None:
            self.store.amend(self.step, self.selection)

    # ---- Loop --------------------------------------------------------------------------------------------------------

    def run(self, stop_at: int | None = None) -> None:
        """Train to the end, or until `stop_at` updates are done; leaves a checkpoint either way."""
        last = self.plan.total_steps if stop_at is None else min(stop_at, self.plan.total_steps)
        if self.world.is_main:
            self.metrics = MetricsWriter(self.run_dir, self.step, self.recipe.logging.tensorboard)
            self.progress = TrainingProgress(self.plan.total_steps)
        values: dict[str, float] = {}
        stopped_early = self._has_run_out_of_patience()
        last = self.step if stopped_early else last
        self.engine.train()
        with self.progress or contextlib.nullcontext(), self._open_loader(last) as loader:
            pace = _Pace(self.step)
            for batch in pace.timed(on_device(loader, self.world.device)):
                step = self._train_step(batch)
                self.step += 1
                self.bad_samples += batch.bad_samples
                if self.step % self.recipe.logging.every == 0 or self.step == last:
                    self._log(batch, step, pace)
                with pace.paused():
                    # Before evaluating: whatever is wrong with the test data, the weights are safe.
                    saves = self.step == last or self._is_due(self.plan.checkpoint_every)
                    if saves:
                        self._save()
                    if self._is_due(self.plan.evaluate_every) or self.step == self.plan.total_steps:
                        values = self._evaluate()
                        stopped_early = self._select(values)
                        if saves:
                            self._amend_selection()
                        elif stopped_early or self.selection["best_step"] == self.step:
                            self._save()
                if stopped_early:
                    break
        is_done = stopped_early or self.step == self.plan.total_steps
        if is_done and not values:
            values = self._evaluate()  # the process that took the last step ended before it could say so
        if self.world.is_main:
            self.metrics.close()
        if is_done:
            distributed.on_main(lambda: self._write_done(values, stopped_early), self.run_dir)
        else:
            self._say(f"stopped at step {self.step:,}, as --stop-at {stop_at} asks; repeat the command to go on")
        if self.lock is not None:
            self.lock.close()

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0

    def _has_run_out_of_patience(self) -> bool:
        rule = self.recipe.selection
        return rule is not None and rule.patience is not None and self.selection["without_better"] >= rule.patience

    def _log(self, batch: Batch, step: "_Step", pace: "_Pace") -> None:
        """One line of metrics; all ranks take part, rank 0 writes."""
        seconds, waited = pace.per_step(self.step)
        numbers = [step.loss_sum.item(), waited, self._peak_memory(), self.bad_samples]
        rows = distributed.gather_numbers(self.world, numbers)
        self.bad_samples = 0
        digest = distributed.sum_integers(self.world, batch.digest) if batch.digest is not None else None
        if not self.world.is_main:
            return
        global_batch = self.recipe.batch.global_size
        loss = rows[:, 0].sum().item() / step.samples
        images_per_s = global_batch / seconds
        line: dict[str, float | str] = {
            "loss": loss,
            "lr": step.rate,
            "grad_norm": self.gradient_norm,
            "images_per_s": images_per_s,
            "data_wait": rows[:, 1].max().item(),
            "step_time_s": seconds,
            "world_size": self.world.size,
            "exaflops": accounting.exaflops(self.work.accounting_macs, self.step * global_batch),
            "peak_memory_bytes": int(rows[:, 2].max().item()),
        }
        mfu = accounting.mfu(images_per_s, self.work.macs, self.world.size, self.peak_flops)
        if mfu is not None:
            line["mfu"] = mfu
        if self.recipe.data.bad_samples != "error":
            line["bad_samples"] = int(rows[:, 3].sum().item())
        if digest is not None:
            line["batch_digest"] = f"{digest:016x}"
        self.metrics.training(self.step, line)
        if self.progress is not None:
            self.progress.update(self.step, loss=loss, lr=step.rate, images_per_s=images_per_s)

    def _peak_memory(self) -> int:
        """Bytes: what torch allocated on a CUDA device, the process's resident set on a CPU."""
        if self.world.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def _write_done(self, values: dict[str, float], stopped_early: bool) -> None:
        summary = {
            "step": self.step,
            "total_steps": self.plan.total_steps,
            "stopped_early": stopped_early,
            "best_step": self.selection["best_step"],
            "exaflops": accounting.exaflops(self.work.accounting_macs, self.step * self.recipe.batch.global_size),
            "evaluation": values,
        }
        write_text(self.run_dir / DONE_FILE, json.dumps(summary, indent=1) + "\n")
        self._say(f"done: {self.step:,} steps, checkpoints and metrics in {self.run_dir}")


class _Step(NamedTuple):
    """One update: this rank's sum of losses, the samples of all ranks that counted, the learning rate."""

    loss_sum: torch.Tensor
    samples: int
    rate: float


class _InitialValues:
    """The initial weights as a source of fragments; the last parameter drawn is kept, as its pieces come together."""

    def __init__(self, model: Model, shapes: dict[str, list[int]], seed: int) -> None:
        self._model, self._shapes, self._seed = model, shapes, seed
        self._name: str | None = None
        self._value = torch.empty(0)

    def __call__(self, kind: str, name: str, start: int, length: int) -> torch.Tensor:
        if name != self._name:
            self._name = name
            self._value = initial_value(self._model, name, torch.Size(self._shapes[name]), self._seed).view(-1)
        return self._value[start : start + length]


class _Pace:
    """Seconds a step takes and waits for data, between two lines of metrics; evaluations and checkpoints left out."""

    def __init__(self, step: int) -> None:
        self._start_interval(step)

    def _start_interval(self, step: int) -> None:
        self._step, self._began, self._waited, self._paused = step, time.perf_counter(), 0.0, 0.0

    def timed(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The loader's batches, the wait for each of them counted."""
        batches = iter(loader)
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            self._waited += time.perf_counter() - asked
            if batch is None:
                return
            yield batch

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time in here is no part of any step."""
        began = time.perf_counter()
        yield
        self._paused += time.perf_counter() - began

    def per_step(self, step: int) -> tuple[float, float]:
        """(seconds, seconds waited for data) a step since the last call."""
        steps = max(1, step - self._step)
        seconds = (time.perf_counter() - self._began - self._paused) / steps
        waited = self._waited / steps
        self._start_interval(step)
        return seconds, waited
