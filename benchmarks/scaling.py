"""How training scales over ranks of this machine's CPUs: measured and counted.

    python benchmarks/scaling.py [--model ViT-S/16] [--batch 8] [--ranks 1 2 4] [--stages 1 3] [--steps 5] [--json]

Every rank has `batch` images a step and one thread. `efficiency`: images/s by those of one rank times the number of
ranks, or of cores where there are fewer. `sent`: megabytes that rank 0 gives to torch.distributed in a step, as a ring
sends them.
"""

import argparse
import json
import os
import statistics
import sys
import time
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
    """Entry point of a rank: seconds of a step and what is sent, to a file of rank 0."""
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
    if rank == 0:
        found = {"step_s": statistics.median(seconds[3:]), "sent": sent}
        (folder / f"{stage}-{ranks}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def physical_cores() -> int:
    """Cores that this process may use, threads of one core counted once."""
    siblings = (Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list") for cpu in os.sched_getaffinity(0))
    return len({path.read_text() if path.exists() else path for path in siblings})


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
                row = {"stage": stage, "ranks": ranks, "step_s": found["step_s"], "sent_mb": found["sent"] / 1e6}
                row["efficiency"] = ranks * alone_s / found["step_s"] / min(ranks, cores)
                rows.append(row)
    if options.json:
        print(json.dumps({"model": options.model, "batch": options.batch, "cores": cores, "rows": rows}))
    else:
        print(f"{'ZeRO':>4}{'ranks':>7}{'step':>10}{'efficiency':>12}{'sent':>12}")
        for row in rows:
            print(
                f"{row['stage']:>4}{row['ranks']:>7}{row['step_s']:>8.3f} s{row['efficiency']:>12.2f}"
                f"{row['sent_mb']:>9.1f} MB"
            )


if __name__ == "__main__":
    main()
