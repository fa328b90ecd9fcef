"""The operations that the loader applies to decoded pixels: turns each sample's key into a program of instructions."""

from collections.abc import Sequence
from itertools import permutations

import numpy as np

from vitscale import recipe
from vitscale.data import randaugment
from vitscale.data.draws import between, operation_keys, stratum, uniform
from vitscale.ground.images import INSTRUCTION, Code

_DONE, _CHOICE, _ORDER, _RADIUS, *_FACTORS = range(8)  # purposes of draws
_JITTERS = np.array([Code.BRIGHTNESS, Code.CONTRAST, Code.COLOR, Code.HUE], np.int32)
_WEIGHT_UNIT = 2**12
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
            deviations = between(block.radius, uniform(keys, _RADIUS))
            if block.kernel is None:
                return _one(block.probability, keys, Code.BLUR, deviations)
            programs = _one(block.probability, keys, Code.KERNEL, min(block.kernel // 2, side - 1))
            weights = kernel_weights(deviations, min(block.kernel // 2, side - 1))
            programs["values"][:, 0, 1 : 1 + weights.shape[1]] = weights
            return programs
        case recipe.ColorJitter():
            strengths = (block.brightness, block.contrast, block.saturation)
            return _jitter(keys, strengths, block.probability, block.hue)
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


def kernel_weights(deviations: np.ndarray, reach: int) -> np.ndarray:
    """Weights of Gaussians of these standard deviations (B,) in pixels, float64 (B, reach + 1), from the middle on.

    They are whole multiples of 2^-12, in that unit, and a kernel of 2 reach + 1 sums to one.
    """
    # exp(-1 / (2 s^2)) by its series and repeated squares: every processor multiplies and adds alike.
    small = 1 / (2 * np.maximum(deviations, 0.05) ** 2) / 2**12  # less blurs nothing
    term, total = np.ones_like(small), np.ones_like(small)
    for number in range(1, 12):
        term = term * small / number
        total = total + term
    for _ in range(12):
        total = total * total
    exact = np.stack([_power(1 / total, k * k) for k in range(reach + 1)], axis=1)
    exact *= _WEIGHT_UNIT / (2 * exact.sum(axis=1, keepdims=True) - exact[:, :1])
    weights = np.rint(exact)
    weights[:, 0] = _WEIGHT_UNIT - 2 * weights[:, 1:].sum(axis=1)
    return weights


def _power(base: np.ndarray, exponent: int) -> np.ndarray:
    power = np.ones_like(base)
    for _ in range(exponent):
        power = power * base
    return power


def _jitter(
    keys: np.ndarray, strengths: tuple[float, float, float], probability: float, hue: float = 0.0
) -> np.ndarray:
    """Brightness, contrast, saturation, and with `hue` hue, in a random order; a strength of 0 leaves that one out."""
    count = 4 if hue else 3
    programs = np.zeros((len(keys), count), INSTRUCTION)
    ranges = [(max(0.0, 1 - strength), 1 + strength) for strength in strengths] + [(-hue, hue)] * (count - 3)
    factors = np.stack(
        [between(range_, uniform(keys, purpose)) for range_, purpose in zip(ranges, _FACTORS, strict=False)], axis=1
    )
    if hue:
        factors[:, 3] = np.trunc(factors[:, 3] * 255) % 256  # as torchvision turns a share into 256ths
    orders = np.array(list(permutations(range(count))))
    order = orders[stratum(keys, len(orders), _ORDER)]
    codes = np.where(np.array([*strengths, hue][:count]) > 0, _JITTERS[:count], Code.NOTHING)
    programs["code"] = np.where((uniform(keys, _DONE) < probability)[:, None], codes[order], Code.NOTHING)
    programs["values"][..., 0] = np.take_along_axis(factors, order, axis=1)
    return programs
