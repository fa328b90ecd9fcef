"""Measures a representation by simple classifiers on it: few-shot ridge, neighbours, a probe, heads."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitscale.data.shards import Manifest
from vitscale.evaluation.attentive import best_attentive, patches_of
from vitscale.evaluation.build import check_class_names, samples_expected
from vitscale.evaluation.features import Features, extract_features, read_features
from vitscale.evaluation.fewshot import PAPER_L2S, Solved, Task, development
from vitscale.evaluation.finished import FinishedModel, tell_common_samples
from vitscale.evaluation.heads import Layout, best_of_bank, extract_blocks
from vitscale.evaluation.placing import tell
from vitscale.evaluation.probes import Splits, logistic_probe, neighbour_accuracies
from vitscale.evaluation.ridge import best_shared_l2, fewshot_accuracy
from vitscale.evaluation.segmentation import IGNORED, WHOLE, SegmentationProbe
from vitscale.evaluation.splits import Overlap, common_samples, judge
from vitscale.ground.errors import DataError, VitscaleError
from vitscale.ground.machine import available_memory
from vitscale.ground.ranks import on_rank_zero
from vitscale.models import Outputs
from vitscale.recipe import EvalCrop
from vitscale.recipe.families import model_of

Method = Literal["ridge", "knn", "logistic", "heads", "attentive"]
Strength = float | Literal["shared", "others"]
FEWSHOT_CROP = EvalCrop(kind="square")
"""The crop of the paper's few-shot evaluation: the central 224 / 256 of each side."""
PAPERS_L2 = 2.0**10


class Measuring(NamedTuple):
    """How representations are measured.

    Attributes:
        method: the classifier.
        counts: numbers of training samples per class; None means all.
        seeds: the number of draws of training samples.
        strength: of ridge regression: a number, or how to choose it.
        overlap: whether a task's splits may share samples; by default what a run's recipe says, otherwise "refuse".
    """

    method: Method
    counts: Sequence[int | None]
    seeds: int
    strength: Strength
    overlap: Overlap | None = None


def default_counts(method: Method) -> list[int | None]:
    """The numbers of samples per class of a method: the paper's for ridge; for the others None, which means all."""
    return [1, 5, 10, 25] if method == "ridge" else [None]


def measure(model: FinishedModel, tasks: Sequence[tuple[str, str]], how: Measuring) -> dict[str, Any]:
    """The accuracies of each task, (training, test) datasets, for each number of shots, for JSON.

    Each has its mean and deviation over the draws. Raises `DataError` if the classes of a task's datasets differ,
    labels are outside them, or the datasets share samples and that is refused.
    """
    opened = _opened(model, tasks, how.overlap)
    for (_, test), manifests in zip(tasks, opened, strict=True):
        check_class_names(test, manifests[1].class_names, manifests[0].class_names)
    pairs: list[list[Features | None]] = []
    layout = None
    images = sum(manifest.num_samples for manifests in opened for manifest in manifests)
    free, others = on_rank_zero(available_memory), model_of(**model.description.model).extra_tokens

    def patches(batch: Tensor) -> Outputs:
        room = math.inf if free is None else 0.8 * free
        return patches_of(model.predict(batch), others, "--method attentive", images, room)

    for manifests in opened:
        pair = []
        for manifest in manifests:
            loader, expected = model.loader(manifest, FEWSHOT_CROP), samples_expected(model.recipe, manifest)
            if how.method == "heads":
                features, layout = extract_blocks(loader, model.block_tokens, expected)
            elif how.method == "attentive":
                features = extract_features(loader, patches, expected)
            else:
                features = extract_features(loader, model.predict, expected)
            pair.append(features)
        pairs.append(pair)
    device, policy = model.accelerator.device, model.policy(FEWSHOT_CROP)

    def measured() -> dict[str, Any]:
        splits = [
            Task.of(name, manifests[0].class_names, train, test)
            for (name, _), manifests, (train, test) in zip(tasks, opened, pairs, strict=True)
        ]
        return _measured(splits, how, layout, device) | {"policy": policy}

    return on_rank_zero(measured)


def measure_masks(
    model: FinishedModel,
    tasks: Sequence[tuple[str, str]],
    folder: Path,
    num_classes: int | None = None,
    ignored: int | None = None,
    overlap: Overlap | None = None,
) -> dict[str, Any]:
    """The mean IoU of a linear segmentation probe for each task, for JSON; arguments as `SegmentationProbe` has them.

    Raises `RecipeError` and `DataError` as that does, and `DataError` if datasets share samples and that is refused.
    """
    probe = SegmentationProbe(model, folder, num_classes, IGNORED if ignored is None else ignored)
    results = {}
    for (name, _), (train, test) in zip(tasks, _opened(model, tasks, overlap), strict=True):
        samples = {"train_samples": train.num_samples, "test_samples": test.num_samples}
        results[name] = samples | probe.measure(train, test)
    return {"method": "segmentation", "tasks": results, "policy": model.policy(WHOLE)}


def _opened(
    model: FinishedModel, tasks: Sequence[tuple[str, str]], overlap: Overlap | None
) -> list[tuple[Manifest, Manifest]]:
    """The datasets of tasks, training and test. Raises `DataError` if these share samples and that is refused."""
    opened = [(model.dataset(train), model.dataset(test)) for train, test in tasks]
    for _, test in opened:
        tell_common_samples(model, test)
    default: Overlap = "refuse" if model.recipe is None else model.recipe.evaluation.overlap
    _judge([common_samples(test, train) for train, test in opened], overlap or default)
    return opened


def measure_features(tasks: Sequence[tuple[str, str]], how: Measuring, device: torch.device) -> dict[str, Any]:
    """As `measure`, from folders that `vitscale features` wrote; linear heads are trained on `device`.

    Also raises `DataError` if the folders are from different models, views or classes.
    """

    def measured() -> dict[str, Any]:
        splits: list[tuple[str, list[str], Features, Features]] = []
        common: list[str | None] = []
        first: tuple[str, dict[str, Any]] | None = None
        for train, test in tasks:
            folders = []
            for name in (train, test):
                features, meta = read_features(Path(name))
                about = {key: meta.get(key) for key in ("source", "width")} | meta["policy"]
                first = (name, about) if first is None else first
                if differing := [key for key in about if about[key] != first[1].get(key)]:
                    key = differing[0]
                    raise DataError(
                        f"{name} and {first[0]} do not go together: {key} is {about[key]!r} here and "
                        f"{first[1].get(key)!r} there"
                    )
                folders.append((name, features, meta))
            class_names = folders[0][2]["class_names"]
            check_class_names(test, folders[1][2]["class_names"], class_names)
            common.append(_common_features(*folders))
            splits.append((train, class_names, folders[0][1], folders[1][1]))
        _judge(common, how.overlap or "refuse")
        layout = Layout(1, meta["width"], has_patches=False)
        return _measured([Task.of(*split) for split in splits], how, layout, device) | {"policy": meta["policy"]}

    return on_rank_zero(measured)


def _judge(lines: Sequence[str | None], overlap: Overlap) -> None:
    """Report test samples that are also in their task's training set, or raise `DataError` on all processes."""
    overlaps = [line for line in lines if line is not None]
    try:
        judge(overlaps, overlap, "--overlap allow")
    except DataError as error:
        raise error.on_all_ranks() from None
    for line in overlaps:
        tell(line)


_Folder = tuple[str, Features, dict[str, Any]]  # a folder of features: its name, its content, and its meta.json


def _common_features(train: _Folder, test: _Folder) -> str | None:
    """As `common_samples`, for two folders of features, by the datasets that they come from."""
    (train_name, ours, train_meta), (test_name, theirs, test_meta) = train, test
    digests = [meta.get("dataset_sha256") for meta in (train_meta, test_meta)]
    if digests[0] is not None and digests[0] == digests[1]:
        count = int(np.isin(theirs.uids.numpy(), ours.uids.numpy()).sum())
        return f"{count:,} of the {len(theirs.uids):,} samples of {test_name} are among those of {train_name}"
    try:
        manifests = [Manifest.load(str(meta.get("dataset"))) for meta in (train_meta, test_meta)]
        if [manifest.sha256 for manifest in manifests] == digests:
            return common_samples(manifests[1], manifests[0])
    except VitscaleError:
        pass
    tell(f"{test_name}: its dataset, or that of {train_name}, has gone or changed: no samples were compared")
    return None


def _measured(tasks: Sequence[Task], how: Measuring, layout: Layout | None, device: torch.device) -> dict[str, Any]:
    l2s = list(PAPER_L2S) if isinstance(how.strength, str) else [how.strength]
    solve = partial(_solve, how.method, l2s, layout, device)
    # For each task and number of shots: accuracies (draws, columns), and what each column is.
    tables = [[task.draws(count, range(how.seeds), solve) for count in how.counts] for task in tasks]
    results = {}
    for at, task in enumerate(tasks):
        result: dict[str, Any] = {"train_samples": len(task.train.labels), "test_samples": len(task.test.labels)}
        for row, count in enumerate(how.counts):
            table, columns = tables[at][row]
            if how.method == "ridge":
                best = 0
                if isinstance(how.strength, str):
                    means = torch.from_numpy(np.stack([of_task[row][0].mean(axis=0) for of_task in tables]))
                    best = best_shared_l2(means, at if how.strength == "others" else None)
                table, columns = table[:, best : best + 1], [{"l2": l2s[best]}]
            for column, more in enumerate(columns):
                key = "all" if count is None else f"{count}shot"
                key += f"/{more['k']}nn" if "k" in more else ""
                result[key] = {"mean": float(table[:, column].mean()), "std": float(table[:, column].std()), **more}
                result[key] |= {"draws": len(table)}
                if count is not None and (scarce := task.scarce_classes(count)):
                    result[key]["scarce_classes"] = scarce
        results[task.name] = result
    return {"method": how.method, "tasks": results}


def _solve(
    method: Method, l2s: Sequence[float], layout: Layout | None, device: torch.device, few: Splits, uids: Tensor
) -> Solved:
    """Classifies by a method; `uids` are those of the samples for training."""
    match method:
        case "ridge":
            return fewshot_accuracy(few, l2s), [{"l2": l2} for l2 in l2s]
        case "knn":
            accuracies = neighbour_accuracies(few)
            if not accuracies:
                raise DataError(f"{len(uids)} training samples are fewer than the fewest neighbours, 10")
            return list(accuracies.values()), [{"k": k} for k in accuracies]
        case "logistic":
            strength, accuracy = logistic_probe(few, development(few.train_y, uids))
            return [accuracy], [{"C": float(strength)}]
        case "heads":
            assert layout is not None, "heads know what they read"
            head, accuracy = best_of_bank(few, development(few.train_y, uids), layout, device=device)
            return [accuracy], [{"lr": head.rate, "blocks": head.blocks, "patches": head.patches}]
        case "attentive":
            rate, accuracy = best_attentive(few, development(few.train_y, uids), device=device)
            return [accuracy], [{"lr": rate}]
