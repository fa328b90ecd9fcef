"""The commands that look at a finished model, and the options that they share."""

import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vitscale.ground.errors import DataError, RecipeError, VitscaleError
from vitscale.ground.safe_text import printable, without_secrets
from vitscale.ground.storage import read_text
from vitscale.ground.table import Console
from vitscale.ground.wording import counted

if TYPE_CHECKING:
    from vitscale.evaluation.finished import FinishedModel

NoEma = Annotated[bool, typer.Option("--no-ema", help="For a run: use its last weights, not their average.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe's field.")]
_Source = Annotated[Path, typer.Argument(help="A run's directory, or weights of any format.")]
Step = Annotated[int | None, typer.Option(help="Step of a run's checkpoint; default: the newest.")]
ModelName = Annotated[str | None, typer.Option(help="Model of weights in another format: ViT-B/16, or a recipe.")]
ImageSize = Annotated[
    int | None, typer.Option(min=1, max=8192, help="For weights: image size in pixels; positions are resampled.")
]
_Batch = Annotated[
    int | None, typer.Option(min=1, max=2**20, help="For weights: images per batch and process; default 64.")
]
Precision = Annotated[Literal["fp32", "bf16"] | None, typer.Option(help="For weights: precision; default fp32.")]
_ClassNames = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="For weights: a file of class names, one per line, in the order of the outputs; imagenet: its "
        "WordNet ids.",
    ),
]
MaxMemory = Annotated[
    float | None,
    typer.Option(metavar="GB", help="GB of each device for weights; the rest goes to host memory and disk."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def evaluate(
    source: _Source,
    step: Step = None,
    no_ema: NoEma = False,
    settings: Settings = None,
    model: ModelName = None,
    image_size: ImageSize = None,
    class_names: _ClassNames = None,
    data: Annotated[
        str | None, typer.Option(metavar="DATASET", help="Dataset to evaluate on, instead of the recipe's.")
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="With --data: top1, top5, mean_per_class, calibration; default: all."),
    ] = None,
    real: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="With --data: also ImageNet-ReaL, by its real.json or timm's (timm)."),
    ] = None,
    objectnet: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --data: as ObjectNet; a JSON of its classes -> the model's."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="With --data: write results by class, confusions and predictions there."),
    ] = None,
    batch: _Batch = None,
    precision: Precision = None,
    max_memory: MaxMemory = None,
    as_json: _Json = False,
) -> None:
    """Evaluate a run, as its recipe says, or any weights on --data.

    Under `accelerate launch -m vitscale` several processes share the images.
    """
    from vitscale.evaluation.finished import evaluate_finished
    from vitscale.evaluation.scoring import scores
    from vitscale.runs.intervals import accuracy_intervals

    if data is None:
        of_data = {"--metrics": metrics, "--real": real, "--objectnet": objectnet, "--out": out}
        _refuse("there is no --data", of_data)
    with opened(
        source, step, no_ema, settings, model, image_size, class_names, batch, precision, max_memory
    ) as finished:
        policy = finished.policy()
        with _at_work(finished, "evaluating"):
            if data is None:
                values = evaluate_finished(finished)
            else:
                if objectnet is not None:
                    _refuse("--objectnet has metrics of its own", {"--metrics": metrics, "--real": real, "--out": out})
                asked = None if metrics is None else metrics.split(",")
                values, about = scores(finished, data, asked, real, objectnet, out)
                policy |= about
        if not finished.accelerator.is_main_process:
            return
        validation = finished.recipe.evaluation.validation if data is None and finished.recipe is not None else None
        samples = None if validation is None else finished.dataset(validation).num_samples
        of_split = {name: value for name, value in values.items() if "/" not in name or name.startswith("validation/")}
        intervals = accuracy_intervals(of_split, samples)
        if as_json:
            print(json.dumps({"step": finished.step, **values, "intervals": intervals, "policy": policy}))
            return
        print(f"{source}, step {finished.step:,}" if finished.step is not None else source)
        if samples is not None:
            print(f"  {validation}: {counted(samples, 'sample')}")
        for metric, value in values.items():
            text = f"{int(value):,}" if metric.endswith("samples") else f"{value:.4f}"
            within = "  ({:.4f} to {:.4f})".format(*intervals[metric]) if metric in intervals else ""
            print(f"  {metric:<24} {text}{within}")


def features(
    source: _Source,
    dataset: Annotated[str, typer.Argument(help="A dataset: NAME/SPLIT of a run's data.root, a path, or a URL.")],
    out: Annotated[Path, typer.Option(help="The folder; it does not exist, or is empty.")],
    view: Annotated[
        Literal["evaluation", "fewshot"], typer.Option(help="See images as evaluate does, or as fewshot does.")
    ] = "evaluation",
    step: Step = None,
    no_ema: NoEma = False,
    settings: Settings = None,
    model: ModelName = None,
    image_size: ImageSize = None,
    batch: _Batch = None,
    precision: Precision = None,
    max_memory: MaxMemory = None,
) -> None:
    """Write a dataset's representations: .npy files.

    Beside them are labels, uids and meta.json, which says how they came about. Under `accelerate launch -m vitscale`
    several processes share the images; the files are the same.
    """
    from vitscale.evaluation.build import samples_expected
    from vitscale.evaluation.features import write_features
    from vitscale.evaluation.representation import FEWSHOT_CROP

    crop = FEWSHOT_CROP if view == "fewshot" else None
    with opened(source, step, no_ema, settings, model, image_size, None, batch, precision, max_memory) as finished:
        manifest = finished.dataset(dataset)
        about = {
            "source": without_secrets(str(source)),
            "dataset": without_secrets(manifest.where),
            "dataset_sha256": manifest.sha256,
            "class_names": list(manifest.class_names),
            "policy": finished.policy(crop),
        }
        expected = samples_expected(finished.recipe, manifest)
        with _at_work(finished, "computing representations"):
            count = write_features(finished.loader(manifest, crop), finished.predict, out, about, expected)
        if finished.accelerator.is_main_process:
            print(f"wrote {out}: the representations of {count:,} samples")


def predict(
    source: _Source,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files, and folders of them.")],
    top: Annotated[int, typer.Option(min=1, max=10**6, help="Classes to show per image, the most probable first.")] = 5,
    step: Step = None,
    no_ema: NoEma = False,
    settings: Settings = None,
    model: ModelName = None,
    image_size: ImageSize = None,
    class_names: _ClassNames = None,
    batch: _Batch = None,
    precision: Precision = None,
    max_memory: MaxMemory = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line for each image.")] = False,
) -> None:
    """Say what is in images: classes and their probabilities.

    An image is prepared as conversion and evaluation do it. Probabilities are softmax, or sigmoid where the run was
    trained so. What cannot be read is told, and the exit code is 3.
    """
    from vitscale.evaluation.prediction import image_files, predict_files

    files = image_files(images)
    with opened(
        source, step, no_ema, settings, model, image_size, class_names, batch, precision, max_memory
    ) as finished:
        failed = 0
        for found in predict_files(finished, files, top):
            failed += found.problem is not None
            if not finished.accelerator.is_main_process:
                continue
            if as_json:
                line = json.dumps(found.plain(), ensure_ascii=False)
                print(line if line.isprintable() else json.dumps(found.plain()))
            elif found.problem is not None:
                print(printable(f"{found.file}: {found.problem}"), file=sys.stderr)
            else:
                print(printable(str(found.file)))
                for name, probability in found.classes:
                    print(f"  {probability:8.2%}  {printable(name)}")
        if failed:
            raise DataError(f"{failed} of {len(files)} images cannot be read").on_all_ranks()


def fewshot(
    source: Annotated[
        Path | None,
        typer.Argument(help="A run's directory, or weights of any format; none where folders of features are given."),
    ] = None,
    *,
    train: Annotated[
        list[str], typer.Option(metavar="DATASET", help="Training samples; again for several tasks, with --test.")
    ],
    test: Annotated[list[str], typer.Option(metavar="DATASET", help="Test samples, of the same classes.")],
    method: Annotated[
        Literal["ridge", "knn", "logistic", "heads"],
        typer.Option(help="The paper's ridge regression, DINO's neighbours, a logistic probe, DINOv2's linear heads."),
    ] = "ridge",
    shots: Annotated[
        str | None, typer.Option(metavar="N,...", help="Samples per class: 1,5,10,25 for ridge; all for the others.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Draws of training samples.")] = 3,
    l2: Annotated[
        str | None,
        typer.Option(
            metavar="L2",
            help="For ridge: a number, default 1024; or by mean rank on all tasks (shared) or on the others (others).",
        ),
    ] = None,
    overlap: Annotated[
        Literal["refuse", "allow"] | None,
        typer.Option(
            help="Test samples that are among the training samples: an error, or told. Default: a run's "
            "evaluation.overlap, else refuse."
        ),
    ] = None,
    step: Step = None,
    no_ema: NoEma = False,
    settings: Settings = None,
    model: ModelName = None,
    image_size: ImageSize = None,
    batch: _Batch = None,
    precision: Precision = None,
    max_memory: MaxMemory = None,
    as_json: _Json = False,
) -> None:
    """Measure the representation by simple classifiers on it.

    Images are seen as the paper's few-shot evaluation does: resized to a square, of which the central 224 / 256.
    Without SOURCE no model is run: --train and --test are folders that `vitscale features --view fewshot` wrote.
    """
    from vitscale.cli.fewshot_output import counts_of, strength_of, table_of
    from vitscale.evaluation.placing import join
    from vitscale.evaluation.representation import measure, measure_features

    counts = counts_of(shots, method)
    if l2 is not None and method != "ridge":
        raise RecipeError(f"--l2 is for --method ridge, and this is {method}")
    strength = strength_of(l2, len(train))
    if len(train) != len(test):
        raise RecipeError(f"{len(train)} times --train and {len(test)} times --test: a task has one of each")
    if len(set(train)) < len(train):
        raise RecipeError("--train: two tasks have one training set, by which they are called")
    tasks = list(zip(train, test, strict=True))
    if source is None:
        of_models: dict[str, Any] = {"--step": step, "--no-ema": no_ema or None, "--set": settings, "--model": model}
        of_models |= {"--image-size": image_size, "--batch": batch}
        of_models |= {"--precision": precision, "--max-memory": max_memory}
        _refuse("without SOURCE no model is run", of_models)
        with _one_speaks():
            accelerator = join()
            found = measure_features(tasks, method, counts, seeds, strength, overlap, accelerator.device)
            if accelerator.is_main_process:
                print(json.dumps(found) if as_json else table_of(found))
        return
    with opened(source, step, no_ema, settings, model, image_size, None, batch, precision, max_memory) as finished:
        found = measure(finished, tasks, method, counts, seeds, strength, overlap)
        if finished.accelerator.is_main_process:
            print(json.dumps(found) if as_json else table_of(found))


@contextmanager
def opened(
    source: Path,
    step: int | None,
    no_ema: bool,
    settings: list[str] | None,
    model: str | None,
    image_size: int | None,
    class_names: Path | None,
    batch: int | None,
    precision: Literal["fp32", "bf16"] | None,
    max_memory: float | None,
) -> Iterator["FinishedModel"]:
    """Open the model of a source as the options say.

    Raises `RecipeError` for options that have no effect for this source, and as `FinishedModel` does.
    """
    from vitscale.cli.model_block import model_block
    from vitscale.evaluation.finished import FinishedModel, OfWeights
    from vitscale.runs.checkpoint.opening import is_weights

    if max_memory is not None and not max_memory > 0:  # a NaN, too
        raise RecipeError(f"--max-memory {max_memory:g}: expected gigabytes above 0")
    with _one_speaks():
        if is_weights(source):
            _refuse(f"{source} is a file of weights", {"--step": step, "--no-ema": no_ema or None})
            names = None if class_names is None else _read_names(class_names)
            weights = OfWeights(model_block(model, settings or []), image_size, names, batch or 64, precision or "fp32")
            yield FinishedModel(source, weights=weights, max_memory_gb=max_memory)
        else:
            of_weights = {"--model": model, "--image-size": image_size, "--class-names": class_names}
            _refuse(f"{source} is a run", of_weights)
            _refuse(
                f"{source} is a run: --set evaluation.batch=N, --set precision=fp32",
                {"--batch": batch, "--precision": precision},
            )
            yield FinishedModel(source, settings or [], step, use_average=not no_ema, max_memory_gb=max_memory)


def _at_work(finished: "FinishedModel", what: str) -> AbstractContextManager[Any]:
    """What the command is doing, seen on a terminal only."""
    return Console(stderr=True, quiet=not finished.accelerator.is_main_process).status(what)


@contextmanager
def _one_speaks() -> Iterator[None]:
    """Let only one process report an error that all raise; always leave the process group at the end."""
    import torch.distributed as dist

    from vitscale.evaluation.placing import is_main

    try:
        yield
    except VitscaleError as error:
        if error.is_on_all_ranks and not is_main():
            raise typer.Exit(error.exit_code) from None
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _refuse(why: str, options: dict[str, Any]) -> None:
    if given := [flag for flag, value in options.items() if value is not None]:
        raise RecipeError(f"{', '.join(given)}: no effect, since {why}")


def _read_names(path: Path) -> list[str]:
    from vitscale.evaluation.imagenet import imagenet_synsets

    if str(path) == "imagenet" and not path.exists():
        return list(imagenet_synsets())
    try:
        names = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise RecipeError(f"--class-names {path}: cannot be read: {error}") from None
    if not names or "" in names or len(set(names)) != len(names):
        raise RecipeError(f"--class-names {path}: expected a name on each line, and none twice")
    return names
