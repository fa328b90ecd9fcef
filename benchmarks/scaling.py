"""How training scales over ranks of this machine's CPUs: measured, counted, and as the model of `vitscale plan` has it.

    python benchmarks/scaling.py [--model ViT-S/16] [--batch 8] [--ranks 1 2 4] [--stages 1 3] [--steps 5] [--json]

Every rank has `batch` images a step and one thread. `efficiency`: images/s by those of one rank times the number of
ranks, or of cores where there are fewer. `sent`: megabytes that rank 0 gives to torch.distributed in a step, as a ring
sends them, by what is planned. `plan`: the step by vitscale.about.planning.step_time, with the speed of one rank's step
and of an all-reduce of the gradients, both measured here, by the measured step; it knows of no other work on the cores.

Fails where what is sent differs from the plan by 5 %.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.multiprocessing as mp
from rank_engines import build, join
from step_recipe import SIDE, make_recipe
from traffic import Counter

CLASSES = 1000


def work(rank: int, ranks: int, port: int, folder: Path, model: str, batch: int, stage: int, steps: int) -> None:
    """Entry point of a rank: seconds of a step and of an all-reduce, and what is sent, to a file of rank 0."""
    counter = Counter()
    import torch.distributed as dist

    join(rank, ranks, port)
    torch.set_num_threads(1)  # behind what gives a single rank all cores
    recipe = make_recipe(model, batch, ranks, num_classes=CLASSES, parallelism={"zero_stage": stage})
    engine = build(recipe, CLASSES, ranks).deepspeed
    images, labels = (torch.rand(batch, SIDE, SIDE, 3) * 2 - 1).bfloat16(), torch.arange(batch)
    seconds = []
    for _ in range(3 + steps):
        counter.reset()
        dist.barrier()
        began = time.perf_counter()
        engine.backward(engine(images, labels).per_sample.mean())
        engine.step()
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    sent = sum(counter.sent.values())
    gradients = torch.zeros(sum(getattr(one, "ds_numel", one.numel()) for one in engine.module.parameters()))
    reducing = []
    for _ in range(3):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(gradients)
        reducing.append(time.perf_counter() - began)
    if rank == 0:
        found = {"step_s": statistics.median(seconds[3:]), "sent": sent, "all_reduce_s": min(reducing)}
        (folder / f"{stage}-{ranks}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def physical_cores() -> int:
    """Cores that this process may use, threads of one core counted once."""
    siblings = (Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list") for cpu in os.sched_getaffinity(0))
    return len({path.read_text() if path.exists() else path for path in siblings})


def planned(options: argparse.Namespace, stage: int, ranks: int, alone_s: float, all_reduce_s: float) -> dict[str, Any]:
    """Bytes and seconds of a step on paper."""
    from vitscale.about.planning.cluster import make_cluster
    from vitscale.about.planning.communication import communication
    from vitscale.about.planning.step_time import step_time
    from vitscale.flops.accounting import training_flops_per_image
    from vitscale.flops.hardware import Device
    from vitscale.flops.work import recipe_work
    from vitscale.training.beginning.tensors import model_parameters

    parallelism = {"zero_stage": stage}
    recipe = make_recipe(options.model, options.batch, ranks, num_classes=CLASSES, parallelism=parallelism)
    parameters, flops = model_parameters(recipe, CLASSES), recipe_work(recipe, CLASSES)
    peak = training_flops_per_image(flops.macs) * options.batch / alone_s
    device = Device("this core", "", {"bf16": peak * min(1, physical_cores() / ranks)}, None, "measured")
    cluster = make_cluster(device, ranks, devices_per_node=ranks, memory=1e12, efficiency=1.0)
    rate = 2 * (ranks - 1) / ranks * 4 * parameters.total / all_reduce_s if ranks > 1 else cluster.link
    collectives = communication(recipe, parameters, ranks, accumulation=1)
    time_of = step_time(recipe, flops, parameters, replace(cluster, link=rate), collectives)
    return {"sent": sum(one.sent(ranks) for one in collectives), "step_s": time_of.total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-S/16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # this is about CPUs
    from vitscale.ground.machine import free_port

    rows: list[dict[str, Any]] = []
    cores = physical_cores()
    with TemporaryDirectory() as folder:
        for stage in options.stages:
            alone_s = 0.0
            for ranks in sorted({1, *options.ranks}):
                given = (Path(folder), options.model, options.batch, stage, options.steps)
                mp.spawn(work, (ranks, int(free_port()), *given), nprocs=ranks)
                found = json.loads((Path(folder) / f"{stage}-{ranks}.json").read_text())
                alone_s = alone_s or found["step_s"]
                paper = planned(options, stage, ranks, alone_s, found["all_reduce_s"])
                row = {"stage": stage, "ranks": ranks, "step_s": found["step_s"], "sent_mb": found["sent"] / 1e6}
                row["efficiency"] = ranks * alone_s / found["step_s"] / min(ranks, cores)
                row["sent_by_plan"] = found["sent"] / paper["sent"] if ranks > 1 else 1.0
                row["plan"] = paper["step_s"] / found["step_s"]
                rows.append(row)
    if options.json:
        print(json.dumps({"model": options.model, "batch": options.batch, "cores": cores, "rows": rows}))
    else:
        print(f"{'ZeRO':>4}{'ranks':>7}{'step':>10}{'efficiency':>12}{'sent':>12}{'by plan':>9}{'plan':>7}")
        for row in rows:
            print(
                f"{row['stage']:>4}{row['ranks']:>7}{row['step_s']:>8.3f} s{row['efficiency']:>12.2f}"
                f"{row['sent_mb']:>9.1f} MB{row['sent_by_plan']:>9.3f}{row['plan']:>7.2f}"
            )
    if any(abs(row["sent_by_plan"] - 1) > 0.05 for row in rows):
        raise SystemExit("missed: what is sent is to be within 5 % of the plan")


if __name__ == "__main__":
    main()
