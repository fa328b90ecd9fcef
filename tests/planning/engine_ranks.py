"""What real DeepSpeed ranks hold in memory between the parts of a step."""

import gc
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch


def held() -> dict[int, int]:
    """Bytes of every storage that a tensor of this process looks at, and of the gradients'."""
    gc.collect()
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
        tensors += [tensor.grad for tensor in tensors if tensor.grad is not None]
    for tensor in tensors:
        if tensor.device.type == "cpu":
            found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return found


def run_engines(rank: int, world_size: int, port: int, folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Entry point of a rank: two steps of each case's recipe, and what is held in the second one, to a file of rank 0.

    `backward`: after the last backward pass. `step`: after the update.
    """
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import deepspeed
    from toy_recipes import make_recipe

    from vitscale.models import build_model, initialise
    from vitscale.training import distributed
    from vitscale.training.engine import Fp32Accumulation, build_engine, derive_config

    distributed.start(rank, world_size, rank)
    results = {}
    for name, blocks in cases.items():
        before = held()

        def new(before: dict[int, int] = before) -> int:
            return sum(size for storage, size in held().items() if storage not in before)

        recipe = make_recipe(**blocks)
        config = derive_config(recipe, world_size)
        dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
        if recipe.parallelism.zero_stage == 3:
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = build_model(recipe, 10)
            with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
                initialise(model, seed=0)
        else:
            model = build_model(recipe, 10)
            initialise(model, seed=0)
            model.to(dtype)
        engine = build_engine(recipe, model, config)
        accumulation = config["gradient_accumulation_steps"]
        is_summed_here = recipe.parallelism.zero_stage == 0 and recipe.precision == "bf16" and accumulation > 1
        sums = Fp32Accumulation(engine) if is_summed_here else None
        result = {}
        for _ in range(2):
            for _ in range(accumulation):
                size = recipe.data.image_size
                engine.backward(engine(torch.zeros(1, size, size, 3, dtype=dtype)).sum())
                result["backward"] = new()
                engine.step()
            result["step"] = new()
        results[name] = result
        engine.destroy()
        del engine, model, sums
    if rank == 0:
        (folder / "held.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)
