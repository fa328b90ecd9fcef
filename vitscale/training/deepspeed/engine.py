"""DeepSpeed's engine, the state of its optimizer and the average of its weights, in every ZeRO stage.

Nothing is gathered for a checkpoint: each rank reads and writes the pieces that it has (fragments.py).

The optimizer does not know frozen parameters. Each rank keeps an equal share of their fp32 values, which low-precision
weights would lose, in host memory, in every stage.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vitscale.objectives import Objective
from vitscale.recipe import Recipe, is_frozen
from vitscale.runs.checkpoint import MASTER, Fragment
from vitscale.training.deepspeed.config import is_plain, is_single
from vitscale.training.deepspeed.exchange import Exchange, ScatteredSums, in_buckets
from vitscale.training.deepspeed.fragments import Source, pieces_of
from vitscale.training.deepspeed.lean_deepspeed import deepspeed
from vitscale.training.deepspeed.zero_update import RankGradients, ZeroUpdate
from vitscale.training.optimizers.parameter_groups import BASE_DECAY, INDEX, LR_FACTOR, parameter_groups
from vitscale.training.optimizers.rule import rule_of
from vitscale.training.optimizers.schedule import Rates
from vitscale.training.optimizers.whole_tensors import Piece, WholeTensorOptimizer

_AT_ONCE = 1 << 24  # elements copied at a time while weights and average change places

Average = Mapping[Tensor, Tensor]  # each of an engine's `masters` -> a tensor of its shape


_Share = tuple[str, int, Tensor]
"""What this rank keeps of a frozen parameter: its name, and its fp32 values from an element on, perhaps none."""


def build_optimizer(recipe: Recipe, objective: Objective, bucket: int | None = None) -> torch.optim.Optimizer:
    """The recipe's optimizer, torch's or one of ours, over the groups of `parameter_groups`; raises as that does.

    The learning rate is 0 until `set_rates`, which runs before each step: DeepSpeed creates some of its state by a step
    with zero gradients, and that must not decay the weights. A group has at most `bucket` elements, if that is given.
    """
    groups = parameter_groups(recipe, objective)
    return rule_of(recipe.optimizer).build(groups if bucket is None else in_buckets(groups, bucket))


class Engine:
    """DeepSpeed's engine around an objective, by `derive_config`. All ranks make one; `load` sets its weights."""

    shapes: dict[str, list[int]]  # of whole parameters by name, in the model's order, under ZeRO 3 too
    masters: list[Tensor]  # the fp32 tensors that the optimizer updates, hence the keys of its state
    pieces: list[Piece]  # the parameters' parts that this rank has in `masters`
    is_replicated: bool  # whether every rank has all pieces (stage 0)
    exchange: Exchange | None = None  # gathers the weights; None if DeepSpeed does
    zero_update: ZeroUpdate | None = None  # measures and clips the gradients; None if DeepSpeed does

    def __init__(self, recipe: Recipe, objective: Objective, config: dict[str, Any]) -> None:
        _quieten()
        for name, parameter in objective.named_weights():
            if is_frozen(recipe.optimizer, name):
                parameter.requires_grad_(False)
        world_size = dist.get_world_size()
        exchanges = recipe.parallelism.exchanges and world_size > 1
        bucket = config["zero_optimization"]["reduce_bucket_size"] if exchanges else None
        self.module, self.optimizer = objective, build_optimizer(recipe, objective, bucket)
        engine, *_ = deepspeed.initialize(
            model=objective, optimizer=self.optimizer, config=config, dist_init_required=False
        )
        # A second engine of this process would take the first one's group, or fail because there is one.
        deepspeed.utils.groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        self.deepspeed: Any = engine
        self._kind = type(engine.optimizer).__name__
        is_torchs = isinstance(engine.optimizer, torch.optim.Optimizer)
        self.is_replicated = is_torchs or self._kind == "FP16_UnfusedOptimizer"
        self.shapes = {name: list(getattr(p, "ds_shape", p.shape)) for name, p in objective.named_weights()}
        self.pieces = list(pieces_of(engine.optimizer, {p: name for name, p in objective.named_weights()}))
        if self._kind == "DeepSpeedZeroOptimizer_Stage3":  # the torch groups are empty between steps
            self.masters = list(engine.optimizer.fp32_partitioned_groups_flat)
        else:
            self.masters = [tensor for group in self.optimizer.param_groups for tensor in group["params"]]
        self._kept_in_bf16 = recipe.optimizer.kept_in_bf16
        self._kept = {
            name: recipe.kept(name, tuple(shape))
            for name, shape in self.shapes.items()
            if not is_frozen(recipe.optimizer, name)
        }
        self._frozen_shares: list[_Share] = []
        if isinstance(self.optimizer, WholeTensorOptimizer):
            axes = {name: recipe.axes(name, tuple(shape)) for name, shape in self.shapes.items()}
            self.optimizer.attach(self.masters, self.pieces, axes, are_shared=recipe.parallelism.zero_stage > 0)
        self._take_over(recipe, config, exchanges, world_size)

    def _take_over(self, recipe: Recipe, config: dict[str, Any], exchanges: bool, world_size: int) -> None:
        """Do in DeepSpeed's place what it does slowly or, in stage 0, less precisely."""
        engine, stage, accumulates = self.deepspeed, recipe.parallelism.zero_stage, recipe.split(world_size)[1] > 1
        is_alone = is_single(config, world_size)
        like_bf16 = is_alone and stage == 1 and accumulates and recipe.precision != "fp32"
        if exchanges:
            self.exchange = Exchange(engine, engine.communication_data_type)
        elif recipe.parallelism.overlaps and world_size > 1 and dist.get_backend() == "gloo":
            ScatteredSums(engine)
        elif is_alone:
            RankGradients(engine, engine.communication_data_type if like_bf16 else torch.float32)
        is_zero = self._kind == "DeepSpeedZeroOptimizer"  # not its BF16_Optimizer
        if is_zero and not engine.optimizer.cpu_offload and "torch_autocast" not in config:
            self.zero_update = ZeroUpdate(engine, is_pooled=exchanges, like_bf16=like_bf16)
        if stage == 0 and world_size == 1:
            engine.enable_backward_allreduce = False  # it would copy every gradient twice, even on a single rank
        if stage == 0 and not is_plain(recipe):
            # It would make the host wait for the device once per parameter. The norm, computed next, shows the same.
            engine.optimizer.overflow_checker.check = lambda: False
            if accumulates:
                _accumulate_in_fp32(engine)

    def set_rates(self, rates: Rates) -> None:
        """Set each group's learning rate, and its weight decay and momentum if the schedule changes them."""
        for group in self.deepspeed.optimizer.param_groups:
            factor = 0.0 if group[INDEX] in rates.waiting else group[LR_FACTOR]
            group["lr"], group["updates"] = rates.learning_rate * factor, rates.updates + 1
            if rates.weight_decay_factor is not None:
                group["weight_decay"] = rates.weight_decay_factor * group[BASE_DECAY]
            if rates.momentum is not None:
                if "momentum" in group:
                    group["momentum"] = rates.momentum
                else:
                    group["betas"] = (rates.momentum, group["betas"][1])

    def forget_gradients(self) -> None:
        """Clear what is left of the gradient after an update that DeepSpeed has skipped.

        With an offloaded optimizer, stages 1 and 2 would keep the sum over micro-batches and add to it (DeepSpeed
        0.19.8).
        """
        if self._kind == "DeepSpeedZeroOptimizer":
            for group in self.deepspeed.optimizer.averaged_gradients:
                self.deepspeed.optimizer.averaged_gradients[group] = None

    def moment_kinds(self) -> list[str]:
        """Kinds of tensors that the optimizer keeps for parameters that it updates."""
        return sorted({kind for kept in self._kept.values() for kind in kept})

    def kinds_as_parameter(self, name: str) -> list[str]:
        """Kinds of state that have the parameter's shape and are divided as it is."""
        return [kind for kind, shape in self._kept[name].items() if shape == tuple(self.shapes[name])]

    def _of_other_shape(self, name: str) -> dict[str, tuple[int, ...]]:
        """Kinds and shapes of the other state, whole on every rank with a piece; `KIND/NAME` in the optimizer."""
        return {kind: shape for kind, shape in self._kept[name].items() if shape != tuple(self.shapes[name])}

    def state_shapes(self) -> dict[str, dict[str, list[int] | None]]:
        """Kind -> parameter -> shape of its state where that differs from the parameter's; None if it has no state."""
        differing: dict[str, dict[str, list[int] | None]] = {}
        for kind in self.moment_kinds():
            kept = {name: self._kept.get(name, {}).get(kind) for name in self.shapes}
            other = {
                name: None if shape is None else list(shape)
                for name, shape in kept.items()
                if shape != tuple(self.shapes[name])
            }
            differing |= {kind: other} if other else {}
        return differing

    def owned(self, rank: int, world_size: int, averages: Mapping[str, Average] | None = None) -> list[Fragment]:
        """What this rank saves: over all ranks every element of every parameter exactly once. Tensors are views.

        `averages` are those of the masters, by kind.
        """
        averages = averages or {}
        fragments, whole = [], []
        for piece in self.pieces[rank::world_size] if self.is_replicated else self.pieces:
            state = self.optimizer.state[piece.flat]
            tensors = {MASTER: piece.view(piece.flat)}
            tensors |= {kind: piece.view(state[kind]) for kind in self.kinds_as_parameter(piece.name)}
            tensors |= {kind: piece.view(average[piece.flat]) for kind, average in averages.items()}
            fragments.append(Fragment(piece.name, piece.start, tensors))
            if piece.start == 0:  # every rank with a piece has the whole of these
                whole += [
                    Fragment(piece.name, 0, {kind: state[f"{kind}/{piece.name}"].view(-1)})
                    for kind in self._of_other_shape(piece.name)
                ]
        frozen_kinds = [MASTER, *averages]  # a frozen parameter's average is its value
        frozen = [
            Fragment(name, start, dict.fromkeys(frozen_kinds, values))
            for name, start, values in self._frozen_shares
            if values.numel()
        ]
        return fragments + whole + frozen

    @torch.no_grad()
    def load(self, source: Source, *, optimizer_steps: int) -> None:
        """Set masters, moments and low-precision weights; all ranks call it together.

        With `optimizer_steps` 0 the moments are zero and only masters are read from `source`. DeepSpeed may have made
        optimizer state by a step of its own with zero gradients: whatever it holds is overwritten, the step count too.
        """
        self._create_state(optimizer_steps)
        for piece in self.pieces:
            state = self.optimizer.state[piece.flat]
            piece.view(piece.flat).copy_(source(MASTER, piece.name, piece.start, piece.length))
            if optimizer_steps:
                for kind in self.kinds_as_parameter(piece.name):
                    piece.view(state[kind]).copy_(source(kind, piece.name, piece.start, piece.length))
                for kind in self._of_other_shape(piece.name):
                    whole = state[f"{kind}/{piece.name}"].view(-1)
                    whole.copy_(source(kind, piece.name, 0, whole.numel()))
        frozen = [(name, p) for name, p in self.module.named_weights() if not p.requires_grad]
        self._frozen_shares = [_load_frozen(name, parameter, source) for name, parameter in frozen]
        self.refresh_weights()

    @torch.no_grad()
    def load_average(self, average: Average, source: Source, kind: str) -> None:
        """Fill an average of the masters from those of a kind in `source`."""
        for piece in self.pieces:
            piece.view(average[piece.flat]).copy_(source(kind, piece.name, piece.start, piece.length))

    def _create_state(self, optimizer_steps: int) -> None:
        """Set all state that the optimizer keeps to zero, creating what is missing, and AdamW's step count."""
        if isinstance(self.optimizer, WholeTensorOptimizer):
            for piece in self.pieces:
                for kind in self.kinds_as_parameter(piece.name):
                    self._zero(piece.flat, kind, kind, tuple(piece.flat.shape))
                for kind, shape in self._of_other_shape(piece.name).items():
                    self._zero(piece.flat, f"{kind}/{piece.name}", kind, shape)
        else:
            for flat in self.masters:  # torch's optimizers update padding as well
                if isinstance(self.optimizer, torch.optim.AdamW):
                    step = torch.tensor(float(optimizer_steps), dtype=torch.float32, device=flat.device)
                    self.optimizer.state[flat]["step"] = step
                for kind in self.moment_kinds():
                    self._zero(flat, kind, kind, tuple(flat.shape))
        if self._kind in ("BF16_Optimizer", "DeepSpeedZeroOptimizer"):
            self.deepspeed.optimizer._lazy_init_hp_params_optimizer_state()

    def _zero(self, flat: Tensor, key: str, kind: str, shape: tuple[int, ...]) -> None:
        state = self.optimizer.state[flat]
        if state.get(key) is None:
            dtype = torch.bfloat16 if kind in self._kept_in_bf16 else flat.dtype
            state[key] = torch.zeros(shape, dtype=dtype, device=flat.device)
        else:
            state[key].zero_()  # padding between and behind the parameters too

    def settle_weights(self) -> None:
        """Wait until all weights have been gathered; needed before reading them other than by a forward pass."""
        if self.exchange is not None:
            self.exchange.settle()

    @contextmanager
    def first_pass(self) -> Iterator[None]:
        """A context for forward passes that go before those that learn.

        In ZeRO 3 DeepSpeed records the modules of an update's first pass to gather weights ahead. It would record these
        passes, find another order in those that learn, and begin anew, at every update; once the latter are recorded,
        passes that begin as they do keep the record.
        """
        coordinator: Any = None
        if self._kind == "DeepSpeedZeroOptimizer_Stage3":
            coordinator = self.deepspeed.optimizer.parameter_offload.get_param_coordinator()
        is_unknown = coordinator is not None and coordinator.is_invalid_trace()
        yield
        if is_unknown and not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()
        elif coordinator is not None:
            coordinator._clean_inflight_param_registry()  # weights gathered ahead, which may soon be others

    def refresh_weights(self) -> None:
        """Compute the low-precision weights of what is trained from the masters; all ranks call it together."""
        optimizer = self.deepspeed.optimizer
        match self._kind:
            case "FP16_UnfusedOptimizer":
                for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
                    for weight, master in zip(weights, masters, strict=True):
                        weight.data.copy_(master.data)
            case "BF16_Optimizer" | "DeepSpeedZeroOptimizer":
                optimizer.update_lp_params()
            case "DeepSpeedZeroOptimizer_Stage3":
                optimizer._partition_all_parameters()
                for group in range(len(optimizer.fp16_groups)):
                    optimizer._reassign_or_swap_out_partitioned_parameters(group)
                if optimizer.persistent_parameters:
                    optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
                parameter: Any
                for parameter in self.module.parameters():  # DeepSpeed forgets only the copies of what is trained
                    parameter.ds_secondary_tensor = None


class WeightAverage:
    """A moving average (Polyak and Juditsky) of an engine's masters, or of another average; it begins with the masters.

    Each rank averages the masters that it has, so that nothing is gathered, and no stage needs more than four bytes a
    parameter, divided as the masters are.
    """

    def __init__(self, engine: Engine, of: "WeightAverage | None" = None) -> None:
        self._engine, self._of = engine, of
        self.values: dict[Tensor, Tensor] = {flat: flat.detach().clone() for flat in engine.masters}

    @torch.no_grad()
    def update(self, kept: float) -> None:
        """Move the average towards what it is made of; it keeps a share `kept`."""
        if kept < 1.0:
            source = self.values if self._of is None else self._of.values.values()
            torch._foreach_lerp_(list(self.values.values()), [each.detach() for each in source], 1 - kept)

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Have the engine compute with the average inside; afterwards its weights are restored to the last bit.

        After an exception only the masters are restored: refreshing the engine's weights takes all ranks, and the
        exception may have come from one alone.
        """
        self._exchange()
        self._engine.refresh_weights()
        try:
            yield
        except BaseException:
            self._exchange()
            raise
        self._exchange()
        self._engine.refresh_weights()

    @torch.no_grad()
    def _exchange(self) -> None:
        for flat, average in self.values.items():
            pieces = flat.detach().view(-1).split(_AT_ONCE)
            for weights, averages in zip(pieces, average.view(-1).split(_AT_ONCE), strict=True):
                kept = weights.clone()
                weights.copy_(averages)
                averages.copy_(kept)


def _quieten() -> None:
    """Silence DeepSpeed's progress messages and memory reports, and a FutureWarning of torch's; its errors remain."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    deepspeed.runtime.bf16_optimizer.see_memory_usage = lambda *arguments, **options: None


def _load_frozen(name: str, parameter: Any, source: Source) -> _Share:
    """Give a frozen parameter its value. Returns this rank's share of it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if hasattr(parameter, "ds_tensor"):  # ZeRO 3: this rank has its share only, the last ranks with padding
        size, length = parameter.ds_tensor.ds_numel, parameter.ds_numel
        start = min(rank * size, length)
        values = source(MASTER, name, start, min(size, length - start))
        parameter.ds_tensor[: values.numel()].copy_(values)
        return name, start, values.clone()
    length = parameter.numel()
    values = source(MASTER, name, 0, length)
    parameter.view(-1).copy_(values)
    start, stop = (length * each // world_size for each in (rank, rank + 1))
    return name, start, values[start:stop].clone()


def _accumulate_in_fp32(engine: Any) -> None:
    """Sum the micro-batches' gradients in fp32 in stage 0 with bf16, where DeepSpeed itself would sum in bf16.

    Each parameter's gradient is removed after every micro-batch; after the last one the sum takes its place, before
    DeepSpeed reduces it over the ranks.
    """
    sums: dict[Tensor, Tensor] = {}

    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if parameter not in sums:
            sums[parameter] = torch.zeros_like(parameter, dtype=torch.float32)
        total = sums[parameter].add_(parameter.grad)
        if engine.is_gradient_accumulation_boundary():
            parameter.grad.copy_(total)
            total.zero_()
        else:
            parameter.grad = None

    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(add)
