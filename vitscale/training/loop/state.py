"""The state of a run beside its weights: what changes from step to step, to and from a checkpoint's index.

Which checkpoint is the best, and when a run is out of patience, are pure functions of what evaluations yield.
"""

import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

import vitscale
from vitscale.data.batch import Batch
from vitscale.data.order import ORDER_VERSION
from vitscale.ground.native import libjpeg_turbo_version
from vitscale.recipe import schema
from vitscale.runs.checkpoint import MASTER, CheckpointIndex, weight_kinds
from vitscale.training.beginning.run_plan import RunPlan
from vitscale.training.deepspeed.lean_deepspeed import deepspeed
from vitscale.training.loop.learner import Learner
from vitscale.training.watching.anomalies import AnomalyRecord


@dataclass(frozen=True)
class SelectionState:
    """What the evaluations so far have shown; saved in checkpoints."""

    best: float | None = None  # value of the rule's metric; None before there is one
    best_step: int | None = None
    without_better: int = 0  # evaluations since then
    evaluated: int = 0  # the last step that was evaluated
    # The best value and step before these, for when the best step cannot be saved; not in checkpoints.
    before: tuple[float | None, int | None] = field(default=(None, None), compare=False)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "SelectionState":
        """From a checkpoint; old ones do not record what was evaluated, and an empty state begins anew."""
        known = ("best", "best_step", "without_better", "evaluated")
        return cls(**{key: state[key] for key in known if key in state})

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        state = asdict(self)
        del state["before"]
        return state

    def after(self, rule: schema.Selection | None, step: int, metrics: Mapping[str, float]) -> "SelectionState":
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

    def without(self, step: int) -> "SelectionState":
        """The selection after a step's save has failed: if it was the best, the one before is again, and is kept."""
        if self.best_step != step:
            return self
        best, best_step = self.before
        return replace(self, best=best, best_step=best_step)

    def is_out_of_patience(self, rule: schema.Selection | None) -> bool:
        return rule is not None and rule.patience is not None and self.without_better >= rule.patience


@dataclass(frozen=True)
class RunState:
    """Where a run is."""

    step: int = 0  # updates done
    position: int = 0  # the next batch's, in the order
    selection: SelectionState = field(default_factory=SelectionState)
    anomalies: AnomalyRecord = field(default_factory=AnomalyRecord)

    @classmethod
    def of(cls, index: CheckpointIndex) -> "RunState":
        """The state in a checkpoint."""
        return cls(index.step, index.position, SelectionState.of(index.selection), AnomalyRecord.of(index.anomalies))

    def after(self, batch: Batch) -> "RunState":
        return replace(self, step=self.step + 1, position=batch.position + 1)


def make_index(state: RunState, plan: RunPlan, learner: Learner, world_size: int) -> CheckpointIndex:
    """The index of a checkpoint of this state and what the learner holds."""
    recipe, engine = plan.recipe, learner.engine
    _, *averages = weight_kinds(recipe)
    data = data_identity(plan) | {"working_directory": plan.working_directory}
    known = {"init": learner.began_with, "teacher": learner.learns_from}
    return CheckpointIndex(
        step=state.step,
        position=state.position,
        world_size=world_size,
        shapes=engine.shapes,
        state_shapes=engine.state_shapes(),
        kinds=[MASTER, *engine.moment_kinds(), *averages],
        optimizer_steps=state.step,
        recipe=recipe.dump(),
        data=data | {key: value for key, value in known.items() if value is not None},
        versions={
            "vitscale": vitscale.__version__,
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
            "python": platform.python_version(),
            "libjpeg_turbo": libjpeg_turbo_version(),
        },
        selection=state.selection.state(),
        anomalies=state.anomalies.state(),
    )


def changed_data(index: CheckpointIndex, plan: RunPlan) -> list[str]:
    """The keys of `data_identity` whose values differ between a checkpoint and now."""
    now = data_identity(plan)
    return [key for key in now if index.data.get(key) != now[key]]


def data_identity(plan: RunPlan) -> dict[str, Any]:
    """What must not change about the data while a run lasts."""
    return {
        "manifest_sha256": plan.manifest.sha256,
        "num_samples": plan.manifest.num_samples,
        "order_version": ORDER_VERSION,
        "segments": plan.order.segments,
        "class_names": list(plan.manifest.class_names),
    }
