"""Time and memory of our trainer's step, against a plain PyTorch loop with timm's model of the same shape.

    python benchmarks/train_step.py [--models ViT-Ti/16 ViT-B/16] [--batch 32] [--zero 1] [--rounds 7] [--json]

One process each, which take turns of a few steps, in changing order; a ratio is ours by the peer's of the same round,
and the median of them is printed. Both train in bf16 on one rank with every core: ours as a recipe does, with fp32
masters under DeepSpeed; the peer has fp32 weights under autocast, torch's fused AdamW and clipping. A step begins with
a batch of 224 x 224 pixels in memory, uint8 for ours, normalised fp32 for the peer; it ends with the value of its loss.

`memory`: peak of the resident set above what the process held before it made its model; `process`: the whole peak.

Fails where ours takes more than 1.03 times the time, or more memory than the peer.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

SIDE = 224
PEERS = {"ViT-Ti/16": "vit_tiny_patch16_224", "ViT-S/16": "vit_small_patch16_224", "ViT-B/16": "vit_base_patch16_224"}
LIMITS = {"time": 1.03, "memory": 1.0}


def memory(field: str) -> int:
    """Bytes of this process, by the kernel: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def our_step(model: str, batch: int, zero: int, folder: Path) -> Callable[[], float]:
    """The trainer of a recipe, and one of its batches again and again."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    from vitscale.recipe import validate_recipe
    from vitscale.shards.generated import write_generated_dataset
    from vitscale.training import distributed
    from vitscale.training.plan import plan_run
    from vitscale.training.trainer import Trainer

    os.environ["MASTER_PORT"] = distributed.free_port()
    write_generated_dataset(folder / "train", [2 * batch])
    content = {
        "model": {"name": model, "head": "linear"},
        "data": {"train": "train", "root": str(folder), "image_size": SIDE},
        "batch": {"global": batch, "micro_max": batch},
        "objective": {"loss": "softmax"},
        "optimizer": {"name": "adamw", "lr": 1e-4, "weight_decay": 0.1, "clip_norm": 1.0},
        "schedule": {"duration": {"steps": 1000}, "warmup": {"steps": 10}},
        "parallelism": {"zero_stage": zero},
        "logging": {"tensorboard": False},
    }
    recipe = validate_recipe(content, "benchmark")
    world = distributed.start(0, 1, 0)
    plan = plan_run(recipe, 0, 1)
    begin_measuring()
    trainer = Trainer(recipe, plan, folder / "run", world)
    trainer.engine.train()
    with trainer._open_loader(0, 1) as loader:
        data = next(iter(loader))

    def step() -> float:
        done = trainer._train_step(data)
        trainer.step += 1
        return done.loss_sum.item()

    return step


def peer_step(model: str, batch: int) -> Callable[[], float]:
    """A loop such as people write."""
    import peers  # noqa: F401 (makes timm importable)
    import timm

    begin_measuring()
    vit = timm.create_model(PEERS[model], num_classes=7, act_layer="gelu_tanh")
    optimizer = torch.optim.AdamW(vit.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    images, labels = torch.randn(batch, 3, SIDE, SIDE), torch.arange(batch) % 7

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(vit(images), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vit.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def begin_measuring() -> None:
    """Everything is imported; forget the peak so far."""
    Path("/proc/self/clear_refs").write_text("5")
    print("before", memory("VmRSS"), flush=True)


def work(who: str, model: str, batch: int, zero: int, folder: Path) -> None:
    """A contender: for every line that comes in, so many steps, and the seconds of one goes out; then the peak."""
    torch.manual_seed(0)
    step = our_step(model, batch, zero, folder) if who == "ours" else peer_step(model, batch)
    print("ready", 0, flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        for _ in range(int(line)):
            step()
        print("seconds", (time.perf_counter() - began) / int(line), flush=True)
    print("peak", memory("VmHWM"), flush=True)
    sys.stdout.flush()
    os._exit(0)


class Contender:
    """A process that takes steps when it is told to."""

    def __init__(self, who: str, model: str, batch: int, zero: int, folder: Path) -> None:
        command = [sys.executable, __file__, "--work", who, str(folder), "--models", model, "--batch", str(batch)]
        self._process = subprocess.Popen(
            [*command, "--zero", str(zero)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._before = self._read("before")
        self._read("ready")

    def _read(self, what: str) -> float:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, _, value = line.partition(" ")
            if word == what:
                return float(value)
        raise SystemExit(f"a contender ended without {what!r}")

    def steps(self, number: int) -> float:
        """Seconds of one."""
        assert self._process.stdin is not None
        print(number, file=self._process.stdin, flush=True)
        return self._read("seconds")

    def end(self) -> tuple[float, float]:
        """Peak bytes: since the model was made, and of the whole process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        peak = self._read("peak")
        self._process.wait()
        return peak - self._before, peak


def compare(model: str, batch: int, zero: int, rounds: int) -> dict[str, float | str]:
    """The ratios for one model."""
    with tempfile.TemporaryDirectory() as folder:
        contenders = {who: Contender(who, model, batch, zero, Path(folder)) for who in ("ours", "peer")}
        for contender in contenders.values():
            contender.steps(2)
        number = max(1, round(3 / contenders["peer"].steps(1)))  # some seconds
        found: dict[str, list[float]] = {who: [] for who in contenders}
        for turn in range(rounds):
            for who in sorted(contenders, reverse=bool(turn % 2)):
                found[who].append(contenders[who].steps(number))
        peaks = {who: contender.end() for who, contender in contenders.items()}
    ratios = [ours / peer for ours, peer in zip(found["ours"], found["peer"], strict=True)]
    return {
        "model": model,
        "batch": batch,
        "zero_stage": zero,
        "time": statistics.median(ratios),
        "time_from": min(ratios),
        "time_to": max(ratios),
        "memory": peaks["ours"][0] / peaks["peer"][0],
        "process": peaks["ours"][1] / peaks["peer"][1],
        "ours_s": statistics.median(found["ours"]),
        "peer_s": statistics.median(found["peer"]),
        "ours_mb": peaks["ours"][0] / 1e6,
        "peer_mb": peaks["peer"][0] / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["ViT-Ti/16", "ViT-B/16"], choices=PEERS)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--zero", type=int, default=1, choices=range(4))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", nargs=2, metavar=("WHO", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.work[0], options.models[0], options.batch, options.zero, Path(options.work[1]))
    results = [compare(model, options.batch, options.zero, options.rounds) for model in options.models]
    if options.json:
        print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "results": results}))
    else:
        print(f"{'model':<12}{'time':>7}{'(from - to)':>16}{'memory':>9}{'process':>9}{'ours':>18}{'timm':>18}")
        for one in results:
            print(
                f"{one['model']:<12}{one['time']:>7.3f}{one['time_from']:>9.3f} - {one['time_to']:<.3f}"
                f"{one['memory']:>8.3f}{one['process']:>9.3f}{one['ours_s']:>8.3f} s{one['ours_mb']:>6,.0f} MB"
                f"{one['peer_s']:>8.3f} s{one['peer_mb']:>6,.0f} MB"
            )
    if any(one[what] > limit for one in results for what, limit in LIMITS.items()):
        raise SystemExit("missed: " + ", ".join(f"{what} at most {limit}" for what, limit in LIMITS.items()))
    return None


if __name__ == "__main__":
    main()
