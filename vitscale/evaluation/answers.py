"""What a model answers, sample by sample and class by class: tables in a folder, equal on any number of processes."""

import csv
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitscale.data.shards import Manifest
from vitscale.data.shards.opening import sample_names
from vitscale.evaluation.contract import Predict
from vitscale.evaluation.metrics import Scores, most_probable
from vitscale.ground.errors import DataError
from vitscale.ground.files.durable import new_folder
from vitscale.ground.ranks import gather_rows, on_rank_zero
from vitscale.ground.safe_text import csv_cell
from vitscale.runs.intervals import accuracy_intervals, wilson_interval


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
        """As `Metric.sums`: nothing. Collective."""
        answers, logits = most_probable(logits), logits.double()
        probabilities = logits.softmax(dim=1) if self.loss == "softmax" else logits.sigmoid()
        rows = gather_rows(uids, labels, answers, probabilities.gather(1, answers[:, None])[:, 0])
        self.rows.extend([] if rows is None else [rows])
        return logits.new_zeros(1)

    def results(self, sums: Tensor) -> dict[str, float]:
        """As `Metric.results`: none."""
        return {}


def write_evaluation(
    out: Path, scores: Scores, predict: Predict, manifest: Manifest, loss: str, policy: dict[str, Any]
) -> dict[str, float]:
    """Evaluate, and write a folder, complete or not at all; returns the metrics. Collective.

    The folder has per_class.csv, confusion.csv, predictions.csv, and evaluation.json, with the metrics.

    Args:
        out: a folder that does not exist or is empty.
        manifest: the dataset's, whose classes are those of the answers.
        loss: as in `Answers`.
        policy: how images became the model's input, for evaluation.json.

    Raises `RecipeError` if the folder is not free, `DataError` if the disk is full, and as `Scores.run` does.
    """
    with ExitStack() as stack:
        folder = Path(on_rank_zero(lambda: str(stack.enter_context(new_folder(out, "--out")))))
        answers = Answers(loss)
        values = dict(replace(scores, metrics=[*scores.metrics, answers]).run(predict))
        content = {**values, "intervals": accuracy_intervals(values), "policy": policy}
        on_rank_zero(lambda: _write(folder, answers, manifest, content))
        on_rank_zero(stack.close)
    return values


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
    (folder / "evaluation.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _table(path: Path, columns: str, rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([columns.split(), *rows])
