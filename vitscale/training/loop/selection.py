"""Which checkpoint is the best, and when a run has run out of patience: pure functions of what evaluations yield."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vitscale.recipe import schema


@dataclass(frozen=True)
class Selection:
    """What the evaluations so far have shown; saved in checkpoints.

    Attributes:
        best, best_step: the best value of the rule's metric, and its step; None before there is one.
        without_better: the number of evaluations since then.
        evaluated: the last step that was evaluated.
        before: the best value and step before these, for when the best step cannot be saved; not in checkpoints.
    """

    best: float | None = None
    best_step: int | None = None
    without_better: int = 0
    evaluated: int = 0
    before: tuple[float | None, int | None] = field(default=(None, None), compare=False)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Selection":
        """From a checkpoint; old ones do not record what was evaluated, and an empty state begins anew."""
        if not state:
            return cls()
        return cls(state["best"], state["best_step"], state["without_better"], state.get("evaluated", 0))

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        state = asdict(self)
        del state["before"]
        return state

    def after(self, rule: schema.Selection | None, step: int, metrics: Mapping[str, float]) -> "Selection":
        """The selection with the metrics of one more step."""
        seen = replace(self, evaluated=step)
        if rule is None:
            return seen
        value = metrics[rule.metric]
        # A value that is not a number is worse than any: nothing would ever compare as better than it.
        is_better = not math.isnan(value) and (
            self.best is None or (value > self.best if rule.mode == "max" else value < self.best)
        )
        if not is_better:
            return replace(seen, without_better=self.without_better + 1)
        return replace(seen, best=value, best_step=step, without_better=0, before=(self.best, self.best_step))

    def without(self, step: int) -> "Selection":
        """The selection after a step's save has failed: if it was the best, the one before is again, and is kept."""
        if self.best_step != step:
            return self
        best, best_step = self.before
        return replace(self, best=best, best_step=best_step)

    def is_out_of_patience(self, rule: schema.Selection | None) -> bool:
        """Whether the run is to end early."""
        return rule is not None and rule.patience is not None and self.without_better >= rule.patience
