"""A linear segmentation probe: logistic regression on the patches' tokens of a frozen model, measured by mean IoU.

As in DINO's and DINOv2's linear segmentation (Oquab et al. 2023, section 7.4), but with a classifier that has one
solution: no learning rates, no seeds. Images are seen whole, as squares.

Shape legend: B images of a batch, h w rows and columns of tokens, D width of a token, K classes, S side of what is
compared, in pixels of the model's input, n tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitscale.data.shards import Manifest
from vitscale.evaluation.build import samples_expected
from vitscale.evaluation.classification import check_count
from vitscale.evaluation.features import gathered
from vitscale.evaluation.fewshot import hash_of
from vitscale.evaluation.finished import FinishedModel
from vitscale.evaluation.masks import MOST_CLASSES, Masks
from vitscale.evaluation.probes import DEVELOPMENT, Solution, solve, statistics
from vitscale.ground.errors import DataError, RecipeError
from vitscale.recipe import EvalCrop

WHOLE = EvalCrop(kind="square", fraction=1.0)
IGNORED = 255  # the number that masks have where there is no class, as those of PASCAL VOC and Cityscapes
STRENGTHS = tuple(10.0**exponent for exponent in range(-5, 2))  # C, among which the probe chooses
MOST_TOKENS = 1 << 16  # tokens that are fitted; of more, equally many of each image are drawn by a hash, at least one
_EVERY = round(1 / DEVELOPMENT)  # every so many images choose C


def label_of_patches(mask: np.ndarray, stride: int, ignored: int) -> np.ndarray:
    """The commonest class among the pixels of each patch, the lowest of equally common ones: (S, S) -> (h, w).

    -1 where more than half of the pixels have none.
    """
    h, w = (side // stride for side in mask.shape)
    pixels = mask.reshape(h, stride, w, stride)
    best, label = np.zeros((h, w), np.int64), np.full((h, w), -1, np.int64)
    for value in np.unique(mask[mask != ignored]):
        count = (pixels == value).sum(axis=(1, 3))
        label[count > best] = value
        best = np.maximum(best, count)
    label[2 * (pixels == ignored).sum(axis=(1, 3)) > stride**2] = -1
    return label


class Confusion:
    """Pixels by class and predicted class, (K, K), over all images."""

    def __init__(self, num_classes: int) -> None:
        self.table = np.zeros((num_classes, num_classes), np.int64)

    def add(self, mask: np.ndarray, predicted: np.ndarray, ignored: int) -> None:
        """Count the pixels of an image that have a class."""
        K, known = len(self.table), mask != ignored
        self.table += np.bincount(mask[known] * K + predicted[known], minlength=K * K).reshape(K, K)

    def measures(self) -> dict[str, Any]:
        """Mean IoU over the classes that are there or predicted, IoU by class (None for others), pixel accuracy."""
        right = np.diag(self.table)
        union = self.table.sum(axis=0) + self.table.sum(axis=1) - right
        if not union.any():
            raise DataError("no pixel of the test masks has a class")
        by_class = [float(a / b) if b else None for a, b in zip(right, union, strict=True)]
        return {
            "mean": float(np.mean([iou for iou in by_class if iou is not None])),
            "pixel_accuracy": float(right.sum() / self.table.sum()),
            "by_class": by_class,
        }


def predicted_classes(tokens: Tensor, solution: Solution, size: int) -> Tensor:
    """The class of each pixel (B, S, S) from whitened tokens (B, h, w, D): logits are interpolated, bilinear."""
    logits = F.linear(tokens, solution.weight, solution.bias).permute(0, 3, 1, 2)
    return F.interpolate(logits, size=(size, size), mode="bilinear", align_corners=False).argmax(dim=1)


def fit(x: Tensor, y: Tensor, development: Tensor, num_classes: int) -> tuple[Solution, float]:
    """Choose C by the accuracy on the development tokens, then fit all. Between equal ones the smaller C wins.

    Args:
        x, y: whitened tokens (n, D), float64, and classes (n,).
        development: bool (n,).
    """
    scores, start = [], None
    for strength in STRENGTHS:
        start = solve(x[~development], y[~development], num_classes, strength, start)
        scores.append(start.accuracy(x[development], y[development]))
    best = STRENGTHS[scores.index(max(scores))]
    return solve(x, y, num_classes, best), best


@dataclass(frozen=True)
class SegmentationProbe:
    """The linear probe of one model.

    Args:
        model: the model.
        folder: the folder of the masks of all images.
        num_classes: K; by default one more than the largest number in the training masks.
        ignored: the number that is no class.

    Raises `RecipeError` for a model without patches, and under several processes.
    """

    model: FinishedModel
    folder: Path
    num_classes: int | None = None
    ignored: int = IGNORED

    def __post_init__(self) -> None:
        if self.model.backbone.anatomy().grid is None:
            raise RecipeError(f"{self.model.title} does not say where its patches are, which masks are compared with")
        if self.model.accelerator.num_processes > 1:
            raise RecipeError("a probe by masks is one process: start it without torchrun").on_all_ranks()

    def measure(self, train: Manifest, test: Manifest) -> dict[str, Any]:
        """Fit on the training images and measure on the test images, for JSON. Raises `DataError`."""
        of_test = Masks.of(self.folder, test)  # before anything is computed
        x, y, uids, highest = self._tokens_of(train)
        num_classes = self.num_classes or highest + 1
        mean, std = statistics(x)
        order = np.unique(uids)[np.argsort(hash_of(0, np.unique(uids)))]
        if not len(order[_EVERY - 1 :: _EVERY]):
            raise DataError(f"{train.where}: {len(order)} images; a tenth chooses the settings, so {_EVERY} are needed")
        development = torch.from_numpy(np.isin(uids, order[_EVERY - 1 :: _EVERY]))
        solution, strength = fit((x - mean) / std, y, development, num_classes)
        confusion = Confusion(num_classes)
        for tokens, mask, _ in self._seen(test, of_test, num_classes):
            predicted = predicted_classes(((tokens.double() - mean) / std)[None], solution, len(mask))[0].numpy()
            confusion.add(mask, predicted, self.ignored)
        return {"miou": {**confusion.measures(), "std": 0.0, "draws": 1, "C": float(strength), "tokens": len(y)}}

    def _seen(self, dataset: Manifest, masks: Masks, num_classes: int) -> Iterator[tuple[Tensor, np.ndarray, int]]:
        """The tokens (h, w, D) of each image, the mask of what they cover, (S, S), and the image's uid."""
        anatomy, size, count = self.model.backbone.anatomy(), self.model.image_size, 0
        side = (anatomy.grid or 0) * anatomy.stride  # the patches may end before the image does, or behind it
        for rows in gathered(self.model.loader(dataset, WHOLE), self.model.predict_patches):
            assert rows is not None, "there is one process"
            count += len(rows[2])
            for tokens, uid in zip(rows[0], rows[2].tolist(), strict=True):
                mask = np.full((side, side), self.ignored, np.int64)
                mask[:size, :size] = masks.read(uid, size, size)[:side, :side]
                if (beyond := mask[(mask >= num_classes) & (mask != self.ignored)]).size:
                    raise DataError(
                        f"{masks.files[uid][0]}: class {beyond.max()}; expected 0 to {num_classes - 1}, or "
                        f"{self.ignored} for none (--mask-classes, --ignore)"
                    )
                yield tokens, mask, uid
        check_count(str(dataset.where), count, samples_expected(self.model.recipe, dataset))

    def _tokens_of(self, train: Manifest) -> tuple[Tensor, Tensor, np.ndarray, int]:
        """Tokens, float64 (n, D), their classes and images' uids, (n,), and the largest class."""
        masks = Masks.of(self.folder, train)
        share, highest = max(1, MOST_TOKENS // max(1, train.num_samples)), 0
        found: list[tuple[Tensor, np.ndarray, np.ndarray]] = []
        for tokens, mask, uid in self._seen(train, masks, self.num_classes or MOST_CLASSES):
            highest = max(highest, int(mask[mask != self.ignored].max(initial=0)))
            labels = label_of_patches(mask, self.model.backbone.anatomy().stride, self.ignored).ravel()
            places = np.flatnonzero(labels >= 0)
            places = places[np.argsort(hash_of(uid, places))[:share]]
            found.append((tokens.flatten(0, 1)[places].clone(), labels[places], np.full(len(places), uid)))
        classes = np.concatenate([of_image for _, of_image, _ in found])
        if not len(classes):
            raise DataError(f"{self.folder}: no patch of the training images has a class")
        x = torch.cat([of_image for of_image, _, _ in found]).double()
        return x, torch.from_numpy(classes), np.concatenate([of_image for _, _, of_image in found]), highest
