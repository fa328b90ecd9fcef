"""What real DeepSpeed ranks send to each other in one step."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from traffic import Counter

STEPS = 4  # ZeRO 3 learns in the first ones which parameters are used when


def run_steps(rank: int, world_size: int, port: int, folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Entry point of a rank: some steps of each case's recipe, and what rank 0 sends in the last one, to a file."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    counter = Counter()
    import deepspeed
    from toy_recipes import make_recipe

    from vitscale.models import build_model, initialise
    from vitscale.training import distributed
    from vitscale.training.agreement import Agreement
    from vitscale.training.engine import Fp32Accumulation, build_engine, derive_config

    distributed.start(rank, world_size, rank)
    agreement = Agreement()
    results = {}
    for name, blocks in cases.items():
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
        for _ in range(STEPS):
            counter.reset()
            for _ in range(accumulation):
                size = recipe.data.image_size
                engine.backward(engine(torch.zeros(1, size, size, 3, dtype=dtype)).sum())
                engine.step()
            agreement.largest(0, 0)
        results[name] = {"sent": dict(counter.sent), "calls": dict(counter.calls)}
        engine.destroy()
        del engine, model, sums
        if rank == 0:
            (folder / "sent.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)
