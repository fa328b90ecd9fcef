"""Communication between ranks: sums, gathered rows, results of rank 0, and what they agree on between two steps.

Sums, gathered rows and work of rank 0 need no process group: without one there is one rank and nothing to exchange.
Tensors stay on their device, which must be one that the process group's backend supports.

Values of Python travel as JSON, not as pickles, which would run the code of whoever reaches the ranks' ports. What
arrives is what JSON has: lists for tuples, mappings for dataclasses, of which callers make their own types.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from vitscale.ground.errors import PeerLostError, RecipeError, VitscaleError, as_plain, from_plain

Result = TypeVar("Result")

_MOST_ROWS = 1 << 22  # whose terms, multiples of 2^-40, are added
_MOST_BYTES = 1 << 28  # of a value; the largest, a part of a large checkpoint's layouts, has some megabytes


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


def all_rows(rows: Tensor) -> Tensor:
    """The rows of all ranks, in rank order, on every rank; each has equally many."""
    if world_size() == 1:
        return rows
    whole = rows.new_empty(world_size() * len(rows), *rows.shape[1:])
    dist.all_gather_into_tensor(whole, rows.contiguous())
    return whole


@dataclass(frozen=True)
class Sums:
    """What the ranks compute together of rows that each of them has equally many of; all of them call it together.

    One rank by default, which exchanges nothing.
    """

    rank: int = 0
    ranks: int = 1

    def rows(self, values: Tensor) -> Tensor:
        """The rows of all ranks, in the order of the global batch's slots, on every rank."""
        return values if self.ranks == 1 else all_rows(values)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of rows (n, ...) of all ranks."""
        count = len(whole) // self.ranks
        return whole[self.rank * count : (self.rank + 1) * count]

    def total(self, terms: Tensor | Iterable[Tensor]) -> Tensor:
        """The sum over the rows (n, ...) of all ranks: the same bits whatever their order, ranks and micro-batches.

        Each term is rounded to a multiple of 2^-40, and integers are added. If a term is no number, or so far outside
        [-1, 1] (by 1) that integers could wrap around, all of the sum is NaN, on every rank.

        Args:
            terms: within [-1, 1], not below fp32; at most 2^22 rows of all ranks. Perhaps in parts, one after another,
                so that not all rows have to be in memory.

        Raises `ValueError` for more rows.
        """
        total: Tensor | None = None
        rows = 0
        for part in [terms] if isinstance(terms, Tensor) else terms:
            of_part = (part * 2.0**40).round().to(torch.int64).sum(dim=0)
            is_wrong = ~(part.abs() < 2).all()  # of NaN too
            of_part = torch.cat([of_part.flatten(), is_wrong.to(torch.int64)[None]])
            total, rows = of_part if total is None else total + of_part, rows + len(part)
            shape, dtype = part.shape[1:], part.dtype
        assert total is not None, "no rows"
        if rows * self.ranks > _MOST_ROWS:
            raise ValueError(f"{rows * self.ranks:,} rows; integers of 64 bits hold the sum of {_MOST_ROWS:,}")
        if self.ranks > 1:
            dist.all_reduce(total)
        added = (total[:-1].double() * 2.0**-40).to(dtype).view(shape)
        return torch.where(total[-1] > 0, torch.nan, added)

    def greatest(self, values: Tensor) -> Tensor:
        """The maximum of each of `values` over all ranks. A NaN of one rank may be lost on the way."""
        if self.ranks > 1:
            values = values.clone()
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values


def on_rank_zero(compute: Callable[[], Result]) -> Result:
    """Run `compute` on rank 0 and return its result, plain data, or raise its error, on every rank.

    For work that need not be repeated on every rank, and whose last bits might differ between devices. If it fails by a
    bug, only rank 0 raises that exception, and the others `PeerLostError`.
    """
    if world_size() == 1:
        return compute()
    outcome: list[Any] | None = None
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome = [compute(), None]
            json.dumps(outcome)  # what it cannot write has to fail here
        except Exception as error:  # any error must reach the others, which wait in the broadcast
            failure = error.on_all_ranks() if isinstance(error, VitscaleError) else error
            bug = PeerLostError(f"rank 0 has failed: {type(error).__name__}: {error}")
            outcome = [None, as_plain(error if isinstance(error, VitscaleError) else bug)]
    result, told = from_rank_zero(outcome)
    if failure is not None:
        raise failure
    if told is not None:
        raise from_plain(*told).on_all_ranks()
    return cast(Result, result)


def write_on_rank_zero(work: Callable[[], None], folder: Path) -> None:
    """Run on rank 0 what writes into `folder` for all. On failure every rank raises `RecipeError` and none hangs."""

    def guarded() -> None:
        try:
            work()
        except OSError as error:
            raise RecipeError(f"{error.filename or folder} cannot be written: {error.strerror or error}") from None

    on_rank_zero(guarded)


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list:
    """One value of every rank, plain data, in rank order, on every rank."""
    own = _as_bytes(value, group)
    sizes = [torch.empty(1, dtype=torch.int64, device=own.device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(own)], device=own.device), group)
    lengths = [_checked(int(size)) for size in sizes]
    padded = own.new_zeros(max(lengths))  # the backends only exchange equal shapes
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group)
    return [_of_bytes(part[:length]) for part, length in zip(parts, lengths, strict=True)]


def from_rank_zero(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's value, plain data, on every rank; what the others give is not looked at."""
    content = _as_bytes(value if dist.get_rank() == 0 else None, group)
    size = torch.tensor([len(content)], device=content.device)
    dist.broadcast(size, src=0, group=group)
    if dist.get_rank() != 0:
        content = content.new_empty(_checked(int(size)))
    dist.broadcast(content, src=0, group=group)
    return _of_bytes(content)


def _as_bytes(value: Any, group: dist.ProcessGroup | None) -> Tensor:
    """JSON, uint8 (length,): every float to its last bit, and those that are not finite."""
    device = f"cuda:{torch.cuda.current_device()}" if dist.get_backend(group) == "nccl" else "cpu"
    return torch.frombuffer(bytearray(json.dumps(value), "ascii"), dtype=torch.uint8).to(device)


def _of_bytes(content: Tensor) -> Any:
    try:
        return json.loads(content.cpu().numpy().tobytes())
    except (ValueError, RecursionError):
        raise PeerLostError("a rank has sent something that is not JSON; does it run the same vitscale?") from None


def _checked(length: int) -> int:
    if not 0 < length <= _MOST_BYTES:
        raise PeerLostError(f"a rank announces a value of {length:,} bytes; does it run the same vitscale?")
    return length


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
