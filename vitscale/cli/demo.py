"""`vitscale demo`: the whole platform on data that an ordinary package brings along."""

import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import vitscale
from vitscale.errors import RecipeError, VitscaleError
from vitscale.evaluation.finished import evaluate_run
from vitscale.recipe import load_recipe
from vitscale.shards import Manifest
from vitscale.training.distributed import free_port

_MARKER = ".vitscale-demo"
_STOP_AT = 250
_TEST_EVERY = 5  # every fifth digit is a test image


def run_demo(out: Path) -> None:
    """Convert, train, stop, resume, evaluate, and print what came of it.

    Raises `RecipeError` where `out` holds something that is no earlier demo, or a step fails.
    """
    console = Console()
    began = time.monotonic()
    _clear(out)
    images, data, run = out / "images", out / "data", out / "run"
    count = _write_digits(images)
    console.print(f"wrote {count} scanned digits as PNG files to {images}")
    train, test = data / "digits" / "train", data / "digits" / "test"
    _command(console, [_program("vitscale-convert"), str(images / "train"), str(train), "--shard-samples", "512"])
    _command(console, [_program("vitscale-convert"), str(images / "test"), str(test), "--classes", str(train)])

    ranks = _ranks()
    pretrain = [
        *(_program("deepspeed"), "--num_accelerators", str(ranks), "--master_port", free_port()),
        *(str(Path(vitscale.__file__).with_name("pretrain.py")), "--recipe", "demo"),
        *("--set", f"data.root={data}", "--run-dir", str(run)),
    ]
    console.rule(f"pre-training on {ranks} ranks, stopped on purpose at step {_STOP_AT}")
    _command(console, [*pretrain, "--stop-at", str(_STOP_AT)])
    console.rule("the same command again: the run continues")
    _command(console, pretrain)

    console.rule("evaluating the last checkpoint on its own")
    step, values = evaluate_run(run)
    tested = Manifest.load(test).num_samples
    console.print(_closing_table(run, step, values, tested, time.monotonic() - began))


def _clear(out: Path) -> None:
    if (out / _MARKER).exists():
        shutil.rmtree(out)
    elif out.exists() and any(out.iterdir()):
        raise RecipeError(f"{out} is not empty and no earlier demo; choose another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    (out / _MARKER).touch()


def _write_digits(images: Path) -> int:
    """scikit-learn's digits, 8 x 8 gray, as image files in class folders; the number of files."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise RecipeError("the demo's digits come with scikit-learn: pip install 'vitscale[demo]'") from None
    from PIL import Image

    digits = load_digits()
    for index, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        folder = images / ("test" if index % _TEST_EVERY == 0 else "train") / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * (255 / 16)).astype("uint8")).save(folder / f"{index:04d}.png")
    return len(digits.target)


def _ranks() -> int:
    """Two on CPUs; on GPUs the largest power of two, so that it divides the batch of 128."""
    devices = torch.cuda.device_count()
    return 2 if devices == 0 else min(128, 1 << (devices.bit_length() - 1))


def _program(name: str) -> str:
    """A command of this Python environment, whether or not it is activated."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else name


def _command(console: Console, command: list[str]) -> None:
    shown = shlex.join([Path(command[0]).name, *command[1:]])
    console.print(f"$ {shown}", style="bold", highlight=False, soft_wrap=True)
    code = subprocess.run(command, check=False).returncode
    if code:
        raise DemoError(f"the command above ended with code {code}; its own message says why", code)


class DemoError(VitscaleError):
    """A step of the demo failed; the demo ends with the step's own exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


def _closing_table(run: Path, step: int, values: dict[str, float], tested: int, seconds: float) -> Table:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    training = [line for line in lines if "loss" in line]
    speeds = sorted(line["images_per_s"] for line in training)
    recipe = load_recipe("demo")
    table = Table(title="vitscale demo", show_header=False)
    rows = {
        "test accuracy": f"{values['validation/top1']:.2%} of {tested:,} images",
        "training": f"{step:,} steps of {recipe.batch.global_size} images",
        "speed": f"{speeds[len(speeds) // 2]:,.0f} images/s (median)",
        "compute": f"{training[-1]['exaflops']:.3g} exaFLOPs",
        "whole demo": f"{seconds:.0f} s",
        "the run": str(run),
        "look at it": f"{_program('tensorboard')} --logdir {run}",
    }
    for key, value in rows.items():
        table.add_row(key, value)
    return table
