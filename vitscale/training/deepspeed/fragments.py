"""Where DeepSpeed's optimizers keep the fp32 masters of each parameter, and their gradients, in every ZeRO stage.

Under ZeRO 1 and 2 a rank owns a slice of one long vector of all parameters, under ZeRO 3 an equal share of each
parameter; in stage 0 every rank holds everything, and the parameters are dealt out for saving. The attributes read here
are DeepSpeed 0.19's; `pyproject.toml` pins it for that reason.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitscale.objectives import build_objective
from vitscale.recipe import Recipe, is_frozen
from vitscale.runs.checkpoint import bytes_needed, weight_kinds
from vitscale.training.optimizers.whole_tensors import Piece

Source = Callable[[str, str, int, int], Tensor]  # (kind, parameter, start, length) -> the 1-D fp32 values of that piece


def in_pieces(whole: Callable[[str], Tensor]) -> Source:
    """A source of pieces of what can only be read whole, by a function from a parameter's name to its fp32 tensor.

    The last parameter is kept, as its pieces are read in a row.
    """
    flat = lru_cache(maxsize=1)(lambda name: whole(name).view(-1))
    return lambda kind, name, start, length: flat(name)[start : start + length]


def checkpoint_bytes(recipe: Recipe, num_classes: int) -> int:
    """Bytes of a checkpoint, known before there is a model."""
    with torch.device("meta"):
        objective = build_objective(recipe, num_classes)
    whole = {name: list(parameter.shape) for name, parameter in objective.named_weights()}
    weights = bytes_needed(whole, weight_kinds(recipe))
    by_kind: dict[str, dict[str, list[int]]] = {}
    for name, shape in whole.items():
        if not is_frozen(recipe.optimizer, name):
            for kind, kept in recipe.kept(name, tuple(shape)).items():
                by_kind.setdefault(kind, {})[name] = list(kept)
    return weights + sum(bytes_needed(shapes, [kind]) for kind, shapes in by_kind.items())


def pieces_of(optimizer: Any, names: Mapping[nn.Parameter, str]) -> Iterator[Piece]:
    """This rank's pieces of all trained parameters, by the optimizer of DeepSpeed's engine."""
    match type(optimizer).__name__:
        case _ if isinstance(optimizer, torch.optim.Optimizer):  # stage 0 in fp32: DeepSpeed leaves it as it is
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield Piece(names[parameter], 0, parameter.numel(), parameter, 0)
        case "FP16_UnfusedOptimizer":
            for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
                for weight, master in zip(weights, masters, strict=True):
                    yield Piece(names[weight], 0, master.numel(), master, 0)
        case "BF16_Optimizer":
            for group, flat in zip(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, strict=True):
                for weight in group:
                    if (mapping := weight._hp_mapping) is not None:
                        place, there = mapping.lp_fragment_address, mapping.hp_fragment_address
                        yield Piece(names[weight], place.start, place.numel, flat, there.start)
        case "DeepSpeedZeroOptimizer":
            # Not by `_hp_mapping`, which names the wrong places when DeepSpeed has re-ordered the parameters.
            for index, flat in enumerate(optimizer.single_partition_of_fp32_groups):
                size = optimizer.partition_size[index]
                low = size * dist.get_rank(optimizer.real_dp_process_group[index])
                group, places = optimizer.round_robin_bit16_groups[index], optimizer.round_robin_bit16_offsets[index]
                for weight, at in zip(group, places, strict=True):
                    begin, end = max(at, low), min(at + weight.numel(), low + size)
                    if begin < end:
                        yield Piece(names[weight], begin - at, end - begin, flat, begin - low)
        case "DeepSpeedZeroOptimizer_Stage3":
            for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
                for weight in group:
                    _, offset, size = optimizer.grad_position[optimizer.get_param_id(weight)]
                    start = size * weight.ds_zero_partition_rank
                    length = min(size, weight.ds_numel - start)
                    if length > 0:  # the last ranks of a small parameter hold padding only
                        yield Piece(names[weight], start, length, flat, offset)
        case other:
            raise TypeError(f"cannot access the fragments of DeepSpeed's {other}")


def stepped(pieces: Iterable[Piece], optimizer: torch.optim.Optimizer) -> Iterator[Piece]:
    """The pieces that a torch optimizer is about to update: those that have a gradient.

    ZeRO 1 to 3 step once for each group, ZeRO 3 for parts of groups.
    """
    updated = {flat for group in optimizer.param_groups for flat in group["params"] if flat.grad is not None}
    return (piece for piece in pieces if piece.flat in updated)


def given_gradient(piece: Piece, optimizer: torch.optim.Optimizer) -> Tensor:
    """A piece of the gradient by which a torch optimizer is about to step; fused ones may clip as they read it."""
    scale = getattr(optimizer, "grad_scale", None)
    return piece.of_gradient() if scale is None else piece.of_gradient() / scale


class GradientPiece(NamedTuple):
    """Elements [start, start + len(values)) of one parameter's gradient, fp32 and 1-D, a copy."""

    name: str
    start: int
    values: Tensor


class AppliedGradients:
    """Copies of the gradients that an engine's optimizer is given, after sums and clipping, until `take`.

    Read where every ZeRO stage, precision and offload meet: in the torch optimizer, at the moment of its step.
    """

    def __init__(self, masters: list[Piece], optimizer: torch.optim.Optimizer) -> None:
        self._masters = masters
        self._pieces: list[GradientPiece] = []
        optimizer.register_step_pre_hook(self._keep)

    def take(self) -> list[GradientPiece]:
        """The pieces since the last call; none if DeepSpeed dropped the update."""
        taken, self._pieces = self._pieces, []
        return taken

    def _keep(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for piece in stepped(self._masters, optimizer):
            values = given_gradient(piece, optimizer).float().cpu().clone()
            self._pieces.append(GradientPiece(piece.name, piece.start, values))
