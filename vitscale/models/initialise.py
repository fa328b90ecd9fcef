"""Initial weights as a function of (seed, parameter name) alone, and the distributions that the families draw from."""

from collections.abc import Callable
from typing import Protocol

import torch
import xxhash
from torch import Tensor, nn

Initialiser = Callable[[Tensor, torch.Generator], object]
"""Fills a whole fp32 CPU tensor of a parameter's shape in place; what it returns does not matter."""


class Unfilled:
    """Makes a layer of torch's leave its values unset, which are drawn here, or read from a file."""

    def reset_parameters(self) -> None:
        pass


class Initialisable(Protocol):
    """A model that can say how each of its parameters begins."""

    def initialiser(self, name: str) -> Initialiser: ...


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


def constant(value: float) -> Initialiser:
    """Every element is `value`."""
    return lambda tensor, generator: tensor.fill_(value)


def normal(std: float) -> Initialiser:
    """Normal with mean 0."""
    return lambda tensor, generator: tensor.normal_(0.0, std, generator=generator)


def uniform(bound: float) -> Initialiser:
    """Uniform between `-bound` and `bound`."""
    return lambda tensor, generator: tensor.uniform_(-bound, bound, generator=generator)


def lecun_normal(tensor: Tensor, generator: torch.Generator) -> None:
    """Variance 1 / fan_in from a normal truncated at two standard deviations (flax's default for dense and conv)."""
    truncated_std = 0.87962566103423978  # standard deviation of a unit normal truncated to [-2, 2]
    std = tensor[0].numel() ** -0.5 / truncated_std
    nn.init.trunc_normal_(tensor, std=std, a=-2 * std, b=2 * std, generator=generator)


def xavier_uniform(stacked: int = 1) -> Initialiser:
    """Variance 2 / (fan_in + fan_out) from a uniform distribution.

    `stacked` matrices, such as query, key and value, each have their own fan: over that of three the bound would be
    sqrt(2) too small.
    """

    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        for matrix in tensor.chunk(stacked):
            nn.init.xavier_uniform_(matrix, generator=generator)

    return fill
