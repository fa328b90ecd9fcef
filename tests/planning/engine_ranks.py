"""What real DeepSpeed ranks hold in memory between the parts of a step."""

import gc
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from rank_engines import build, join


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
    from toy_recipes import make_recipe

    from vitscale.models import weight_dtype

    join(rank, world_size, port)
    gc.collect()
    gc.freeze()  # what is imported holds most objects of the process, and none of what is counted
    results = {}
    for name, blocks in cases.items():
        before = held()

        def new(before: dict[int, int] = before) -> int:
            sizes = [-1, 0]
            while sizes[-1] != sizes[-2]:  # gloo's threads let go of what they have summed a moment later
                time.sleep(0.1)
                sizes.append(sum(size for storage, size in held().items() if storage not in before))
            return sizes[-1]

        recipe = make_recipe(**blocks)
        engine = build(recipe, 10, world_size).deepspeed
        _, accumulation = recipe.batch.split(world_size)
        result = {}
        for _ in range(2):
            for _ in range(accumulation):
                size = recipe.data.image_size
                inputs = torch.zeros(1, size, size, 3, dtype=weight_dtype(recipe)), torch.zeros(1, dtype=torch.int64)
                engine.backward(engine(*inputs).per_sample.sum())
                del inputs
                result["backward"] = new()
                engine.step()
            result["step"] = new()
        results[name] = result
        engine.destroy()
        del engine
    if rank == 0:
        (folder / "held.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)
