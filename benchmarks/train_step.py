"""Time and memory of our trainer's step, against a plain PyTorch loop with timm's model of the same shape.

    python benchmarks/train_step.py [--models ViT-Ti/16 ViT-B/16] [--batch 32] [--zero 0] [--rounds 7] [--compile]
                                    [--pool cls|mean] [--precision bf16|fp32] [--device cpu|cuda] [--against CHECKOUT]
                                    [--json]

Contenders, each a process of its own: `trainer`, ours as a recipe runs it, with fp32 masters under DeepSpeed;
`recomputed`, the same with the activations of every block recomputed; `fp8`, the same with products in float8, which
only `--contenders` brings in (CPUs emulate it) and which has no MFU; `muon`, `lamb` and `adafactor`, the same with
those optimizers, by `--contenders` too; `bare`, our model with bf16 weights and fp32 masters in a loop without
DeepSpeed; `plain`, our model in the loop that people write: fp32 weights under bf16 autocast, torch's fused AdamW,
clipping; `timm`, that loop with timm's model; `before`, the trainer of the other checkout of this project that
`--against` names, its extension built. One rank, every core, 224 x 224 pixels that are in memory, uint8 for the trainer
and normalised for the loops; a step ends with the loss read. On a CPU they take turns of a few steps, in changing
order, and a ratio is the median over rounds; on a CUDA device they run one after the other, to be compiled
(`--compile`), with the MFU against the datasheet.

`time` and `memory`: of the trainer by timm; `deepspeed` and `plain_time`: time of the trainer by those two loops, of
which the first computes the same; `recompute_time`, `fp8_time`, `muon_time`, `lamb_time` and `adafactor_time`: of those
by the trainer; `against_time` and
`against_memory`: of the trainer by the one before; `recompute_saved`: the memory that recomputing saves, by what is
planned (vitscale.training.beginning.memory). Memory is the peak above what the process held before it made its model;
on a CUDA device, what torch allocated.

Fails where the trainer takes more than 1.03 times timm's time on a CPU, where it is not 1.05 times as fast on a CUDA
device, where it takes more memory, where DeepSpeed and the trainer add more than 3 % to the bare loop, where
recomputing takes more than 1.38 times the time or saves less than 0.8 of the plan, where the trainer is slower than the
one before or takes 1 % more memory, and on a CUDA device where the MFU is below its goal or cannot be right. A time is
above its limit where its whole interval is.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from paired import median_ratio
from rank_engines import join
from step_recipe import SIDE, make_recipe

from vitscale.flops.accounting import mfu
from vitscale.flops.hardware import peak_flops
from vitscale.flops.work import recipe_work
from vitscale.recipe import Recipe
from vitscale.recipe.families import ViTShape, architecture
from vitscale.training.beginning.memory import expected_memory
from vitscale.training.deepspeed.attention import Attention

CLASSES = 7
CONTENDERS = ("trainer", "recomputed", "bare", "plain", "timm")
OPTIMIZERS = ("muon", "lamb", "adafactor")
OURS = ("trainer", "recomputed", "fp8", *OPTIMIZERS)
LIMITS = {"memory": 1.0, "recompute_time": 1.38, "deepspeed": 1.03, "against_time": 1.0, "against_memory": 1.01}
LEAST_SAVED = 0.8  # of the memory that recomputing is to save
LEAST_MFU = {("ViT-H/14", "cls"): 0.52, ("ViT-H/14", "mean"): 0.54, ("ViT-L/16", "cls"): 0.50}
MOST_MFU = 0.62  # above what the device's memory allows: a figure beyond it is a mistake
TIMES = (
    ("time", "trainer", "timm"),
    ("deepspeed", "trainer", "bare"),
    ("plain_time", "trainer", "plain"),
    ("recompute_time", "recomputed", "trainer"),
    ("fp8_time", "fp8", "trainer"),
    *((f"{who}_time", who, "trainer") for who in OPTIMIZERS),
    ("against_time", "trainer", "before"),
)
MEMORIES = (("memory", "trainer", "timm"), ("against_memory", "trainer", "before"))
RATIOS = (*(name for name, _, _ in (*TIMES, *MEMORIES)), "recompute_saved")
TIME_LIMIT = {"cpu": 1.03, "cuda": 1 / 1.05}


# ---- A contender's process -------------------------------------------------------------------------------------------


def recipe_of(who: str, model: str, folder: str, options: argparse.Namespace) -> Recipe:
    """What the trainer trains."""
    recompute = int(who == "recomputed")
    parallelism = {"zero_stage": options.zero, "compile": options.compile, "activation_checkpointing": recompute}
    precision = "fp8" if who == "fp8" else options.precision
    blocks: dict[str, Any] = {"model": {"pool": options.pool}, "parallelism": parallelism}
    blocks |= {"optimizer": {"name": who}} if who in OPTIMIZERS else {}
    return make_recipe(model, options.batch, folder=folder, precision=precision, **blocks)


def trainer_step(options: argparse.Namespace, folder: Path) -> Callable[[], float]:
    """The trainer of a recipe, and one of its batches again and again."""
    from vitscale.data.loader import on_device
    from vitscale.data.shards.generated import write_generated_dataset
    from vitscale.ground.machine import free_port
    from vitscale.training.beginning.run_plan import open_loader, plan_run
    from vitscale.training.loop.trainer import Trainer

    write_generated_dataset(folder / "train", [2 * options.batch])
    recipe = recipe_of(options.work[0], options.models[0], str(folder), options)
    world = join(0, 1, int(free_port()))
    plan = plan_run(recipe, 0, 1)
    begin_measuring(options.device)
    trainer = Trainer(plan, folder / "run", world)
    trainer.learner.engine.deepspeed.train()
    with open_loader(plan, world, 0, 1) as loader:
        data = next(iter(on_device(loader, world.device)))

    steps = itertools.count()

    def step() -> float:
        return trainer.learner.update(data, next(steps)).loss_sum.item()

    return step


def initial_model(options: argparse.Namespace) -> Any:
    """Our model of the shape that is measured."""
    from vitscale.models import initialise
    from vitscale.models.vit import ViT

    shape = architecture(options.models[0])
    assert isinstance(shape, ViTShape)
    model = ViT(shape, image_size=SIDE, num_classes=CLASSES, pool=options.pool, head="linear")
    initialise(model, seed=0)
    return model


def loop_step(options: argparse.Namespace) -> Callable[[], float]:
    """A loop such as people write."""
    import peers
    import timm  # noqa: F401 (its memory is not the model's)

    from vitscale.models import compile_blocks

    begin_measuring(options.device)
    ours = initial_model(options)
    images = torch.rand(options.batch, SIDE, SIDE, 3) * 2 - 1
    is_timm = options.work[0] == "timm"
    model = ours
    if is_timm:
        model, images = peers.timm_vit(ours).train(), images.permute(0, 3, 1, 2).contiguous()
    model.to(options.device)
    if options.compile and is_timm:
        model.compile()
    elif options.compile:
        compile_blocks(ours.units())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    images, labels = images.to(options.device), (torch.arange(options.batch) % CLASSES).to(options.device)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(options.device, dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images) if is_timm else model(images).logits, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def bare_step(options: argparse.Namespace) -> Callable[[], float]:
    """The trainer's arithmetic without DeepSpeed or a trainer: weights in bf16, fp32 masters, the same malloc."""
    from vitscale.data.image_operations import to_model_input
    from vitscale.models import compile_blocks
    from vitscale.training.deepspeed import distributed

    if options.device == "cpu":
        distributed._keep_freed_memory()
    begin_measuring(options.device)
    vit = initial_model(options)
    vit.to(options.device, torch.bfloat16)
    if options.compile:
        compile_blocks(vit.units())
    weights: list[torch.Tensor] = list(vit.parameters())
    masters = [weight.detach().float().requires_grad_() for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, weight_decay=0.1, fused=True)
    device = torch.device(options.device)
    images = torch.randint(256, (options.batch, SIDE, SIDE, 3), dtype=torch.uint8, device=device)
    labels = (torch.arange(options.batch) % CLASSES).to(device)

    def step() -> float:
        loss = torch.nn.functional.cross_entropy(vit(to_model_input(images, device, torch.bfloat16)).logits, labels)
        loss.backward()
        for master, weight in zip(masters, weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        return loss.item()

    return step


def resident(field: str) -> int:
    """Bytes of this process, by the kernel: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def begin_measuring(device: str) -> None:
    """Everything is imported; forget the peak so far."""
    Path("/proc/self/clear_refs").write_text("5")
    print("before", resident("VmRSS") if device == "cpu" else 0, flush=True)


def work(options: argparse.Namespace) -> None:
    """For every line that comes in, so many steps, and the seconds of one goes out; then the peak."""
    torch.manual_seed(0)
    who, folder = options.work
    steps = {"bare": bare_step, "plain": loop_step, "timm": loop_step}
    step = trainer_step(options, Path(folder)) if who in OURS else steps[who](options)
    print("ready", 0, flush=True)
    with contextlib.nullcontext() if who == "timm" else Attention(torch.device(options.device)).preferred():
        for line in sys.stdin:
            began = time.perf_counter()
            for _ in range(int(line)):
                step()
            print("seconds", (time.perf_counter() - began) / int(line), flush=True)
    print("peak", resident("VmHWM") if options.device == "cpu" else torch.cuda.max_memory_allocated(), flush=True)
    os._exit(0)


# ---- The comparison --------------------------------------------------------------------------------------------------


class Ended(Exception):
    """A contender ended before it was told to."""


class Contender:
    """A process that takes steps when it is told to."""

    def __init__(self, who: str, options: argparse.Namespace, model: str, folder: str) -> None:
        # Another checkout's code is found before the installed one.
        checkout = options.against.resolve() if who == "before" else Path(__file__).resolve().parent.parent
        program, what = checkout / "benchmarks" / "train_step.py", "trainer" if who == "before" else who
        command = [sys.executable, str(program), "--work", what, f"{folder}/{who}", "--models", model]
        command += ["--batch", str(options.batch), "--zero", str(options.zero), "--pool", options.pool]
        command += ["--precision", options.precision, "--device", options.device]
        command += ["--compile"] if options.compile else []
        Path(folder, who).mkdir()
        devices = {"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {}
        environment = {**os.environ, "PYTHONPATH": str(checkout), **devices}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._before = self._read("before")
        self._read("ready")

    def _read(self, what: str) -> float:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, _, value = line.partition(" ")
            if word == what:
                return float(value)
        raise Ended(f"ended without {what!r}")

    def steps(self, number: int) -> float:
        """Seconds of one."""
        assert self._process.stdin is not None
        print(number, file=self._process.stdin, flush=True)
        return self._read("seconds")

    def end(self) -> float:
        """Peak bytes since the model was made."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        peak = self._read("peak")
        self._process.wait()
        return peak - self._before


def compare(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """The ratios for one model."""
    contenders = [*options.contenders, *(["before"] if options.against else [])]
    found: dict[str, list[float]] = {}
    peaks = {}
    with tempfile.TemporaryDirectory() as folder:

        def begin(who: str) -> tuple[Contender, int]:
            contender = Contender(who, options, model, folder)
            contender.steps(3)
            return contender, max(1, round(3 / contender.steps(2)))  # some seconds

        if options.device == "cuda":
            for who in contenders:
                try:
                    contender, number = begin(who)
                    times = [contender.steps(number) for _ in range(options.rounds)]
                    peaks[who] = contender.end()
                except Ended as error:  # such as fp8 without torchao: the others go on
                    print(f"  {who} {error}", file=sys.stderr, flush=True)
                    continue
                found[who] = times
                print(f"  {who}: {statistics.median(times):.4f} s a step", file=sys.stderr, flush=True)
            if not found:
                raise SystemExit(f"{model}: no contender was left")
        else:
            begun = {who: begin(who) for who in contenders}
            number = min(number for _, number in begun.values())
            found = {who: [] for who in contenders}
            for turn in range(options.rounds):
                for who in sorted(begun, reverse=bool(turn % 2)):
                    found[who].append(begun[who][0].steps(number))
            peaks = {who: contender.end() for who, (contender, _) in begun.items()}
    seconds = {who: statistics.median(values) for who, values in found.items()}
    result: dict[str, Any] = {"model": model, "batch": options.batch, "zero_stage": options.zero, "pool": options.pool}
    result |= {"compile": options.compile, "seconds": seconds, "bytes": peaks, "intervals": {}}
    for name, own, peer in TIMES:
        if {own, peer} <= found.keys():
            ratio = median_ratio(found[own], found[peer])
            result[name] = ratio.median
            result["intervals"][name] = ratio.low, ratio.high
    for name, own, peer in MEMORIES:
        if {own, peer} <= found.keys():
            result[name] = peaks[own] / peaks[peer]
    kept = recipe_of("trainer", model, "", options)
    if {"trainer", "recomputed"} <= found.keys():
        less = recipe_of("recomputed", model, "", options)
        planned = [expected_memory(one, CLASSES, 1, device=options.device) for one in (kept, less)]
        most, least = (one.activations + one.workspace for one in planned)
        result["recompute_saved"] = (peaks["trainer"] - peaks["recomputed"]) / (most - least)
    if options.device == "cuda":
        peak, macs = peak_flops(torch.cuda.get_device_name(), "bf16"), recipe_work(kept, CLASSES).macs
        result["mfu"] = {
            who: mfu(options.batch / value, macs, 1, peak) for who, value in seconds.items() if who != "fp8"
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["ViT-Ti/16", "ViT-B/16"])
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=(*CONTENDERS, "fp8", *OPTIMIZERS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--zero", type=int, default=0, choices=range(4))
    parser.add_argument("--pool", default="cls", choices=("cls", "mean"))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp32"), help="the trainer's")
    parser.add_argument("--against", type=Path, help="a checkout of this project, whose trainer takes its turns too")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", nargs=2, metavar=("WHO", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options)
    results = [compare(model, options) for model in options.models]
    if options.json:
        print(json.dumps({"device": options.device, "torch": torch.__version__, "results": results}))
    else:
        for one in results:
            print(f"{one['model']}: " + "  ".join(shown(name, one) for name in RATIOS if name in one))
            for who, seconds in one["seconds"].items():
                share = one.get("mfu", {}).get(who)
                print(
                    f"  {who:<11}{seconds:9.4f} s {options.batch / seconds:9.1f} images/s "
                    f"{one['bytes'][who] / 1e6:9,.0f} MB{'' if share is None else f'{share:9.1%} MFU'}"
                )
    missed = [f"{one['model']}: {what}" for one in results for what in misses(one, options)]
    if missed:
        raise SystemExit(f"missed: {'; '.join(missed)}")
    return None


def shown(name: str, one: dict[str, Any]) -> str:
    """A ratio, and its interval where it has one."""
    interval = " ({:.3f} to {:.3f})".format(*one["intervals"][name]) if name in one["intervals"] else ""
    return f"{name} {one[name]:.3f}{interval}"


def misses(one: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """The goals that a result does not reach."""
    limits = {"time": TIME_LIMIT[options.device], **LIMITS}
    least = {what: one["intervals"].get(what, (value,))[0] for what, value in one.items() if what in limits}
    found = [f"{what} at most {limits[what]:.3g}" for what, value in least.items() if value > limits[what]]
    if one.get("recompute_saved", LEAST_SAVED) < LEAST_SAVED:
        found.append(f"recompute_saved at least {LEAST_SAVED}")
    for who, share in one.get("mfu", {}).items():
        if share is None or share > MOST_MFU:
            found.append(f"an MFU of {who} that can be believed")
        elif who == "trainer" and share < LEAST_MFU.get((one["model"], options.pool), 0):
            found.append(f"an MFU of at least {LEAST_MFU[one['model'], options.pool]:.0%}")
    return found


if __name__ == "__main__":
    main()
