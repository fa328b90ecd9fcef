"""`vitscale demo`: the whole platform on data that scikit-learn ships."""

import importlib.util
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

from rich.table import Table
from typer import Option

from vitscale.cli.console import say
from vitscale.data.shards import Manifest
from vitscale.ground.errors import RecipeError, VitscaleError
from vitscale.ground.machine import count_devices
from vitscale.ground.table import Console
from vitscale.runs.run import Run

_MARKER = ".vitscale-demo"
_STOP_AT = 150
_TEST_EVERY = 5  # every fifth digit is a test image
_NEXT = """Next, your own photos, in folders photos/train/CLASS and photos/test/CLASS:
  vitscale convert photos/train DATA/photos/train
  vitscale convert photos/test DATA/photos/test --classes DATA/photos/train
and a recipe of a few lines: README.md, "Your own images"."""


def demo(
    out: Annotated[Path, Option(help="Where the demo puts its images, shards and run.")] = Path("runs/demo"),
) -> None:
    """Go from images to accuracy on scanned digits, in minutes."""
    console = Console()
    began = time.monotonic()
    _clear(out)
    images, data, run = out / "images", out / "data", out / "run"
    count = _write_digits(images)
    console.print(f"wrote {count} scanned digits as PNG files to {images}")
    train, test = data / "digits" / "train", data / "digits" / "test"
    _command(console, "vitscale-convert", images / "train", train, "--shard-samples", 512)
    _command(console, "vitscale-convert", images / "test", test, "--classes", train)

    # By default there is one rank per GPU; on CPUs two, to show ranks.
    ranks = [] if count_devices() else ["--ranks", "2"]
    launch = ["launch", "demo", *ranks, "--set", f"data.root={data}", "--run-dir", str(run)]
    console.rule(f"pre-training, stopped on purpose at step {_STOP_AT}")
    _command(console, "vitscale", *launch, "--stop-at", _STOP_AT)
    console.rule("the same command again: the run continues")
    _command(console, "vitscale", *launch)

    console.rule("evaluating the last checkpoint on its own")
    _command(console, "vitscale", "evaluate", run)
    if importlib.util.find_spec("ffcv") is not None:
        console.rule("stock FFCV reads it")
        _command(console, "vitscale", "shards", "verify", train, "--stock")
    console.print(_closing_table(Run(run), Manifest.load(test).num_samples, time.monotonic() - began))
    say(_NEXT)


def _clear(out: Path) -> None:
    if (out / _MARKER).exists():
        shutil.rmtree(out)
    elif out.exists() and any(out.iterdir()):
        raise RecipeError(f"{out} is not empty and no earlier demo; choose another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    (out / _MARKER).touch()


def _write_digits(images: Path) -> int:
    """Write scikit-learn's digits, 8 x 8 gray, as image files in class folders; returns the number of files."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise RecipeError("the demo's digits come with scikit-learn: pip install scikit-learn") from None
    from PIL import Image

    digits = load_digits()
    for index, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        folder = images / ("test" if index % _TEST_EVERY == 0 else "train") / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * (255 / 16)).astype("uint8")).save(folder / f"{index:04d}.png")
    return len(digits.target)


def _command(console: Console, name: str, *arguments: str | int | Path) -> None:
    """Run a command of this environment, and print it as a person would type it."""
    texts = [str(argument) for argument in arguments]
    console.print(f"$ {shlex.join([name, *texts])}", style="bold", highlight=False, soft_wrap=True)
    program = Path(sys.executable).with_name(name)  # whether or not the environment is activated
    if code := subprocess.run([str(program) if program.exists() else name, *texts], check=False).returncode:
        raise VitscaleError(f"the command above ended with code {code}; its own message says why").with_code(code)


def _closing_table(run: Run, tested: int, seconds: float) -> Table:
    recipe, log = run.recipe, run.metrics.rows
    speeds = sorted(line["images_per_s"] for line in log)
    table = Table(title="vitscale demo", show_header=False)
    rows = {
        "test accuracy": f"{run.evaluation['validation/top1']:.2%} of {tested:,} images",
        "training": f"{run.total_steps:,} steps of {recipe.batch.global_size} images in {recipe.precision}",
        "speed": f"{speeds[len(speeds) // 2]:,.0f} images/s (median)",
        "compute": f"{log[-1]['exaflops']:.3g} exaFLOPs",
        "whole demo": f"{seconds:.0f} s",
        "curves": f"tensorboard --logdir {run.directory}",
    }
    for key, value in rows.items():
        table.add_row(key, value)
    return table
