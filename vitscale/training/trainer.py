"""The trainer: one recipe, one run directory, from the first step or the last checkpoint to the end.

It reads from top to bottom: set-up, data, model, checkpoint, step, anomalies, evaluation, loop. The step is the only
clock: learning rate, samples, augmentation, dropout, evaluation and checkpoint times are functions of (recipe, seed,
step), and of the batches that were left out.
"""

import contextlib
import json
import math
import platform
import resource
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
import torch
import xxhash

import vitscale
from vitscale.checkpoint import (
    DONE_FILE,
    EMA,
    MASTER,
    RECIPE_FILE,
    CheckpointReader,
    Index,
)
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
from vitscale.errors import (
    CheckpointError,
    DataError,
    NonFiniteError,
    PeerLostError,
    PreemptedError,
    RecipeError,
    StorageError,
    VitscaleError,
)
from vitscale.evaluation import ModelOutputs, evaluate
from vitscale.evaluation.distributed import on_rank_zero
from vitscale.flops import accounting, hardware
from vitscale.flops.work import recipe_work
from vitscale.interruption import Interruption
from vitscale.models import ViT, build_model, compile_blocks, weight_dtype
from vitscale.recipe import Recipe
from vitscale.training import distributed, fragments, replicas, run_directory
from vitscale.training.agreement import Agreement
from vitscale.training.anomalies import Anomaly, AnomalyRecord, Suspects, TrainStep, describe, write_report
from vitscale.training.attention import preferred_attention
from vitscale.training.averaging import WeightAverage
from vitscale.training.engine import Fp32Accumulation, build_engine, forget_gradients, is_plain
from vitscale.training.initial_values import InitialValues
from vitscale.training.metrics import METRICS_FILE, MetricsWriter
from vitscale.training.pace import OwnWork, Pace
from vitscale.training.plan import Plan
from vitscale.training.preflight import preflight
from vitscale.training.profile import StepProfiler, part
from vitscale.training.progress import TrainingProgress, tell
from vitscale.training.saves import Saves
from vitscale.training.watchdog import Watchdog

# Behind the watchdog's, which has more to say.
_AFTER_THE_WATCHDOG_S = 60


class Trainer:
    """One run. Construct it on every rank, then `run`.

    Args:
        watchdog: is told of every progress.
        interruption: what may ask this process to end early.

    Raises `RecipeError`, `DataError`, `CheckpointError`, `NonFiniteError`, `ReplicaError` or `PreemptedError` for
    what a person can mend.
    """

    # ---- Set-up ------------------------------------------------------------------------------------------------------

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        run_dir: Path,
        world: distributed.World,
        watchdog: Watchdog | None = None,
        interruption: Interruption | None = None,
    ) -> None:
        self.recipe = recipe
        self.plan = plan
        self.run_dir = run_dir
        self.world = world
        self.watchdog = watchdog
        self.interruption = interruption
        self.dtype = weight_dtype(recipe)
        self.step = 0
        self.progress: TrainingProgress | None = None
        self.gradient_norm = math.nan
        self.logged_at = self.saved_at = time.monotonic()
        self.line_is_overdue = self.save_is_overdue = False  # the same on all ranks
        self.bad_samples = 0  # of this rank since the last line of metrics
        self.values: dict[str, float] = {}  # of the last evaluation
        self.best_before: dict[str, Any] = {"best": None, "best_step": None}
        for warning in plan.warnings:
            self._say(f"WARNING: {warning}")
        self.own_work = OwnWork(world.device)
        self.profiler = StepProfiler(recipe.profile.steps if world.is_main else 0, run_dir, world.device)
        self.hosts = distributed.gather(socket.gethostname())
        self.working_directory: str | None = None  # what a relative data.root is relative to
        with contextlib.suppress(FileNotFoundError):  # somebody has deleted it
            self.working_directory = str(Path.cwd())
        self.lock: contextlib.ExitStack | None = None  # both of rank 0 alone
        self.metrics: MetricsWriter
        distributed.on_main(self._claim_run_dir, run_dir)
        for line in preflight(recipe, plan, run_dir, world, fragments.checkpoint_bytes(recipe, plan.num_classes)):
            self._say(line)
        self._begin("making the model")
        self._set_up_model()
        self.agreement = Agreement()
        distributed.set_timeout_everywhere(timedelta(seconds=recipe.check.step_timeout_s + _AFTER_THE_WATCHDOG_S))
        self.saves = Saves(recipe, plan.keep_every, run_dir, world, self._say, self._forget_best)
        self._restore()

    def _claim_run_dir(self) -> None:
        self.lock = run_directory.claim(self.run_dir, self.recipe)

    def _renew_run_dir(self) -> None:
        """Where the run directory was moved or deleted, make a whole one: the repeated command finds a run in it."""
        if not self.world.is_main or (self.run_dir / RECIPE_FILE).exists():
            return
        if self.lock is not None:
            self.lock.close()
        with contextlib.suppress(OSError, VitscaleError):  # what is to be saved will tell
            self._claim_run_dir()
            self.metrics.close()
            self.metrics = self._open_metrics()
            self._say(
                f"WARNING: {self.run_dir} was moved or deleted: from here on the run is in a new one of that name"
            )

    def _begin(self, phase: str) -> None:
        """There is progress; the watchdog's clock starts again."""
        if self.watchdog is not None:
            self.watchdog.at(self.step, phase)

    def _say(self, message: str) -> None:
        if self.world.is_main:
            if self.progress is not None:
                self.progress.note(message)
            else:
                tell(message)

    # ---- Data --------------------------------------------------------------------------------------------------------

    def _open_loader(self, start: int, stop: int) -> Loader:
        """The batches of positions [start, stop) of the order."""
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
            start_step=start,
            stop_step=stop,
            digest=self.recipe.logging.batch_digest,
        )

    # ---- Model -------------------------------------------------------------------------------------------------------

    def _set_up_model(self) -> None:
        if self.recipe.parallelism.zero_stage == 3:
            # Each parameter is divided among the ranks as it is made: no rank ever holds the whole model.
            with deepspeed.zero.Init(config_dict_or_path=self.plan.config):
                model = build_model(self.recipe, self.plan.num_classes)
        else:
            with torch.device("meta"):
                model = build_model(self.recipe, self.plan.num_classes)
            model = model.to(self.dtype).to_empty(device=self.world.device)
            if self.recipe.precision == "fp8":
                from vitscale.models.float8 import train_in_float8  # only those who ask for it need torchao

                assert isinstance(model, ViT)
                self._say(f"{train_in_float8(model.blocks, self.world.device)} dense layers train in float8")
            if self.recipe.parallelism.compile:
                compile_blocks(model)
        self.to_input = to_model_input
        if self.recipe.parallelism.compile:
            self.to_input = torch.compile(to_model_input, fullgraph=True, dynamic=False)
        self.engine = build_engine(self.recipe, model, self.plan.config)
        if self.recipe.parallelism.zero_stage == 0 and self.recipe.precision != "fp32" and self.plan.accumulation > 1:
            Fp32Accumulation(self.engine)
        self.work = recipe_work(self.recipe, self.plan.num_classes)
        self.peak_flops = None
        if self.world.device.type == "cuda" and self.recipe.precision == "bf16":
            self.peak_flops = hardware.peak_flops(torch.cuda.get_device_name(), "bf16")

    # ---- Checkpoint --------------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Continue from the newest checkpoint that verifies, or begin with the initial weights."""
        if (self.run_dir / DONE_FILE).exists():
            self._say(f"WARNING: {self.run_dir / DONE_FILE} is damaged, and passed over")
        reader = self._newest_checkpoint()
        if reader is not None:
            self._check_same_data(reader.index)
            run_directory.check_recipe(reader.index.recipe, self.recipe, f"{reader.folder}")
            decoder = reader.index.versions.get("libjpeg_turbo", LIBJPEG_TURBO_VERSION)
            if decoder != LIBJPEG_TURBO_VERSION:
                self._say(
                    f"WARNING: images were decoded by libjpeg-turbo {decoder} so far, and are by "
                    f"{LIBJPEG_TURBO_VERSION} from here on: pixels may differ in their last bits"
                )
        elif (self.run_dir / METRICS_FILE).exists():
            self._say(f"WARNING: {self.run_dir} holds a run without a checkpoint: it begins again at step 0")
        self._load(reader)
        if reader is not None:
            self._say(f"resumed from {reader.folder} at step {self.step:,} of {self.plan.total_steps:,}")

    def _newest_checkpoint(self) -> CheckpointReader | None:
        """The newest that verifies; None where the run has never saved. Raises `CheckpointError`, `StorageError`."""
        self._begin("verifying checkpoints")
        reader = self.saves.store.newest(lambda problem: self._say(f"WARNING: {problem}"))
        known = on_rank_zero(lambda: run_directory.read_newest(self.run_dir))
        if reader is None and known is not None:
            raise run_directory.missing_checkpoints(self.recipe, self.run_dir, known).on_all_ranks()
        if reader is not None and known is not None and reader.index.step < known.step:
            self._say(f"WARNING: step {known.step:,} was saved, and is not there or is unusable")
        if reader is not None and self.world.is_main:
            run_directory.write_newest(self.run_dir, reader.index.step, self.saves.store.root)
        return reader

    def _load(self, reader: CheckpointReader | None) -> None:
        """Take everything that training depends on from a checkpoint, or begin."""
        self._begin("loading weights")
        whole = fragments.shapes(self.engine)
        if reader is None:
            fragments.load(self.engine, InitialValues(self.engine.module, whole, self.recipe.seed), optimizer_steps=0)
            self.step = self.position = self.saved_step = 0
            self.selection: dict[str, Any] = {"best": None, "best_step": None, "without_better": 0, "evaluated": 0}
            state: dict[str, Any] = {}
        else:
            reader.check_shapes(whole)
            fragments.load(self.engine, reader.read, optimizer_steps=reader.index.optimizer_steps)
            self.step = self.saved_step = reader.index.step
            self.position = reader.index.position
            self.selection, state = reader.index.selection, reader.index.anomalies
        self.logged_step = self.saves.newest = self.step
        self.anomalies = AnomalyRecord(self.recipe.anomalies, state)
        self.average: WeightAverage | None = None  # the memory of one is given back before more is taken
        if self.recipe.ema is not None:
            self.average = WeightAverage(self.engine, self.recipe.ema)
            if reader is not None:
                fragments.load_average(self.engine, self.average.values, reader.read)

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
                f"{self.saves.store.root}: this run began on other data: {', '.join(changed)} of "
                f"{self.plan.manifest.where} differ from the checkpoint's. Point data.root at "
                f"the dataset that it began with, or start over in another --run-dir"
            ).on_all_ranks()

    def _save(self) -> None:
        """Hand a checkpoint of this step over to be written."""
        self._begin("saving")
        self.saves.wait()  # whether the best checkpoint was lost decides which are kept
        if self.recipe.check.replicas_every is not None:
            self._compare_replicas()  # what is saved is to be right
        index = Index(
            step=self.step,
            position=self.position,
            world_size=self.world.size,
            shapes=fragments.shapes(self.engine),
            kinds=[MASTER, *fragments.moment_kinds(self.engine), *([EMA] if self.average is not None else [])],
            optimizer_steps=self.step,
            recipe=self.recipe.dump(),
            data=self._data_identity() | {"working_directory": self.working_directory},
            versions={
                "vitscale": vitscale.__version__,
                "torch": torch.__version__,
                "deepspeed": deepspeed.__version__,
                "python": platform.python_version(),
                "libjpeg_turbo": LIBJPEG_TURBO_VERSION,
            },
            selection=self.selection,
            anomalies=self.anomalies.state(),
        )
        average = self.average.values if self.average is not None else None
        owned = fragments.owned(self.engine, self.world.rank, self.world.size, average)
        self._renew_run_dir()
        self.saves.begin(index, owned, best=self.selection["best_step"])
        self.saved_step, self.saved_at, self.save_is_overdue = self.step, time.monotonic(), False

    # ---- Step --------------------------------------------------------------------------------------------------------

    def _train_step(self, batch: Batch) -> TrainStep:
        """One update on one global batch. Raises `Anomaly` on all ranks, and no update is made."""
        self.plan.objective.check_labels(batch.labels, self.plan.num_classes)
        rate = self.plan.learning_rate(self.step)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        step = TrainStep([], torch.zeros((), device=self.world.device), self._valid_samples(batch), rate)
        is_whole = bool(batch.mask.all())
        # DeepSpeed averages over ranks and micro-batches: with this factor the gradient is that of the global mean.
        scale = self.world.size * self.plan.accumulation / step.samples
        mean, limit = 0.0, math.inf
        skipped_before = self.engine.skipped_steps
        for micro_step in range(self.plan.accumulation):
            rows = slice(micro_step * self.plan.micro_batch, (micro_step + 1) * self.plan.micro_batch)
            is_last = micro_step == self.plan.accumulation - 1
            labels = batch.labels[rows].to(self.world.device, non_blocking=True)
            self._seed_dropout(micro_step)
            with self.own_work.counted(), part("forward"):
                logits = self.engine(self.to_input(batch.images[rows], self.world.device, self.dtype))
                losses = self.plan.objective.per_sample_loss(logits, labels)
            if not is_whole:
                losses = torch.where(batch.mask[rows].to(self.world.device, non_blocking=True), losses, 0.0)
            step.losses.append(losses.detach())
            step.loss_sum.add_(losses.detach().sum())
            if is_last and self.anomalies.losses is not None:
                mean, limit = self._mean_loss(step), self.anomalies.losses.limit()
            leaps = limit < mean < math.inf
            # DeepSpeed drops an update whose gradient is not finite, in every stage, with all that it has gathered. A
            # loss that is not finite may have a gradient that is: nothing times it is NaN, and no device has to wait.
            with part("backward"):
                self.engine.backward(losses.sum() * (math.nan if leaps else scale + 0.0 * step.loss_sum))
            with part("update"):
                if is_plain(self.recipe) and is_last:
                    self._clip_plain()
                self.engine.step()
        if not is_plain(self.recipe):
            self.gradient_norm = float(self.engine.get_global_grad_norm())
        if leaps:
            raise Anomaly("spike", step)
        if self.engine.skipped_steps > skipped_before or not math.isfinite(self.gradient_norm):
            raise Anomaly("non-finite", step)
        if self.anomalies.losses is not None:
            self.anomalies.losses.add(mean)
        return step

    def _valid_samples(self, batch: Batch) -> int:
        """Samples of the global batch that count: all, unless damaged ones are left out."""
        if self.recipe.data.bad_samples != "mask":
            return self.recipe.batch.global_size
        samples = distributed.sum_integers(self.world, int(batch.mask.sum()))
        if samples == 0:
            raise DataError(f"step {self.step + 1}: every sample of the batch is damaged").on_all_ranks()
        return samples

    def _mean_loss(self, step: TrainStep) -> float:
        """Over the global batch; all ranks take part."""
        return distributed.gather_numbers(self.world, [step.loss_sum.item()]).sum().item() / step.samples

    def _clip_plain(self) -> None:
        """Norm, check and clipping of the averaged gradients, where DeepSpeed has none: stage 0 in fp32."""
        limit = self.recipe.optimizer.clip_norm or math.inf
        self.gradient_norm = float(torch.nn.utils.clip_grad_norm_(self.engine.module.parameters(), limit))
        if not math.isfinite(self.gradient_norm):
            self.engine.optimizer.zero_grad(set_to_none=True)  # torch's optimizers leave out what has no gradient

    def _seed_dropout(self, micro_step: int) -> None:
        """Dropout is a function of (seed, step, rank, micro-step), so that it needs no state in a checkpoint."""
        if self.recipe.model.dropout:
            key = f"{self.recipe.seed}:{self.step}:{self.world.rank}:{micro_step}"
            torch.manual_seed(xxhash.xxh64_intdigest(key.encode()) >> 1)

    def _check_devices(self, batch: Batch) -> None:
        """Compare ranks with each other, at the steps that the recipe says."""
        if self._is_due(self.recipe.check.replicas_every):
            self._compare_replicas()
        if self._is_due(self.recipe.check.recompute_every):
            images, zero = batch.images[: self.plan.micro_batch], self.recipe.parallelism.zero_stage
            with self._eager():  # what is compiled by several processes may differ in its last bits
                replicas.compare_computation(self.engine, images, self.world, self.dtype, self.step, zero)

    def _eager(self) -> contextlib.AbstractContextManager[Any]:
        """In here, blocks are not those that were compiled."""
        is_compiled = self.recipe.parallelism.compile
        return torch.compiler.set_stance("force_eager") if is_compiled else contextlib.nullcontext()

    def _compare_replicas(self) -> None:
        if self.recipe.parallelism.zero_stage < 3:
            replicas.compare_weights(self.engine.module, self.step)

    # ---- Anomalies ---------------------------------------------------------------------------------------------------

    def _meet(self, anomaly: Anomaly, batch: Batch) -> None:
        """Do what the recipe wants done about a batch that must not be trained on; all ranks come here together."""
        forget_gradients(self.engine)
        policy = self.anomalies.policy(anomaly.kind)
        bad = distributed.gather(Suspects.of(anomaly, batch))
        mean = self._mean_loss(anomaly.step)
        message = describe(anomaly, policy, self.step + 1, mean, bad)
        if self.world.is_main:
            norm = self.gradient_norm
            message += write_report(self.run_dir, anomaly, policy, self.step + 1, batch.step, mean, norm, bad)
        if policy == "stop":
            self._begin("writing the checkpoint")
            with contextlib.suppress(CheckpointError):  # said already, and not why the run ends
                self.saves.wait()  # what is being written was right
            raise NonFiniteError(
                f"{message}. The newest checkpoint is that of step {self.saves.newest:,}. Lower optimizer.lr, set "
                f"optimizer.clip_norm, in another --run-dir, or have such batches left out (anomalies.{anomaly.key}; "
                f"{self.anomalies.count} of anomalies.limit {self.recipe.anomalies.limit} were)"
            ).on_all_ranks()
        self.anomalies.count += 1
        self._say(f"WARNING: {message} ({self.anomalies.count} of anomalies.limit {self.recipe.anomalies.limit})")
        start = self.position = batch.step
        if policy == "rewind":
            self._rewind()
            start = self.position
        self.anomalies.skipped.add(start, batch.step + 1)

    def _rewind(self) -> None:
        """Go back to the newest checkpoint; what is known of batches to leave out stays known."""
        self._begin("writing the checkpoint")
        self.saves.wait()
        known = self.anomalies
        self._load(self._newest_checkpoint())
        self.anomalies.keep_from(known)
        # What was counted since the last line of metrics is of steps that are done again.
        self.own_work.take()
        self.bad_samples = 0
        if self.world.is_main:
            self.metrics.close()
            self.metrics = self._open_metrics()
        self._say(f"went back to step {self.step:,}")

    # ---- Evaluation --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _predict(self, images: torch.Tensor) -> ModelOutputs:
        self._begin("evaluating")
        if self._is_interrupted():
            raise _Interrupted
        seen: dict[str, torch.Tensor] = {}
        logits = self.engine(to_model_input(images, self.world.device, self.dtype), intermediates=seen)
        return ModelOutputs(logits, seen["pre_logits"])

    def _evaluate(self) -> dict[str, float]:
        """Metrics of the weights, or of their average where the recipe has one. Raises `_Interrupted`."""
        if not self.plan.evaluators:
            return {}
        self.engine.eval()
        try:
            with (
                self.average.in_place_of_weights() if self.average is not None else contextlib.nullcontext(),
                self._eager(),  # batches of other sizes would each be compiled anew
            ):
                return evaluate(self.plan.evaluators, self._predict)
        finally:
            self.engine.train()

    def _evaluate_and_select(self) -> None:
        """Evaluate this step, and note whether it is the best so far."""
        self.values = values = self._evaluate()
        if self.world.is_main and values:
            self.metrics.evaluation(self.step, values)
            shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
            self._say(f"step {self.step:,}  {shown}")
        rule = self.recipe.selection
        self.selection = {**self.selection, "evaluated": self.step}
        if rule is not None:
            value, best = values[rule.metric], self.selection["best"]
            # A value that is not a number is worse than any: nothing would ever compare as better than it.
            better = not math.isnan(value) and (best is None or (value > best if rule.mode == "max" else value < best))
            self.best_before = {"best": best, "best_step": self.selection["best_step"]} if better else self.best_before
            self.selection |= (
                {"best": value, "best_step": self.step, "without_better": 0}
                if better
                else {"without_better": self.selection["without_better"] + 1}
            )
        if self.saved_step == self.step:
            self.saves.amend(self.step, self.selection)
        elif self._has_run_out_of_patience() or self.selection["best_step"] == self.step:
            self._save()

    def _forget_best(self, step: int) -> None:
        """The save of a step has failed: the best checkpoint that there is is the one before, and is kept."""
        if self.selection["best_step"] == step:
            self.selection = self.selection | self.best_before

    def _has_run_out_of_patience(self) -> bool:
        rule = self.recipe.selection
        return rule is not None and rule.patience is not None and self.selection["without_better"] >= rule.patience

    def _attention(self) -> contextlib.AbstractContextManager[None]:
        return preferred_attention(self.world.device, has_bias=self.recipe.model.position.kind == "relative")

    # ---- Loop --------------------------------------------------------------------------------------------------------

    def run(self, stop_at: int | None = None) -> None:
        """Train to the end, or until `stop_at` updates are done; leaves a checkpoint either way.

        Raises `PreemptedError` on all ranks where the run was interrupted, with a checkpoint of that step, and
        `RecipeError` where the ranks were told to stop at different steps.
        """
        asked = distributed.gather(stop_at)
        if len(set(asked)) > 1:
            raise RecipeError(f"--stop-at differs between the ranks: {', '.join(map(str, asked))}").on_all_ranks()
        self.last = self.plan.total_steps if stop_at is None else min(stop_at, self.plan.total_steps)
        self.past = f" (step {self.last:,} was past before)" if self.step > self.last else ""
        if self.world.is_main:
            self.metrics = self._open_metrics()
            self.progress = TrainingProgress(self.plan.total_steps, self.step)
        if self.interruption is not None:
            self.interruption.save_first()
        self.line_is_overdue, self.saved_at = True, time.monotonic()  # the first step of a process is shown at once
        self.engine.train()
        with self.progress or contextlib.nullcontext(), self._attention():
            try:
                self._train()
                self._finish()
            except _Interrupted:
                self._end_early()
            except PeerLostError:
                raise
            except VitscaleError:
                # What was handed over before was right, and the next start goes on from it. The other ranks write their
                # parts, too, whether or not they know of the error.
                self._begin("writing the checkpoint")
                self.saves.settle(self.recipe.check.step_timeout_s / 2)
                raise
            finally:
                if self.world.is_main:
                    self.metrics.close()
        if self.lock is not None:
            self.lock.close()

    def _train(self) -> None:
        if self.step > 0 and self._evaluates_now() and self.selection.get("evaluated") != self.step:
            self._evaluate_and_select()  # the process that took this step ended before it could
        while self.step < self.last and not self._has_run_out_of_patience():
            start, border = self.anomalies.skipped.next_stretch(self.position)
            stop = start + self.last - self.step
            with self._open_loader(start, stop if border is None else min(stop, border)) as loader:
                self._train_on(loader)

    def _train_on(self, loader: Loader) -> None:
        """Train on the batches of a loader: to their end, until the run goes back, or for want of a better step."""
        pace = Pace(self.step)
        self._begin("waiting for data")
        for batch in pace.timed(on_device(loader, self.world.device)):
            began = time.monotonic()
            self._begin("training")
            try:
                step = self._train_step(batch)
            except Anomaly as anomaly:
                self._meet(anomaly, batch)
                return
            self.step += 1
            self.position = batch.step + 1
            if self.average is not None:
                self.average.update(self.step)
            self.bad_samples += batch.bad_samples
            with part("metrics"):
                if self.progress is not None:
                    self.progress.advance(self.step)
                if self._logs_now():
                    self._log(batch, step, pace)
            with pace.paused(), part("checks, saving and evaluation"):
                self._check_devices(batch)
                # Before evaluating: whatever is wrong with the test data, the weights are safe.
                if self._saves_now():
                    self._save()
                if self._evaluates_now():
                    self._evaluate_and_select()
                    if self._has_run_out_of_patience():
                        return
            with pace.paused():
                self._begin("profiling")
                for line in self.profiler.step_ends(self.step):
                    self._say(line)
            if self.step < self.last and self._is_interrupted(time.monotonic() - began):
                if self.logged_step != self.step:
                    self._log(batch, step, pace)
                raise _Interrupted
            self._begin("waiting for data")

    def _open_metrics(self) -> MetricsWriter:
        return MetricsWriter(self.run_dir, self.step, self.recipe.logging.tensorboard)

    def _is_interrupted(self, step_s: float = 0.0) -> bool:
        """Whether any rank was asked to end early.

        Looks at the saves, too, that have ended on all ranks, and at what will be overdue after a step of `step_s`.
        """
        wanted = self.interruption is not None and self.interruption.pending
        then = time.monotonic() + step_s
        late_line = then - self.logged_at > self.recipe.logging.most_s
        late_save = self.plan.checkpoint_every is None and then - self.saved_at > self.recipe.checkpoint.default_every_s
        interrupted, line, save, finished = self.agreement.largest(
            int(wanted), int(late_line), int(late_save), -self.saves.finished()
        )
        self.line_is_overdue |= bool(line)
        self.save_is_overdue |= bool(save)
        self.saves.note(-finished)
        return bool(interrupted)

    def _end_early(self) -> NoReturn:
        assert self.interruption is not None
        reason = self.interruption.reason
        try:
            if self.saved_step != self.step:
                self._save()
            self.saves.finish(self.step)
        except CheckpointError as error:
            # The place may be in order where the run goes on.
            unsaved = StorageError(f"{reason}: ending without a checkpoint of step {self.step:,}: {error}")
            raise unsaved.on_all_ranks() from None
        raise PreemptedError(
            f"{reason}: saved at step {self.step:,} of {self.plan.total_steps:,} in {self.saves.store.root}; repeat "
            f"the command to continue"
        ).on_all_ranks()

    def _finish(self) -> None:
        """Leave a checkpoint of this step, and where the run is done the file that says so."""
        for line in self.profiler.end():
            self._say(line)
        stopped_early = self._has_run_out_of_patience()
        is_done = stopped_early or self.step == self.plan.total_steps
        if self.saved_step != self.step:
            self._save()
        if is_done and not self.values:
            self.values = self._evaluate()  # again: the process that took the last step did not say that it is done
        self._begin("writing the checkpoint")
        self.saves.finish(self.step)
        if is_done:
            distributed.on_main(lambda: self._write_done(stopped_early), self.run_dir)
        else:
            self._say(f"stopped at step {self.step:,}, as --stop-at asks{self.past}; repeat the command to go on")

    def _evaluates_now(self) -> bool:
        return self.step == self.plan.total_steps or self._is_due(self.plan.evaluate_every)

    def _saves_now(self) -> bool:
        return self.step == self.last or self._is_due(self.plan.checkpoint_every) or self.save_is_overdue

    def _logs_now(self) -> bool:
        is_due = self._is_due(self.recipe.logging.every) or self.line_is_overdue
        return is_due or self._saves_now() or self._evaluates_now()  # the records tell of every step that is saved

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0

    def _log(self, batch: Batch, step: TrainStep, pace: Pace) -> None:
        """One line of metrics; all ranks take part, rank 0 writes."""
        seconds, waited = pace.per_step(self.step)
        own = waited + self.own_work.take() / (self.step - self.logged_step)
        self.logged_step, self.logged_at, self.line_is_overdue = self.step, time.monotonic(), False
        numbers = [step.loss_sum.item(), waited, self._peak_memory(), self.bad_samples, own]
        rows = distributed.gather_numbers(self.world, numbers)
        stalled_s, self.bad_samples = self.saves.stalled_s(), 0
        digest = distributed.sum_integers(self.world, batch.digest) if batch.digest is not None else None
        if not self.world.is_main:
            return
        global_batch = self.recipe.batch.global_size
        loss = rows[:, 0].sum().item() / step.samples
        images_per_s = global_batch / seconds
        line: dict[str, float | str] = {
            "epoch": self.position / self.plan.order.steps_per_epoch,
            "images_seen": self.step * global_batch,
            "loss": loss,
            "lr": step.rate,
            "grad_norm": self.gradient_norm,
            "images_per_s": images_per_s,
            "data_wait_s": rows[:, 1].max().item(),
            "step_time_s": seconds,
            "world_size": self.world.size,
            "exaflops": accounting.exaflops(self.work.accounting_macs, self.step * global_batch),
            "peak_memory_bytes": int(rows[:, 2].max().item()),
        }
        if self.world.size > 1:
            slowest = int(rows[:, 4].argmax())
            line["slowest_rank"] = f"{slowest} ({self.hosts[slowest]})"
            line["slowest_rank_s"] = rows[slowest, 4].item()
            line["median_rank_s"] = rows[:, 4].median().item()
        mfu = accounting.mfu(images_per_s, self.work.macs, self.world.size, self.peak_flops)
        if mfu is not None:
            line["mfu"] = mfu
        if self.recipe.data.bad_samples != "error":
            line["bad_samples"] = int(rows[:, 3].sum().item())
        if stalled_s:
            line["checkpoint_stall_s"] = stalled_s
        if self.anomalies.count:
            line["anomalies"] = self.anomalies.count
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

    def _write_done(self, stopped_early: bool) -> None:
        summary = {
            "step": self.step,
            "total_steps": self.plan.total_steps,
            "stopped_early": stopped_early,
            "best_step": self.selection["best_step"],
            "exaflops": accounting.exaflops(self.work.accounting_macs, self.step * self.recipe.batch.global_size),
            "evaluation": self.values,
        }
        self._renew_run_dir()
        write_text(self.run_dir / DONE_FILE, json.dumps(summary, indent=1) + "\n")
        self._say(f"done: {self.step:,} steps, checkpoints and metrics in {self.run_dir}")


class _Interrupted(Exception):
    """A rank was asked to end early, and all ranks know."""
