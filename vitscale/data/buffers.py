"""Memory for batches, reused as soon as nothing refers to it any more."""

import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor


class Buffers:
    """A pool of image tensors. A tensor's memory returns to it when the last tensor or array that views it is gone.

    Args:
        shape: the shape of the tensors, which are uint8.
        pinned: whether the memory is page-locked, so that a CUDA device can copy from it while the host does other
            work. Then torch does the reuse, as it knows which copies are still under way.
    """

    def __init__(self, shape: tuple[int, ...], pinned: bool) -> None:
        self._shape, self._pinned = shape, pinned
        self._free: deque[np.ndarray] = deque()  # its methods are safe wherever the garbage collector runs

    def take(self) -> Tensor:
        """A tensor with undefined content."""
        if self._pinned:
            return torch.empty(self._shape, dtype=torch.uint8, pin_memory=True)
        try:
            array = self._free.pop()
        except IndexError:
            array = np.empty(self._shape, np.uint8)
        handed = array.view()
        # A tensor made from this view keeps it alive, and so does every tensor or array made from that tensor. (An
        # array made from the view itself would not: it would keep the underlying array alive instead.)
        weakref.finalize(handed, self._free.append, array).atexit = False
        return torch.from_numpy(handed)
