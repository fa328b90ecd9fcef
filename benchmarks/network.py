"""How much of sending disappears behind computing, over links that take about as long as the computing does.

    # python benchmarks/network.py [--ranks 2 4] [--steps 5] [--json]

Needs root and `ip`, `tc` and `nsenter`: every rank is in a network namespace, the namespaces meet in a bridge, and a
token bucket (tc-tbf) on both ends of each rank's link lets it send and receive so many bytes a second and no more. A
rank trains a ViT of 12 small blocks. This machine's processors are to compute little and a network to have something
to hide behind, so each block sleeps besides, as long in the backward pass as twice in the forward pass: as a GPU would
leave the processor alone.

`before` is what DeepSpeed does with our recipes, `after` the same with `parallelism.overlap`; in stage 3 `before` is
without its prefetching, `after` with it, too. DDP is torch's, with its hook that sends bf16. All take turns
in each round: some steps without a limit (their time is computing, and what any exchange costs) and some with it.

`waits`: seconds that the link adds to a step. `hidden`: the part of the time which the sent bytes take on the link
that the step does not wait. `gone`: the part of `before`'s waiting that `after` is without. `sent`: megabytes that a
rank's interface has sent in a step, headers left out. `by DDP`: the step, by DDP's.

Fails where `gone` is below 70 %, or where stage 1 with sums in bf16, which sends as much as DDP does, takes 2 % longer.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, DEPTH, SIDE, CLASSES = 192, 12, 32, 10
BLOCK = 12 * WIDTH * WIDTH + 13 * WIDTH
MTU, HEADERS = 9000, 66  # bytes of Ethernet, IP and TCP with time stamps before the data of each packet
GOALS = {"gone": 0.7, "by_ddp": 1.02}
OVERLAP = {"overlap": True}
DEEPSPEED: dict[str, Any] = {"reduce_bucket_size": BLOCK}
PREFETCHED = DEEPSPEED | {
    "stage3_param_persistence_threshold": 1000,
    "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 4 * BLOCK,
}
ONE_BY_ONE = PREFETCHED | {"stage3_prefetch_bucket_size": 0, "overlap_comm": False}
# name -> (parallelism, zero_optimization)
CONTENDERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stage 1, before": ({"zero_stage": 1}, DEEPSPEED),
    "stage 1, after": ({"zero_stage": 1} | OVERLAP, DEEPSPEED),
    "stage 1 bf16, before": ({"zero_stage": 1, "reduce_dtype": "bf16"}, DEEPSPEED),
    "stage 1 bf16, after": ({"zero_stage": 1, "reduce_dtype": "bf16"} | OVERLAP, DEEPSPEED),
    "stage 2, before": ({"zero_stage": 2}, DEEPSPEED),
    "stage 2, after": ({"zero_stage": 2} | OVERLAP, DEEPSPEED),
    "stage 3, before": ({"zero_stage": 3}, ONE_BY_ONE),
    "stage 3, after": ({"zero_stage": 3} | OVERLAP, PREFETCHED | {"stage3_prefetch_bucket_size": 2 * BLOCK}),
    # Two ranks to a node, with --per-node 2.
    "stage 3 hpZ, after": (
        {"zero_stage": 3, "hpz_size": 2} | OVERLAP,
        PREFETCHED | {"stage3_prefetch_bucket_size": 2 * BLOCK},
    ),
}
DDP, ALIKE = "DDP bf16", "stage 1 bf16, after"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--per-node", type=int, default=1, help="ranks that share a namespace, and its link")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of each contender in a round, on the limited link")
    parser.add_argument("--forward", type=float, default=0.015, help="seconds that a block sleeps in the forward pass")
    parser.add_argument("--sending", type=float, default=1.0, help="time of sending, in stage 1 before, by computing")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--contenders", nargs="+", default=[*CONTENDERS, DDP])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        work(given)
        return
    if os.geteuid() != 0:
        raise SystemExit("needs root: it makes network namespaces")
    results = []
    for ranks in given.ranks:
        with TemporaryDirectory() as folder, namespaces(ranks // given.per_node) as names:
            command = [sys.executable, __file__, *sys.argv[1:], "--ranks", str(ranks), "--folder", folder]
            started = [
                subprocess.Popen(["ip", "netns", "exec", names[rank // given.per_node], *command, "--rank", str(rank)])
                for rank in range(ranks)
            ]
            ends = [process.wait() for process in started]
            if any(ends):
                raise SystemExit("a rank has failed")
            results.append(json.loads((Path(folder) / "found.json").read_text()))
        if not given.json:
            show(results[-1])
    missed = [f"{found['ranks']} ranks: {problem}" for found in results for problem in problems(found)]
    if given.json:
        print(json.dumps({"worlds": results, "missed": missed}))
    if missed:
        raise SystemExit("missed: " + "; ".join(missed))


# ---- The network -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def namespaces(count: int) -> Iterator[list[str]]:
    """Namespaces with an address 10.77.2.N on eth0 each, which meet in a bridge; they are gone afterwards."""
    bridge, names = "vsnb", [f"vsnb{number}" for number in range(1, count + 1)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    ip("link", "add", bridge, "type", "bridge")
    try:
        ip("link", "set", bridge, "mtu", str(MTU), "up")
        for number, name in enumerate(names, 1):
            ip("netns", "add", name)
            ip("link", "add", f"{name}h", "mtu", str(MTU), "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{name}h", "master", bridge, "up")
            ip("-n", name, "addr", "add", f"10.77.2.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "mtu", str(MTU), "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
        ip("link", "del", bridge)


def limit(node: int, rate: float | None) -> None:
    """Let this node send, and be sent, so many bytes/s; None for as many as there are."""
    for place, device in (([], "eth0"), (["nsenter", "-t", str(os.getppid()), "-n"], f"vsnb{node + 1}h")):
        command = [*place, "tc", "qdisc"]
        subprocess.run([*command, "del", "dev", device, "root"], check=False, stderr=subprocess.DEVNULL)
        if rate is not None:
            shape = ["tbf", "rate", f"{int(8 * rate)}bit", "burst", "128kb", "latency", "500ms"]
            subprocess.run([*command, "add", "dev", device, "root", *shape], check=True)


def sent() -> int:
    """Bytes that eth0 has sent, without headers."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("eth0:"):
            fields = line.split(":")[1].split()
            return int(fields[8]) - HEADERS * int(fields[9])
    raise SystemExit("no eth0")


# ---- A rank ----------------------------------------------------------------------------------------------------------


class Sleep(torch.autograd.Function):
    """The identity, which takes its time in both passes."""

    @staticmethod
    def forward(context: Any, values: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        time.sleep(seconds)
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * context.seconds)
        return gradient, None


def slow_down(model: Any, seconds: float) -> None:
    """Have each block of a backbone take some seconds more."""
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: Sleep.apply(output, seconds))


def make_recipe(ranks: int, accumulate: int, parallelism: dict[str, Any], zero: dict[str, Any]) -> Any:
    from vitscale.recipe import validate_recipe

    return validate_recipe(
        {
            "precision": "bf16",
            "model": {"patch_size": 8, "width": WIDTH, "depth": DEPTH, "mlp_dim": 4 * WIDTH, "num_heads": 3},
            "data": {"train": "train", "image_size": SIDE},
            "batch": {"global": ranks * accumulate, "micro_max": 1},
            "optimizer": {"name": "adamw", "lr": 1e-4, "clip_norm": 1.0},
            "schedule": {"duration": {"steps": 1000}},
            "parallelism": parallelism,
            "deepspeed": {"zero_optimization": zero},
        },
        "benchmark",
    )


def make_engine(name: str, ranks: int, given: Any) -> Callable[[], None]:
    """What takes a step of a contender."""
    from rank_engines import build

    recipe = make_recipe(ranks, given.accumulate, *CONTENDERS[name])
    engine = build(recipe, CLASSES, ranks).deepspeed
    slow_down(engine.module.backbone, given.forward)
    images, labels = torch.rand(1, SIDE, SIDE, 3).bfloat16(), torch.zeros(1, dtype=torch.int64)

    def step() -> None:
        for _ in range(given.accumulate):
            engine.backward(engine(images, labels).per_sample.sum())
            engine.step()

    return step


def make_ddp(ranks: int, given: Any) -> Callable[[], None]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    from vitscale.models import build_model, initialise

    recipe = make_recipe(ranks, given.accumulate, {"zero_stage": 0}, {})
    model = build_model(recipe, CLASSES)
    initialise(model, seed=0)
    slow_down(model, given.forward)
    parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=4 * BLOCK / 2**20)
    # By another name: torch lets the hook itself onto NCCL alone, though gloo sums bf16 as well.
    parallel.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4, fused=True)
    images, labels = torch.rand(1, SIDE, SIDE, 3), torch.zeros(1, dtype=torch.int64)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for micro in range(given.accumulate):
            last = micro == given.accumulate - 1
            with contextlib.nullcontext() if last else parallel.no_sync():
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = nn.functional.cross_entropy(parallel(images).logits, labels)
                loss.backward()
        nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        optimizer.step()

    return step


def work(given: Any) -> None:
    """A rank: all contenders take turns; rank 0 writes what came out."""
    import torch.distributed as dist

    (ranks,), rank = given.ranks, given.rank
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="10.77.2.1", MASTER_PORT="29400", GLOO_SOCKET_IFNAME="eth0", CUDA_VISIBLE_DEVICES="")
    from vitscale.training.deepspeed import distributed

    distributed.start(rank, ranks, 0)
    torch.set_num_threads(1)
    steps = {
        name: make_ddp(ranks, given) if name == DDP else make_engine(name, ranks, given) for name in given.contenders
    }

    def limit_node(rate: float | None) -> None:
        if rank % given.per_node == 0:
            limit(rank // given.per_node, rate)

    limit_node(None)
    for step in steps.values():  # ZeRO 3 learns in the first ones which parameters are used when
        for _ in range(3):
            step()
    free: dict[str, list[float]] = {name: [] for name in steps}
    limited: dict[str, list[float]] = {name: [] for name in steps}
    bytes_sent: dict[str, list[float]] = {name: [] for name in steps}

    def timed(step: Callable[[], None], times: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(times):
            step()
        dist.barrier()
        return (time.perf_counter() - began) / times

    # What stage 1 sends before takes as long as its computing, unless --sending says otherwise.
    first, before = next(iter(steps.values())), sent()
    computing = min(timed(first, 2) for _ in range(3))
    size = torch.tensor([(sent() - before) / 6, computing])
    dist.broadcast(size, 0)
    rate = float(size[0] / (given.sending * size[1]))
    for _ in range(given.rounds):
        for name, step in steps.items():
            free[name].append(timed(step, given.steps))
            limit_node(rate)
            dist.barrier()
            step()
            dist.barrier()
            began = sent()
            limited[name].append(timed(step, given.steps))
            bytes_sent[name].append((sent() - began) / given.steps)
            limit_node(None)
            dist.barrier()
    if rank == 0:
        found = {
            name: {
                "free": statistics.median(free[name]),
                "limited": statistics.median(limited[name]),
                "waits": statistics.median(a - b for a, b in zip(limited[name], free[name], strict=True)),
                "sent": statistics.median(bytes_sent[name]),
            }
            for name in steps
        }
        (given.folder / "found.json").write_text(json.dumps({"ranks": ranks, "rate": rate, "contenders": found}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


# ---- What is shown ---------------------------------------------------------------------------------------------------


def hidden(one: dict[str, float], rate: float) -> float:
    return 1 - one["waits"] / (one["sent"] / rate)


def gone(found: dict[str, Any], after: str) -> float:
    before = found["contenders"][after.replace("after", "before")]
    return 1 - found["contenders"][after]["waits"] / before["waits"]


def pairs(found: dict[str, Any]) -> list[str]:
    """Those after, of which there is one before."""
    present = found["contenders"]
    return [name for name in present if "after" in name and name.replace("after", "before") in present]


def show(found: dict[str, Any]) -> None:
    rate = found["rate"]
    print(f"{found['ranks']} ranks, {8 * rate / 1e6:.0f} Mbit/s each")
    print(f"  {'':22}{'computes':>9}{'step':>9}{'waits':>9}{'hidden':>8}{'gone':>7}{'sent':>10}{'by DDP':>8}")
    for name, one in found["contenders"].items():
        by_ddp = f"{one['limited'] / found['contenders'][DDP]['limited']:8.2f}" if DDP in found["contenders"] else ""
        less = f"{gone(found, name):.0%}" if name in pairs(found) else ""
        print(
            f"  {name:22}{one['free']:7.3f} s{one['limited']:7.3f} s{one['waits']:7.3f} s{hidden(one, rate):8.0%}"
            f"{less:>7}{one['sent'] / 1e6:7.2f} MB{by_ddp}",
            flush=True,
        )


def problems(found: dict[str, Any]) -> Iterator[str]:
    present = found["contenders"]
    for name in pairs(found):
        if (less := gone(found, name)) < GOALS["gone"]:
            yield f"{name}: {less:.0%} of the waiting is gone, not 70 %"
    if DDP in present and ALIKE in present:
        by_ddp = present[ALIKE]["limited"] / present[DDP]["limited"]
        if by_ddp > GOALS["by_ddp"]:
            yield f"{ALIKE}: takes {by_ddp:.2f} of DDP's step"


if __name__ == "__main__":
    main()
