"""RandAugment: the sets of operations of timm and of big_vision, and what a magnitude means to each operation.

Facts from timm 1.0 (`data/auto_augment.py`) and big_vision (`pp/archive/autoaugment.py`). The operations themselves
are Pillow's in both sets, except for two of big_vision's. Its Contrast blends with a gray that depends only on the
image's size, the number of pixels / 256, in place of the mean: AugReg's weights were trained so, and big_vision
computed the mean only later. Its Posterize keeps at least one bit, because TensorFlow shifts uint8 by at most 7.
Differences that remain: in TensorFlow gray and smoothed values are rounded differently, and shears keep the middle of
the first pixel in place. What it does with a threshold above 255 or with more than 8 bits was not tried; here such an
operation changes nothing, as in Pillow.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from vitscale.data.draws import normal, stratum, uniform
from vitscale.ground.images import INSTRUCTION, Code, Interpolation
from vitscale.recipe import RandAugment

_CHOICE, _DONE, _MAGNITUDE, _SIGN, _INTERPOLATION, _ROW, _COLUMN = range(7)  # purposes of draws
_SOFT = np.array([Interpolation.BILINEAR, Interpolation.BICUBIC], np.int32)
_DEGREE = 0.017453292519943295


class Drawn(NamedTuple):
    """The random draws for k images of `side` pixels that one operation is applied to."""

    part: np.ndarray  # magnitude / 10, float64 (k,)
    sign: np.ndarray  # -1 or 1, float64 (k,)
    keys: np.ndarray  # for further draws, uint64 (k,)
    side: int


_Values = tuple[np.ndarray | float, ...]


class _Operation(NamedTuple):
    code: Code
    values: Callable[[Drawn], _Values] = lambda drawn: ()


class _Set(NamedTuple):
    operations: Mapping[str, _Operation]
    highest: float = 10  # possible magnitude
    probability: float = 0.5
    interpolation: str = "random"


def plan(block: RandAugment, keys: np.ndarray, side: int) -> np.ndarray:
    """Instructions for images of `side` pixels, INSTRUCTION (B, n), by their keys for this operation, uint64 (B,)."""
    named = SETS[block.set]
    operations = list(named.operations.values())
    probability = named.probability if block.probability is None else block.probability
    interpolation = block.interpolation or named.interpolation
    programs = np.zeros((len(keys), block.n), INSTRUCTION)
    for layer in range(block.n):
        chosen = stratum(keys, len(operations), layer, _CHOICE)
        is_done = uniform(keys, layer, _DONE) < probability
        magnitudes = np.full(len(keys), block.m)
        if block.std:
            magnitudes = np.clip(magnitudes + block.std * normal(keys, layer, _MAGNITUDE), 0, named.highest)
        signs = 1.0 - 2 * stratum(keys, 2, layer, _SIGN)
        column = programs[:, layer]
        for index, operation in enumerate(operations):
            rows = np.flatnonzero(is_done & (chosen == index))
            drawn = Drawn(magnitudes[rows] / 10, signs[rows], keys[rows] + np.uint64(layer), side)
            column["code"][rows] = operation.code
            for number, values in enumerate(operation.values(drawn)):
                column["values"][rows, number] = values
        column["fill"] = block.fill
        if interpolation == "random":
            column["interpolation"] = _SOFT[stratum(keys, 2, layer, _INTERPOLATION)]
        else:
            column["interpolation"] = Interpolation[interpolation.upper()]
    return programs


def _translation_x(pixels: np.ndarray) -> _Values:
    return (1.0, 0.0, pixels, 0.0, 1.0, 0.0)


def _translation_y(pixels: np.ndarray) -> _Values:
    return (1.0, 0.0, 0.0, 0.0, 1.0, pixels)


def _factor(drawn: Drawn) -> _Values:
    return (drawn.part * 1.8 + 0.1,)


def _factor_around_one(drawn: Drawn) -> _Values:
    return (np.maximum(0.1, 1 + drawn.sign * (drawn.part * 0.9)),)


def _cutout(drawn: Drawn) -> _Values:
    reach = np.floor(drawn.part * 40)
    row, column = (np.floor(uniform(drawn.keys, purpose) * drawn.side) for purpose in (_ROW, _COLUMN))
    low, high = 0, drawn.side
    return (
        *(np.maximum(low, row - reach), np.maximum(low, column - reach)),
        *(np.minimum(high, row + reach), np.minimum(high, column + reach)),
    )


_BOTH = {
    "AutoContrast": _Operation(Code.AUTOCONTRAST),
    "Equalize": _Operation(Code.EQUALIZE),
    "Invert": _Operation(Code.INVERT),
    "Rotate": _Operation(Code.AFFINE, lambda d: rotation(d.sign * (d.part * 30), d.side)),
}
_FACTORS = {"Color": Code.COLOR, "Contrast": Code.CONTRAST, "Brightness": Code.BRIGHTNESS, "Sharpness": Code.SHARPNESS}
_SHEARS = {
    "ShearX": _Operation(Code.AFFINE, lambda d: (1.0, d.sign * (d.part * 0.3), 0.0, 0.0, 1.0, 0.0)),
    "ShearY": _Operation(Code.AFFINE, lambda d: (1.0, 0.0, 0.0, d.sign * (d.part * 0.3), 1.0, 0.0)),
}
_TIMM_MOVES = {
    **_SHEARS,
    "TranslateXRel": _Operation(Code.AFFINE, lambda d: _translation_x(d.sign * (d.part * 0.45) * d.side)),
    "TranslateYRel": _Operation(Code.AFFINE, lambda d: _translation_y(d.sign * (d.part * 0.45) * d.side)),
}
_TIMM_ADD = _Operation(Code.SOLARIZE_ADD, lambda d: (np.minimum(128, np.floor(d.part * 110)),))

SETS = {
    "timm": _Set(
        {
            **_BOTH,
            "Posterize": _Operation(Code.POSTERIZE, lambda d: (np.floor(d.part * 4),)),
            "Solarize": _Operation(Code.SOLARIZE, lambda d: (np.minimum(256, np.floor(d.part * 256)),)),
            "SolarizeAdd": _TIMM_ADD,
            **{name: _Operation(code, _factor) for name, code in _FACTORS.items()},
            **_TIMM_MOVES,
        }
    ),
    "timm_increasing": _Set(
        {
            **_BOTH,
            "PosterizeIncreasing": _Operation(Code.POSTERIZE, lambda d: (4 - np.floor(d.part * 4),)),
            "SolarizeIncreasing": _Operation(Code.SOLARIZE, lambda d: (256 - np.minimum(256, np.floor(d.part * 256)),)),
            "SolarizeAdd": _TIMM_ADD,
            **{f"{name}Increasing": _Operation(code, _factor_around_one) for name, code in _FACTORS.items()},
            **_TIMM_MOVES,
        }
    ),
    "big_vision": _Set(
        {
            **_BOTH,
            "Posterize": _Operation(Code.POSTERIZE, lambda d: (np.maximum(1, np.floor(d.part * 4)),)),
            "Solarize": _Operation(Code.SOLARIZE, lambda d: (np.floor(d.part * 256),)),
            **{name: _Operation(code, _factor) for name, code in _FACTORS.items()},
            "Contrast": _Operation(Code.BRIGHTNESS, lambda d: (*_factor(d), min(255, d.side**2 // 256))),
            **_SHEARS,
            "TranslateX": _Operation(Code.AFFINE, lambda d: _translation_x(d.sign * (d.part * 100))),
            "TranslateY": _Operation(Code.AFFINE, lambda d: _translation_y(d.sign * (d.part * 100))),
            "Cutout": _Operation(Code.CUTOUT, _cutout),
            "SolarizeAdd": _Operation(Code.SOLARIZE_ADD, lambda d: (np.floor(d.part * 110),)),
        },
        highest=30,
        probability=1.0,
        interpolation="nearest",
    ),
}
"""A set's name in a recipe -> the set, its operations by their authors' names for them, all equally likely."""


def rotation(degrees: np.ndarray, side: int) -> _Values:
    """The affine matrix that rotates images of `side` pixels counterclockwise about their middle, as Pillow's `rotate`.

    Sines come from a Taylor series, good up to 90 degrees: those of NumPy and C differ from machine to machine.
    """
    angle = -degrees * _DEGREE
    square, sine, cosine = angle * angle, np.ones_like(angle), np.ones_like(angle)
    for order in range(11, 0, -1):
        sine = 1 - square / (2 * order * (2 * order + 1)) * sine
        cosine = 1 - square / (2 * order * (2 * order - 1)) * cosine
    sine, middle = angle * sine, side / 2
    return (
        *(cosine, sine, middle - cosine * middle - sine * middle),
        *(-sine, cosine, middle + sine * middle - cosine * middle),
    )
