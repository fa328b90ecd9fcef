"""Finds devices that compute wrongly: compares ranks that should hold, or compute, the same bits.

A device that returns wrong numbers without an error ruins a run of weeks in silence. Nothing is repaired here: the run
ends with the code for "repeat", and the message names the ranks that differ from the others.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitscale.ground.errors import ReplicaError
from vitscale.ground.ranks import gather
from vitscale.training.deepspeed.distributed import World

_AT_ONCE = 1 << 22  # elements copied at a time, to 8 bytes each
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor, first: int = 0) -> int:
    """A checksum modulo 2^64 of a tensor's bits and their order, computed where the tensor lies.

    The checksums of consecutive pieces of a tensor, each beginning at element `first`, add up to that of the whole.
    """
    bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start, piece in zip(range(first, first + bits.numel(), _AT_ONCE), bits.split(_AT_ONCE), strict=True):
        # Odd factors, so that no changed bit is lost; sums wrap around.
        factors = torch.arange(2 * start + 1, 2 * (start + piece.numel()), 2, device=tensor.device)
        total += (piece.to(torch.int64) * factors).sum()
    return int(total.item()) % 2**64


def compare_weights(module: nn.Module, step: int) -> None:
    """On all ranks: check that they hold the same weights, ZeRO 0 to 2. Raises `ReplicaError` on all."""
    total = sum(index * checksum(parameter) for index, parameter in enumerate(module.parameters(), 1)) % 2**64
    _compare(total, f"step {step:,}: the ranks' weights, which should be equal, differ")


def compare_computation(
    engine: Any, images: Tensor, world: World, to_input: Callable[[Tensor], Tensor], step: int, zero: int
) -> None:
    """Have all ranks compute one micro-batch of one of them, and check that every bit of the results agrees.

    The ranks take turns in providing it. The logits are compared, and below ZeRO 3 also the gradient of the input,
    which passes back through every layer.

    Raises `ReplicaError` on all ranks.

    Args:
        images: uint8 (b, S, S, 3), equally many on every rank.
        to_input: turns them into the model's input, on the device.
    """
    same = images.to(world.device).contiguous()
    source = step % world.size
    dist.broadcast(same, source)
    has_gradient = zero < 3  # under ZeRO 3 the order in which parameters are gathered must not change
    engine.eval()
    with torch.set_grad_enabled(has_gradient), _reproducibly(world.device):
        inputs = to_input(same).requires_grad_(has_gradient)
        # Not by the engine, which would take the backward pass for one of its own.
        outputs = (engine.module if has_gradient else engine)(inputs)
        result = outputs.pooled if outputs.logits is None else outputs.logits
        total = checksum(result)
        if has_gradient:
            (gradient,) = torch.autograd.grad(result.float().square().sum(), inputs)
            total = (total + 3 * checksum(gradient)) % 2**64
    engine.train()
    _compare(total, f"step {step:,}: all ranks have computed a micro-batch of rank {source}, and their bits differ")


@contextlib.contextmanager
def _reproducibly(device: torch.device) -> Iterator[None]:
    """A context without kernels that add in a varying order.

    With `warn_only` torch keeps that of attention's backward pass on CUDA; only its plain formula has none.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH) if device.type == "cuda" else contextlib.nullcontext():
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


def _compare(total: int, what: str) -> None:
    sums = gather(total)
    (common, votes), *others = Counter(sums).most_common()
    if not others:
        return
    if votes > others[0][1]:
        odd = [rank for rank, value in enumerate(sums) if value != common]
        who = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))} against the other {votes}"
    else:
        who = "no majority tells which are right: " + ", ".join(f"rank {r} {v:016x}" for r, v in enumerate(sums))
    raise ReplicaError(
        f"{what}: {who}. A device or its memory returns wrong bits; repeat the command to continue from the "
        f"last checkpoint, without that device if it happens again"
    ).on_all_ranks()
