"""The state of a run beside its weights: what changes from step to step, to and from a checkpoint's index."""

import platform
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import vitscale
from vitscale.data.batch import Batch
from vitscale.data.order import ORDER_VERSION
from vitscale.ground.native import libjpeg_turbo_version
from vitscale.recipe import Recipe
from vitscale.runs.checkpoint import EMA, MASTER, CheckpointIndex
from vitscale.training.beginning.run_plan import RunPlan
from vitscale.training.deepspeed.lean_deepspeed import deepspeed
from vitscale.training.loop.learner import Learner
from vitscale.training.loop.selection import Selection
from vitscale.training.watching.anomalies import AnomalyRecord


@dataclass(frozen=True)
class RunState:
    """Where a run is.

    Attributes:
        step: updates done.
        position: the next batch's position in the order.
        selection: what the evaluations so far have shown.
        anomalies: what has gone wrong so far, and what was left out.
    """

    step: int = 0
    position: int = 0
    selection: Selection = field(default_factory=Selection)
    anomalies: AnomalyRecord = field(default_factory=AnomalyRecord)

    @classmethod
    def of(cls, index: CheckpointIndex) -> "RunState":
        """The state in a checkpoint."""
        return cls(index.step, index.position, Selection.of(index.selection), AnomalyRecord.of(index.anomalies))

    def after(self, batch: Batch) -> "RunState":
        """The state after one more batch was trained on."""
        return replace(self, step=self.step + 1, position=batch.position + 1)


def make_index(state: RunState, recipe: Recipe, plan: RunPlan, learner: Learner, world_size: int) -> CheckpointIndex:
    """The index of a checkpoint of this state and what the learner holds."""
    data = data_identity(plan) | {"working_directory": plan.working_directory}
    known = {"init": learner.began_with, "teacher": learner.learns_from}
    return CheckpointIndex(
        step=state.step,
        position=state.position,
        world_size=world_size,
        shapes=learner.shapes,
        state_shapes=learner.state_shapes(),
        kinds=[MASTER, *learner.moments(), *([EMA] if recipe.ema is not None else [])],
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
