"""Memory for batches, used again as soon as nobody can see it any more."""

import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor


class Buffers:
    """Tensors for images. One that was handed out comes back when the last tensor or array that looks at it is gone.

    Args:
        shape: of the tensors, uint8.
        pinned: whether the memory is page-locked, so that a CUDA device can copy from it while the host goes on. Then
            torch keeps it for use again, and knows which copies are still under way.
    """

    def __init__(self, shape: tuple[int, ...], pinned: bool) -> None:
        self._shape, self._pinned = shape, pinned
        self._free: deque[np.ndarray] = deque()  # its methods are safe wherever the garbage collector runs

    def take(self) -> Tensor:
        """A tensor whose content is of no meaning."""
        if self._pinned:
            return torch.empty(self._shape, dtype=torch.uint8, pin_memory=True)
        try:
            array = self._free.pop()
        except IndexError:
            array = np.empty(self._shape, np.uint8)
        handed = array.view()
        # A tensor made of it holds the view, and so does every tensor or array made of that one. (An array made of the
        # view itself would not: it would hold the array below.)
        weakref.finalize(handed, self._free.append, array).atexit = False
        return torch.from_numpy(handed)
