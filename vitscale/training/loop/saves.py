"""A run's saves, written while it trains, and what is done about those that fail."""

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from vitscale.ground.errors import CheckpointError, PreemptedError, StorageError
from vitscale.ground.files.durable import sync
from vitscale.ground.ranks import from_rank_zero, gather
from vitscale.recipe import Recipe
from vitscale.runs.checkpoint import BackgroundSaver, CheckpointIndex, CheckpointStore, Fragment, checkpoint_directory
from vitscale.runs.checkpoint.directory import LocalDirectory
from vitscale.runs.directory import write_newest
from vitscale.runs.names import METRICS_FILE
from vitscale.training.beginning.run_plan import RunPlan
from vitscale.training.deepspeed.distributed import World

# Writing files may take longer than a step; a rank that has gone is noticed at once all the same.
_TIMEOUT = timedelta(hours=2)


class Saves:
    """Makes a run's saves. All ranks must call every method together, except `finished`, `settle` and `stalled_s`.

    Losing one save is better than losing the machines that train: a failure is reported and training continues, until
    too many in a row have failed.

    Args:
        plan: says which checkpoints are kept for good.
        say: prints a line for people, on rank 0.
        lost: called with each step whose save has failed.

    Attributes:
        store: the checkpoints, for reading.
        newest: step of the newest checkpoint, 0 for none.
    """

    def __init__(
        self,
        recipe: Recipe,
        plan: RunPlan,
        run_dir: Path,
        world: World,
        say: Callable[[str], None],
        lost: Callable[[int], None],
    ) -> None:
        settings = recipe.checkpoint
        self._run_dir, self._is_main = run_dir, world.is_main
        directory = checkpoint_directory(recipe, run_dir)
        self.store = CheckpointStore(directory, rank=world.rank, gather=gather, share=from_rank_zero)
        # What the saving threads of the ranks do together must not meet what the main threads do.
        group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        written = CheckpointStore(
            directory,
            rank=world.rank,
            gather=lambda value: gather(value, group),
            share=lambda value: from_rank_zero(value, group),
        )
        self._saver = BackgroundSaver(
            written, keep=settings.keep, keep_every=plan.keep_every, tail=plan.tail, background=settings.background
        )
        self._saver.first = self._sync_metrics if world.is_main else None
        self._allowed = settings.max_failures
        self._say, self._lost = say, lost
        self.newest = 0
        self._failures = 0  # in a row
        self._stalled_s = 0.0

    def begin(self, index: CheckpointIndex, fragments: list[Fragment], best: int | None) -> None:
        """Save what this rank owns; the tensors may change once this returns."""
        self._stalled_s += self._saver.save(index, fragments, best)

    def amend(self, step: int, selection: dict[str, Any]) -> None:
        """Replace the state of the selection in a checkpoint that has been begun."""
        self._saver.amend(step, selection)

    def stalled_s(self) -> float:
        """Seconds that training has waited for saves since the last call."""
        seconds, self._stalled_s = self._stalled_s, 0.0
        return seconds

    def finished(self) -> int:
        """How many saves have ended on this rank and are still to be noted."""
        return self._saver.finished()

    def note(self, count: int | None = None) -> None:
        """Take note of how the next `count` saves went; they have ended on every rank. None means all.

        Raises `CheckpointError` on all ranks for too many failures in a row.
        """
        for outcome in self._saver.outcomes(count):
            self._failures = self._failures + 1 if outcome.error else 0
            if outcome.error is None:
                self.newest = outcome.step
                if self._is_main:
                    write_newest(self._run_dir, outcome.step, self.store.root)
            if self._failures > self._allowed:
                self._give_up(
                    f"{outcome.error}. {self._failures} failures in a row; checkpoint.max_failures is {self._allowed}"
                )
            if outcome.error:
                self._lost(outcome.step)
                self._say(f"WARNING: training continues WITHOUT THIS CHECKPOINT: {outcome.error}")

    def wait(self) -> None:
        """Wait for the saves under way. Raises as `note`."""
        began = time.monotonic()
        self._saver.wait()
        self._stalled_s += time.monotonic() - began
        self.note()

    def settle(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for the saves under way, whatever becomes of them. Not collective."""
        self._saver.wait(timeout_s)

    def finish(self, step: int) -> None:
        """Wait for the last save, that of `step`. Raises `CheckpointError` on all ranks if it has failed."""
        self.wait()
        if self._failures:
            self._give_up(
                f"step {step:,} is not saved, see above. Fix that, then repeat the command; it continues from the "
                "previous checkpoint"
            )
        self._saver.close()
        if self._is_main and isinstance(self.store.directory, LocalDirectory):
            with suppress(OSError):  # `latest`, if it could not be written with the last save
                self.store.directory.tidy()

    def _sync_metrics(self) -> None:
        """A run that continues from a checkpoint does not write the lines before it again."""
        with suppress(OSError):  # losing a metric is better than losing a checkpoint
            sync(self._run_dir / METRICS_FILE)
            sync(self._run_dir)

    def end_early(self, save: Callable[[], None], reason: str, step: int, total_steps: int) -> NoReturn:
        """Wait for the save of `step`, which `save` begins if need be, and end the run for a reason.

        Raises `PreemptedError` on all ranks, or `StorageError` if the step cannot be saved.
        """
        try:
            save()
            self.finish(step)
        except CheckpointError as error:
            # The directory may be available again when the run continues.
            unsaved = StorageError(f"{reason}: ending without a checkpoint of step {step:,}: {error}")
            raise unsaved.on_all_ranks() from None
        raise PreemptedError(
            f"{reason}: saved at step {step:,} of {total_steps:,} in {self.store.root}; repeat the command to continue"
        ).on_all_ranks()

    def _give_up(self, message: str) -> NoReturn:
        self.store.gather(None)  # fails if a rank has gone: then that is the cause, and there is nothing to mend
        raise CheckpointError(message).on_all_ranks()
