"""Measures a model's representation by simple classifiers on it: few-shot ridge, neighbours, a probe, linear heads."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vitscale.data.shards import Manifest
from vitscale.evaluation.build import check_class_names, samples_expected
from vitscale.evaluation.features import Features, extract_features, read_features
from vitscale.evaluation.fewshot import PAPER_L2S, check_labels, hash_of, select_shots
from vitscale.evaluation.finished import FinishedModel, tell_common_samples
from vitscale.evaluation.heads import Layout, best_of_bank, extract_blocks
from vitscale.evaluation.logistic import DEVELOPMENT, logistic_probe
from vitscale.evaluation.neighbours import neighbour_accuracies
from vitscale.evaluation.placing import tell
from vitscale.evaluation.ridge import best_shared_l2, fewshot_accuracy
from vitscale.evaluation.splits import Overlap, common_samples, judge
from vitscale.ground.errors import DataError, VitscaleError
from vitscale.ground.ranks import on_rank_zero
from vitscale.recipe import EvalCrop

Method = Literal["ridge", "knn", "logistic", "heads"]
Strength = float | Literal["shared", "others"]
FEWSHOT_CROP = EvalCrop(kind="square")
"""The crop of the paper's few-shot evaluation: the central 224 / 256 of each side."""
PAPERS_L2 = 2.0**10
_Split = tuple[str, Sequence[str], Features | None, Features | None]
"""A task's name, class names, training features and test features."""
_Folder = tuple[str, Features, dict[str, Any]]
"""A folder of features: its name, its content, and its meta.json."""


def default_counts(method: Method) -> list[int | None]:
    """The numbers of samples per class of a method: the paper's for ridge; for the others None, which means all."""
    return [1, 5, 10, 25] if method == "ridge" else [None]


def measure(
    model: FinishedModel,
    tasks: Sequence[tuple[str, str]],
    method: Method,
    counts: Sequence[int | None],
    seeds: int,
    strength: Strength,
    overlap: Overlap | None,
) -> dict[str, Any]:
    """The accuracies of each task for each number of shots, with mean and deviation over the draws, for JSON.

    `overlap` defaults to what a run's recipe says. Raises `DataError` if the classes of a task's datasets differ,
    labels are outside them, or the datasets share samples and that is refused.
    """
    splits: list[_Split] = []
    layout = None
    opened = [[model.dataset(name) for name in task] for task in tasks]
    for (_, test), manifests in zip(tasks, opened, strict=True):
        check_class_names(test, manifests[1].class_names, manifests[0].class_names)
        tell_common_samples(model, manifests[1])
    default: Overlap = "refuse" if model.recipe is None else model.recipe.evaluation.overlap
    _judge([common_samples(test, train) for train, test in opened], overlap or default)
    for (train, _), manifests in zip(tasks, opened, strict=True):
        found = []
        for manifest in manifests:
            loader, expected = model.loader(manifest, FEWSHOT_CROP), samples_expected(model.recipe, manifest)
            if method == "heads":
                features, layout = extract_blocks(loader, model.block_tokens, expected)
            else:
                features = extract_features(loader, model.predict, expected)
            found.append(features)
        splits.append((train, manifests[0].class_names, found[0], found[1]))
    solve = _solver(method, layout, model.accelerator.device)
    policy = model.policy(FEWSHOT_CROP)
    return on_rank_zero(lambda: _measured(splits, method, solve, counts, seeds, strength) | {"policy": policy})


def measure_features(
    tasks: Sequence[tuple[str, str]],
    method: Method,
    counts: Sequence[int | None],
    seeds: int,
    strength: Strength,
    overlap: Overlap | None,
    device: torch.device,
) -> dict[str, Any]:
    """As `measure`, from folders that `vitscale features` wrote; linear heads are trained on `device`.

    Also raises `DataError` if the folders are from different models, views or classes.
    """
    return on_rank_zero(lambda: _measured_features(tasks, method, counts, seeds, strength, overlap or "refuse", device))


def _measured_features(
    tasks: Sequence[tuple[str, str]],
    method: Method,
    counts: Sequence[int | None],
    seeds: int,
    strength: Strength,
    overlap: Overlap,
    device: torch.device,
) -> dict[str, Any]:
    splits: list[_Split] = []
    common: list[str | None] = []
    first: tuple[str, dict[str, Any]] | None = None
    for train, test in tasks:
        found = []
        for name in (train, test):
            features, meta = read_features(Path(name))
            about = {key: meta.get(key) for key in ("source", "width")} | meta["policy"]
            first = (name, about) if first is None else first
            if differing := [key for key in about if about[key] != first[1].get(key)]:
                key = differing[0]
                raise DataError(
                    f"{name} and {first[0]} do not go together: {key} is {about[key]!r} here and {first[1].get(key)!r} "
                    "there"
                )
            found.append((name, features, meta))
        class_names = found[0][2]["class_names"]
        check_class_names(test, found[1][2]["class_names"], class_names)
        common.append(_common_features(*found))
        splits.append((train, class_names, found[0][1], found[1][1]))
    _judge(common, overlap)
    solve = _solver(method, Layout(1, meta["width"], has_patches=False), device)
    return _measured(splits, method, solve, counts, seeds, strength) | {"policy": meta["policy"]}


def _judge(found: Sequence[str | None], overlap: Overlap) -> None:
    """Report test samples that are also in their task's training set, or raise `DataError` on all processes."""
    lines = [line for line in found if line is not None]
    try:
        judge(lines, overlap, "--overlap allow")
    except DataError as error:
        raise error.on_all_ranks() from None
    for line in lines:
        tell(line)


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


def _measured(
    splits: Sequence[_Split],
    method: Method,
    solve: "_Solve",
    counts: Sequence[int | None],
    seeds: int,
    strength: Strength,
) -> dict[str, Any]:
    l2s = list(PAPER_L2S) if isinstance(strength, str) else [strength]
    # For each task and number of shots: accuracies (draws, columns), and what each column is.
    tables = [[_drawn(split, solve, count, seeds, l2s) for count in counts] for split in splits]
    results = {}
    for at, (name, class_names, train, test) in enumerate(splits):
        assert train is not None and test is not None, "the solver has looked"
        task: dict[str, Any] = {"train_samples": len(train.labels), "test_samples": len(test.labels)}
        held = torch.bincount(train.labels, minlength=len(class_names))
        for row, count in enumerate(counts):
            table, about = tables[at][row]
            if method == "ridge":
                means = torch.from_numpy(np.stack([tables[task][row][0].mean(axis=0) for task in range(len(splits))]))
                best = best_shared_l2(means, at if strength == "others" else None) if isinstance(strength, str) else 0
                table, about = table[:, best : best + 1], [{"l2": l2s[best]}]
            for column, more in enumerate(about):
                key = "all" if count is None else f"{count}shot"
                key += f"/{more['k']}nn" if "k" in more else ""
                found = {"mean": float(table[:, column].mean()), "std": float(table[:, column].std()), **more}
                found |= {"draws": len(table)}
                if count is not None and (scarce := int((held < count).sum())):
                    found["scarce_classes"] = scarce
                task[key] = found
        results[name] = task
    return {"method": method, "tasks": results}


def _drawn(
    split: _Split,
    solve: "_Solve",
    count: int | None,
    seeds: int,
    l2s: Sequence[float],
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Accuracies (draws, columns), and what to report about each column."""
    name, class_names, train, test = split
    if train is None or test is None:
        raise DataError(f"{name}: its {'training' if train is None else 'test'} split has no samples")
    check_labels(name, train, "training", len(class_names))
    check_labels(name, test, "test", len(class_names))
    num_classes = len(class_names)
    draws = []
    for seed in range(1 if count is None else seeds):
        rows = (
            torch.arange(len(train.labels))
            if count is None
            else select_shots(train.labels, train.uids, count, num_classes, seed)
        )
        few = train.features[rows], train.labels[rows], test.features, test.labels, num_classes
        draws.append(solve(few, train.uids[rows], l2s))
    # What was chosen may differ from draw to draw.
    columns = []
    for column in zip(*(about for _, about in draws), strict=True):
        every = {key: [one[key] for one in column] for key in column[0]}
        columns.append({key: values[0] if len(set(values)) == 1 else values for key, values in every.items()})
    return np.array([values for values, _ in draws]), columns


_Few = tuple[Tensor, Tensor, Tensor, Tensor, int]
_Found = tuple[list[float], list[dict[str, Any]]]


def _ridge(few: _Few, uids: Tensor, l2s: Sequence[float]) -> _Found:
    return fewshot_accuracy(*few, l2s), [{"l2": l2} for l2 in l2s]


def _knn(few: _Few, uids: Tensor, l2s: Sequence[float]) -> _Found:
    found = neighbour_accuracies(*few)
    if not found:
        raise DataError(f"{len(uids)} training samples are fewer than the fewest neighbours, 10")
    return list(found.values()), [{"k": k} for k in found]


def _logistic(few: _Few, uids: Tensor, l2s: Sequence[float]) -> _Found:
    probe = logistic_probe(*few, _development(few[1], uids))
    return [probe.accuracy], [{"C": probe.strength}]


def _heads(few: _Few, uids: Tensor, l2s: Sequence[float], layout: Layout, device: torch.device) -> _Found:
    chosen = best_of_bank(*few, _development(few[1], uids), layout, device=device)
    head = chosen.head
    return [chosen.accuracy], [{"lr": head.rate, "blocks": head.blocks, "patches": head.patches}]


def _development(labels: Tensor, uids: Tensor) -> Tensor:
    """A mask (N,) bool of the training samples that settings are chosen on."""
    every = round(1 / DEVELOPMENT)
    development = torch.zeros(len(uids), dtype=torch.bool)
    # Every tenth sample of the classes, each in the order of a hash, so that no class is missing from what is fitted.
    order = torch.from_numpy(np.lexsort((hash_of(0, uids.numpy()), labels.numpy())))
    development[order[every - 1 :: every]] = True
    if not development.any():
        raise DataError(f"{len(uids)} training samples: this needs {every}, to choose its settings on a tenth of them")
    return development


_Solve = Callable[[_Few, Tensor, Sequence[float]], _Found]


def _solver(method: Method, layout: Layout | None, device: torch.device) -> _Solve:
    if method == "heads":
        assert layout is not None, "heads know what they read"
        return partial(_heads, layout=layout, device=device)
    solvers: dict[Method, _Solve] = {"ridge": _ridge, "knn": _knn, "logistic": _logistic}
    return solvers[method]
