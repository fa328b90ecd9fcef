"""Compares what the engine did with what it had to do: the worst of every parameter group, and all beyond limits.

Errors and limits are relative: for gradients to what micro-batches add to them, for all else to the values' norm.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vitscale.about.checks import rounding
from vitscale.about.checks.oracle import Gradient, Oracle, Rates
from vitscale.training.deepspeed.fragments import GradientPiece

Aspect = Literal["gradient", "update", "moments", "average", "weights"]
ASPECTS: tuple[Aspect, ...] = ("gradient", "update", "moments", "average", "weights")
_LEAST = 1e-30


class Worst(NamedTuple):
    """The comparison of one aspect of a group that came nearest to its limit, or went farthest beyond it."""

    error: float
    limit: float
    where: str

    @property
    def ratio(self) -> float:
        """Error over limit; infinite for an error that is not a number, and for any error if none is allowed."""
        if math.isnan(self.error):
            return math.inf
        return self.error / self.limit if self.limit else math.inf if self.error else 0.0

    def plain(self) -> dict[str, Any]:
        """Plain data for JSON: an error that is not finite is None."""
        return {"error": self.error if math.isfinite(self.error) else None, "limit": self.limit, "where": self.where}

    @property
    def is_within(self) -> bool:
        """Whether the error is within the limit."""
        return self.ratio <= 1


@dataclass
class GroupResult:
    """The results for the parameters that are trained in one way.

    Attributes:
        name: what distinguishes the group from others.
        parameters, elements: the number of each.
        worst: the worst comparison of each aspect that was compared.
    """

    name: str
    parameters: int = 0
    elements: int = 0
    worst: dict[Aspect, Worst] = field(default_factory=dict)


@dataclass
class State:
    """What the ranks hold, assembled.

    Attributes:
        values: kind -> parameter -> its values in its own shape, fp32; what no rank holds is NaN.
        checksums: for each rank, of the weights that it computes with, by parameter.
    """

    values: dict[str, dict[str, Tensor]]
    checksums: Sequence[Mapping[str, int]]


class Comparison:
    """Collects the comparisons, step by step.

    Args:
        oracle: computes what the engine must do.
        shapes: the shapes of all parameters.
        roundings: the roundings of a gradient on its way from rank to rank.
    """

    def __init__(self, oracle: Oracle, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, roundings: int) -> None:
        self.groups: dict[str, GroupResult] = {}
        self.findings: list[str] = []
        self.clipped = 0
        self.norm = Worst(0.0, 0.0, "")
        self.oracle, self._shapes, self._dtype, self._roundings = oracle, shapes, dtype, roundings
        for name, shape in shapes.items():
            group = self._group(name)
            group.parameters += 1
            group.elements += math.prod(shape)

    def _group(self, name: str) -> GroupResult:
        found = self.oracle.group(name)
        key = "frozen" if found is None else f"lr x {found[0]:g}, decay {found[1]:g}"
        return self.groups.setdefault(key, GroupResult(key))

    def _note(self, aspect: Aspect, name: str, worst: Worst) -> None:
        of_group = self._group(name).worst
        if aspect not in of_group or worst.ratio > of_group[aspect].ratio:
            of_group[aspect] = worst
        if not worst.is_within:
            self.findings.append(f"{worst.where}: {aspect} {worst.error:.3g} away, limit {worst.limit:.3g}")

    def gradients(
        self,
        step: int,
        expected: Mapping[str, Gradient],
        norms: tuple[float, float],
        found: Sequence[Sequence[GradientPiece]],
    ) -> dict[str, Tensor]:
        """Compare every rank's pieces of the gradients of a step, and their norm before clipping.

        Args:
            norms: the norms that the oracle and the engine found.

        Returns:
            The gradients that were applied, whole.
        """
        clip_norm = self.oracle.recipe.optimizer.clip_norm
        self.clipped += clip_norm is not None and norms[0] > clip_norm
        limits = {
            name: rounding.of_gradient(each.way, each.noise, self._dtype, self._roundings)
            for name, each in expected.items()
        }
        of_norm = Worst(abs(norms[1] / max(norms[0], _LEAST) - 1), max(limits.values()), f"step {step}")
        self.norm = max(self.norm, of_norm, key=lambda worst: worst.ratio)
        if not of_norm.is_within:
            self.findings.append(f"step {step}: norm of all gradients {norms[1]:.6g}; it has to be {norms[0]:.6g}")
        whole = {name: torch.full_like(each.value, math.nan).view(-1) for name, each in expected.items()}
        for rank, pieces in enumerate(found):
            for name, start, values in pieces:
                stop, right = start + len(values), expected[name].value.view(-1)
                whole[name][start:stop] = values
                # A piece of a parameter may have next to none of its gradient, but still its part of the rounding
                # errors.
                size = max(expected[name].size * math.sqrt(len(values) / len(right)), _LEAST)
                error = float((values - right[start:stop]).norm()) / size
                where = f"step {step}, rank {rank}, {name}[{start}:{stop}]"
                self._note("gradient", name, Worst(error, limits[name], where))
        for name, value in whole.items():
            if missing := int(value.isnan().sum()):
                where = f"step {step}, {name}: {missing:,} elements were given none"
                self._note("gradient", name, Worst(math.nan, limits[name], where))
        return {name: value.view(self._shapes[name]) for name, value in whole.items()}

    def updates(self, step: int, before: State, after: State, applied: Mapping[str, Tensor], rates: Rates) -> None:
        """Compare masters, moments and average after a step with what follows from those before and the gradient."""
        for name, shape in self._shapes.items():
            kinds = self.oracle.recipe.kept(name, tuple(shape)) if name in applied else {}
            weight = before.values["master"][name].double()
            kept = {kind: before.values[kind][name].double() for kind in kinds}
            expected, moments = self.oracle.update(name, weight, kept, applied.get(name, weight), rates)
            where = f"step {step}, {name}"
            of_step = rounding.of_update(*self.oracle.rule.roundings(kept))
            moved, size = float((expected - weight).norm()), max(float(weight.norm()), float(expected.norm()), _LEAST)
            limit = rounding.of_update(torch.float32) + of_step * moved / size
            self._note("update", name, Worst(_apart(after.values["master"][name], expected, size), limit, where))
            for kind, moment in moments.items():
                stored = torch.bfloat16 if kind in self.oracle.recipe.optimizer.kept_in_bf16 else torch.float32
                scale = max(float(moment.norm()), float(kept[kind].norm()), _LEAST)
                error = _apart(after.values[kind][name], moment, scale)
                self._note("moments", name, Worst(error, rounding.of_update(stored), f"{where}, {kind}"))
            if "ema" in before.values:
                old = before.values["ema"][name].double()
                mean = self.oracle.average(old, after.values["master"][name].double(), rates[0] + 1)
                scale = max(float(old.norm()), float(mean.norm()), _LEAST)
                error = _apart(after.values["ema"][name], mean, scale)
                self._note("average", name, Worst(error, rounding.of_update(torch.float32), where))

    def weights(self, step: int, state: State, checksum: Any) -> None:
        """Check that the weights of every rank are the masters, rounded, to the last bit."""
        for name, master in state.values["master"].items():
            expected = checksum(self.oracle.rounded(master))
            for rank, of_rank in enumerate(state.checksums):
                where = f"step {step}, rank {rank}, {name}"
                self._note("weights", name, Worst(float(of_rank[name] != expected), 0.0, where))


def _apart(found: Tensor, expected: Tensor, size: float) -> float:
    return float((found.double() - expected).norm()) / size
