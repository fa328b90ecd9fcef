"""`vitscale evaluate`, `features` and `predict`: what a finished model says of datasets and images."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from vitscale.cli.options import Json, ModelOptions, Source, at_work, refuse, with_model_options
from vitscale.ground.errors import DataError
from vitscale.ground.safe_text import printable, without_secrets
from vitscale.ground.wording import counted, decimals, finite


@with_model_options()
def evaluate(
    source: Source,
    options: ModelOptions = ModelOptions(),
    data: Annotated[
        str | None, Option(metavar="DATASET", help="Dataset to evaluate on, instead of the recipe's.")
    ] = None,
    real: Annotated[
        str | None, Option(metavar="FILE", help="With --data: also ImageNet-ReaL, by its real.json or timm's (timm).")
    ] = None,
    objectnet: Annotated[
        Path | None, Option(metavar="FILE", help="With --data: as ObjectNet; a JSON of its classes -> the model's.")
    ] = None,
    out: Annotated[
        Path | None,
        Option(metavar="FOLDER", help="With --data: write results by class, confusions and predictions there."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a run, as its recipe says, or any weights on --data.

    Under `torchrun -m vitscale` several processes share the images.
    """
    from vitscale.evaluation.finished import evaluate_finished
    from vitscale.evaluation.scoring import scores
    from vitscale.runs.intervals import accuracy_intervals

    if data is None:
        refuse("there is no --data", {"--real": real, "--objectnet": objectnet, "--out": out})
    with options.opened(source) as finished:
        policy = finished.policy()
        with at_work(finished, "evaluating"):
            if data is None:
                values = evaluate_finished(finished)
            else:
                if objectnet is not None:
                    refuse("--objectnet has metrics of its own", {"--real": real, "--out": out})
                values, about = scores(finished, data, real, objectnet, out)
                policy |= about
        if not finished.accelerator.is_main_process:
            return
        validation = finished.recipe.evaluation.validation if data is None and finished.recipe is not None else None
        samples = None if validation is None else finished.dataset(validation).num_samples
        of_split = {name: value for name, value in values.items() if "/" not in name or name.startswith("validation/")}
        intervals = accuracy_intervals(of_split, samples)
        if as_json:
            print(json.dumps(finite({"step": finished.step, **values, "intervals": intervals, "policy": policy})))
            return
        print(f"{source}, step {finished.step:,}" if finished.step is not None else source)
        if samples is not None:
            print(f"  {validation}: {counted(samples, 'sample')}")
        for metric, value in values.items():
            text = f"{int(value):,}" if metric.endswith("samples") else decimals(value)
            within = "  ({:.4f} to {:.4f})".format(*intervals[metric]) if metric in intervals else ""
            print(f"  {metric:<24} {text}{within}")


@with_model_options("class_names")
def features(
    source: Source,
    dataset: Annotated[str, Argument(help="A dataset: NAME/SPLIT of a run's data.root, a path, or a URL.")],
    out: Annotated[Path, Option(help="The folder; it does not exist, or is empty.")],
    view: Annotated[
        Literal["evaluation", "fewshot"], Option(help="See images as evaluate does, or as fewshot does.")
    ] = "evaluation",
    tokens: Annotated[
        bool, Option("--tokens", help="Write the patches' tokens, one map for each image, and the images' names.")
    ] = False,
    options: ModelOptions = ModelOptions(),
) -> None:
    """Write a dataset's representations (embeddings), or the tokens of its patches: .npy files.

    Beside them are labels, uids and meta.json, which says how they came about. Under `torchrun -m vitscale`
    several processes share the images; the files are the same.
    """
    from vitscale.data.shards.opening import names_by_uid
    from vitscale.evaluation.build import samples_expected
    from vitscale.evaluation.features import write_features
    from vitscale.evaluation.representation import FEWSHOT_CROP

    crop = FEWSHOT_CROP if view == "fewshot" else None
    with options.opened(source) as finished:
        manifest = finished.dataset(dataset)
        about = {
            "source": without_secrets(str(source)),
            "dataset": without_secrets(manifest.where),
            "dataset_sha256": manifest.sha256,
            "class_names": list(manifest.class_names),
            "policy": finished.policy(crop),
        }
        expected = samples_expected(finished.recipe, manifest)
        with at_work(finished, "computing representations"):
            predict = finished.predict_patches if tokens else finished.predict
            names = partial(names_by_uid, manifest) if tokens else None
            count = write_features(finished.loader(manifest, crop), predict, out, about, expected, names)
        if finished.accelerator.is_main_process:
            print(f"wrote {out}: the {'patch tokens' if tokens else 'representations'} of {count:,} samples")


@with_model_options()
def predict(
    source: Source,
    images: Annotated[list[Path], Argument(metavar="IMAGE...", help="Image files, and folders of them.")],
    top: Annotated[int, Option(min=1, max=10**6, help="Classes to show per image, the most probable first.")] = 5,
    options: ModelOptions = ModelOptions(),
    as_json: Annotated[bool, Option("--json", help="Print one JSON object a line for each image.")] = False,
) -> None:
    """Say what is in images: classes and their probabilities.

    An image is prepared as conversion and evaluation do it. Probabilities are softmax, or sigmoid where the model was
    trained with it. Files that cannot be read are reported, and the exit code is 3.
    """
    from vitscale.evaluation.prediction import image_files, predict_files

    files = image_files(images)
    with options.opened(source) as finished:
        failed = 0
        for prediction in predict_files(finished, files, top):
            failed += prediction.problem is not None
            if not finished.accelerator.is_main_process:
                continue
            if as_json:
                line = json.dumps(prediction.plain(), ensure_ascii=False)
                print(line if line.isprintable() else json.dumps(prediction.plain()))
            elif prediction.problem is not None:
                print(printable(f"{prediction.file}: {prediction.problem}"), file=sys.stderr)
            else:
                print(printable(prediction.file))
                for name, probability in prediction.classes:
                    print(f"  {probability:8.2%}  {printable(name)}")
        if failed:
            raise DataError(f"{failed} of {len(files)} images cannot be read").on_all_ranks()
