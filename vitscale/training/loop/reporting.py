"""What a run reports: lines for people, metrics in `metrics.jsonl` and for trackers, and DONE at its end."""

import contextlib
import resource
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from vitscale.data.batch import Batch
from vitscale.flops import accounting, hardware
from vitscale.flops.work import recipe_work
from vitscale.ground.ranks import gather, gather_numbers, sum_integers
from vitscale.ground.wording import decimals
from vitscale.runs.done import write_done
from vitscale.training.beginning.run_plan import RunPlan
from vitscale.training.deepspeed import distributed
from vitscale.training.deepspeed.profile import StepTimer
from vitscale.training.deepspeed.progress import TrainingProgress, tell
from vitscale.training.loop.learner import Update
from vitscale.training.loop.state import RunState
from vitscale.training.watching.trackers import MetricsWriter


class Report:
    """Reports on a run: rank 0 writes and prints. All ranks make one and call `log` together."""

    def __init__(self, plan: RunPlan, run_dir: Path, world: distributed.World) -> None:
        self._recipe, self._plan, self._run_dir, self._world = plan.recipe, plan, run_dir, world
        recipe = plan.recipe
        self._hosts = gather(socket.gethostname())
        self._work = recipe_work(recipe, plan.num_classes)
        self._peak_flops = None
        if world.device.type == "cuda" and recipe.precision == "bf16":
            self._peak_flops = hardware.peak_flops(torch.cuda.get_device_name(), "bf16")
        self._progress: TrainingProgress | None = None
        self._metrics: MetricsWriter | None = None
        self._has_complained = False
        self._bad_samples = 0  # of this rank since the last line of metrics
        self.logged_step, self._logged_at = 0, time.monotonic()  # of the last line of metrics

    def say(self, message: str) -> None:
        """Print a line for people, on rank 0."""
        if self._world.is_main:
            if self._progress is not None:
                self._progress.note(message)
            else:
                tell(message)

    def begin_at(self, step: int) -> None:
        """Begin at this step, from which the run continues or to which it goes back: later steps are done again."""
        self.logged_step, self._bad_samples = step, 0
        if self._world.is_main:
            self.close()
            self._metrics = MetricsWriter(self._run_dir, step, self._recipe.logging.trackers)

    def go_on_in_new_directory(self, step: int) -> None:
        """Continue in a new run directory after the old one was moved or deleted; called on rank 0 only."""
        self.close()
        self._metrics = MetricsWriter(self._run_dir, step, self._recipe.logging.trackers)
        self.say(f"WARNING: {self._run_dir} was moved or deleted: the run continues in a new one of that name")

    def close(self) -> None:
        """Write out what is still in memory."""
        if self._metrics is not None:
            self._metrics.close()

    def progress(self, step: int) -> contextlib.AbstractContextManager[object]:
        """A context in which the run's progress is shown, on rank 0."""
        if not self._world.is_main:
            return contextlib.nullcontext()
        self._progress = TrainingProgress(self._plan.total_steps, step)
        return self._progress

    def advance(self, step: int, batch: Batch) -> None:
        """Note that one more batch was trained on."""
        self._bad_samples += batch.bad_samples
        if self._progress is not None:
            self._progress.advance(step)

    def line_is_late(self, at: float) -> bool:
        """Whether, at time `at` of the monotonic clock, the last line of metrics is too old."""
        return at - self._logged_at > self._recipe.logging.most_s

    def log(
        self, state: RunState, batch: Batch, update: Update, pace: StepTimer, computed_s: float, stalled_s: float
    ) -> None:
        """Write one line of metrics.

        Args:
            computed_s: seconds of this rank's forward passes since the last line.
            stalled_s: seconds since then that training has waited for saves.
        """
        seconds, waited = pace.per_step(state.step)
        worked = waited + computed_s / (state.step - self.logged_step)
        self.logged_step, self._logged_at = state.step, time.monotonic()
        shown = {name: value.item() for name, value in update.shown.items()}
        numbers = [update.loss_sum.item(), waited, _peak_memory(self._world), self._bad_samples, worked]
        rows = gather_numbers([*numbers, *shown.values()], self._world.device)
        self._bad_samples = 0
        digest = sum_integers(batch.digest, self._world.device) if batch.digest is not None else None
        if not self._world.is_main:
            return
        global_batch = self._recipe.batch.global_size
        loss = rows[:, 0].sum().item() / update.samples
        images_per_s = global_batch / seconds
        line: dict[str, float | str] = {
            "epoch": self._plan.order.epochs(state.position),
            "images_seen": state.step * global_batch,
            "loss": loss,
            **{name: rows[:, 5 + at].sum().item() / update.samples for at, name in enumerate(shown)},
            "lr": update.rate,
            "grad_norm": update.gradient_norm,
            "images_per_s": images_per_s,
            "data_wait_s": rows[:, 1].max().item(),
            "step_time_s": seconds,
            "world_size": self._world.size,
            "exaflops": self._exaflops(state.step),
            "peak_memory_bytes": int(rows[:, 2].max().item()),
        }
        if self._world.size > 1:
            slowest = int(rows[:, 4].argmax())
            line["slowest_rank"] = f"{slowest} ({self._hosts[slowest]})"
            line["slowest_rank_s"] = rows[slowest, 4].item()
            line["median_rank_s"] = rows[:, 4].median().item()
        optional: dict[str, float | str | None] = {
            "mfu": accounting.mfu(images_per_s, self._work.macs, self._world.size, self._peak_flops),
            "bad_samples": None if self._recipe.data.bad_samples == "error" else int(rows[:, 3].sum().item()),
            "first_step": self._recipe.first_step or None,
            "checkpoint_stall_s": stalled_s or None,
            "anomalies": state.anomalies.count or None,
            "batch_digest": None if digest is None else f"{digest:016x}",
        }
        line |= {key: value for key, value in optional.items() if value is not None}
        assert self._metrics is not None
        self._metrics.training(state.step, line)
        complaint = self._recipe.objective.complaint(line)
        if complaint is not None and not self._has_complained and 10 * state.step >= self._plan.total_steps:
            self._has_complained = True
            self.say(f"WARNING: step {state.step:,}: {complaint}")
        if self._progress is not None:
            self._progress.update(state.step, loss=loss, lr=update.rate, images_per_s=images_per_s)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Write and print what evaluators yielded after `step` updates."""
        if self._metrics is not None and values:
            self._metrics.evaluation(step, values)
            self.say(f"step {step:,}  " + "  ".join(f"{name} {decimals(value)}" for name, value in values.items()))

    def done(self, state: RunState, values: Mapping[str, float], *, stopped_early: bool) -> None:
        """Write the file that marks the run as done; called on rank 0 only. Raises OSError."""
        summary = {
            "step": state.step,
            "total_steps": self._plan.total_steps,
            "stopped_early": stopped_early,
            "best_step": state.selection.best_step,
            "exaflops": self._exaflops(state.step),
            "evaluation": values,
        }
        write_done(self._run_dir, summary)
        self.say(f"done: {state.step:,} steps, checkpoints and metrics in {self._run_dir}")

    def _exaflops(self, step: int) -> float:
        return accounting.exaflops(self._work.accounting_macs, step * self._recipe.batch.global_size)


def _peak_memory(world: distributed.World) -> int:
    """Bytes: what torch allocated on a CUDA device, the process's resident set on a CPU."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
