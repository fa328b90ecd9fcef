"""Optimizers in which the update of an element depends on others of its parameter, under every ZeRO stage.

Like every optimizer, such a one sees the tensors that its rank updates: a parameter, or under ZeRO 1 to 3 one long
vector with pieces of many. It learns which piece of which parameter lies where, here and on the other ranks, and
exchanges with them what it needs: sums of numbers, or whole matrices, each of which one rank works on. All ranks step
together.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vitscale.ground.ranks import gather

_AT_ONCE = 1 << 24  # elements copied at a time

Group = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of one parameter in this rank's optimizer: elements [start, start + length), at `offset` of `flat`."""

    name: str
    start: int
    length: int
    flat: Tensor
    offset: int

    def view(self, tensor: Tensor) -> Tensor:
        """The same part, 1-D, of a tensor that is laid out as `flat`."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.length)

    def of_gradient(self) -> Tensor:
        """The same part of the gradient, which must exist."""
        assert self.flat.grad is not None
        return self.view(self.flat.grad)


@dataclass
class PlacedParameter:
    """A parameter that lies, in part or whole, in the tensors that an optimizer updates together."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    piece: Piece | None = None  # this rank's, if it has one
    holders: list[tuple[int, int, int]] = field(default_factory=list)  # (rank, start, length) of all pieces, in order
    owner: int = 0  # the rank that works on the whole parameter


class WholeTensorOptimizer(torch.optim.Optimizer):
    """Does nothing before `attach`: DeepSpeed first makes a step with zero gradients to have state created."""

    def __init__(self, groups: Iterable[Group], defaults: dict[str, Any]) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "updates": 0, **defaults})
        self._parts: dict[Tensor, list[PlacedParameter]] = {}
        self._rank, self._world_size = 0, 1

    def attach(
        self, masters: Sequence[Tensor], pieces: list[Piece], shapes: Mapping[str, Sequence[int]], *, are_shared: bool
    ) -> None:
        """Set where parameters lie; all ranks call it together.

        Args:
            masters: the tensors that the optimizer updates, in the same order on every rank.
            pieces: this rank's pieces.
            shapes: shapes of whole parameters, in the same order on every rank.
            are_shared: whether each rank has other pieces; else every rank has all parameters.
        """
        order = list(shapes)
        number = {name: index for index, name in enumerate(order)}
        of_master: dict[Tensor, dict[str, Piece]] = {master: {} for master in masters}
        for piece in pieces:
            of_master[piece.flat][piece.name] = piece
        mine = [[(number[p.name], p.start, p.length) for p in each.values()] for each in of_master.values()]
        by_rank = [mine]
        if are_shared:
            by_rank, self._rank, self._world_size = gather(mine), dist.get_rank(), dist.get_world_size()
        for index, master in enumerate(masters):
            parts: dict[int, PlacedParameter] = {}
            for rank, of_rank in enumerate(by_rank):
                for name, start, length in of_rank[index]:
                    part = parts.setdefault(name, PlacedParameter(order[name], tuple(shapes[order[name]])))
                    part.holders.append((rank, start, length))
            for part in parts.values():
                part.holders.sort(key=lambda holder: holder[1])
                part.piece = of_master[master].get(part.name)
            self._parts[master] = [parts[name] for name in sorted(parts)]
            _deal(self._parts[master], self._world_size)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; takes no closure. The gradients are overwritten."""
        assert closure is None, "a loss is not computed anew"
        for group in self.param_groups:
            masters = [master for master in group["params"] if master.grad is not None and master in self._parts]
            if masters:
                self.update(group, masters)

    def update(self, group: Group, masters: list[Tensor]) -> None:
        """Update tensors of one group, with the same collectives on every rank."""
        raise NotImplementedError

    def parts(self, masters: list[Tensor]) -> list[PlacedParameter]:
        """The parameters in these tensors, in the same order on every rank."""
        return [part for master in masters for part in self._parts[master]]

    def here(self, parts: Iterable[PlacedParameter]) -> Iterator[tuple[PlacedParameter, Piece, dict[str, Tensor]]]:
        """The parts of which this rank has a piece, each with the piece and the state of its tensor."""
        return ((part, part.piece, self.state[part.piece.flat]) for part in parts if part.piece is not None)

    @property
    def device(self) -> torch.device:
        """The device of all that is updated."""
        return next(iter(self._parts)).device

    def summed(self, values: Tensor) -> Tensor:
        """Sum over the ranks that have different pieces, in place."""
        if self._world_size > 1:
            dist.all_reduce(values)
        return values

    def on_whole_matrices(
        self, parts: list[PlacedParameter], of: Callable[[Piece], Tensor], work: Callable[[Tensor], Tensor]
    ) -> None:
        """Replace every parameter's values by what `work` makes of the whole parameter on its owner, in bf16.

        Args:
            of: a piece -> its fp32 values, 1-D, which are read and written.
            work: a bf16 matrix -> another of its shape; of tensors with more sides, all but the first are merged.
        """
        if self._world_size == 1:
            for part, piece, _ in self.here(parts):
                values = of(piece)
                values.copy_(work(values.bfloat16().view(part.shape[0], -1)).reshape(-1))
            return
        if not parts:
            return
        ranks = range(self._world_size)
        # In the order of sending; pieces of one owner stay in order.
        mine = sorted(((part.owner, piece) for part, piece, _ in self.here(parts)), key=lambda each: each[0])
        owned = [part for part in parts if part.owner == self._rank]
        # In the order of arrival.
        here = sorted(((*holder, part) for part in owned for holder in part.holders), key=lambda each: each[0])
        out = [sum(piece.length for owner, piece in mine if owner == rank) for rank in ranks]
        back = [sum(length for holder, _, length, _ in here if holder == rank) for rank in ranks]
        nothing = torch.empty(0, dtype=torch.bfloat16, device=self.device)
        received = _exchange(torch.cat([nothing, *(of(piece).bfloat16() for _, piece in mine)]), out, back)
        wholes = {part.name: nothing.new_empty(math.prod(part.shape)) for part in owned}
        for (_, start, length, part), values in zip(here, received.split([each[2] for each in here]), strict=True):
            wholes[part.name][start : start + length] = values
        for part in owned:
            wholes[part.name] = work(wholes[part.name].view(part.shape[0], -1)).reshape(-1)
        answers = (wholes[part.name][start : start + length] for _, start, length, part in here)
        returned = _exchange(torch.cat([nothing, *answers]), back, out)
        for (_, piece), values in zip(mine, returned.split([piece.length for _, piece in mine]), strict=True):
            of(piece).copy_(values)


def _deal(parts: list[PlacedParameter], world_size: int) -> None:
    """Give every parameter an owner, so that all ranks have about equally much to do; the same on every rank."""
    busy = [0] * world_size
    for part in sorted(parts, key=lambda part: -_multiplications(part.shape)):
        part.owner = busy.index(min(busy))
        busy[part.owner] += _multiplications(part.shape)


def _multiplications(shape: tuple[int, ...]) -> int:
    """Multiplications in a product of the matrix with its own transpose: the shorter side counts twice."""
    rows = shape[0] if shape else 1
    columns = math.prod(shape[1:])
    return rows * columns * min(rows, columns)


def _exchange(values: Tensor, out: list[int], back: list[int]) -> Tensor:
    """Send `out[rank]` of the values to each rank; returns `back[rank]` of each, in the order of ranks."""
    received = values.new_empty(sum(back))
    word = values.element_size()  # as bytes: not every backend has bf16
    sizes = [word * length for length in back], [word * length for length in out]
    dist.all_to_all_single(received.view(torch.uint8), values.view(torch.uint8), *sizes)
    return received


def update_means(group: Group, gradient: Tensor, mean: Tensor, square: Tensor) -> None:
    """Adam's update of 1-D tensors: moves the two means, and overwrites the gradient with the direction."""
    (beta1, beta2), updates = group["betas"], group["updates"]
    root = math.sqrt(1 - beta2**updates)
    for g, m, v in zip(*(tensor.split(_AT_ONCE) for tensor in (gradient, mean, square)), strict=True):
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        torch.div(m, (v.sqrt() / root).add_(group["eps"]).mul_(1 - beta1**updates), out=g)
