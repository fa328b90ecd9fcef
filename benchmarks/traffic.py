"""Counting what a rank gives to torch.distributed, as bytes that a ring would send."""

import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def _bytes(tensor: Any) -> int:
    """Bytes of a tensor or of a list of tensors."""
    tensors = tensor if isinstance(tensor, list | tuple) else [tensor]
    return sum(one.numel() * one.element_size() for one in tensors)


# Of each collective the argument that has the whole message, and which part of it, in units of (W - 1) / W, each rank
# of a ring sends: in an all-reduce first the sums go round, then the results.
_COLLECTIVES = {
    "all_reduce": (0, 2),
    "all_gather": (0, 1),
    "all_gather_into_tensor": (0, 1),
    "reduce_scatter": (1, 1),
    "reduce_scatter_tensor": (1, 1),
    "broadcast": (0, 1),
    "reduce": (0, 1),
    "all_to_all_single": (0, 1),
}
_NOT_EXPECTED = ("all_to_all", "gather", "scatter", "send", "recv", "isend", "irecv", "all_reduce_coalesced")


class Counter:
    """Counts what this process gives to torch.distributed; installed before DeepSpeed is imported."""

    def __init__(self) -> None:
        self.sent: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        for name, (place, share) in _COLLECTIVES.items():
            self._wrap(name, place, share)
        for name in _NOT_EXPECTED:
            self._refuse(name)

    def _wrap(self, name: str, place: int, share: int) -> None:
        function: Callable = getattr(dist, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            whole = args[place] if len(args) > place else kwargs[_parameter(function, place)]
            size = dist.get_world_size(kwargs.get("group"))
            self.sent[name] += _bytes(whole) * share * (size - 1) / size
            self.calls[name] += 1
            return function(*args, **kwargs)

        setattr(dist, name, counted)
        setattr(dist.distributed_c10d, name, counted)

    def _refuse(self, name: str) -> None:
        def refused(*args: Any, **kwargs: Any) -> None:
            raise AssertionError(f"{name} is not counted")

        setattr(dist, name, refused)

    def reset(self) -> None:
        self.sent.clear()
        self.calls.clear()


def _parameter(function: Callable, place: int) -> str:
    return list(inspect.signature(function).parameters)[place]
