"""Metrics of a finished model on any labelled dataset."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitscale.data.shards import Manifest
from vitscale.evaluation import metrics as m
from vitscale.evaluation.answers import write_evaluation
from vitscale.evaluation.build import samples_expected
from vitscale.evaluation.finished import FinishedModel, tell_common_samples
from vitscale.ground.errors import RecipeError

METRICS = ("top1", "top5", "mean_per_class", "calibration")


def scores(
    finished: FinishedModel,
    data: str,
    asked: Sequence[str] | None = None,
    real: str | None = None,
    objectnet: Path | None = None,
    out: Path | None = None,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics on a dataset, and facts about how they were measured.

    Args:
        finished: the model.
        data: the dataset, as in `FinishedModel.dataset`.
        asked: some of `METRICS`; by default all.
        real: also the accuracy by ImageNet-ReaL's labels: their file, or "timm" for timm's copy.
        objectnet: ObjectNet's accuracies instead, by a file of its classes -> the model's.
        out: a new folder for results by class, confusions and predictions; not with `objectnet`.

    Raises `RecipeError` for a model without classes and unknown metrics, `DataError` if the dataset's classes are not
    the model's.
    """
    asked = METRICS if asked is None else asked
    if unknown := [name for name in asked if name not in METRICS]:
        raise RecipeError(f"--metrics: {unknown[0]!r} is none; expected some of {','.join(METRICS)}")
    if finished.num_classes is None:
        raise RecipeError(f"{finished.source} has no classes to be evaluated; fewshot and features are for such models")
    manifest = finished.dataset(data)
    tell_common_samples(finished, manifest)
    loader = finished.loader(manifest, border=0 if objectnet is None else m.OBJECTNET_BORDER)
    chosen: list[m.Metric] = []
    columns, border = None, 0
    if objectnet is not None:
        chosen.append(m.ObjectNet.of(objectnet, manifest, finished.class_names, finished.num_classes))
        classes, border = "by --objectnet", m.OBJECTNET_BORDER
    else:
        columns, classes = m.columns_of(manifest, finished.class_names, finished.num_classes)
        num_classes = len(manifest.class_names)
        ready: dict[str, m.Metric] = {"top1": m.TopK(1), "top5": m.TopK(5)}
        ready |= {"mean_per_class": m.MeanPerClass(num_classes), "calibration": m.Calibration()}
        chosen += [ready[name] for name in asked if name != "top5" or num_classes > 5]
        if real is not None:
            chosen.append(_real_labels(real, manifest, finished, columns is None))
    expected = samples_expected(finished.recipe, manifest)
    found = m.Scores("data", loader, chosen, len(manifest.class_names), expected, columns)
    about = {"dataset": manifest.sha256, "classes": classes, "border": border}
    if out is None:
        return dict(found.run(finished.predict)), about
    return write_evaluation(out, found, finished.predict, manifest, finished.loss, finished.policy() | about), about


def _real_labels(real: str, manifest: Manifest, finished: FinishedModel, is_whole: bool) -> m.ReaL:
    if finished.num_classes != 1000 or not is_whole:
        raise RecipeError("--real: the labels are for the 1,000 classes of ImageNet in their order")
    return m.ReaL.of(m.real_labels_of_timm() if real == "timm" else Path(real), manifest)
