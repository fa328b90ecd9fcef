"""The recipe's operations on pixels: how often each is drawn, with which magnitude, against timm's own code."""

import random
from collections import Counter
from statistics import NormalDist

import numpy as np
import pytest
import torch
from pictures import make_picture
from PIL import Image
from scipy import stats
from timm.data import auto_augment
from timm.data.random_erasing import RandomErasing as TimmsErasing

from vitscale import recipe
from vitscale.data.draws import combine, hashes, mix, normal_quantiles, operation_keys, strata, stratum, uniform
from vitscale.data.pixel_programs import PixelPrograms
from vitscale.data.randaugment import SETS, Drawn
from vitscale.data.random_erasing import RandomErasing
from vitscale.ground.images import INSTRUCTION, OK, Code, Interpolation, operate

SIDE = 48
COUNT = 60_000
KEYS = hashes(COUNT, 1)


def programs(*blocks, keys: np.ndarray = KEYS, side: int = SIDE) -> np.ndarray:
    return PixelPrograms(blocks, side)(keys)


def randaugment(**keys) -> recipe.RandAugment:
    return recipe.RandAugment(kind="randaugment", **keys)


def assert_about(count: int, probability: float, of: int = COUNT) -> None:
    """Within five standard deviations."""
    assert abs(count - of * probability) < 5 * (of * probability * (1 - probability)) ** 0.5 + 1


def test_strata_are_equally_wide():
    """Of evenly spaced hashes each part gets the same number, but for one where it does not divide."""
    evenly = np.arange(2**16, dtype=np.uint64) << np.uint64(48)
    for count in (1, 2, 3, 14, 15, 16, 720):
        found = np.bincount(strata(evenly, count), minlength=count)
        assert len(found) == count and found.max() - found.min() <= 1
        assert (np.diff(strata(evenly, count)) >= 0).all()
    assert strata(np.array([2**64 - 1], np.uint64), 15).tolist() == [14]


def test_draws_do_not_follow_from_each_other():
    one, other = uniform(KEYS, 0, 1), uniform(KEYS, 1, 0)
    assert abs(np.corrcoef(one, other)[0, 1]) < 5 / COUNT**0.5
    assert abs(np.corrcoef(stratum(KEYS, 15, 0, 0), stratum(KEYS, 15, 1, 0))[0, 1]) < 5 / COUNT**0.5
    assert not np.array_equal(operation_keys(KEYS, 0), operation_keys(KEYS, 1))


def test_no_normal_number_hangs_on_the_rounding_of_a_logarithm():
    """Before they are rounded, none is nearly in the middle between two units: libraries differ by 1e-15 or so."""
    exact = np.array([NormalDist().inv_cdf((index + 0.5) / 2**16) for index in range(2**16)])
    assert np.abs(np.abs(exact) * 2**12 % 1 - 0.5).min() > 1e-6
    assert np.abs(normal_quantiles() - exact).max() <= 2.0**-13 + 1e-12


def test_the_sets_are_timms_and_big_visions():
    assert list(SETS["timm"].operations) == auto_augment._RAND_TRANSFORMS
    assert list(SETS["timm_increasing"].operations) == auto_augment._RAND_INCREASING_TRANSFORMS
    of_big_vision = (
        "AutoContrast Brightness Color Contrast Cutout Equalize Invert Posterize Rotate Sharpness ShearX ShearY "
        "Solarize SolarizeAdd TranslateX TranslateY"
    )
    assert " ".join(sorted(SETS["big_vision"].operations)) == of_big_vision


def performed(named: str, name: str, cases: np.ndarray, image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A set's operation: its instructions for a level and a sign in each case, and what they make of the image."""
    operation = SETS[named].operations[name]
    made = np.zeros((len(cases), 1), INSTRUCTION)
    made["code"], made["interpolation"], made["fill"] = operation.code, Interpolation.BICUBIC, 128
    levels, signs = cases.T
    for number, values in enumerate(operation.values(Drawn(levels / 10, signs, KEYS[: len(cases)], len(image)))):
        made["values"][:, 0, number] = values
    found = np.repeat(image[None], len(cases), axis=0)
    operate(found, made, np.full(len(cases), OK, np.int32))
    return made[:, 0], found


def timms(name: str, level: float, sign: float, side: int, image: Image.Image) -> Image.Image:
    """What timm's own code makes of an image, its random sign given."""
    negate, auto_augment._randomly_negate = auto_augment._randomly_negate, lambda value: value * sign
    try:
        options = {"img_mean": (128, 128, 128), "interpolation": Image.Resampling.BICUBIC, "translate_pct": 0.45}
        return auto_augment.AugmentOp(name, prob=1.0, magnitude=level, hparams=options)(image)
    finally:
        auto_augment._randomly_negate = negate


@pytest.mark.parametrize("named", ["timm", "timm_increasing"])
def test_every_operation_of_any_magnitude_is_timms(named):
    image = make_picture(7, SIDE, SIDE)
    cases = [(level, sign) for level in (*range(11), 0.37, 8.61) for sign in (-1.0, 1.0)]
    for name, operation in SETS[named].operations.items():
        instructions, found = performed(named, name, np.array(cases), np.asarray(image))
        for (level, sign), ours, instruction in zip(cases, found, instructions, strict=True):
            if operation.code == Code.POSTERIZE and instruction["values"][0] == 0:
                assert not ours.any()  # as by the Pillow of the published results; newer ones refuse 0 bits
                continue
            theirs = np.asarray(timms(name, level, sign, SIDE, image))
            allowed = 1 if operation.code == Code.AFFINE else 0
            assert np.abs(ours.astype(int) - theirs.astype(int)).max() <= allowed, (name, level, sign)


def test_big_vision_magnitudes():
    """By its published code: level / 10 times 30 degrees, 0.3, 100 pixels, 1.8 + 0.1, 4 bits, 256, 110, 40 pixels."""

    def values(name: str, level: float, side: int = 224) -> list[float]:
        operation = SETS["big_vision"].operations[name]
        found = operation.values(Drawn(np.array([level / 10]), np.array([1.0]), KEYS[:1], side))
        return [float(np.broadcast_to(value, (1,))[0]) for value in found]

    assert values("Color", 15) == pytest.approx([2.8]) and values("Posterize", 15) == [6]
    assert values("Solarize", 9) == [230] and values("Solarize", 15) == [384] and values("SolarizeAdd", 9) == [99]
    assert values("ShearX", 15) == pytest.approx([1, 0.45, 0, 0, 1, 0])
    assert values("TranslateY", 15) == pytest.approx([1, 0, 0, 0, 1, 150])
    assert values("Rotate", 15)[0] == pytest.approx(np.cos(np.radians(45)))
    top, left, bottom, right = values("Cutout", 10)
    assert 0 <= top < bottom <= 224 and 0 <= left < right <= 224 and bottom - top <= 80 and right - left <= 80


@pytest.mark.parametrize(("side", "gray"), [(SIDE, 9), (160, 100), (224, 196), (256, 255), (384, 255)])
def test_contrast_of_big_vision_blends_with_a_gray_of_the_size(side, gray):
    """As AugReg was trained: the counts of a histogram summed, not weighted by their values, / 256, at most 255."""
    levels, image = (0, 3, 5, 10, 15, 30), np.asarray(make_picture(7, side, side))
    for level, found in zip(levels, of_big_vision("Contrast", levels, image), strict=True):
        factor = np.float32(level / 10 * 1.8 + 0.1)
        blended = gray + factor * (image.astype(np.float32) - gray)
        assert np.array_equal(found, np.clip(blended, 0, 255).astype(np.uint8)), level  # truncated, as TensorFlow casts


def test_posterize_of_big_vision_keeps_the_highest_bit():
    """TensorFlow shifts uint8 by 7 at most, so that 0 bits, those of AugReg's light1, are one."""
    levels, image = (0, 2.4, 2.5, 5, 9, 10, 15, 20), np.asarray(make_picture(7, SIDE, SIDE))
    for level, found in zip(levels, of_big_vision("Posterize", levels, image), strict=True):
        shift = min(8 - int(level / 10 * 4), 7)
        assert np.array_equal(found, image >> shift << shift), level


def of_big_vision(name: str, levels: tuple[float, ...], image: np.ndarray) -> np.ndarray:
    return performed("big_vision", name, np.array([(level, 1.0) for level in levels]), image)[1]


@pytest.mark.parametrize(("named", "size", "probability"), [("timm", 15, 0.5), ("big_vision", 16, 1.0)])
def test_each_operation_is_drawn_equally_often_and_in_each_layer_anew(named, size, probability):
    found = programs(randaugment(set=named, m=9))
    assert found.shape == (COUNT, 2)
    codes = Counter(operation.code for operation in SETS[named].operations.values())
    for layer in range(2):
        for code, ways in codes.items():
            assert_about(int((found["code"][:, layer] == code).sum()), probability * ways / size)
    both = (found["code"] == Code.INVERT).all(axis=1).sum()
    assert_about(int(both), (probability / size) ** 2)


def test_what_is_moved_goes_either_way_and_is_interpolated_either_way():
    found = programs(randaugment(set="timm", n=1, probability=1.0, fill=[1, 2, 3]))[:, 0]
    moved = found[(found["code"] == Code.AFFINE)]
    sheared = moved[moved["values"][:, 1] != 0]
    for share in (sheared["values"][:, 1] > 0, moved["interpolation"] == Interpolation.BICUBIC):
        assert_about(int(share.sum()), 0.5, len(share))
    assert set(moved["interpolation"].tolist()) == {Interpolation.BILINEAR, Interpolation.BICUBIC}
    assert (moved["fill"] == (1, 2, 3)).all()
    named = programs(randaugment(set="timm", interpolation="nearest"))
    assert set(named["interpolation"].ravel().tolist()) == {Interpolation.NEAREST}
    assert set(programs(randaugment(set="big_vision"))["interpolation"].ravel().tolist()) == {Interpolation.NEAREST}


def test_magnitudes_spread_around_theirs_and_stay_in_their_range():
    made = programs(randaugment(set="timm", n=1, probability=1.0, m=9, std=0.5))[:, 0]
    magnitudes = (made["values"][made["code"] == Code.BRIGHTNESS, 0] - 0.1) / 0.18
    assert magnitudes.max() == pytest.approx(10) and abs(np.median(magnitudes) - 9) < 0.05
    assert_about(int((magnitudes > 9.999).sum()), 0.02275, len(magnitudes))  # cut at two standard deviations
    fixed = programs(randaugment(set="timm", n=1, probability=1.0, m=9))[:, 0]
    assert np.unique(fixed["values"][fixed["code"] == Code.BRIGHTNESS, 0]).tolist() == pytest.approx([1.72])


def test_shares_are_those_of_the_recipe():
    for block, code in (
        (recipe.Gray(kind="gray", probability=0.2), Code.COLOR),
        (recipe.Solarize(kind="solarize", probability=0.3), Code.SOLARIZE),
        (recipe.GaussianBlur(kind="gaussian_blur", probability=0.7), Code.BLUR),
        (recipe.ColorJitter(kind="color_jitter", probability=0.8), Code.CONTRAST),
    ):
        found = programs(block)["code"]
        assert_about(int((found == code).any(axis=1).sum()), block.probability)
        untouched = (found == Code.NOTHING).all(axis=1)
        assert_about(int(untouched.sum()), 1 - block.probability)


def test_jitter_takes_every_order_and_any_factor_of_its_range():
    block = recipe.ColorJitter(kind="color_jitter", brightness=0.4, contrast=1.5, saturation=0.2)
    made = programs(block)
    orders = Counter(map(tuple, made["code"].tolist()))
    assert len(orders) == 6
    for count in orders.values():
        assert_about(count, 1 / 6)
    for code, (low, high) in {Code.BRIGHTNESS: (0.6, 1.4), Code.CONTRAST: (0.0, 2.5), Code.COLOR: (0.8, 1.2)}.items():
        factors = made["values"][..., 0][made["code"] == code]
        assert len(factors) == COUNT and low <= factors.min() < low + 0.001 and high - 0.001 < factors.max() < high
        assert abs(factors.mean() - (low + high) / 2) < 5 * (high - low) / (12 * COUNT) ** 0.5
    without = programs(recipe.ColorJitter(kind="color_jitter", contrast=0, saturation=0))["code"]
    assert set(without.ravel().tolist()) == {Code.NOTHING, Code.BRIGHTNESS}


def test_three_augment_does_one_of_three_and_then_jitter():
    made = programs(recipe.ThreeAugment(kind="three_augment"))
    assert made.shape == (COUNT, 4)
    first = made[:, 0]
    for code, low, high in ((Code.COLOR, 0, 0), (Code.SOLARIZE, 128, 128), (Code.BLUR, 0.1, 2.0)):
        chosen = first["values"][first["code"] == code, 0]
        assert_about(len(chosen), 1 / 3)
        assert low <= chosen.min() and chosen.max() <= high
    factors = made["values"][:, 1:, 0]
    assert 0.7 <= factors.min() < 0.701 and 1.299 < factors.max() < 1.3
    assert {tuple(sorted(codes)) for codes in made["code"][:1000, 1:].tolist()} == {
        tuple(sorted((Code.BRIGHTNESS, Code.CONTRAST, Code.COLOR)))
    }


def test_a_program_is_of_the_samples_own_key_and_of_the_place_in_the_recipe():
    blocks = (randaugment(set="timm", std=0.5), recipe.ThreeAugment(kind="three_augment"))
    whole, keys = programs(*blocks, keys=KEYS[:300]), KEYS[:300]
    assert whole.shape == (300, 6)
    order = np.random.default_rng(0).permutation(300)
    assert np.array_equal(programs(*blocks, keys=keys[order]), whole[order])
    assert np.array_equal(np.concatenate([programs(*blocks, keys=keys[i : i + 7]) for i in range(0, 300, 7)]), whole)
    twice = programs(blocks[0], blocks[0], keys=keys)
    assert not np.array_equal(twice[:, :2], twice[:, 2:])
    assert programs(keys=keys).shape == (300, 0)


def erasing(**keys):
    return RandomErasing(recipe.RandomErasing(kind="random_erasing", **keys))


def test_erased_rectangles_are_distributed_as_timms():
    side, count = 64, 20_000
    rectangles = erasing(probability=0.5).rectangles(KEYS[:count], side)
    is_erased = rectangles[2] > 0
    assert_about(int(is_erased.sum()), 0.5, count)
    assert ((rectangles[:2] >= 0) & (rectangles[:2] + rectangles[2:] <= side)).all()

    drawn = []

    class Noting:
        """In place of an image."""

        def __setitem__(self, place, value):
            drawn.append([each.indices(side) for each in place[1:]])

    random.seed(0)
    theirs = TimmsErasing(probability=1.0, device="cpu")
    for _ in range(10_000):
        theirs._erase(Noting(), 3, side, side, None)
    (tops, bottoms), (lefts, rights) = np.array(drawn)[..., :2].transpose(1, 2, 0)
    for ours, expected in (
        (rectangles[0], tops),
        (rectangles[1], lefts),
        (rectangles[2], bottoms - tops),
        (rectangles[3], rights - lefts),
        (rectangles[2] * rectangles[3], (bottoms - tops) * (rights - lefts)),
    ):
        assert stats.ks_2samp(ours[is_erased], expected).pvalue > 1e-6


def test_erased_are_noise_or_the_mean_and_the_rest_is_intact():
    pixels = torch.rand(64, 32, 32, 3, generator=torch.Generator().manual_seed(0)) + 5
    before = pixels.clone()
    noise = erasing(probability=0.5)
    for operation in (noise, erasing(probability=0.5, mode="mean")):
        found = operation(pixels, KEYS[:64])
        assert torch.equal(pixels, before)
        places = operation.rectangles(KEYS[:64], 32)
        outside = torch.ones(64, 32, 32, dtype=torch.bool)
        for row, (top, left, height, width) in enumerate(places.T.tolist()):
            outside[row, top : top + height, left : left + width] = False
        assert torch.equal(found[outside], pixels[outside])
        inside = found[~outside]
        if operation is noise:
            # The generator is the one of draws.py.
            row = int(np.flatnonzero(places[2])[0])
            count = int(places[2, row] * places[3, row] * 3)
            with np.errstate(over="ignore"):
                bits = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
                bits = mix(bits + (KEYS[row] ^ combine(5)))
            expected = normal_quantiles()[bits >> np.uint64(48)].astype(np.float32)
            assert np.array_equal(found[row][~outside[row]].numpy().ravel(), expected)
            assert abs(inside.mean()) < 5 / inside.numel() ** 0.5 and abs(inside.std() - 1) < 0.02
        else:
            assert (inside == 0).all()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(noise(pixels[order], KEYS[:64][order.numpy()]), noise(pixels, KEYS[:64])[order])
