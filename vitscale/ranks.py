"""Communication between ranks: sums, gathered rows, results of rank 0, and what they agree on between two steps.

Sums, gathered rows and work of rank 0 need no process group: without one there is one rank and nothing to exchange.
Tensors stay on their device, which must be one that the process group's backend supports.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vitscale.errors import RecipeError, VitscaleError

Result = TypeVar("Result")


def world_size() -> int:
    """The number of ranks in the process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def reduce_sum(values: Tensor) -> Tensor:
    """The sum of `values` over all ranks, on all of them."""
    if world_size() > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values


def gather_rows(*columns: Tensor) -> tuple[Tensor, ...] | None:
    """The rows of all ranks, in rank order, in host memory of rank 0; None on the other ranks.

    All columns of a rank have the same number of rows; ranks may differ.
    """
    if world_size() == 1:
        return tuple(column.cpu() for column in columns)
    rows = columns[0].shape[0]
    count = torch.tensor([rows], device=columns[0].device)
    counts = [torch.empty_like(count) for _ in range(world_size())]
    dist.all_gather(counts, count)
    rows_by_rank = [int(other) for other in counts]
    gathered = []
    for column in columns:
        # The backends only exchange equal shapes.
        padded = column.new_zeros(max(1, *rows_by_rank), *column.shape[1:])
        padded[:rows] = column
        parts = [torch.empty_like(padded) for _ in rows_by_rank] if dist.get_rank() == 0 else None
        dist.gather(padded, parts, dst=0)
        if parts is not None:
            gathered.append(torch.cat([part[:n] for part, n in zip(parts, rows_by_rank, strict=True)]).cpu())
    return tuple(gathered) if dist.get_rank() == 0 else None


def on_rank_zero(compute: Callable[[], Result]) -> Result:
    """Run `compute` on rank 0 and return its result, or raise its exception, on every rank.

    For work that need not be repeated on every rank, and whose last bits might differ between devices.
    """
    if world_size() == 1:
        return compute()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = compute()
        except Exception as error:  # any error must reach the others, which wait in the broadcast
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1].on_all_ranks() if isinstance(outcome[1], VitscaleError) else outcome[1]
    return outcome[0]


def write_on_rank_zero(work: Callable[[], None], folder: Path) -> None:
    """Run on rank 0 what writes into `folder` for all. On failure every rank raises `RecipeError` and none hangs."""

    def guarded() -> None:
        try:
            work()
        except OSError as error:
            raise RecipeError(f"{error.filename or folder} cannot be written: {error.strerror or error}") from None

    on_rank_zero(guarded)


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list:
    """One object of every rank, in rank order, on every rank."""
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values


def from_rank_zero(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's object, on every rank; what the others give is not looked at."""
    values = [value]
    dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


def agreed(value: int | None, what: str) -> int | None:
    """The value that all ranks were given. Collective. Raises `RecipeError` if the values differ; `what` names them."""
    given = gather(value)
    if len(set(given)) > 1:
        raise RecipeError(f"{what} differs between the ranks: {', '.join(map(str, given))}").on_all_ranks()
    return value


def gather_numbers(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Every rank's numbers, float64 (ranks, len(numbers)) on the CPU, on every rank; exchanged on `device`."""
    own = torch.tensor(numbers, dtype=torch.float64, device=device)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return torch.stack(rows).cpu()


def sum_integers(value: int, device: torch.device) -> int:
    """The sum of unsigned integers over all ranks, modulo 2^64; exchanged on `device`."""
    signed = value - 2**64 if value >= 2**63 else value
    return int(reduce_sum(torch.tensor(signed, dtype=torch.int64, device=device)).item()) % 2**64


class Agreement:
    """Lets ranks agree between two steps, over a process group of its own in host memory, so that no device waits.

    A signal reaches ranks at different moments, and files are written at different speeds. Whatever follows from such
    an event must happen at the same step on every rank, or one of them waits forever in a collective that others left.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")

    def largest(self, *numbers: int) -> list[int]:
        """The maximum of each number over all ranks. Collective: every rank must give the same count of numbers."""
        values = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        return [int(value) for value in values]
