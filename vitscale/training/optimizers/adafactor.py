"""Adafactor as "Scaling Vision Transformers" trains with it (Zhai et al. 2022, section 3.5; big_vision's form)."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from vitscale.recipe import Adafactor as Settings
from vitscale.training.optimizers.pieces import Piece
from vitscale.training.optimizers.whole_tensors import Group, Part, WholeTensorOptimizer

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
        for part in parts:
            if part.piece is None:
                continue
            state, gradient = self.state[part.piece.flat], part.piece.of_gradient()
            if self._settings.factored_dims(part.shape) is None:
                square = part.piece.view(state["exp_avg_sq"])
                square.lerp_(gradient.square().add_(_EPS), kept)
                gradient.mul_(square.rsqrt())
            mean = part.piece.view(state["exp_avg"])
            mean.lerp_(gradient.to(mean.dtype), 1 - group["momentum"])
            weights = part.piece.view(part.piece.flat).mul_(1 - group["lr"] * group["weight_decay"])
            weights.add_(mean.float(), alpha=-group["lr"])

    def _update_factors(self, parts: list[Part], kept: float) -> None:
        """Update the means of rows and columns, and scale the gradients by them in place."""
        if not parts:
            return
        shapes = [shape for part in parts for shape in self._factors(part)]
        sums = torch.zeros(sum(map(math.prod, shapes)), device=self.device)
        cut = sums.split([math.prod(shape) for shape in shapes])
        views = [values.view(shape) for values, shape in zip(cut, shapes, strict=True)]
        pairs = list(zip(parts, views[::2], views[1::2], strict=True))
        for part, rows, columns in pairs:
            if part.piece is not None:
                slab = _Slab(part, part.piece)
                slab.values.square_()
                for into, side in zip((rows, columns), self._sides(part), strict=True):
                    slab.of(into).add_(slab.values.sum(dim=side, keepdim=True))
        self.summed(sums)
        for part, rows, columns in pairs:
            if part.piece is None:
                continue
            state = self.state[part.piece.flat]
            longest, second = self._sides(part)
            row, column = state[f"exp_avg_sq_r/{part.name}"], state[f"exp_avg_sq_c/{part.name}"]
            row.lerp_(rows.div_(part.shape[longest]).add_(_EPS), kept)
            column.lerp_(columns.div_(part.shape[second]).add_(_EPS), kept)
            factor = (row / row.mean(dim=second, keepdim=True)).rsqrt_()
            slab = _Slab(part, part.piece)
            slab.values.mul_(slab.of(factor)).mul_(slab.of(column.rsqrt()))
            part.piece.of_gradient().copy_(slab.piece)

    def _sides(self, part: Part) -> tuple[int, int]:
        """The longest side of a tensor, over which row means run, and the second longest, for column means."""
        dims = self._settings.factored_dims(part.shape)
        assert dims is not None
        return dims[1], dims[0]

    def _factors(self, part: Part) -> list[tuple[int, ...]]:
        kept = self._settings.kept(part.name, part.shape)
        return [kept["exp_avg_sq_r"], kept["exp_avg_sq_c"]]


class _Slab:
    """A piece of a gradient, padded with zeros to whole indices of the tensor's first side.

    Attributes:
        values: a copy, (indices touched, other sides ...).
    """

    def __init__(self, part: Part, piece: Piece) -> None:
        width = math.prod(part.shape[1:])
        self._first, stop = piece.start // width, -(-(piece.start + piece.length) // width)
        self._from, self._length = piece.start - self._first * width, piece.length
        self.values = piece.flat.new_zeros(stop - self._first, *part.shape[1:])
        self._stop = stop
        self.piece.copy_(piece.of_gradient())

    @property
    def piece(self) -> Tensor:
        """The piece in the slab, 1-D."""
        return self.values.view(-1).narrow(0, self._from, self._length)

    def of(self, factor: Tensor) -> Tensor:
        """The part of a factor of rows or columns that belongs to the slab."""
        return factor if factor.shape[0] == 1 else factor[self._first : self._stop]
