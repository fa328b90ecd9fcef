"""Configures DeepSpeed so that it computes exactly what a recipe says.

The configuration is derived from the recipe; a `deepspeed:` block may add to it, but not contradict it. DeepSpeed's
defaults that would change results are overridden here, each with its reason.
"""

import difflib
import logging
import warnings
from typing import Any

import pydantic
import torch
import torch.distributed as dist
from torch import nn

from vitscale.ground.errors import RecipeError
from vitscale.ground.wording import describe_mistake
from vitscale.objectives import Objective
from vitscale.recipe import Recipe, is_frozen
from vitscale.training.deepspeed import fragments
from vitscale.training.deepspeed.bucket_sizes import bucket_sizes
from vitscale.training.deepspeed.exchange import Exchange, ScatteredSums, in_buckets
from vitscale.training.deepspeed.lean_deepspeed import deepspeed
from vitscale.training.deepspeed.zero_update import RankGradients, ZeroUpdate
from vitscale.training.optimizers.parameter_groups import BASE_DECAY, LR_FACTOR, freeze, parameter_groups
from vitscale.training.optimizers.rule import rule_of
from vitscale.training.optimizers.schedule import Rates
from vitscale.training.optimizers.whole_tensors import WholeTensorOptimizer

# The keys that a `deepspeed:` block may have: DeepSpeed itself silently accepts any unknown top-level key.
_TOP_LEVEL_KEYS = (
    "activation_checkpointing",
    "aio",
    "bf16",
    "comms_logger",
    "communication_data_type",
    "compile",
    "data_types",
    "disable_allgather",
    "dump_state",
    "flops_profiler",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "gradient_predivide_factor",
    "memory_breakdown",
    "prescale_gradients",
    "seq_parallel_communication_data_type",
    "steps_per_print",
    "timers",
    "torch_autocast",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization",
)


# DeepSpeed's keys for what vitscale does itself -> where a recipe sets it instead.
_OURS = {
    "amp": "the recipe has precision",
    "checkpoint": "the recipe has checkpoint",
    "comet": "the recipe has logging.trackers",
    "csv_monitor": "metrics.jsonl has the metrics",
    "fp16": "the recipe has precision",
    "optimizer": "the recipe has optimizer",
    "scheduler": "the recipe has schedule",
    "tensorboard": "the recipe has logging.trackers",
    "wandb": "the recipe has logging.trackers",
}

# What exchange.py would pass over: messages that DeepSpeed does not send, dtypes that it does not choose.
_NOT_WITH_OVERLAP = ("comms_logger", "torch_autocast")
_OFFLOADING = ("offload_optimizer", "cpu_offload", "zenflow")

_BLOCKS = ("activation_checkpointing", "aio", "bf16", "comms_logger", "compile", "data_types", "flops_profiler")


def derive_config(recipe: Recipe, world_size: int) -> dict[str, Any]:
    """The DeepSpeed configuration for a recipe on `world_size` ranks.

    Raises `RecipeError` if the recipe's `deepspeed:` block has an unknown key or contradicts the recipe.
    """
    micro, accumulation = recipe.split(world_size)
    stage = recipe.parallelism.zero_stage
    zero: dict[str, Any] = {"stage": stage, "compute_grad_norm": True}  # the trainer detects NaN by the norm
    if stage == 3:
        # Its replacement for a linear layer rounds differently from every other stage.
        zero["memory_efficient_linear"] = False
        zero["zero_hpz_partition_size"] = recipe.parallelism.hpz_ranks(world_size)
    exchanges = recipe.parallelism.exchanges and world_size > 1
    if recipe.parallelism.overlaps and world_size > 1:
        # In stages 1 and 2 exchange.py sums and gathers instead of DeepSpeed, whose keys for that have no effect.
        zero |= {"overlap_comm": stage == 3, "reduce_scatter": True, "use_multi_rank_bucket_allreduce": True}
        if exchanges:
            zero |= {"contiguous_gradients": True, "allgather_partitions": True}
    if recipe.parallelism.offload == "optimizer":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    config: dict[str, Any] = {
        "train_batch_size": recipe.batch.global_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        # In stage 0 with fp32 DeepSpeed neither computes the norm nor checks it: the trainer does both.
        "gradient_clipping": 0.0 if is_plain(recipe) else recipe.optimizer.clip_norm or 0.0,
        "zero_optimization": zero,
        # The optimizer is torch's in every stage and on every device: one definition of AdamW, no operator to compile.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        **({"prescale_gradients": False, "gradient_predivide_factor": 1.0} if exchanges or stage == 3 else {}),
        # This timer would make the host wait for the device twice per micro-batch.
        "timers": {"throughput": {"enabled": False}},
    }
    if recipe.precision != "fp32":
        # A non-finite gradient must not reach the weights. DeepSpeed silently skips such a step; the trainer checks.
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
        config["communication_data_type"] = recipe.parallelism.reduce_dtype
        if exchanges:  # DeepSpeed accumulates nothing; exchange.py does, in fp32
            config["data_types"] = {"grad_accum_dtype": "bf16"}
        elif stage > 0 and accumulation > 1:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    elif exchanges:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    config = _add(config, recipe.deepspeed)
    _check_sending(recipe, config, exchanges)
    if recipe.precision != "fp32" and world_size == accumulation == 1:
        # Nothing is summed, and DeepSpeed would convert every gradient to fp32 and back.
        config["communication_data_type"] = "bf16"
    config["zero_optimization"] = bucket_sizes(stage, exchanges) | config["zero_optimization"]
    if recipe.deepspeed:
        _check_blocks(config)
    if _is_single(config, world_size) and recipe.precision != "fp32":
        config["data_types"] = {"grad_accum_dtype": "bf16"}  # as above: zero_update.py accumulates
    return config


def _is_single(config: dict[str, Any], world_size: int) -> bool:
    """Whether a single rank sums its gradients itself (zero_update.py): in ZeRO 1 and 2, on its own device."""
    zero = config["zero_optimization"]
    is_tried = not any(key in zero for key in _OFFLOADING) and "torch_autocast" not in config
    return world_size == 1 and zero["stage"] in (1, 2) and is_tried


def is_plain(recipe: Recipe) -> bool:
    """Whether DeepSpeed leaves the torch optimizer as it is: stage 0 in fp32."""
    return recipe.parallelism.zero_stage == 0 and recipe.precision == "fp32"


def _add(config: dict[str, Any], extra: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    merged = dict(config)
    for key, value in extra.items():
        path = f"{prefix}{key}"
        if not prefix and key not in _TOP_LEVEL_KEYS:
            near = difflib.get_close_matches(key, _TOP_LEVEL_KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"allowed keys: {', '.join(_TOP_LEVEL_KEYS)}"
            reason = f"{_OURS[key]} instead" if key in _OURS else hint
            raise RecipeError(f"deepspeed.{path}: not a key that vitscale passes on to DeepSpeed; {reason}")
        current = merged.get(key)
        if not prefix and key in _BLOCKS and not isinstance(value, dict):
            raise RecipeError(f"deepspeed.{key}: {value!r}: expected a block of keys")
        if isinstance(current, dict) and isinstance(value, dict):
            merged[key] = _add(current, value, f"{path}.")
        elif key in merged and current != value:
            raise RecipeError(
                f"deepspeed.{path}: {value!r} contradicts the recipe, from which {current!r} follows; "
                f"change the recipe's own field instead"
            )
        else:
            merged[key] = value
    return merged


def _check_sending(recipe: Recipe, config: dict[str, Any], exchanges: bool) -> None:
    """Refuse keys that `overlap` would silently ignore, and those that it or `hpz_size` was not tried with."""
    refused = [key for key in _NOT_WITH_OVERLAP if key in config] if exchanges else []
    if recipe.parallelism.overlaps or recipe.parallelism.hpz_size > 1:
        refused += [f"zero_optimization.{key}" for key in _OFFLOADING if key in config["zero_optimization"]]
    if refused:
        raise RecipeError(f"deepspeed.{refused[0]}: not together with parallelism.overlap or parallelism.hpz_size")


def _check_blocks(config: dict[str, Any]) -> None:
    """Check the blocks for which DeepSpeed has a schema, and raise its complaint as one readable `RecipeError`."""
    runtime = deepspeed.runtime
    schemas = {
        "zero_optimization": runtime.zero.config.DeepSpeedZeroConfig,
        "bf16": runtime.precision_config.DeepSpeedBF16Config,
    }
    for block, schema in schemas.items():
        try:
            schema(**config.get(block, {}))
        except pydantic.ValidationError as error:
            details = error.errors()[0]
            key = ".".join(map(str, ("deepspeed", block, *details["loc"])))
            what = describe_mistake({**details, "loc": ()})
            raise RecipeError(f"{key}: {details['input']!r}: {what}") from None


def build_optimizer(recipe: Recipe, objective: Objective, bucket: int | None = None) -> torch.optim.Optimizer:
    """The recipe's optimizer, torch's or one of ours, over the groups of `parameter_groups`; raises as that does.

    Args:
        recipe: the recipe.
        objective: the objective, whose parameters are trained.
        bucket: the largest number of elements in a group; None for no limit.

    The learning rate is 0 until `set_rates`, which runs before each step: DeepSpeed creates some of its state by a step
    with zero gradients, and that must not decay the weights.
    """
    groups = parameter_groups(recipe, objective)
    if bucket is not None:
        groups = in_buckets(groups, bucket)
    return rule_of(recipe.optimizer).build(groups)


def set_rates(engine: Any, rates: Rates) -> None:
    """Set each group's learning rate, and its weight decay and momentum if the schedule changes them."""
    for group in engine.optimizer.param_groups:
        group["lr"], group["updates"] = rates.learning_rate * group[LR_FACTOR], rates.updates + 1
        if rates.weight_decay_factor is not None:
            group["weight_decay"] = rates.weight_decay_factor * group[BASE_DECAY]
        if rates.momentum is not None:
            if "momentum" in group:
                group["momentum"] = rates.momentum
            else:
                group["betas"] = (rates.momentum, group["betas"][1])


def build_engine(recipe: Recipe, objective: Objective, config: dict[str, Any]) -> Any:
    """A DeepSpeed engine around an objective. Its weights are not set yet: `fragments.load` does that.

    It gets extra attributes. `fragments` needs three of them to handle the optimizer's state: `whole_shapes` (parameter
    -> shape), `kept` (trained parameter -> kind -> shape) and `kept_in_bf16` (kinds). `exchange` is None if DeepSpeed
    gathers the weights itself, `zero_update` if it measures and clips the gradients itself.
    """
    _quieten()
    freeze(recipe, objective)
    exchanges = recipe.parallelism.exchanges and dist.get_world_size() > 1
    bucket = config["zero_optimization"]["reduce_bucket_size"] if exchanges else None
    optimizer = build_optimizer(recipe, objective, bucket)
    engine, *_ = deepspeed.initialize(model=objective, optimizer=optimizer, config=config, dist_init_required=False)
    # A second engine of this process would take the first one's group, or fail because there is one.
    deepspeed.utils.groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    engine.whole_shapes = {name: tuple(shape) for name, shape in fragments.shapes(engine).items()}
    engine.kept_in_bf16 = recipe.optimizer.kept_in_bf16
    engine.kept = {
        name: recipe.kept(name, shape)
        for name, shape in engine.whole_shapes.items()
        if not is_frozen(recipe.optimizer, name)
    }
    if isinstance(optimizer, WholeTensorOptimizer):
        optimizer.attach(
            fragments.masters(engine),
            fragments.pieces_of(engine),
            {name: recipe.axes(name, shape) for name, shape in engine.whole_shapes.items()},
            are_shared=recipe.parallelism.zero_stage > 0,
        )
    is_single = _is_single(config, dist.get_world_size())
    is_summed = recipe.parallelism.zero_stage == 1 and engine.gradient_accumulation_steps() > 1
    like_bf16 = is_single and is_summed and recipe.precision != "fp32"
    engine.exchange = engine.zero_update = None
    if exchanges:
        engine.exchange = Exchange(engine, engine.communication_data_type)
    elif recipe.parallelism.overlaps and dist.get_world_size() > 1 and dist.get_backend() == "gloo":
        ScatteredSums(engine)
    elif is_single:
        RankGradients(engine, engine.communication_data_type if like_bf16 else torch.float32)
    is_zero = type(engine.optimizer).__name__ == "DeepSpeedZeroOptimizer"  # not its BF16_Optimizer
    if is_zero and not engine.optimizer.cpu_offload and "torch_autocast" not in config:
        engine.zero_update = ZeroUpdate(engine, is_pooled=exchanges, like_bf16=like_bf16)
    if recipe.parallelism.zero_stage == 0 and engine.world_size == 1:
        engine.enable_backward_allreduce = False  # it would copy every gradient twice, even on a single rank
    if recipe.parallelism.zero_stage == 0 and not is_plain(recipe):
        # It would make the host wait for the device once per parameter. The norm, computed next, shows the same.
        engine.optimizer.overflow_checker.check = lambda: False
    return engine


def _quieten() -> None:
    """Silence DeepSpeed's messages about its own progress, a FutureWarning of torch's, and memory reports.

    DeepSpeed's errors still get through.
    """
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    deepspeed.runtime.bf16_optimizer.see_memory_usage = lambda *arguments, **options: None


def settle_weights(engine: Any) -> None:
    """Wait until all weights have been gathered; needed before reading them other than by a forward pass."""
    if engine.exchange is not None:
        engine.exchange.settle()


def forget_gradients(engine: Any) -> None:
    """Clear what is left of the gradient after an update that DeepSpeed has skipped.

    With an offloaded optimizer, stages 1 and 2 would keep the sum over micro-batches and add to it (DeepSpeed 0.19.8).
    """
    if type(engine.optimizer).__name__ == "DeepSpeedZeroOptimizer":
        for group in engine.optimizer.averaged_gradients:
            engine.optimizer.averaged_gradients[group] = None


class Fp32Accumulation:
    """Sums the micro-batches' gradients in fp32 in stage 0 with bf16, where DeepSpeed itself would sum in bf16.

    Each parameter's gradient is removed after every micro-batch; after the last one the sum takes its place, before
    DeepSpeed reduces it over the ranks.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        for parameter in engine.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._take)

    def _take(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        if parameter not in self._sums:
            self._sums[parameter] = torch.zeros_like(parameter, dtype=torch.float32)
        total = self._sums[parameter].add_(parameter.grad)
        if self._engine.is_gradient_accumulation_boundary():
            parameter.grad.copy_(total)
            total.zero_()
        else:
            parameter.grad = None
