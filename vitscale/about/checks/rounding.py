"""How far apart two computations of the same thing may be, given the number formats in which they were made.

A rounding moves a number by at most its format's `unit`, in proportion to the number. A number that is rounded R times
on its way, each time randomly up or down, ends about sqrt(R) units away. R is counted: it is the length of the longest
way from the loss to a parameter in autograd's graph, there and back. Some models amplify errors on the way (a normed
convolution's weights, say), so plain torch computes each gradient in the engine's format too, and the engine may be as
far from fp32 as that is. `_MARGIN` allows for bad luck.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_MARGIN = 2.0
_TERMS = 4096
"""Terms of the sums that are made in fp32, whatever the format: in another order they round differently."""


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def of_gradient(way: int, noise: float, dtype: torch.dtype, exchanges: int) -> float:
    """The limit for a gradient, relative to its size.

    Args:
        way, noise: as in `oracle.Gradient`.
        dtype: the dtype in which the engine computes.
        exchanges: roundings to the format in which ranks exchange gradients.
    """
    of_one = unit(dtype) + math.sqrt(_TERMS) * unit(torch.float32) / 8
    return _MARGIN * max(math.sqrt(2 * way + exchanges) * of_one, noise)


def of_update(dtype: torch.dtype, roundings: int = 16) -> float:
    """The limit for what an optimizer computes from one gradient in `roundings` operations, relative to its size."""
    return roundings * unit(dtype)


def ways(loss: Tensor, weights: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of operations on the longest way from a loss to each of some leaves, in autograd's graph."""
    length: dict[Any, int] = {loss.grad_fn: 0}
    missing: dict[Any, int] = {}  # node -> ways to it that are not known yet
    stack: list[Any] = [loss.grad_fn]
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is not None:
                if following not in missing:
                    stack.append(following)
                missing[following] = missing.get(following, 0) + 1
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        for following, _ in node.next_functions:
            if following is not None:
                length[following] = max(length.get(following, 0), length[node] + 1)
                missing[following] -= 1
                if missing[following] == 0:
                    stack.append(following)
    leaves = {node.variable: of_node for node, of_node in length.items() if hasattr(node, "variable")}
    return {name: leaves.get(weight, 0) for name, weight in weights.items()}
