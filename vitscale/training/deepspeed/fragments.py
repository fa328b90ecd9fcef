"""Reads and writes the state of DeepSpeed's optimizers as fragments of fp32 masters and moments, for every ZeRO stage.

Under ZeRO 1 and 2 a rank owns a slice of one long vector of all parameters, under ZeRO 3 an equal share of each
parameter; in stage 0 every rank holds everything, and the parameters are dealt out for saving. Nothing is gathered. The
attributes read here are DeepSpeed 0.19's; `pyproject.toml` pins it for that reason.

The optimizer does not know frozen parameters. Each rank keeps an equal share of their fp32 values, which low-precision
weights would lose, in host memory, in every stage.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitscale.objectives import build_objective
from vitscale.recipe import Recipe, is_frozen
from vitscale.runs.checkpoint import EMA, MASTER, Fragment, bytes_needed
from vitscale.training.optimizers.pieces import Piece
from vitscale.training.optimizers.whole_tensors import WholeTensorOptimizer

Source = Callable[[str, str, int, int], Tensor]
"""(kind, parameter, start, length) -> the 1-D fp32 values of that piece."""


class InPieces:
    """A source of pieces of what can only be read whole; keeps the last parameter, as its pieces are read in a row.

    Args:
        whole: a parameter's name -> its fp32 tensor, on the CPU.
    """

    def __init__(self, whole: Callable[[str], Tensor]) -> None:
        self._whole = whole
        self._name: str | None = None
        self._value = torch.empty(0)

    def __call__(self, kind: str, name: str, start: int, length: int) -> Tensor:
        if name != self._name:
            self._name, self._value = name, self._whole(name).view(-1)
        return self._value[start : start + length]


Average = Mapping[Tensor, Tensor]
"""Each of `masters(engine)` -> a tensor of its shape."""


@dataclass(frozen=True)
class _Share:
    """What this rank keeps of a frozen parameter: its fp32 values from `start` on, perhaps none."""

    name: str
    start: int
    values: Tensor


def shapes(engine: Any) -> dict[str, list[int]]:
    """Whole shapes of the parameters by name, in the model's order, under ZeRO 3 too."""
    return {name: list(getattr(p, "ds_shape", p.shape)) for name, p in engine.module.named_weights()}


def state_shapes(engine: Any) -> dict[str, dict[str, list[int] | None]]:
    """Kind -> parameter -> shape of its state where that differs from the parameter's; None if it has no state."""
    found: dict[str, dict[str, list[int] | None]] = {}
    whole = shapes(engine)
    for kind in moment_kinds(engine):
        kept = {name: engine.kept.get(name, {}).get(kind) for name in whole}
        other = {name: shape and list(shape) for name, shape in kept.items() if shape != tuple(whole[name])}
        found |= {kind: other} if other else {}
    return found


def owned(engine: Any, rank: int, world_size: int, average: Average | None = None) -> list[Fragment]:
    """What this rank saves: over all ranks every element of every parameter exactly once. Tensors are views."""
    state = base_optimizer(engine).state
    pieces = list(pieces_of(engine))
    if is_replicated(engine):
        pieces = pieces[rank::world_size]
    frozen_kinds = [MASTER, *([EMA] if average is not None else [])]  # a frozen parameter's average is its value
    return (
        [
            Fragment(
                piece.name,
                piece.start,
                {MASTER: piece.view(piece.flat)}
                | {kind: piece.view(state[piece.flat][kind]) for kind in kinds_as_parameter(engine, piece.name)}
                | ({EMA: piece.view(average[piece.flat])} if average is not None else {}),
            )
            for piece in pieces
        ]
        + [
            Fragment(piece.name, 0, {kind: state[piece.flat][_own_key(kind, piece.name)].view(-1)})
            for piece in pieces
            if piece.start == 0  # every rank with a piece has the whole of these
            for kind in _of_other_shape(engine, piece.name)
        ]
        + [
            Fragment(share.name, share.start, dict.fromkeys(frozen_kinds, share.values))
            for share in engine.frozen_shares
            if share.values.numel()
        ]
    )


@torch.no_grad()
def load(engine: Any, source: Source, *, optimizer_steps: int) -> None:
    """Give the engine its masters, moments and low-precision weights; all ranks call it together.

    With `optimizer_steps` 0 the moments are zero and only masters are read from `source`. DeepSpeed may have made
    optimizer state by a step of its own with zero gradients: whatever it holds is overwritten, the step count too.
    """
    _create_state(engine, optimizer_steps)
    state = base_optimizer(engine).state
    for piece in pieces_of(engine):
        piece.view(piece.flat).copy_(source(MASTER, piece.name, piece.start, piece.length))
        if optimizer_steps:
            for kind in kinds_as_parameter(engine, piece.name):
                piece.view(state[piece.flat][kind]).copy_(source(kind, piece.name, piece.start, piece.length))
            for kind in _of_other_shape(engine, piece.name):
                whole = state[piece.flat][_own_key(kind, piece.name)].view(-1)
                whole.copy_(source(kind, piece.name, 0, whole.numel()))
    engine.frozen_shares = [_load_frozen(name, parameter, source) for name, parameter in _frozen(engine)]
    refresh_weights(engine)


@torch.no_grad()
def load_average(engine: Any, average: Average, source: Source) -> None:
    """Fill an average of the masters from `source`."""
    for piece in pieces_of(engine):
        piece.view(average[piece.flat]).copy_(source(EMA, piece.name, piece.start, piece.length))


def checkpoint_bytes(recipe: Recipe, num_classes: int) -> int:
    """Bytes of a checkpoint, known before there is a model."""
    with torch.device("meta"):
        objective = build_objective(recipe, num_classes)
    whole = {name: list(parameter.shape) for name, parameter in objective.named_weights()}
    weights = bytes_needed(whole, [MASTER, *([EMA] if recipe.ema is not None else [])])
    by_kind: dict[str, dict[str, list[int]]] = {}
    for name, shape in whole.items():
        if not is_frozen(recipe.optimizer, name):
            for kind, kept in recipe.kept(name, tuple(shape)).items():
                by_kind.setdefault(kind, {})[name] = list(kept)
    return weights + sum(bytes_needed(shapes, [kind]) for kind, shapes in by_kind.items())


def moment_kinds(engine: Any) -> list[str]:
    """Kinds of tensors that the optimizer keeps for parameters that it updates."""
    return sorted({kind for kept in engine.kept.values() for kind in kept})


def kinds_as_parameter(engine: Any, name: str) -> list[str]:
    """Kinds of state that have the parameter's shape and are divided as it is."""
    whole = engine.whole_shapes[name]
    return [kind for kind, shape in engine.kept[name].items() if shape == whole]


def _of_other_shape(engine: Any, name: str) -> list[str]:
    """Kinds of state that have another shape than the parameter, whole on every rank that has a part of it."""
    whole = engine.whole_shapes[name]
    return [kind for kind, shape in engine.kept[name].items() if shape != whole]


def _own_key(kind: str, name: str) -> str:
    """The optimizer's key of state whose shape differs from its parameter's."""
    return f"{kind}/{name}"


def _wrapper(engine: Any) -> str:
    return type(engine.optimizer).__name__


def base_optimizer(engine: Any) -> torch.optim.Optimizer:
    optimizer = engine.optimizer
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer


def is_replicated(engine: Any) -> bool:
    return isinstance(engine.optimizer, torch.optim.Optimizer) or _wrapper(engine) == "FP16_UnfusedOptimizer"


def masters(engine: Any) -> list[Tensor]:
    """The fp32 tensors that the torch optimizer updates, hence the keys of its state."""
    if _wrapper(engine) == "DeepSpeedZeroOptimizer_Stage3":
        return list(engine.optimizer.fp32_partitioned_groups_flat)  # the torch groups are empty between steps
    return [tensor for group in base_optimizer(engine).param_groups for tensor in group["params"]]


def _create_state(engine: Any, optimizer_steps: int) -> None:
    """Set all state that the optimizer keeps to zero, creating what is missing, and AdamW's step count."""
    base = base_optimizer(engine)
    has_step = isinstance(base, torch.optim.AdamW)
    if isinstance(base, WholeTensorOptimizer):
        for piece in pieces_of(engine):
            for kind in kinds_as_parameter(engine, piece.name):
                _zero(engine, piece.flat, kind, kind, tuple(piece.flat.shape))
            for kind in _of_other_shape(engine, piece.name):
                _zero(engine, piece.flat, _own_key(kind, piece.name), kind, engine.kept[piece.name][kind])
    else:
        for flat in masters(engine):  # torch's optimizers update padding as well
            if has_step:
                step = torch.tensor(float(optimizer_steps), dtype=torch.float32, device=flat.device)
                base.state[flat]["step"] = step
            for kind in moment_kinds(engine):
                _zero(engine, flat, kind, kind, tuple(flat.shape))
    if _wrapper(engine) in ("BF16_Optimizer", "DeepSpeedZeroOptimizer"):
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def _zero(engine: Any, flat: Tensor, key: str, kind: str, shape: tuple[int, ...]) -> None:
    of_flat = base_optimizer(engine).state[flat]
    if of_flat.get(key) is None:
        dtype = torch.bfloat16 if kind in engine.kept_in_bf16 else flat.dtype
        of_flat[key] = torch.zeros(shape, dtype=dtype, device=flat.device)
    else:
        of_flat[key].zero_()  # padding between and behind the parameters too


def stepped(pieces: Iterable[Piece], optimizer: torch.optim.Optimizer) -> Iterator[Piece]:
    """The pieces that a torch optimizer is about to update: those that have a gradient.

    ZeRO 1 to 3 step once for each group, ZeRO 3 for parts of groups.
    """
    given = {flat for group in optimizer.param_groups for flat in group["params"] if flat.grad is not None}
    return (piece for piece in pieces if piece.flat in given)


def given_gradient(piece: Piece, optimizer: torch.optim.Optimizer) -> Tensor:
    """A piece of the gradient by which a torch optimizer is about to step; fused ones may clip as they read it."""
    scale = getattr(optimizer, "grad_scale", None)
    return piece.of_gradient() if scale is None else piece.of_gradient() / scale


def pieces_of(engine: Any) -> Iterator[Piece]:
    names = {parameter: name for name, parameter in engine.module.named_weights()}
    optimizer = engine.optimizer
    match _wrapper(engine):
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


def _frozen(engine: Any) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in engine.module.named_weights() if not p.requires_grad)


def _load_frozen(name: str, parameter: Any, source: Source) -> _Share:
    """Give a frozen parameter its value. Returns this rank's share of it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if hasattr(parameter, "ds_tensor"):  # ZeRO 3: this rank has its share only, the last ranks with padding
        size, length = parameter.ds_tensor.ds_numel, parameter.ds_numel
        start = min(rank * size, length)
        values = source(MASTER, name, start, min(size, length - start))
        parameter.ds_tensor[: values.numel()].copy_(values)
        return _Share(name, start, values.clone())
    length = parameter.numel()
    values = source(MASTER, name, 0, length)
    parameter.view(-1).copy_(values)
    start, stop = (length * each // world_size for each in (rank, rank + 1))
    return _Share(name, start, values[start:stop].clone())


def refresh_weights(engine: Any) -> None:
    """Compute the low-precision weights of what is trained from the masters; all ranks call it together."""
    optimizer = engine.optimizer
    if _wrapper(engine) == "DeepSpeedZeroOptimizer_Stage3":
        optimizer._partition_all_parameters()
    match _wrapper(engine):
        case "FP16_UnfusedOptimizer":
            for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
                for weight, master in zip(weights, masters, strict=True):
                    weight.data.copy_(master.data)
        case "BF16_Optimizer" | "DeepSpeedZeroOptimizer":
            optimizer.update_lp_params()
        case "DeepSpeedZeroOptimizer_Stage3":
            for group in range(len(optimizer.fp16_groups)):
                optimizer._reassign_or_swap_out_partitioned_parameters(group)
            if optimizer.persistent_parameters:
                optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
            for parameter in engine.module.parameters():  # DeepSpeed forgets only the copies of what is trained
                parameter.ds_secondary_tensor = None
