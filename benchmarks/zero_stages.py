"""What each ZeRO stage of ours holds and takes on two ranks, against PyTorch's DistributedDataParallel.

    python benchmarks/zero_stages.py [--model ViT-B/16] [--batch 4] [--ranks 2] [--rounds 5] [--json]

Every rank has `batch` images of 224 x 224 pixels and one thread. DDP holds fp32 weights under autocast with torch's
fused AdamW. `bytes a parameter`: weights, gradients and optimizer of rank 0 when the backward pass is done, counted
tensor by tensor; `formula`: what the papers on ZeRO give for N ranks, 4 + 12 / N in stage 1, 2 + 14 / N in stage 2,
16 / N in stage 3. `time`: a step by DDP's, the median of rounds in which all take turns.

Fails where a stage holds 5 % more than its formula.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.multiprocessing as mp
from paired import median_ratio
from rank_engines import build, join
from step_recipe import SIDE, make_recipe

CLASSES = 1000
FORMULAS: dict[int, Callable[[int], float]] = {
    1: lambda ranks: 4 + 12 / ranks,
    2: lambda ranks: 2 + 14 / ranks,
    3: lambda ranks: 16 / ranks,
}


def tensors_of(engine: Any) -> list[torch.Tensor]:
    """Weights, gradients and what the optimizer has, of a DeepSpeed engine."""
    found = [getattr(one, "ds_tensor", one) for one in engine.module.parameters()]
    found += [one.grad for one in engine.module.parameters() if one.grad is not None]
    wrapper = engine.optimizer
    for gradients in getattr(wrapper, "averaged_gradients", {}).values():
        found += [one for one in gradients or [] if one is not None]
    if getattr(wrapper, "grad_partitions_flat_buffer", None) is not None:
        found.append(wrapper.grad_partitions_flat_buffer)
    inner = wrapper.optimizer
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        found += list(getattr(wrapper, name, []))
    for state in inner.state.values():
        found += [one for one in state.values() if torch.is_tensor(one)]
    return found


def bytes_of(tensors: list[torch.Tensor]) -> int:
    """Of all storages, each once."""
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


def work(rank: int, ranks: int, port: int, folder: Path, model: str, batch: int, rounds: int) -> None:
    """Entry point of a rank."""
    import torch.distributed as dist

    from vitscale.models import build_model, initialise

    join(rank, ranks, port)
    torch.set_num_threads(1)  # behind what gives a single rank all cores
    images = torch.rand(batch, SIDE, SIDE, 3) * 2 - 1
    labels = torch.arange(batch) + batch * rank
    steps: dict[str, Callable[[], None]] = {}
    held: dict[str, float] = {}
    for stage in FORMULAS:
        recipe = make_recipe(model, batch, ranks, num_classes=CLASSES, parallelism={"zero_stage": stage})
        engine = build(recipe, CLASSES, ranks).deepspeed

        def backward(engine: Any = engine) -> None:
            engine.backward(engine(images.bfloat16(), labels).per_sample.mean())

        def step(engine: Any = engine, backward: Callable[[], None] = backward) -> None:
            backward()
            engine.step()

        step()
        backward()
        parameters = sum(getattr(one, "ds_numel", one.numel()) for one in engine.module.parameters())
        held[f"zero{stage}"] = bytes_of(tensors_of(engine)) / parameters
        engine.step()
        steps[f"zero{stage}"] = step
    recipe = make_recipe(model, batch, ranks, num_classes=CLASSES)
    plain = build_model(recipe, CLASSES)
    initialise(plain, seed=0)
    ddp = torch.nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4, weight_decay=0.1, fused=True)

    def peer() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(ddp(images).logits, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()

    steps["ddp"] = peer
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name in sorted(steps, reverse=bool(turn % 2)):
            dist.barrier()
            began = time.perf_counter()
            steps[name]()
            dist.barrier()
            seconds[name].append(time.perf_counter() - began)
    if rank == 0:
        (folder / "results.json").write_text(json.dumps({"held": held, "seconds": seconds}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B/16")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # this is about CPUs
    from vitscale.ground.machine import free_port

    with TemporaryDirectory() as folder:
        arguments = (options.ranks, int(free_port()), Path(folder), options.model, options.batch, options.rounds)
        mp.spawn(work, arguments, nprocs=options.ranks)
        found = json.loads((Path(folder) / "results.json").read_text())
    rows = []
    for stage, formula in FORMULAS.items():
        name = f"zero{stage}"
        row = {"stage": stage, "bytes_a_parameter": found["held"][name], "formula": formula(options.ranks)}
        row["share"] = row["bytes_a_parameter"] / row["formula"]
        row["time"] = median_ratio(found["seconds"][name][1:], found["seconds"]["ddp"][1:]).median
        rows.append(row)
    if options.json:
        print(json.dumps({"model": options.model, "ranks": options.ranks, "batch": options.batch, "stages": rows}))
    else:
        print(f"{'ZeRO':>4}{'bytes a parameter':>19}{'formula':>9}{'share':>7}{'time by DDP':>13}")
        for row in rows:
            print(
                f"{row['stage']:>4}{row['bytes_a_parameter']:>19.2f}{row['formula']:>9.2f}{row['share']:>7.3f}"
                f"{row['time']:>13.3f}"
            )
    if any(row["share"] > 1.05 for row in rows):
        raise SystemExit("missed: at most 5 % above the formula")


if __name__ == "__main__":
    main()
