"""Initial weights as a function of (seed, parameter name) alone."""

from collections.abc import Callable
from typing import Protocol

import torch
import xxhash
from torch import Tensor


class Initialisable(Protocol):
    """A model that can say how each of its parameters begins."""

    def initialiser(self, name: str) -> Callable[[Tensor, torch.Generator], None]: ...


def initial_value(model: Initialisable, name: str, shape: torch.Size, seed: int) -> Tensor:
    """The whole fp32 CPU tensor with which the parameter `name` begins; equal on every rank, stage and world size."""
    generator = torch.Generator().manual_seed(xxhash.xxh64_intdigest(f"{seed}:{name}".encode()) >> 1)
    # The CPU is named because a `zero.Init` or meta-device context may be active where this is called.
    value = torch.empty(shape, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        model.initialiser(name)(value, generator)
    return value


def initialise(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter of a model that holds whole parameters its initial value, in the parameter's dtype."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(model, name, parameter.shape, seed))  # type: ignore[arg-type]
