"""A run's saves, written while it trains, and what the ranks agree on between two steps about these and the clock."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from vitscale.ground.errors import CheckpointError
from vitscale.ground.files.durable import sync
from vitscale.ground.ranks import Agreement, from_rank_zero, gather
from vitscale.runs.checkpoint import BackgroundSaver, CheckpointIndex, CheckpointStore, Fragment, checkpoint_directory
from vitscale.runs.checkpoint.directory import LocalDirectory
from vitscale.runs.directory import write_newest
from vitscale.runs.names import METRICS_FILE
from vitscale.training.beginning.run_plan import RunPlan
from vitscale.training.deepspeed.distributed import World
from vitscale.training.loop.reporting import Report

# Writing files may take longer than a step; a rank that has gone is noticed at once all the same.
_TIMEOUT = timedelta(hours=2)


class Saves:
    """Makes a run's saves. All ranks must call every method together, except `stalled_s`.

    Losing one save is better than losing the machines that train: a failure is reported and training continues, until
    too many in a row have failed.

    Args:
        say: prints a line for people, on rank 0.
        lost: called with each step whose save has failed.
    """

    def __init__(
        self, plan: RunPlan, run_dir: Path, world: World, say: Callable[[str], None], lost: Callable[[int], None]
    ) -> None:
        settings = plan.recipe.checkpoint
        self._run_dir, self._is_main = run_dir, world.is_main
        directory = checkpoint_directory(plan.recipe, run_dir)
        self.store = CheckpointStore(directory, rank=world.rank, gather=gather, share=from_rank_zero)  # for reading
        # What the saving threads of the ranks do together must not meet what the main threads do.
        group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        written = CheckpointStore(
            directory,
            rank=world.rank,
            gather=lambda value: gather(value, group),
            share=lambda value: from_rank_zero(value, group),
        )
        self.saver = BackgroundSaver(
            written, keep=settings.keep, keep_every=plan.keep_every, tail=plan.tail, background=settings.background
        )
        self.saver.first = self._sync_metrics if world.is_main else None
        self._max_failures = settings.max_failures
        self._say, self._lost = say, lost
        self.newest = 0  # step of the newest checkpoint, 0 for none
        self._failures = 0  # in a row
        self._stalled_s = 0.0

    def begin(self, index: CheckpointIndex, fragments: list[Fragment], best: int | None) -> None:
        """Save what this rank owns; the tensors may change once this returns."""
        self._stalled_s += self.saver.save(index, fragments, best)

    def stalled_s(self) -> float:
        """Seconds that training has waited for saves since the last call."""
        seconds, self._stalled_s = self._stalled_s, 0.0
        return seconds

    def note(self, count: int | None = None) -> None:
        """Take note of how the next `count` saves went; they have ended on every rank. None means all.

        Raises `CheckpointError` on all ranks for too many failures in a row.
        """
        for outcome in self.saver.outcomes(count):
            self._failures = self._failures + 1 if outcome.error else 0
            if outcome.error is None:
                self.newest = outcome.step
                if self._is_main:
                    write_newest(self._run_dir, outcome.step, self.store.root)
            elif self._failures > self._max_failures:
                limit = f"{self._failures} failures in a row; checkpoint.max_failures is {self._max_failures}"
                self._give_up(f"{outcome.error}. {limit}")
            else:
                self._lost(outcome.step)
                self._say(f"WARNING: training continues WITHOUT THIS CHECKPOINT: {outcome.error}")

    def wait(self) -> None:
        """Wait for the saves under way. Raises as `note`."""
        began = time.monotonic()
        self.saver.wait()
        self._stalled_s += time.monotonic() - began
        self.note()

    def finish(self, step: int) -> None:
        """Wait for the last save, that of `step`. Raises `CheckpointError` on all ranks if it has failed."""
        self.wait()
        if self._failures:
            self._give_up(
                f"step {step:,} is not saved, see above. Fix that, then repeat the command; it continues from the "
                "previous checkpoint"
            )
        self.saver.close()
        if self._is_main and isinstance(self.store.directory, LocalDirectory):
            with suppress(OSError):  # `latest`, if it could not be written with the last save
                self.store.directory.tidy()

    def _sync_metrics(self) -> None:
        """A run that continues from a checkpoint does not write the lines before it again."""
        with suppress(OSError):  # losing a metric is better than losing a checkpoint
            sync(self._run_dir / METRICS_FILE)
            sync(self._run_dir)

    def _give_up(self, message: str) -> NoReturn:
        self.store.gather(None)  # fails if a rank has gone: then that is the cause, and there is nothing to mend
        raise CheckpointError(message).on_all_ranks()


class StepBorder:
    """What the ranks agree on between two steps, as signals, clocks and saves reach them at different moments.

    Every rank makes one, and all call its methods together.
    """

    # Whether there was no line of metrics for too long, and no save in a run that saves by the clock; on all ranks.
    line_is_overdue = save_is_overdue = False

    def __init__(self, plan: RunPlan, report: Report) -> None:
        self._report, self._agreement = report, Agreement()
        self._save_after_s = plan.recipe.checkpoint.default_every_s if plan.checkpoint_every is None else math.inf
        self._saved_at = time.monotonic()

    def begin(self) -> None:
        """Note that the loop begins. A process's first step is shown at once."""
        self.line_is_overdue, self._saved_at = True, time.monotonic()

    def saved(self) -> None:
        self.save_is_overdue, self._saved_at = False, time.monotonic()

    def is_end(self, wanted: bool, saves: Saves, step_s: float = 0.0) -> bool:
        """Whether any rank wants to end here.

        Also notes the saves that have ended on all ranks, and what will be overdue after a step of `step_s` seconds.
        Raises `CheckpointError` on all ranks if too many saves in a row have failed.
        """
        then = time.monotonic() + step_s
        late_line, late_save = self._report.line_is_late(then), then - self._saved_at > self._save_after_s
        ends, line, save, finished = self._agreement.largest(
            int(wanted), int(late_line), int(late_save), -saves.saver.finished()
        )
        self.line_is_overdue |= bool(line)
        self.save_is_overdue |= bool(save)
        saves.note(-finished)
        return bool(ends)
