"""Metrics of a classifier on a labelled dataset, each from sums over samples, which add up over processes.

Shape legend: B samples, K classes.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from vitscale.data.shards import Manifest
from vitscale.evaluation.classification import check_count, rank_of_label
from vitscale.evaluation.contract import Evaluator, MakeLoader, Predict
from vitscale.ground.errors import DataError, RecipeError, turned
from vitscale.ground.ranks import reduce_sum
from vitscale.ground.storage import read_text

BINS = 15  # the number of bins of the expected calibration error
OBJECTNET_BORDER = 2  # the width in pixels of the red frame of ObjectNet's pictures, which is cut off first

_REAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})")
_REAL_IMAGES, _REAL_CLASSES = 50_000, 1000


@cache
def imagenet_synsets() -> tuple[str, ...]:
    """WordNet ids, such as n01440764, of ImageNet's thousand classes (ILSVRC 2012) in the order of published models.

    ImageNet's folders are named after them.
    """
    # The ids and their order are facts about the data set; this list of them was written from timm's (Apache-2.0).
    return tuple(Path(__file__).with_name("imagenet_synsets.txt").read_text(encoding="ascii").split())


class Metric(Protocol):
    """One or several numbers that measure predicted classes."""

    def sums(self, logits: Tensor, labels: Tensor, uids: Tensor) -> Tensor:
        """Sums over the samples of a batch, float64 (n,), from logits, fp32 (B, K), labels and uids, int64 (B,)."""

    def results(self, sums: Tensor) -> dict[str, float]:
        """The metrics by name, from the sums over all samples, on the CPU."""


@dataclass(frozen=True)
class TopK:
    """`top<k>`: the share of samples whose class is among the k most probable; among equals the lower class leads."""

    k: int

    def sums(self, logits: Tensor, labels: Tensor, uids: Tensor) -> Tensor:
        return _sums(rank_of_label(logits, labels) < self.k, torch.ones_like(labels))

    def results(self, sums: Tensor) -> dict[str, float]:
        return {f"top{self.k}": _ratio(sums)}


@dataclass(frozen=True)
class MeanPerClass:
    """`mean_per_class`: top-1 accuracy of each class, averaged over the classes that have samples."""

    num_classes: int

    def sums(self, logits: Tensor, labels: Tensor, uids: Tensor) -> Tensor:
        right = labels[rank_of_label(logits, labels) < 1]
        return torch.cat([torch.bincount(each, minlength=self.num_classes) for each in (right, labels)]).double()

    def results(self, sums: Tensor) -> dict[str, float]:
        right, samples = sums.view(2, -1)
        there = samples > 0
        return {"mean_per_class": float((right[there] / samples[there]).mean())}


@dataclass(frozen=True)
class Calibration:
    """`nll` in nats and `ece`, the expected calibration error, both of the softmax, whatever loss was used in training.

    `ece` is the mean, over samples, of the distance between the accuracy and the mean confidence of their bin, with 15
    bins of equal width (Guo et al. 2017).
    """

    def sums(self, logits: Tensor, labels: Tensor, uids: Tensor) -> Tensor:
        log_p = logits.double().log_softmax(dim=1)
        nll = F.nll_loss(log_p, labels, reduction="sum")
        confidence = log_p.amax(dim=1).exp()
        bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
        right = (rank_of_label(logits, labels) < 1).double()
        by_bin = torch.zeros(3, BINS, dtype=torch.float64, device=logits.device)
        by_bin.index_add_(1, bins, torch.stack([torch.ones_like(right), right, confidence]))
        return torch.cat([nll[None], by_bin.flatten()])

    def results(self, sums: Tensor) -> dict[str, float]:
        samples, right, confidence = sums[1:].view(3, BINS)
        total = samples.sum()
        return {"nll": float(sums[0] / total), "ece": float((right - confidence).abs().sum() / total)}


class ReaL:
    """`real_top1`: the share of samples whose most probable class is one of the reassessed labels of ImageNet.

    Images without any such label do not count (Beyer et al. 2020); `real_samples` is the number of those that do. Given
    are the labels of all images by their uids.
    """

    def __init__(self, labels: Mapping[int, Sequence[int]]) -> None:
        longest, uids = max(map(len, labels.values()), default=0), sorted(labels)
        self._uids = torch.tensor(uids, dtype=torch.int64)
        rows = [[*labels[uid], *[-1] * (max(longest, 1) - len(labels[uid]))] for uid in uids]
        self._labels = torch.tensor(rows, dtype=torch.int64)

    @classmethod
    def of(cls, file: Path, manifest: Manifest) -> "ReaL":
        """From a file `real.json`, a list of labels for each image, joined to a dataset by its files' names.

        Raises `DataError` for any other file, and for a dataset of other images.
        """
        from vitscale.data.shards.opening import sample_names  # loads pyarrow

        with turned(f"{file}: cannot be read", DataError, OSError, ValueError, TypeError, RecursionError):
            lists = json.loads(read_text(file))
            is_one = len(lists) == _REAL_IMAGES and all(
                isinstance(label, int) and 0 <= label < _REAL_CLASSES for labels in lists for label in labels
            )
        if not is_one:
            raise DataError(f"{file}: expected a list of labels from 0 to 999 for each of {_REAL_IMAGES:,} images")
        found = {}
        for uid, name in sample_names(manifest):
            number = _REAL_NAME.search(name)
            if number is None or not 1 <= int(number[1]) <= _REAL_IMAGES:
                raise DataError(
                    f"{manifest.where}: {name} is not an image of ImageNet's validation set: ILSVRC2012_val_N"
                )
            found[uid] = lists[int(number[1]) - 1]
        return cls(found)

    def sums(self, logits: Tensor, labels: Tensor, uids: Tensor) -> Tensor:
        accepted = self._labels[torch.searchsorted(self._uids, uids.cpu())].to(logits.device)
        is_labelled = (accepted >= 0).any(dim=1)
        is_right = (accepted == most_probable(logits)[:, None]).any(dim=1)
        return _sums(is_right & is_labelled, is_labelled)

    def results(self, sums: Tensor) -> dict[str, float]:
        return {"real_top1": _ratio(sums), "real_samples": float(sums[1])}


@dataclass(frozen=True)
class ObjectNet:
    """Accuracy on the classes that ObjectNet shares with a model, by the two protocols in use.

    `objectnet_top1_of_all`: the most probable of all K classes is one of those that the label is mapped to.
    `objectnet_top1_of_mapped`: the same, but only among the classes that any label is mapped to. Samples whose label is
    mapped to no class do not count; `objectnet_samples` is the number of those that do.

    Attributes:
        accepted: which of the model's classes are right for a label, bool (labels, K).
    """

    accepted: Tensor

    @classmethod
    def of(cls, file: Path, manifest: Manifest, class_names: Sequence[str] | None, num_classes: int) -> "ObjectNet":
        """From a JSON file: name of the dataset's class -> name or number of the model's class, or a list of these.

        Raises `DataError`.
        """
        with turned(f"{file}: cannot be read", DataError, OSError, ValueError, RecursionError):
            content = json.loads(read_text(file))
            if not isinstance(content, dict):
                raise ValueError(f"expected an object, found {type(content).__name__}")
        accepted = torch.zeros(len(manifest.class_names), num_classes, dtype=torch.bool)
        places = {name: at for at, name in enumerate(class_names or [])}
        rows = {name: at for at, name in enumerate(manifest.class_names)}
        for name, theirs in content.items():
            if name not in rows:
                raise DataError(f"{file}: {manifest.where} has no class {name!r}")
            for their in theirs if isinstance(theirs, list) else [theirs]:
                at = their if isinstance(their, int) else places.get(their)
                if at is None or not 0 <= at < num_classes:
                    raise DataError(f"{file}: {name!r} is mapped to {their!r}, which is not a class of the model")
                accepted[rows[name], at] = True
        if not accepted.any():
            raise DataError(f"{file}: maps no class")
        return cls(accepted)

    def sums(self, logits: Tensor, labels: Tensor, uids: Tensor) -> Tensor:
        accepted = self.accepted.to(logits.device)
        right = accepted[labels]  # (B, K)
        counts = right.any(dim=1)
        of_all = right.gather(1, most_probable(logits)[:, None])[:, 0]
        of_mapped = most_probable(logits.masked_fill(~accepted.any(dim=0), -torch.inf))
        return _sums(of_all, right.gather(1, of_mapped[:, None])[:, 0], counts)

    def results(self, sums: Tensor) -> dict[str, float]:
        of_all, of_mapped = (sums[:2] / sums[2]).tolist()
        shares = {"objectnet_top1_of_all": of_all, "objectnet_top1_of_mapped": of_mapped}
        return shares | {"objectnet_samples": float(sums[2])}


@dataclass(frozen=True)
class Scores(Evaluator):
    """Evaluates metrics over a whole dataset; all processes together count each sample once.

    Args:
        make_loader: starts an exact pass over the dataset.
        num_labels: the number of the dataset's classes.
        num_samples: the number of the dataset's samples; another number is an error. None if damaged samples may be
            masked.
        columns: the model's class for each of the dataset's classes, int64 (labels,); None if they are the same, or if
            the metrics map the classes themselves.
    """

    name: str
    make_loader: MakeLoader
    metrics: Sequence[Metric]
    num_labels: int
    num_samples: int | None = None
    columns: Tensor | None = None

    @torch.no_grad()
    def run(self, predict: Predict) -> Iterator[tuple[str, float]]:
        """Yield `samples`, then the metrics.

        Raises `DataError` for labels outside the classes, outputs that are NaN, and a wrong number of samples.
        """
        counts: Tensor | None = None
        sums: list[Tensor] = []
        for batch in self.make_loader():
            logits = predict(batch.images).logits
            assert logits is not None, "metrics need a model with classes"
            mask = batch.mask.to(logits.device)
            labels, uids = (values.to(logits.device)[mask] for values in (batch.labels, batch.uids))
            logits = logits.float()[mask]
            if self.columns is not None:
                logits = logits[:, self.columns.to(logits.device)]
            valid = (labels >= 0) & (labels < self.num_labels)
            rows = logits[valid], labels[valid], uids[valid]
            found = [metric.sums(*rows) for metric in self.metrics]
            sums = [one + other for one, other in zip(sums, found, strict=True)] if sums else found
            count = torch.stack([mask.sum(), (~valid).sum(), logits.isnan().any(dim=1).sum()])
            counts = count if counts is None else counts + count
        assert counts is not None, "a dataset without samples has no loader"
        samples, mislabelled, undefined = reduce_sum(counts).tolist()
        if mislabelled:
            raise DataError(
                f"{mislabelled} of {samples} samples have a label outside 0..{self.num_labels - 1} (-1 is unlabelled)"
            ).on_all_ranks()
        if undefined:
            raise DataError(f"the model's outputs for {undefined} of {samples} samples are not numbers").on_all_ranks()
        check_count(self.name, samples, self.num_samples)
        yield "samples", samples
        for metric, own in zip(self.metrics, sums, strict=True):
            yield from metric.results(reduce_sum(own).cpu()).items()


def columns_of(manifest: Manifest, class_names: Sequence[str] | None, num_classes: int) -> tuple[Tensor | None, str]:
    """The model's class for each of a dataset's classes, and a description such as `same` or `160 of 1000, by name`.

    ImageNet-A and -R have 200 of the thousand classes: the others are left out of the model's answers. A thousand
    outputs without names are taken for ImageNet's if the name of any of the dataset's classes is one of its WordNet
    ids. The columns are None if both have the same classes in the same order, or if the model's names are unknown and
    the numbers of classes agree.

    Raises `DataError` if the dataset has a class that the model does not have.
    """
    theirs, how, hint = manifest.class_names, "by name", ""
    if num_classes == len(imagenet_synsets()) and not set(theirs).isdisjoint(imagenet_synsets()):
        if class_names is None:
            class_names, how = imagenet_synsets(), "by WordNet id"
        else:
            hint = "; if its outputs are ImageNet's thousand classes in their order: --class-names imagenet"
    if class_names is None:
        if len(theirs) != num_classes:
            raise DataError(
                f"{manifest.where} has {len(theirs)} classes, but the model has {num_classes} without names; give "
                "their names: --class-names FILE"
            )
        return None, "as many; the weights have no names"
    if tuple(theirs) == tuple(class_names):
        return None, "same" if how == "by name" else f"same, {how}"
    places = {name: at for at, name in enumerate(class_names)}
    foreign = [name for name in theirs if name not in places]
    if foreign or not theirs:
        raise DataError(
            f"{manifest.where}: {len(foreign)} of its {len(theirs)} classes are not among the model's, the first "
            f"{(foreign or ['none'])[0]!r}; the model's first is {class_names[0]!r}{hint}"
        )
    return torch.tensor([places[name] for name in theirs]), f"{len(theirs)} of {num_classes}, {how}"


def real_labels_of_timm() -> Path:
    """The path of timm's copy of the reassessed labels. Raises `RecipeError` if timm is not installed."""
    found = find_spec("timm")
    if found is None or found.origin is None:
        raise RecipeError("--real timm: timm is not installed; pip install timm, or give the file real.json")
    return Path(found.origin).parent / "data" / "_info" / "imagenet_real_labels.json"


def most_probable(logits: Tensor) -> Tensor:
    """The class with the largest logit in each row, int64 (B,); the first of equal ones."""
    return (logits == logits.amax(dim=1, keepdim=True)).int().argmax(dim=1)


def _sums(*columns: Tensor) -> Tensor:
    return torch.stack([column.double().sum() for column in columns])


def _ratio(sums: Tensor) -> float:
    return float(sums[0] / sums[1])
