"""`vitscale fewshot`: simple classifiers on the representation of a model, or on representations in folders."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from vitscale.cli.options import Json, ModelOptions, one_speaks, refuse, with_model_options
from vitscale.ground.errors import RecipeError
from vitscale.ground.wording import finite

if TYPE_CHECKING:
    from vitscale.evaluation.representation import Method, Strength


@with_model_options("class_names")
def fewshot(
    source: Annotated[
        Path | None,
        Argument(help="A run's directory, or weights of any format; none where folders of features are given."),
    ] = None,
    *,
    train: Annotated[
        list[str], Option(metavar="DATASET", help="Training samples; again for several tasks, with --test.")
    ],
    test: Annotated[list[str], Option(metavar="DATASET", help="Test samples, of the same classes.")],
    method: Annotated[
        Literal["ridge", "knn", "logistic", "heads", "attentive"],
        Option(
            help="The paper's ridge regression, DINO's neighbours, a logistic probe, DINOv2's linear heads, or CAPI's "
            "attentive heads."
        ),
    ] = "ridge",
    shots: Annotated[
        str | None, Option(metavar="N,...", help="Samples per class: 1,5,10,25 for ridge; all for the others.")
    ] = None,
    seeds: Annotated[int, Option(min=1, max=1000, help="Draws of training samples.")] = 3,
    l2: Annotated[
        str | None,
        Option(
            metavar="L2",
            help="For ridge: a number, default 1024; or by mean rank on all tasks (shared) or on the others (others).",
        ),
    ] = None,
    overlap: Annotated[
        Literal["refuse", "allow"] | None,
        Option(
            help="Test samples that are among the training samples: an error, or only reported. Default: a run's "
            "evaluation.overlap, else refuse."
        ),
    ] = None,
    masks: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="Segment instead, by a linear probe of patch tokens: PNGs of class numbers, named as the images.",
        ),
    ] = None,
    mask_classes: Annotated[
        int | None, Option(min=1, max=1024, help="For --masks: classes.", show_default="those in the training masks")
    ] = None,
    ignore: Annotated[
        int | None, Option(min=0, max=65535, help="For --masks: the number that is no class; default 255.")
    ] = None,
    options: ModelOptions = ModelOptions(),
    as_json: Json = False,
) -> None:
    """Measure the representation by simple classifiers on it: few-shot, k-NN, linear and attentive probes.

    Images are seen as the paper's few-shot evaluation does: resized to a square, of which the central 224 / 256.
    Without SOURCE no model is run: --train and --test are folders that `vitscale features --view fewshot` wrote.
    With --masks images are seen whole, and the result is the mean IoU.
    """
    from vitscale.evaluation.placing import join
    from vitscale.evaluation.representation import Measuring, measure, measure_features, measure_masks

    counts = _counts(shots, method)
    if l2 is not None and method != "ridge":
        raise RecipeError(f"--l2 is for --method ridge, and this is {method}")
    how = Measuring(method, counts, seeds, _strength(l2, len(train)), overlap)
    if len(train) != len(test):
        raise RecipeError(f"{len(train)} times --train and {len(test)} times --test: a task has one of each")
    if len(set(train)) < len(train):
        raise RecipeError("--train: two tasks have one training set, by which they are called")
    tasks = list(zip(train, test, strict=True))
    if masks is None:
        refuse("there is no --masks", {"--mask-classes": mask_classes, "--ignore": ignore})
    else:
        given = {"--shots": shots, "--l2": l2, "--method": None if method == "ridge" else method}
        refuse("--masks has a classifier of its own, of all training images", given)
        if source is None:
            raise RecipeError("--masks: needs a model, as SOURCE, whose patches are compared with the masks")
    if source is None:
        if method == "attentive":
            raise RecipeError("--method attentive: needs a model, as SOURCE, whose patches' tokens it attends to")
        options.refuse("without SOURCE no model is run", *vars(options))
        with one_speaks():
            accelerator = join()
            results = measure_features(tasks, how, accelerator.device)
    else:
        with options.opened(source) as finished:
            accelerator = finished.accelerator
            if masks is None:
                results = measure(finished, tasks, how)
            else:
                results = measure_masks(finished, tasks, masks, mask_classes, ignore, overlap)
    if accelerator.is_main_process:
        print(json.dumps(finite(results)) if as_json else table_of(results))


def _counts(shots: str | None, method: "Method") -> list[int | None]:
    """The numbers of samples per class that `--shots` asks for, with None for all samples."""
    from vitscale.evaluation.representation import default_counts

    if shots is None:
        return default_counts(method)
    for word in (words := shots.split(",")):
        if word != "all" and not (word.isascii() and word.isdecimal() and 0 < int(word) < 2**31):
            raise RecipeError(f"--shots {shots}: {word!r} is none; expected numbers of samples, or all: 1,5,10,all")
    counts = [None if word == "all" else int(word) for word in words]
    if len(set(counts)) != len(counts):
        raise RecipeError(f"--shots {shots}: one is there twice")
    return counts


def _strength(l2: str | None, tasks: int) -> "Strength":
    from vitscale.evaluation.representation import PAPERS_L2

    if l2 is None:
        return PAPERS_L2
    if l2 == "shared":
        return "shared"
    if l2 == "others":
        if tasks < 2:
            raise RecipeError("--l2 others: chosen on the other tasks, and there is one; give more --train and --test")
        return "others"
    try:
        value = float(l2)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise RecipeError(f"--l2 {l2}: expected a number above 0, shared or others")
    return value


def table_of(results: dict[str, Any]) -> str:
    """The results as text for people."""
    lines = []
    for name, task in results["tasks"].items():
        lines.append(f"{name}: {task['train_samples']:,} training, {task['test_samples']:,} test samples")
        for key, value in task.items():
            if not isinstance(value, dict):
                continue
            spread = f" +- {value['std']:.4f} over {value['draws']} draws" if value["draws"] > 1 else ""
            said = [word for word in ("l2", "C", "lr", "blocks") if isinstance(value.get(word), float | int)]
            more = "".join(f", {word} {value[word]:g}" for word in said)
            more += ", mean of patches" if value.get("patches") is True else ""
            scarce = value.get("scarce_classes")
            more += f"; {scarce} classes have fewer samples and give what they have" if scarce else ""
            lines.append(f"  {key:<12} {value['mean']:.4f}{spread}{more}")
    return "\n".join(lines)
