"""Steps that must not be taken: a loss or gradient that is not finite, a loss that leaps; and the batches left out.

A batch has a position in the order, from 0. Without anomalies that is the step; every batch that a policy leaves out
moves the later ones up by one step. Which positions are left out is part of the checkpoint, and so of the order.
"""

import json
import math
import statistics
from collections import deque
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vitscale.data import Batch
from vitscale.durable import write_text
from vitscale.recipe import Anomalies, Policy, Spike
from vitscale.run_directory import ANOMALIES_DIR

Kind = Literal["non-finite", "spike"]

_TO_DEVIATION = 1.4826  # of a normal distribution, times its median absolute deviation
_LEAST_DEVIATION = 1e-3  # of the median: losses that hardly differ are no measure of what may come
_SHOWN = 8  # uids in a message


class TrainStep(NamedTuple):
    """One update: this rank's losses by micro-batch and their sum, the samples of all ranks that counted, the rate."""

    losses: list[Tensor]
    loss_sum: Tensor
    samples: int
    rate: float


class Anomaly(Exception):
    """This step's update must not be applied, and was not."""

    def __init__(self, kind: Kind, step: TrainStep) -> None:
        super().__init__(kind)
        self.kind, self.step = kind, step

    @property
    def key(self) -> str:
        """The recipe's key that says what becomes of it, below `anomalies`."""
        return "spike.policy" if self.kind == "spike" else "non_finite"


class SkippedData:
    """Positions that are not trained on, as sorted ranges [start, stop)."""

    def __init__(self, ranges: list[list[int]] | None = None) -> None:
        self.ranges = [list(one) for one in ranges or []]

    def add(self, start: int, stop: int) -> None:
        """Leave out positions [start, stop) as well; they may overlap what is left out already."""
        merged: list[list[int]] = []
        for low, high in sorted([*self.ranges, [start, stop]]):
            if merged and low <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], high)
            else:
                merged.append([low, high])
        self.ranges = merged

    def next_stretch(self, position: int) -> tuple[int, int | None]:
        """The first position from `position` on that is not left out, and where the next range begins, if any does."""
        for low, high in self.ranges:
            if position < low:
                return position, low
            if position < high:
                position = high
        return position, None


class LossWatch:
    """Tells a leap of the loss from its noise: by median and median absolute deviation of the last losses."""

    def __init__(self, settings: Spike, losses: list[float] | None = None) -> None:
        self._factor = settings.factor
        self._losses = deque(losses or [], maxlen=settings.window)

    @property
    def losses(self) -> list[float]:
        """Of the last steps, oldest first: the state of the watch."""
        return list(self._losses)

    def limit(self) -> float:
        """The loss above which a step is an anomaly; infinite until the window is full."""
        if len(self._losses) < (self._losses.maxlen or 0):
            return math.inf
        median = statistics.median(self._losses)
        deviation = _TO_DEVIATION * statistics.median(abs(loss - median) for loss in self._losses)
        return median + self._factor * max(deviation, _LEAST_DEVIATION * abs(median))

    def add(self, loss: float) -> None:
        """The loss of a step that was taken."""
        self._losses.append(loss)


class AnomalyRecord:
    """What has happened so far in a run, and what a recipe wants done; its state travels in checkpoints."""

    def __init__(self, settings: Anomalies, state: dict[str, Any]) -> None:
        self._settings = settings
        self.skipped = SkippedData(state.get("skipped"))
        self.count: int = state.get("count", 0)
        self.losses = LossWatch(settings.spike, state.get("losses")) if settings.spike is not None else None

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        state: dict[str, Any] = {"skipped": self.skipped.ranges, "count": self.count}
        return state if self.losses is None else {**state, "losses": self.losses.losses}

    def keep_from(self, later: "AnomalyRecord") -> None:
        """Take over what is known from after the checkpoint that this record is of."""
        self.count = later.count
        for start, stop in later.skipped.ranges:
            self.skipped.add(start, stop)

    def policy(self, kind: Kind) -> Policy:
        """What is to be done about one more anomaly."""
        if self.count >= self._settings.limit:
            return "stop"
        if kind == "non-finite":
            return self._settings.non_finite
        assert self._settings.spike is not None
        return self._settings.spike.policy


class Suspects(NamedTuple):
    """One rank's samples of a batch that must not be trained on."""

    uids: list[int]
    losses: list[float]

    @classmethod
    def of(cls, anomaly: Anomaly, batch: Batch) -> "Suspects":
        """Those of this rank."""
        return cls(batch.uids.tolist(), torch.cat(anomaly.step.losses).float().tolist())

    def bad(self) -> list[int]:
        """Uids of the samples whose loss is not finite."""
        return [uid for uid, loss in zip(self.uids, self.losses, strict=True) if not math.isfinite(loss)]


def describe(anomaly: Anomaly, policy: Policy, step: int, mean: float, ranks: list[Suspects]) -> str:
    """An anomaly of the `step`-th update, with the mean loss of the global batch, and what becomes of it, in words."""
    then = {"stop": "", "skip": "; the batch is left out", "rewind": "; going back, without the batches since then"}
    if anomaly.kind == "spike":
        return f"step {step:,}: the loss leaps to {mean:.6g}{then[policy]}"
    where = [
        f"rank {rank} (uids {', '.join(map(str, bad[:_SHOWN]))}{' ...' if len(bad) > _SHOWN else ''})"
        for rank, suspects in enumerate(ranks)
        if (bad := suspects.bad())
    ]
    losses = f"the loss is not finite on {'; '.join(where)}" if where else "every loss is"
    return f"step {step:,}: the gradient is not finite (learning rate {anomaly.step.rate:.3g}); {losses}{then[policy]}"


def write_report(
    run_dir: Path,
    anomaly: Anomaly,
    policy: Policy,
    step: int,
    position: int,
    mean: float,
    gradient_norm: float,
    ranks: list[Suspects],
) -> str:
    """Write uids and losses of the batch at `position` of the order beside the checkpoints; where they are, in words.

    The pixels are not written: they are a function of (recipe, epoch, uid).
    """
    report = {
        "kind": anomaly.kind,
        "policy": policy,
        "step": step,
        "position": position,
        "loss": _json(mean),
        "lr": anomaly.step.rate,
        "grad_norm": _json(gradient_norm),
        "ranks": [{"uids": rank.uids, "losses": [_json(loss) for loss in rank.losses]} for rank in ranks],
    }
    path = run_dir / ANOMALIES_DIR / f"step-{step:08d}-batch-{position:08d}.json"  # several batches may want one step
    try:
        path.parent.mkdir(exist_ok=True)
        write_text(path, json.dumps(report) + "\n")
    except OSError as error:
        return f"; its samples cannot be listed in {path}: {error.strerror or error}"
    return f"; its samples are listed in {path}"


def _json(value: float) -> float | None:
    return value if math.isfinite(value) else None
