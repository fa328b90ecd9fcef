"""Metrics of a finished model on any labelled dataset, and what it answers: tables equal on any number of processes."""

import csv
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitscale.data.shards import Manifest
from vitscale.data.shards.opening import sample_names
from vitscale.evaluation import metrics as m
from vitscale.evaluation.build import samples_expected
from vitscale.evaluation.features import shared_folder
from vitscale.evaluation.finished import FinishedModel, tell_common_samples
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.ranks import gather_rows, on_rank_zero
from vitscale.ground.safe_text import csv_cell
from vitscale.ground.wording import finite
from vitscale.runs.intervals import accuracy_intervals, wilson_interval


def scores(
    finished: FinishedModel, data: str, real: str | None = None, objectnet: Path | None = None, out: Path | None = None
) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics on a dataset, and facts about how they were measured.

    Args:
        data: the dataset, as in `FinishedModel.dataset`.
        real: also the accuracy by ImageNet-ReaL's labels: their file, or "timm" for timm's copy.
        objectnet: ObjectNet's accuracies instead, by a file of its classes -> the model's.
        out: a new folder, complete or not at all, for per_class.csv, confusion.csv, predictions.csv and
            evaluation.json, with the metrics; not with `objectnet`.

    Raises `RecipeError` for a model without classes and a folder that is not free, `DataError` if the dataset's classes
    are not the model's or the disk is full, and as `Scores.run` does. Collective.
    """
    if finished.num_classes is None:
        raise RecipeError(f"{finished.source} has no classes to be evaluated; fewshot and features are for such models")
    manifest = finished.dataset(data)
    tell_common_samples(finished, manifest)
    num_classes, border = len(manifest.class_names), 0 if objectnet is None else m.OBJECTNET_BORDER
    if objectnet is not None:
        columns, classes = None, "by --objectnet"
        chosen: list[m.Metric] = [m.ObjectNet.of(objectnet, manifest, finished.class_names, finished.num_classes)]
    else:
        columns, classes = m.columns_of(manifest, finished.class_names, finished.num_classes)
        chosen = [m.TopK(1), *([m.TopK(5)] if num_classes > 5 else []), m.MeanPerClass(num_classes), m.Calibration()]
        if real is not None:
            if finished.num_classes != 1000 or columns is not None:
                raise RecipeError("--real: the labels are for the 1,000 classes of ImageNet in their order")
            chosen.append(m.ReaL.of(m.real_labels_of_timm() if real == "timm" else Path(real), manifest))
    expected = samples_expected(finished.recipe, manifest)
    found = m.Scores("data", finished.loader(manifest, border=border), chosen, num_classes, expected, columns)
    about = {"dataset": manifest.sha256, "classes": classes, "border": border}
    if out is None:
        return dict(found.run(finished.predict)), about
    with shared_folder(out) as folder:
        answers = Answers(finished.loss)
        values = dict(replace(found, metrics=[*chosen, answers]).run(finished.predict))
        content = {**values, "intervals": accuracy_intervals(values), "policy": finished.policy() | about}
        on_rank_zero(lambda: _write(folder, answers, manifest, content))
    return values, about


@dataclass(frozen=True)
class Answers:
    """Gathers on rank 0, as a `Metric` without a number, what the model answers to each sample.

    Attributes:
        loss: the loss that the classes were trained with: `softmax`, or one that has each class by itself.
        rows: for each batch (uids, labels, answers, probabilities), each (B,); answers are classes of the dataset.
    """

    loss: str
    rows: list[tuple[Tensor, ...]] = field(default_factory=list)

    def sums(self, logits: Tensor, labels: Tensor, uids: Tensor) -> Tensor:
        """Nothing. Collective."""
        answers, logits = m.most_probable(logits), logits.double()
        probabilities = logits.softmax(dim=1) if self.loss == "softmax" else logits.sigmoid()
        rows = gather_rows(uids, labels, answers, probabilities.gather(1, answers[:, None])[:, 0])
        self.rows.extend([] if rows is None else [rows])
        return logits.new_zeros(1)

    def results(self, sums: Tensor) -> dict[str, float]:
        """None."""
        return {}


def _write(folder: Path, answers: Answers, manifest: Manifest, content: dict[str, Any]) -> None:
    uids, labels, found, probabilities = (torch.cat(column) for column in zip(*answers.rows, strict=True))
    order = uids.argsort()
    pairs = list(zip(labels[order].tolist(), found[order].tolist(), strict=True))
    confused, samples, predicted = Counter(pairs), Counter(labels.tolist()), Counter(found.tolist())
    names, classes = dict[int, str](), [csv_cell(name) for name in manifest.class_names]
    with suppress(DataError):  # shards of others have no table of provenance
        names = {uid: csv_cell(name) for uid, name in sample_names(manifest)}

    by_class: list[Sequence[Any]] = []
    for place, name in enumerate(classes):
        count, right = samples[place], confused[place, place]
        share = (right / count, *wilson_interval(right / count, count)) if count else ("", "", "")
        by_class.append((name, count, right, predicted[place], *share))
    of_pairs = [(classes[label], classes[answer], count) for (label, answer), count in sorted(confused.items())]
    of_samples = [
        (uid, names.get(uid, ""), classes[label], classes[answer], f"{probability:.4f}")
        for uid, (label, answer), probability in zip(
            uids[order].tolist(), pairs, probabilities[order].tolist(), strict=True
        )
    ]
    _table(folder / "per_class.csv", "class samples right predicted top1 low high", by_class)
    _table(folder / "confusion.csv", "class predicted samples", of_pairs)
    _table(folder / "predictions.csv", "uid name class predicted probability", of_samples)
    (folder / "evaluation.json").write_text(json.dumps(finite(content), indent=1) + "\n", encoding="utf-8")


def _table(path: Path, columns: str, rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([columns.split(), *rows])
