"""Mixup and CutMix: which images are mixed, in what proportion, and the mixing itself.

Partners are slots 2k and 2k + 1 of the global batch. What is drawn is a function of the samples' keys, or for a whole
batch of (seed, batch), so that it is the same on every world and after resuming.

Shape legend: B batch, S side in pixels.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitscale.data.draws import Purpose, combine, mix, uniform
from vitscale.recipe import Mixing


class Partners(NamedTuple):
    """What each sample is mixed with.

    Attributes:
        labels: int64 (B,), the partners' labels.
        own: fp32 (B,), the sample's own label's share of the target.
    """

    labels: Tensor
    own: Tensor


class Mixer:
    """Mixup and CutMix of pairs, as timm's `Mixup` draws and computes them.

    Args:
        settings: the recipe's settings of mixing.
        seed: the recipe's seed.
        image_size: S.
    """

    def __init__(self, settings: Mixing, seed: int, image_size: int) -> None:
        self._settings, self._seed, self._image_size = settings, seed, image_size
        self._sides = settings.sides(image_size)

    def plan(self, keys: np.ndarray, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """What each sample becomes: its partner's pixels in a box, and a weighted sum of both outside it.

        Returns:
            own: fp32 (B,), the sample's own label's share of the target.
            blend: fp32 (B,), the weight of its own pixels outside of the box.
            boxes: int64 (B, 4), top, bottom, left, right, the ends excluded; empty without a box.
        """
        settings, keys = self._settings, keys.view(np.uint64)
        if settings.per == "batch":
            drawn = np.array([combine(self._seed, Purpose.MIXED_BATCH, step)])
        elif settings.per == "pair":
            drawn = mix(mix(keys[0::2]) ^ keys[1::2])
        else:
            drawn = keys
        own, blend, boxes = (np.repeat(each, len(keys) // len(drawn), axis=0) for each in self._draw(drawn))
        own, blend = own.astype(np.float32), blend.astype(np.float32)
        return torch.from_numpy(own), torch.from_numpy(blend), torch.from_numpy(boxes)

    def _draw(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`plan` for as many draws as there are keys; float64 in place of fp32."""
        settings, side = self._settings, self._image_size
        share = {(True, False): 0.0, (False, True): 1.0}.get((settings.mixup > 0, settings.cutmix > 0))
        is_mixed = uniform(keys, Purpose.MIXED) < settings.probability
        is_cut = uniform(keys, Purpose.CUT) < (settings.cutmix_share if share is None else share)
        alphas = np.where(is_cut, settings.cutmix or 1.0, settings.mixup or 1.0)
        drawn = symmetric_beta(alphas, uniform(keys, Purpose.RADIUS), uniform(keys, Purpose.ANGLE))
        weights = np.where(is_mixed, drawn, 1.0)
        ends = self._ends_around(keys, weights) if self._sides is None else self._ends_within(keys, *self._sides)
        boxes = np.where((is_cut & is_mixed)[:, None], np.stack(ends, axis=1), 0)
        areas = (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2])
        return np.where(is_cut, 1 - areas / side**2, weights), np.where(is_cut, 1.0, weights), boxes

    def _ends_around(self, keys: np.ndarray, weights: np.ndarray) -> list[np.ndarray]:
        """Boxes with the partner's share of the area, centred on any pixel; beyond the border they are cut off."""
        side = self._image_size
        cut = (side * np.sqrt(1 - weights)).astype(np.int64)
        centres = ((uniform(keys, purpose) * side).astype(np.int64) for purpose in (Purpose.ROW, Purpose.COLUMN))
        return [np.clip(at + half, 0, side) for at in centres for half in (-(cut // 2), (cut + 1) // 2)]

    def _ends_within(self, keys: np.ndarray, low: int, high: int) -> list[np.ndarray]:
        """Boxes of any sides from `low` and below `high`, anywhere within the image."""
        ends = []
        # No weight uses these purposes here.
        for of_length, of_place in ((Purpose.RADIUS, Purpose.ROW), (Purpose.ANGLE, Purpose.COLUMN)):
            lengths = low + (uniform(keys, of_length) * (high - low)).astype(np.int64)
            first = (uniform(keys, of_place) * (self._image_size - lengths + 1)).astype(np.int64)
            ends += [first, first + lengths]
        return ends

    def mix_images(self, images: Tensor, blend: Tensor, boxes: Tensor) -> Tensor:
        """Mix images (B, S, S, 3) of any floating dtype, in fp32; `blend` and `boxes` are those of `plan`."""
        along = torch.arange(images.shape[1], device=images.device)
        inside = [(along >= boxes[:, at, None]) & (along < boxes[:, at + 1, None]) for at in (0, 2)]  # each (B, S)
        in_box = (inside[0][:, :, None] & inside[1][:, None, :])[..., None]
        weights = torch.where(in_box, 0.0, blend[:, None, None, None])
        own = images.float()
        return torch.lerp(partners_of(own), own, weights).to(images.dtype)


def symmetric_beta(alphas: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Beta(alpha, alpha) from two independent uniforms in [0, 1), all float64 of one shape.

    Exact and without rejection: (1 + T / sqrt(2 alpha + T^2)) / 2 for a Student's T with 2 alpha degrees of freedom,
    which Bailey's polar method (1994) makes from two uniforms.
    """
    power, cosine = first ** (1 / alphas), np.cos(2 * np.pi * second)
    centred = cosine * np.sqrt((1 - power) / (power + (1 - power) * cosine**2))
    return np.clip((1 + centred) / 2, 0, 1)  # rounding may lead outside by a last bit


def partners_of(values: Tensor) -> Tensor:
    """Rows (B, ...) in which 2k and 2k + 1 have changed places."""
    return values.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
