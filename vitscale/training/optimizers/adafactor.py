"""Adafactor as "Scaling Vision Transformers" trains with it (Zhai et al. 2022, section 3.5; big_vision's form)."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from vitscale.recipe import Adafactor as Settings
from vitscale.runs.checkpoint import MASTER
from vitscale.training.optimizers.rule import Expected, Rule, State, Update, decoupled
from vitscale.training.optimizers.whole_tensors import Group, Piece, PlacedParameter, WholeTensorOptimizer

_EPS = 1e-30  # added to every square
_DECAY_RATE = 0.8


class Adafactor(WholeTensorOptimizer):
    """Divides gradients by the root of their mean squares, kept by row and column; their momentum is kept in bf16."""

    def __init__(self, groups: Iterable[Group], settings: Settings) -> None:
        super().__init__(groups, {"momentum": settings.momentum})
        self._settings = settings

    def update(self, group: Group, masters: list[Tensor]) -> None:
        """Make one update. The ranks sum one vector, with an element for each row and column of the matrices."""
        kept = 1 - min(self._settings.beta2_cap, 1 - group["updates"] ** -_DECAY_RATE)  # the weight of the new value
        parts = self.parts(masters)
        factored = [part for part in parts if self._settings.factored_dims(part.shape) is not None]
        self._update_factors(factored, kept)
        for part, piece, state in self.here(parts):
            gradient = piece.of_gradient()
            if self._settings.factored_dims(part.shape) is None:
                square = piece.view(state["exp_avg_sq"])
                square.lerp_(gradient.square().add_(_EPS), kept)
                gradient.mul_(square.rsqrt())
            mean = piece.view(state["exp_avg"])
            mean.lerp_(gradient.to(mean.dtype), 1 - group["momentum"])
            weights = piece.view(piece.flat).mul_(1 - group["lr"] * group["weight_decay"])
            weights.add_(mean.float(), alpha=-group["lr"])

    def _update_factors(self, parts: list[PlacedParameter], kept: float) -> None:
        """Update the means of rows and columns, and scale the gradients by them in place."""
        if not parts:
            return
        kinds = ("exp_avg_sq_r", "exp_avg_sq_c")
        shapes = [self._settings.kept(part.name, part.shape)[kind] for part in parts for kind in kinds]
        sums = torch.zeros(sum(map(math.prod, shapes)), device=self.device)
        cut = sums.split([math.prod(shape) for shape in shapes])
        views = [values.view(shape) for values, shape in zip(cut, shapes, strict=True)]
        factors = {part.name: pair for part, pair in zip(parts, zip(views[::2], views[1::2], strict=True), strict=True)}
        for part, piece, _ in self.here(parts):
            slab = _Slab(part, piece)
            slab.values.square_()
            for into, side in zip(factors[part.name], self._sides(part), strict=True):
                slab.of(into).add_(slab.values.sum(dim=side, keepdim=True))
        self.summed(sums)
        for part, piece, state in self.here(parts):
            (rows, columns), (longest, second) = factors[part.name], self._sides(part)
            row, column = state[f"exp_avg_sq_r/{part.name}"], state[f"exp_avg_sq_c/{part.name}"]
            row.lerp_(rows.div_(part.shape[longest]).add_(_EPS), kept)
            column.lerp_(columns.div_(part.shape[second]).add_(_EPS), kept)
            factor = (row / row.mean(dim=second, keepdim=True)).rsqrt_()
            slab = _Slab(part, piece)
            slab.values.mul_(slab.of(factor)).mul_(slab.of(column.rsqrt()))
            piece.of_gradient().copy_(slab.piece)

    def _sides(self, part: PlacedParameter) -> tuple[int, int]:
        """The longest side of a tensor, over which row means run, and the second longest, for column means."""
        dims = self._settings.factored_dims(part.shape)
        assert dims is not None
        return dims[1], dims[0]


class _Slab:
    """A piece of a gradient, padded with zeros to whole indices of the tensor's first side."""

    def __init__(self, part: PlacedParameter, piece: Piece) -> None:
        width = math.prod(part.shape[1:])
        self._first, self._stop = piece.start // width, -(-(piece.start + piece.length) // width)
        # A copy, (indices touched, other sides ...), and where the piece lies in it, 1-D.
        self.values = piece.flat.new_zeros(self._stop - self._first, *part.shape[1:])
        self.piece = self.values.view(-1).narrow(0, piece.start - self._first * width, piece.length)
        self.piece.copy_(piece.of_gradient())

    def of(self, factor: Tensor) -> Tensor:
        """The part of a factor of rows or columns that belongs to the slab."""
        return factor if factor.shape[0] == 1 else factor[self._first : self._stop]


class AdafactorRule(Rule[Settings]):
    """Zhai et al., 2022, section 3.5: weights follow a mean in bf16 of directions, divided by factored mean squares."""

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return Adafactor(groups, self.settings)

    def roundings(self, before: State) -> tuple[torch.dtype, int]:
        return torch.bfloat16, super().roundings(before)[1]

    def reference(self, update: Update, before: State, gradient: Tensor) -> State:
        step, means = self._direction(update, before, gradient)
        step = step.bfloat16().double()
        mean = before["exp_avg"].lerp(step, 1 - update.momentum).bfloat16().double()
        return {MASTER: decoupled(update, before[MASTER], mean), **means, "exp_avg": mean}

    def _direction(self, update: Update, before: State, gradient: Tensor) -> tuple[Tensor, State]:
        """With the mean squares by which it is divided."""
        new = 1 - min(self.settings.beta2_cap, 1 - update.number**-_DECAY_RATE)
        kinds = [kind for kind in before if kind not in (MASTER, "exp_avg")]
        slope = gradient.view(torch.broadcast_shapes(*(before[kind].shape for kind in kinds)))  # heads on their own
        means = {kind: (1 - new) * before[kind] + new * _mean_like(slope**2 + _EPS, before[kind]) for kind in kinds}
        if "exp_avg_sq" in means:
            return gradient / means["exp_avg_sq"].sqrt(), means
        rows, columns = means["exp_avg_sq_r"], means["exp_avg_sq_c"]
        return (slope / (rows / _mean_like(rows, columns)).sqrt() / columns.sqrt()).view_as(gradient), means

    def of_elements(self, update: Update, before: State, gradient: Tensor, after: State) -> Expected:
        """The mean direction of a factored tensor is taken as it is."""

        def rule(state: State, slope: Tensor) -> State:
            weights = {MASTER: decoupled(update, state[MASTER], after["exp_avg"])}
            if self.settings.factored_dims(update.shape) is not None:
                return weights
            step, means = self._direction(update, state, slope)
            return {**weights, **means, "exp_avg": state["exp_avg"].lerp(step, 1 - update.momentum)}

        return self.within(rule, before, gradient)


def _mean_like(values: Tensor, shaped: Tensor) -> Tensor:
    """The mean over the sides that have one element in `shaped`."""
    sides = [side for side in range(values.ndim) if shaped.shape[side] == 1 and values.shape[side] > 1]
    return values.mean(dim=sides, keepdim=True) if sides else values
