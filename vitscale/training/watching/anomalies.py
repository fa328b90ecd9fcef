"""Steps that must not be taken: a loss or gradient that is not finite, a loss that leaps; and the batches left out.

A batch has a position in the order, from 0. Without anomalies that is the step; every batch that a policy leaves out
moves the later ones up by one step. Which positions are left out is part of the checkpoint, and so of the order.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vitscale.ground.errors import NonFiniteError
from vitscale.ground.files.durable import write_text
from vitscale.ground.wording import finite
from vitscale.recipe import Anomalies, Policy, Spike
from vitscale.runs.names import ANOMALIES_DIR

Kind = Literal["non-finite", "spike"]

_TO_DEVIATION = 1.4826  # a normal distribution's standard deviation over its median absolute deviation
_LEAST_DEVIATION = 1e-3  # as a share of the median: losses that hardly differ say little about what may come
_SHOWN = 8  # uids shown in a message


@dataclass(frozen=True)
class SkippedData:
    """Positions that are not trained on, as sorted ranges (start, stop)."""

    ranges: tuple[tuple[int, int], ...] = ()

    def adding(self, *ranges: tuple[int, int]) -> "SkippedData":
        """This with more positions; they may overlap ranges that are already left out."""
        merged: list[tuple[int, int]] = []
        for low, high in sorted([*self.ranges, *ranges]):
            if merged and low <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], high)
            else:
                merged.append((low, high))
        return SkippedData(tuple(merged))

    def next_stretch(self, position: int) -> tuple[int, int | None]:
        """The first position at or after `position` not left out, and the start of the next range left out, if any."""
        for low, high in self.ranges:
            if position < low:
                return position, low
            if position < high:
                position = high
        return position, None


def loss_limit(settings: Spike, losses: Sequence[float]) -> float:
    """The loss above which a step is an anomaly; infinite until the window of past `losses` is full.

    A leap is told from noise by the median of the window and its median absolute deviation.
    """
    last = losses[-settings.window :]
    if len(last) < settings.window:
        return math.inf
    median = statistics.median(last)
    deviation = _TO_DEVIATION * statistics.median(abs(loss - median) for loss in last)
    return median + settings.factor * max(deviation, _LEAST_DEVIATION * abs(median))


@dataclass(frozen=True)
class AnomalyRecord:
    """A run's anomalies so far; saved in checkpoints."""

    count: int = 0  # anomalies that the run has survived
    skipped: SkippedData = SkippedData()  # the batches that were left out
    losses: tuple[float, ...] = ()  # of the last steps, oldest first, while the recipe watches for leaps

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "AnomalyRecord":
        """From a checkpoint."""
        ranges = tuple((start, stop) for start, stop in state.get("skipped", ()))
        return cls(state.get("count", 0), SkippedData(ranges), tuple(state.get("losses", ())))

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        state = {"skipped": [list(one) for one in self.skipped.ranges], "count": self.count}
        return {**state, "losses": list(self.losses)} if self.losses else state

    def limit(self, settings: Anomalies) -> float | None:
        """The loss above which the next step is an anomaly; None if the recipe watches for none."""
        return None if settings.spike is None else loss_limit(settings.spike, self.losses)

    def after(self, loss: float | None, settings: Anomalies) -> "AnomalyRecord":
        """The record after a step was taken, with its mean loss if the recipe watches it."""
        if settings.spike is None or loss is None:
            return self
        return replace(self, losses=(*self.losses, loss)[-settings.spike.window :])

    def leaving_out(self, start: int, stop: int) -> "AnomalyRecord":
        """The record with the batches at positions [start, stop) left out."""
        return replace(self, skipped=self.skipped.adding((start, stop)))

    def knowing(self, later: "AnomalyRecord") -> "AnomalyRecord":
        """This earlier record, with the count and the skipped data of a `later` one."""
        return replace(self, count=later.count, skipped=self.skipped.adding(*later.skipped.ranges))

    def policy(self, kind: Kind, settings: Anomalies) -> Policy:
        """What to do about one more anomaly."""
        if self.count >= settings.limit:
            return "stop"
        return settings.non_finite if kind == "non-finite" or settings.spike is None else settings.spike.policy


@dataclass(frozen=True)
class Anomaly:
    """A step that must not be taken."""

    kind: Kind
    step: int  # the update that it would have been, from 1
    position: int  # its batch's, in the order
    loss: float  # the mean over the global batch
    rate: float  # the learning rate
    gradient_norm: float  # that DeepSpeed reports
    ranks: "list[Suspects]"

    def describe(self, policy: Policy) -> str:
        """What happened and what is done about it, in words."""
        rewind = "; going back to a checkpoint, and leaving out the batches since"
        then = {"stop": "", "skip": "; the batch is left out", "rewind": rewind}[policy]
        if self.kind == "spike":
            return f"step {self.step:,}: the loss leaps to {self.loss:.6g}{then}"
        where = []
        for rank, (uids, losses) in enumerate(self.ranks):
            bad = [str(uid) for uid, loss in zip(uids, losses, strict=True) if not math.isfinite(loss)]
            if bad:
                where.append(f"rank {rank} (uids {', '.join(bad[:_SHOWN])}{' ...' if len(bad) > _SHOWN else ''})")
        losses_are = f"the loss is not finite on {'; '.join(where)}" if where else "every loss is"
        return f"step {self.step:,}: the gradient is not finite (learning rate {self.rate:.3g}); {losses_are}{then}"

    def error(self, message: str, newest: int, count: int, limit: int) -> NonFiniteError:
        """The error that ends the run: the message, the step of the newest checkpoint, and what can be done."""
        key = "spike.policy" if self.kind == "spike" else "non_finite"
        return NonFiniteError(
            f"{message}. The newest checkpoint is that of step {newest:,}. In another --run-dir, lower optimizer.lr or "
            f"set optimizer.clip_norm; or have such batches left out (anomalies.{key}; "
            f"{count} of anomalies.limit {limit} were)"
        )

    def write(self, run_dir: Path, policy: Policy) -> str:
        """Write the batch's uids and losses beside the checkpoints. Returns where they are, in words.

        The pixels are not written: they are a function of (recipe, epoch, uid).
        """
        report = {
            "kind": self.kind,
            "policy": policy,
            "step": self.step,
            "position": self.position,
            "loss": self.loss,
            "lr": self.rate,
            "grad_norm": self.gradient_norm,
            "ranks": [{"uids": rank.uids, "losses": rank.losses} for rank in self.ranks],
        }
        # Several batches may be tried for one step.
        path = run_dir / ANOMALIES_DIR / f"step-{self.step:08d}-batch-{self.position:08d}.json"
        try:
            path.parent.mkdir(exist_ok=True)
            write_text(path, json.dumps(finite(report)) + "\n")
        except OSError as error:
            return f"; its samples cannot be listed in {path}: {error.strerror or error}"
        return f"; its samples are listed in {path}"


class Suspects(NamedTuple):
    """One rank's samples of a batch that must not be trained on."""

    uids: list[int]
    losses: list[float]
