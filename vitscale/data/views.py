"""The views of each sample that a loader makes, cut from one decoding of its picture.

Views are counted over all kinds in the recipe's order. View v of a sample has a key of its own, so that what it looks
like depends on (seed, epoch, uid, v) and on nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitscale.data.augmentation import Transform, sample_keys, train_transform
from vitscale.data.pixel_programs import PixelPrograms
from vitscale.recipe import Data


@dataclass(frozen=True)
class ViewKind:
    """`count` views of `side` x `side` pixels that are drawn alike."""

    count: int
    side: int
    transform: Transform
    programs: PixelPrograms


@dataclass
class DrawnViews:
    """How the views of b samples look, for one kind of n views; each row is written again if its sample is replaced."""

    keys: np.ndarray  # uint64 (b, n)
    boxes: np.ndarray  # int32 (b, n, 4)
    flips: np.ndarray  # bool (b, n)
    programs: np.ndarray  # INSTRUCTION (b, n, L)


def view_kinds(data: Data) -> tuple[ViewKind, ...]:
    """A recipe's kinds of views in training: those of `data.views`, or the single view of the other keys."""
    return tuple(
        ViewKind(view.count, side, train_transform(view.crop, view.flip), PixelPrograms(view.operations, side))
        for view, side in data.training_views()
    )


def draw_views(
    kinds: Sequence[ViewKind],
    seed: int,
    epoch: int,
    uids: np.ndarray,
    repeats: np.ndarray,
    heights: np.ndarray,
    widths: np.ndarray,
) -> list[DrawnViews]:
    """Draw all views of samples, by kind.

    Args:
        kinds: the kinds of views.
        seed, epoch: of the augmentation, and of the order.
        uids: the samples, int64 (b,).
        repeats: how often each is in its batch before, int64 (b,).
        heights, widths: sizes of the stored pictures in pixels, int64 (b,).
    """
    total, drawn = sum(kind.count for kind in kinds), []
    for kind, numbers in zip(kinds, numbers_of(kinds), strict=True):
        views = (repeats[:, None] * total + numbers).reshape(-1)
        keys = sample_keys(seed, epoch, np.repeat(uids, kind.count), views)
        boxes = kind.transform.boxes(keys, np.repeat(heights, kind.count), np.repeat(widths, kind.count))
        columns = (keys, boxes, kind.transform.flips(keys), kind.programs(keys))
        drawn.append(DrawnViews(*(each.reshape(len(uids), kind.count, *each.shape[1:]) for each in columns)))
    return drawn


def numbers_of(kinds: Sequence[ViewKind]) -> list[np.ndarray]:
    """The numbers of each kind's views among all of a sample, int64 (n,)."""
    ends = np.cumsum([kind.count for kind in kinds])
    return [np.arange(end - kind.count, end) for kind, end in zip(kinds, ends, strict=True)]
