"""The operations that the loader applies to decoded pixels: turns each sample's key into a program of instructions."""

from collections.abc import Sequence
from itertools import permutations

import numpy as np

from vitscale import recipe
from vitscale.data import randaugment
from vitscale.data.draws import between, operation_keys, stratum, uniform
from vitscale.ground.images import INSTRUCTION, Code

_DONE, _CHOICE, _ORDER, _RADIUS, *_FACTORS = range(7)  # purposes of draws
_JITTERS = np.array([Code.BRIGHTNESS, Code.CONTRAST, Code.COLOR], np.int32)
_ORDERS = np.array(list(permutations(range(3))))
_THREE = np.array([Code.COLOR, Code.SOLARIZE, Code.BLUR], np.int32)
_THREE_RADIUS, _THREE_THRESHOLD = (0.1, 2.0), 128


class PixelPrograms:
    """Plans what the loader does to pixels, as `data.operations` says.

    A program depends on the sample's own key only, so pixels are the same for any number of ranks and after resuming.
    Operations that are not the loader's are left to the device. Images have `side` x `side` pixels.
    """

    def __init__(self, operations: Sequence[recipe.ImageOperation], side: int) -> None:
        self._operations = [(i, each) for i, each in enumerate(operations) if isinstance(each, recipe.LoaderOperation)]
        self._side = side

    def __call__(self, keys: np.ndarray) -> np.ndarray:
        """The programs of samples with these keys, uint64 (B,): INSTRUCTION (B, L)."""
        planned = [plan(block, operation_keys(keys, index), self._side) for index, block in self._operations]
        return np.concatenate([np.zeros((len(keys), 0), INSTRUCTION), *planned], axis=1)


def plan(block: recipe.LoaderOperation, keys: np.ndarray, side: int) -> np.ndarray:
    """An operation's instructions for images of `side` pixels with these keys, uint64 (B,): INSTRUCTION (B, n)."""
    match block:
        case recipe.RandAugment():
            return randaugment.plan(block, keys, side)
        case recipe.Gray():
            return _one(block.probability, keys, Code.COLOR, 0.0)
        case recipe.Solarize():
            return _one(block.probability, keys, Code.SOLARIZE, block.threshold)
        case recipe.GaussianBlur():
            return _one(block.probability, keys, Code.BLUR, between(block.radius, uniform(keys, _RADIUS)))
        case recipe.ColorJitter():
            return _jitter(keys, (block.brightness, block.contrast, block.saturation), block.probability)
        case recipe.ThreeAugment():
            return np.concatenate([_one_of_three(keys), _jitter(keys, (block.jitter,) * 3, 1.0)], axis=1)
    raise NotImplementedError(type(block).__name__)


def _one_of_three(keys: np.ndarray) -> np.ndarray:
    """Gray, solarization or blur, equally likely (3-Augment)."""
    programs = np.zeros((len(keys), 1), INSTRUCTION)
    choice, radius = stratum(keys, len(_THREE), _CHOICE), between(_THREE_RADIUS, uniform(keys, _RADIUS))
    programs["code"][:, 0] = _THREE[choice]
    programs["values"][:, 0, 0] = np.choose(choice, [0.0, float(_THREE_THRESHOLD), radius])
    return programs


def _one(probability: float, keys: np.ndarray, code: Code, value: np.ndarray | float) -> np.ndarray:
    programs = np.zeros((len(keys), 1), INSTRUCTION)
    programs["code"][:, 0] = np.where(uniform(keys, _DONE) < probability, code, Code.NOTHING)
    programs["values"][:, 0, 0] = value
    return programs


def _jitter(keys: np.ndarray, strengths: tuple[float, float, float], probability: float) -> np.ndarray:
    """Brightness, contrast and saturation in one of their six orders; a strength of 0 leaves that one out."""
    programs = np.zeros((len(keys), 3), INSTRUCTION)
    ranges = [(max(0.0, 1 - strength), 1 + strength) for strength in strengths]
    factors = np.stack(
        [between(range_, uniform(keys, purpose)) for range_, purpose in zip(ranges, _FACTORS, strict=True)], axis=1
    )
    order = _ORDERS[stratum(keys, len(_ORDERS), _ORDER)]
    codes = np.where(np.array(strengths) > 0, _JITTERS, Code.NOTHING)
    programs["code"] = np.where((uniform(keys, _DONE) < probability)[:, None], codes[order], Code.NOTHING)
    programs["values"][..., 0] = np.take_along_axis(factors, order, axis=1)
    return programs
