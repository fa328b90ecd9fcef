"""`vitscale demo`: the whole platform on data that scikit-learn ships."""

import importlib.util
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from typer import Option

from vitscale.cli.console import say
from vitscale.data.shards import Manifest
from vitscale.ground.errors import RecipeError, VitscaleError
from vitscale.ground.table import Console
from vitscale.runs.run import Run

if TYPE_CHECKING:
    from vitscale.evaluation.finished import FinishedModel

_MARKER = ".vitscale-demo"
_STOP_AT = 150
_TEST_EVERY = 5  # every fifth digit is a test image
_SHOWN = 36  # images on the contact sheet
_NEXT = """Next, your own photos, in folders photos/train/CLASS and photos/test/CLASS:
  vitscale convert photos/train DATA/photos/train
  vitscale convert photos/test DATA/photos/test --classes DATA/photos/train
and a recipe of a few lines: README.md, "Your own images"."""


def demo(
    out: Annotated[Path, Option(help="Where the demo puts its images, shards and run.")] = Path("runs/demo"),
) -> None:
    """Go from images to accuracy on scanned digits, in minutes."""
    import torch  # which takes seconds

    from vitscale.evaluation.finished import FinishedModel, evaluate_finished

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
    ranks = [] if torch.cuda.is_available() else ["--ranks", "2"]
    launch = ["launch", "demo", *ranks, "--set", f"data.root={data}", "--run-dir", str(run)]
    console.rule(f"pre-training, stopped on purpose at step {_STOP_AT}")
    _command(console, "vitscale", *launch, "--stop-at", _STOP_AT)
    console.rule("the same command again: the run continues")
    _command(console, "vitscale", *launch)

    console.rule("evaluating the last checkpoint on its own")
    model, manifest, sheet = FinishedModel(run), Manifest.load(test), out / "predictions.png"
    values = evaluate_finished(model)
    _draw_predictions(model, manifest, sheet)
    if importlib.util.find_spec("ffcv") is not None:
        console.rule("stock FFCV reads it")
        _command(console, "vitscale", "shards", "verify", train, "--stock")
    console.print(_closing_table(model, run, sheet, values, manifest.num_samples, time.monotonic() - began))
    say(_NEXT)


def _draw_predictions(model: "FinishedModel", manifest: Manifest, sheet: Path) -> None:
    """Save a contact sheet of test images with the model's predictions, its mistakes first."""
    from vitscale.data.shards.contact_sheet import contact_sheet, first_samples
    from vitscale.evaluation.finished import predicted_classes

    predicted = predicted_classes(model, manifest)
    samples = list(first_samples(manifest, manifest.num_samples))
    samples.sort(key=lambda sample: predicted[sample.uid] in sample.class_names)  # stable: else in stored order
    wrong = sum(predicted[sample.uid] not in sample.class_names for sample in samples)
    title = f"{len(samples) - wrong:,} of {len(samples):,} test images right; mistakes ({wrong:,}) come first"
    contact_sheet(samples[:_SHOWN], predicted, title).save(sheet)


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


def _closing_table(
    model: "FinishedModel", run: Path, sheet: Path, values: dict[str, float], tested: int, seconds: float
) -> Table:
    log = Run(run).metrics
    speeds = sorted(line["images_per_s"] for line in log.rows)
    assert model.recipe is not None, "the model of a run has a recipe"
    table = Table(title="vitscale demo", show_header=False)
    rows = {
        "test accuracy": f"{values['validation/top1']:.2%} of {tested:,} images",
        "training": f"{model.step:,} steps of {model.recipe.batch.global_size} images in {model.recipe.precision}",
        "speed": f"{speeds[len(speeds) // 2]:,.0f} images/s (median)",
        "compute": f"{log.rows[-1]['exaflops']:.3g} exaFLOPs",
        "whole demo": f"{seconds:.0f} s",
        "predictions": str(sheet),
        "curves": f"tensorboard --logdir {run}",
    }
    for key, value in rows.items():
        table.add_row(key, value)
    return table
