"""Configures DeepSpeed so that it computes exactly what a recipe says.

The configuration is derived from the recipe; a `deepspeed:` block may add to it, but not contradict it. DeepSpeed's
defaults that would change results are overridden here, each with its reason.
"""

import re
from typing import Any

import pydantic
import torch

from vitscale.ground.errors import RecipeError
from vitscale.ground.wording import describe_mistake, did_you_mean
from vitscale.recipe import Recipe

MOST_UNDER_WAY = 8
"""The most buckets whose gradients are sent at one time with `parallelism.overlap`; they must be kept meanwhile."""

_PERSISTENCE_THRESHOLD = 100_000  # DeepSpeed's own default

# The keys that a `deepspeed:` block may have: DeepSpeed itself silently accepts any unknown top-level key.
_TOP_LEVEL_KEYS = (
    *("activation_checkpointing", "aio", "bf16", "comms_logger", "communication_data_type", "compile"),
    *("data_types", "disable_allgather", "dump_state", "flops_profiler", "gradient_accumulation_steps"),
    *("gradient_clipping", "gradient_predivide_factor", "memory_breakdown", "prescale_gradients"),
    *("seq_parallel_communication_data_type", "steps_per_print", "timers", "torch_autocast", "train_batch_size"),
    *("train_micro_batch_size_per_gpu", "wall_clock_breakdown", "zero_allow_untested_optimizer"),
    *("zero_force_ds_cpu_optimizer", "zero_optimization"),
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

_WORD = re.compile(r"(torch\.nn\.)?\w{1,64}", re.ASCII)
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
    _refuse_places(recipe.deepspeed, "deepspeed")
    config = _add(config, recipe.deepspeed)
    # Keys that `overlap` would silently ignore, and those that it or `hpz_size` was not tried with.
    refused = [key for key in _NOT_WITH_OVERLAP if key in config] if exchanges else []
    if recipe.parallelism.overlaps or recipe.parallelism.hpz_size > 1:
        refused += [f"zero_optimization.{key}" for key in _OFFLOADING if key in config["zero_optimization"]]
    if refused:
        raise RecipeError(f"deepspeed.{refused[0]}: not together with parallelism.overlap or parallelism.hpz_size")
    if "torch_autocast" in config and recipe.objective.compares_views:
        raise RecipeError(
            f"deepspeed.torch_autocast: objective.kind: {recipe.objective.kind} compares in single precision, what "
            f"torch would compute in half; use precision: bf16"
        )
    if recipe.precision != "fp32" and world_size == accumulation == 1:
        # Nothing is summed, and DeepSpeed would convert every gradient to fp32 and back.
        config["communication_data_type"] = "bf16"
    config["zero_optimization"] = bucket_sizes(stage, exchanges) | config["zero_optimization"]
    if recipe.deepspeed:
        _check_blocks(config)
    if is_single(config, world_size) and recipe.precision != "fp32":
        config["data_types"] = {"grad_accum_dtype": "bf16"}  # as above: zero_update.py accumulates
    return config


def bucket_sizes(stage: int, exchanges: bool) -> dict[str, int]:
    """Bucket sizes in elements. They do not affect results; DeepSpeed's own defaults cost gigabytes per rank.

    A `deepspeed:` block may set others. `exchanges` says whether exchange.py sends, instead of DeepSpeed.
    """
    sizes = {"reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000}
    if exchanges:
        sizes["reduce_bucket_size"] = 20_000_000  # a block of ViT-H: the last bucket is sent after all computing
    if stage == 3:
        # A block of ViT-H has 20 million parameters: a few blocks are held whole, and are updated at a time.
        sizes |= {
            "stage3_prefetch_bucket_size": 20_000_000,
            "stage3_max_live_parameters": 100_000_000,
            "stage3_max_reuse_distance": 100_000_000,
            "sub_group_size": 100_000_000,
        }
    return sizes


def elements_in_flight(recipe: Recipe) -> dict[str, int]:
    """The sizes of DeepSpeed's buckets and thresholds, in elements, as the recipe or else training sets them."""
    sizes = bucket_sizes(recipe.parallelism.zero_stage, recipe.parallelism.exchanges)
    sizes["stage3_param_persistence_threshold"] = _PERSISTENCE_THRESHOLD
    return sizes | recipe.deepspeed.get("zero_optimization", {})


def is_single(config: dict[str, Any], world_size: int) -> bool:
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
            hint = did_you_mean(key, _TOP_LEVEL_KEYS) or f"allowed keys: {', '.join(_TOP_LEVEL_KEYS)}"
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


def _refuse_places(block: Any, path: str) -> None:
    """Raise `RecipeError` for a file or module, which DeepSpeed would write or import: recipes may be a stranger's."""
    for key, value in block.items() if isinstance(block, dict) else enumerate(block) if isinstance(block, list) else ():
        is_place = str(key).endswith(("_file", "_path")) and value is not None
        if is_place or (isinstance(value, str) and not _WORD.fullmatch(value)):
            raise RecipeError(f"{path}.{key}: {value!r}: no files, folders and modules, but those of torch.nn")
        _refuse_places(value, f"{path}.{key}")


def _check_blocks(config: dict[str, Any]) -> None:
    """Check the blocks for which DeepSpeed has a schema, and raise its complaint as one readable `RecipeError`."""
    from vitscale.training.deepspeed.lean_deepspeed import deepspeed  # counting memory takes no DeepSpeed

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
            key, what = ".".join(map(str, (block, *details["loc"]))), describe_mistake({**details, "loc": ()})
            raise RecipeError(f"deepspeed.{key}: {details['input']!r}: {what}") from None
