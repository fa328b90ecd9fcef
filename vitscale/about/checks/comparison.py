"""Compares what the engine did with what it had to do: the worst of every parameter group, and all beyond limits.

Errors and limits are relative: for gradients to what micro-batches add to them, for all else to the values' norm.

A limit follows from the number formats. A rounding moves a number by at most its format's `_unit`, in proportion to the
number. A number that is rounded R times on its way, each time randomly up or down, ends about sqrt(R) units away. R is
counted: it is the length of the longest way from the loss to a parameter in autograd's graph, there and back. Some
models amplify errors on the way (a normed convolution's weights, say), so plain torch computes each gradient in the
engine's format too, and the engine may be as far from fp32 as that is, in each rank's piece and in the whole.
`_MARGIN` allows for bad luck.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vitscale.about.checks.oracle import Gradient, Oracle
from vitscale.runs.checkpoint import MASTER, average_kind
from vitscale.training.deepspeed.fragments import GradientPiece
from vitscale.training.optimizers.schedule import Rates
from vitscale.training.watching.replicas import checksum

Aspect = Literal["gradient", "update", "moments", "average", "weights"]
_LEAST = 1e-30
_MARGIN = 2.0
_TERMS = 4096  # of the sums that are made in fp32, whatever the format: in another order they round differently


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
        return {**self._asdict(), "error": self.error if math.isfinite(self.error) else None}


@dataclass
class State:
    """What the ranks hold, assembled."""

    values: dict[str, dict[str, Tensor]]  # kind -> parameter -> values in its shape, fp32; NaN where no rank has any
    checksums: Sequence[Mapping[str, int]]  # for each rank, of the weights that it computes with, by parameter


class Comparison:
    """Collects the comparisons, step by step; `roundings` are those of a gradient on its way from rank to rank."""

    def __init__(self, oracle: Oracle, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, roundings: int) -> None:
        self.findings: list[str] = []
        self.clipped = 0
        self.norm = Worst(0.0, 0.0, "")
        self.oracle, self._shapes, self._dtype, self._roundings = oracle, shapes, dtype, roundings
        self._sizes: dict[str, list[int]] = {}  # of each group of parameters that are trained in one way
        self._worst: dict[str, dict[Aspect, Worst]] = {}
        for name, shape in shapes.items():
            self._sizes.setdefault(self._group(name), []).append(math.prod(shape))
            self._worst.setdefault(self._group(name), {})

    def groups(self) -> list[dict[str, Any]]:
        """Each group: what tells it from others, its size, and the worst of each aspect that was compared."""
        return [
            {"group": group, "parameters": len(sizes), "elements": sum(sizes)}
            | {aspect: worst.plain() for aspect, worst in self._worst[group].items()}
            for group, sizes in self._sizes.items()
        ]

    def _group(self, name: str) -> str:
        factors = self.oracle.group(name)
        return "frozen" if factors is None else f"lr x {factors[0]:g}, decay {factors[1]:g}"

    def _note(self, aspect: Aspect, name: str, error: float, limit: float, where: str) -> None:
        worst, of_group = Worst(error, limit, where), self._worst[self._group(name)]
        if aspect not in of_group or worst.ratio > of_group[aspect].ratio:
            of_group[aspect] = worst
        if not worst.ratio <= 1:
            self.findings.append(f"{where}: {aspect} {error:.3g} away, limit {limit:.3g}")

    def gradients(
        self,
        step: int,
        expected: Mapping[str, Gradient],
        norms: tuple[float, float],
        by_rank: Sequence[Sequence[GradientPiece]],
    ) -> dict[str, Tensor]:
        """Compare every rank's pieces of the gradients of a step, and their norm before clipping.

        `norms`: by the oracle and by the engine. Returns the gradients that were applied, whole.
        """
        clip_norm = self.oracle.recipe.optimizer.clip_norm
        self.clipped += clip_norm is not None and norms[0] > clip_norm
        limits = {
            name: _gradient_limit(each, each.size, slice(None), self._dtype, self._roundings)
            for name, each in expected.items()
        }
        of_norm = Worst(abs(norms[1] / max(norms[0], _LEAST) - 1), max(limits.values()), f"step {step}")
        self.norm = max(self.norm, of_norm, key=lambda worst: worst.ratio)
        if not of_norm.ratio <= 1:
            self.findings.append(f"step {step}: norm of all gradients {norms[1]:.6g}; it has to be {norms[0]:.6g}")
        whole = {name: torch.full_like(each.value, math.nan).view(-1) for name, each in expected.items()}
        for rank, pieces in enumerate(by_rank):
            for name, start, values in pieces:
                stop, right = start + len(values), expected[name].value.view(-1)
                whole[name][start:stop] = values
                # A piece of a parameter may have next to none of its gradient, but still its part of the rounding
                # errors. And these may lie in few of the elements: those of plain torch say where.
                size = max(expected[name].size * math.sqrt(len(values) / len(right)), _LEAST)
                own = _gradient_limit(expected[name], size, slice(start, stop), self._dtype, self._roundings)
                error = float((values - right[start:stop]).norm()) / size
                where = f"step {step}, rank {rank}, {name}[{start}:{stop}]"
                self._note("gradient", name, error, max(limits[name], own), where)
        for name, value in whole.items():
            if missing := int(value.isnan().sum()):
                where = f"step {step}, {name}: {missing:,} elements were given none"
                self._note("gradient", name, math.nan, limits[name], where)
        return {name: value.view(self._shapes[name]) for name, value in whole.items()}

    def updates(self, step: int, before: State, after: State, applied: Mapping[str, Tensor], rates: Rates) -> None:
        """Compare masters, moments and average after a step with what follows from those before and the gradient."""
        for name, shape in self._shapes.items():
            kinds = self.oracle.recipe.kept(name, tuple(shape)) if name in applied else {}
            weight = before.values["master"][name].double()
            kept = {kind: before.values[kind][name].double() for kind in kinds}
            given = name, weight, kept, applied.get(name, weight), rates
            expected, moments = self.oracle.update(*given)
            where, master = f"step {step}, {name}", after.values["master"][name]
            of_step = max(_update_limit(*self.oracle.rule.roundings(kept)), _MARGIN * self.oracle.noise(*given))
            moved, size = float((expected - weight).norm()), _size(weight, expected)
            limit = _update_limit(torch.float32) + of_step * moved / size
            self._note("update", name, _error(master, expected, size), limit, where)
            for kind, moment in moments.items():
                stored = torch.bfloat16 if kind in self.oracle.recipe.optimizer.kept_in_bf16 else torch.float32
                error = _error(after.values[kind][name], moment, _size(moment, kept[kind]))
                self._note("moments", name, error, _update_limit(stored), f"{where}, {kind}")
            for average in self.oracle.recipe.all_averages:
                kind, of = average_kind(average.name), MASTER if average.of is None else average_kind(average.of)
                old, share = before.values[kind][name].double(), rates.averages[average.name]
                mean = share * old + (1 - share) * after.values[of][name].double()
                error = _error(after.values[kind][name], mean, _size(old, mean))
                self._note("average", name, error, _update_limit(torch.float32), f"{where}, {average.name}")

    def weights(self, step: int, state: State) -> None:
        """Check that the weights of every rank are the masters, rounded, to the last bit."""
        for name, master in state.values["master"].items():
            expected = checksum(self.oracle.rounded(master))
            for rank, of_rank in enumerate(state.checksums):
                self._note("weights", name, float(of_rank[name] != expected), 0.0, f"step {step}, rank {rank}, {name}")


def _size(before: Tensor, after: Tensor) -> float:
    return max(float(before.norm()), float(after.norm()), _LEAST)


def _error(actual: Tensor, expected: Tensor, size: float) -> float:
    return float((actual.double() - expected).norm()) / size


def _unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def _gradient_limit(gradient: Gradient, size: float, part: slice, dtype: torch.dtype, exchanges: int) -> float:
    """The limit for a part of a gradient's elements that is computed in `dtype`, relative to the part's size.

    `exchanges`: roundings to the format in which ranks exchange gradients.
    """
    of_one = _unit(dtype) + math.sqrt(_TERMS) * _unit(torch.float32) / 8
    noise = float(gradient.noise.view(-1)[part].norm()) / max(size, _LEAST)
    return _MARGIN * max(math.sqrt(2 * gradient.way + exchanges) * of_one, noise)


def _update_limit(dtype: torch.dtype, roundings: int = 16) -> float:
    """The limit for what an optimizer computes from one gradient in `roundings` operations, relative to its size."""
    return roundings * _unit(dtype)
