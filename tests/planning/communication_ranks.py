"""What real DeepSpeed ranks send to each other in one step."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from rank_engines import build, join
from traffic import Counter

STEPS = 4  # ZeRO 3 learns in the first ones which parameters are used when


def run_steps(rank: int, world_size: int, port: int, folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Entry point of a rank: some steps of each case's recipe, and what rank 0 sends in the last one, to a file."""
    torch.set_num_threads(1)
    counter = Counter()
    from toy_recipes import make_recipe

    from vitscale.ground.ranks import Agreement
    from vitscale.models import weight_dtype

    join(rank, world_size, port)
    agreement = Agreement()
    results = {}
    for name, blocks in cases.items():
        recipe = make_recipe(**blocks)
        engine = build(recipe, 10, world_size).deepspeed
        _, accumulation = recipe.batch.split(world_size)
        for _ in range(STEPS):
            counter.reset()
            for _ in range(accumulation):
                size = recipe.data.image_size
                inputs = torch.zeros(1, size, size, 3, dtype=weight_dtype(recipe)), torch.zeros(1, dtype=torch.int64)
                engine.backward(engine(*inputs).per_sample.sum())
                del inputs
                engine.step()
            agreement.largest(0, 0)
        results[name] = {"sent": dict(counter.sent), "calls": dict(counter.calls)}
        engine.destroy()
        del engine
        if rank == 0:
            (folder / "sent.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)
