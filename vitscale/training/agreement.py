"""What the ranks have to agree on at the border of two steps.

A signal reaches ranks at different moments, and files are written at different speeds. Whatever follows from such a
thing must happen at the same step on every rank, or one of them waits for ever in a collective that the others left.
"""

import torch
import torch.distributed as dist


class Agreement:
    """Compares notes over a process group of its own, in host memory: no device has to wait for it."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")

    def largest(self, *numbers: int) -> list[int]:
        """The largest over the ranks of each number; all ranks call it together with equally many."""
        values = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        return [int(value) for value in values]
