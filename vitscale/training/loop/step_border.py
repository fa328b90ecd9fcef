"""Between two steps: all ranks agree on what reaches them at different moments, such as signals, clocks and saves."""

import math
import time

from vitscale.ground.ranks import Agreement
from vitscale.recipe import Recipe
from vitscale.training.beginning.run_plan import RunPlan
from vitscale.training.loop.reporting import Report
from vitscale.training.loop.saves import Saves


class StepBorder:
    """What the ranks agree on between two steps. Every rank makes one, and all call its methods together.

    Attributes:
        line_is_overdue: whether a line of metrics is due because there was none for too long; the same on all ranks.
        save_is_overdue: whether a save is due, in a run that saves by the clock; the same on all ranks.
    """

    def __init__(self, recipe: Recipe, plan: RunPlan, report: Report) -> None:
        self._report, self._agreement = report, Agreement()
        self._save_after_s = recipe.checkpoint.default_every_s if plan.checkpoint_every is None else math.inf
        self._saved_at = time.monotonic()
        self.line_is_overdue = self.save_is_overdue = False

    def begin(self) -> None:
        """Note that the loop begins. A process's first step is shown at once."""
        self.line_is_overdue, self._saved_at = True, time.monotonic()

    def logged(self) -> None:
        """Note that a line of metrics was written."""
        self.line_is_overdue = False

    def saved(self) -> None:
        """Note that a save has begun."""
        self.save_is_overdue, self._saved_at = False, time.monotonic()

    def is_end(self, wanted: bool, saves: Saves, step_s: float = 0.0) -> bool:
        """Whether any rank wants to end here.

        Also notes the saves that have ended on all ranks, and what will be overdue after a step of `step_s` seconds.
        Raises `CheckpointError` on all ranks if too many saves in a row have failed.
        """
        then = time.monotonic() + step_s
        late_line, late_save = self._report.line_is_late(then), then - self._saved_at > self._save_after_s
        ends, line, save, finished = self._agreement.largest(
            int(wanted), int(late_line), int(late_save), -saves.finished()
        )
        self.line_is_overdue |= bool(line)
        self.save_is_overdue |= bool(save)
        saves.note(-finished)
        return bool(ends)
