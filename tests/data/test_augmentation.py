"""Crops and flips: TensorFlow's distribution, as a function of (seed, epoch, uid)."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vitscale.data.augmentation import EvalTransform, TrainTransform, sample_keys
from vitscale.data.image_operations import to_model_input
from vitscale.recipe import Normalise

AREA, ASPECT = (0.05, 1.0), (3 / 4, 4 / 3)
SIDES = st.integers(1, 700) | st.sampled_from([1, 65535])


def crops(height, width, count, area=AREA, aspect=ASPECT, seed=0):
    keys = sample_keys(seed, 0, np.arange(count))
    return TrainTransform(area, aspect).boxes(keys, np.full(count, height), np.full(count, width))


def tensorflow_crop(rng, height, width, area, aspect):
    """The rule of `sample_distorted_bounding_box`, written anew from its description; positions up to the last."""
    low, high = area[0] * height * width, area[1] * height * width
    for _ in range(100):
        ratio = rng.uniform(*aspect)
        candidates = [h for h in range(height + 1) if round(h * ratio) <= width]
        tallest = min(candidates[-1], round((high / ratio) ** 0.5))
        h = rng.randint(min(tallest, round((low / ratio) ** 0.5)), tallest)
        if h * round(h * ratio) < low:
            h += 1
        if h * round(h * ratio) > high:
            h -= 1
        w = round(h * ratio)
        if low <= h * w <= high and 0 < h <= height and 0 < w <= width:
            return rng.randint(0, height - h), rng.randint(0, width - w), h, w
    return 0, 0, height, width


@pytest.mark.parametrize(
    "height, width, area",
    [(32, 32, AREA), (120, 160, AREA), (97, 61, (0.3, 0.6)), (7, 5, AREA), (30, 200, AREA), (16, 20, (0.9, 1.0))],
)
def test_crops_are_distributed_as_tensorflows(height, width, area):
    count = 4000
    rng = random.Random(1)
    expected = np.array([tensorflow_crop(rng, height, width, area, ASPECT) for _ in range(count)], float)
    found = crops(height, width, 4 * count, area).astype(float)

    def quantities(boxes):
        top, left, h, w = boxes.T
        whole = (h == height) & (w == width)
        return np.stack([top, left, h, w, h * w, h * h, w / h, top + h / 2, left + w / 2, whole], axis=1)

    ours, theirs = quantities(found), quantities(expected)
    for column in range(ours.shape[1]):
        error = np.sqrt(ours[:, column].var() / len(ours) + theirs[:, column].var() / len(theirs))
        assert abs(ours[:, column].mean() - theirs[:, column].mean()) <= 4.5 * error + 1e-9, column
    for column in range(4):  # whole distributions
        assert stats.ks_2samp(found[:, column], expected[:, column]).pvalue > 1e-5


@settings(max_examples=100, deadline=None)
@given(
    SIDES,
    SIDES,
    st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)).map(lambda pair: (min(pair), max(pair))),
    st.tuples(st.floats(0.2, 5), st.floats(0.2, 5)).map(lambda pair: (min(pair), max(pair))),
)
def test_boxes_lie_within_the_picture_and_the_ranges(height, width, area, aspect):
    boxes = crops(height, width, 64, area, aspect).astype(np.int64)
    top, left, h, w = boxes.T
    assert boxes.min() >= 0 and h.min() >= 1 and w.min() >= 1
    assert np.all(top + h <= height) and np.all(left + w <= width)
    whole = (h == height) & (w == width)
    part = h * w / (height * width)
    assert np.all(whole | ((part >= area[0] - 1e-9) & (part <= area[1] + 1e-9)))
    # The width is the height times the ratio, rounded.
    assert np.all(whole | ((w + 0.5 >= h * aspect[0] - 1e-6) & (w - 0.5 <= h * aspect[1] + 1e-6)))


def test_keys_depend_on_seed_epoch_uid_and_view_alone():
    uids = np.array([5, 0, 2**62, 7])
    keys = sample_keys(3, 4, uids)
    assert keys.dtype == np.uint64
    assert np.array_equal(sample_keys(3, 4, uids[::-1]), keys[::-1])  # wherever it stands in whatever batch
    many = [sample_keys(seed, epoch, np.arange(1000)) for seed in range(4) for epoch in range(4)]
    assert len(np.unique(np.concatenate(many))) == 16_000
    assert [hex(key) for key in sample_keys(3, 1, np.array([0, 1, 12345678901])).tolist()] == [
        "0x31328302700161f1",
        "0xdd71f83e14b83968",
        "0xee1f9009dacf5270",
    ]
    # Views of a sample have keys of their own, and the first has the sample's.
    uids, views = np.arange(1000).repeat(5), np.tile(np.arange(5), 1000)
    keys = sample_keys(3, 4, uids, views)
    assert len(np.unique(keys)) == 5000
    assert np.array_equal(keys[views == 0], sample_keys(3, 4, np.arange(1000)))
    assert np.array_equal(keys[1:3], sample_keys(3, 4, uids[1:3], views[1:3]))


def test_what_a_key_shows_is_frozen():
    keys = sample_keys(3, 1, np.array([0, 1, 12345678901]))
    heights, widths = np.array([480, 32, 300]), np.array([640, 32, 40])
    boxes = TrainTransform().boxes(keys, heights, widths)
    assert boxes.dtype == np.int32
    assert boxes.tolist() == [[13, 125, 321, 362], [13, 5, 19, 20], [273, 5, 24, 29]]
    assert TrainTransform().flips(keys).tolist() == [True, False, False]
    alone = TrainTransform().boxes(keys[1:2], heights[1:2], widths[1:2])
    assert alone.tolist() == boxes[1:2].tolist()


@pytest.mark.parametrize("rate", [0.0, 0.25, 0.5, 1.0])
def test_flip_rate(rate):
    keys = sample_keys(0, 0, np.arange(40_000))
    flips = TrainTransform(flip=rate).flips(keys)
    assert flips.dtype == bool
    assert abs(flips.mean() - rate) <= 4 * np.sqrt(rate * (1 - rate) / len(keys))


def test_flips_tell_nothing_of_crops_or_of_the_next_epoch():
    uids = np.arange(40_000)
    sides = np.full(40_000, 100)
    keys, later = sample_keys(0, 0, uids), sample_keys(0, 1, uids)
    transform = TrainTransform()
    flips, boxes = transform.flips(keys), transform.boxes(keys, sides, sides)
    for other in (*boxes.T, transform.flips(later)):
        assert abs(np.corrcoef(flips, other)[0, 1]) < 0.02
    later_boxes = transform.boxes(later, sides, sides)
    for column in range(4):
        assert abs(np.corrcoef(boxes[:, column], later_boxes[:, column])[0, 1]) < 0.02


def test_evaluation_views():
    heights, widths = np.array([256, 300, 1, 256, 375]), np.array([256, 256, 500, 257, 500])
    keys = np.zeros(5, np.uint64)
    central = EvalTransform("central", 224 / 256).boxes(keys, heights, widths)
    assert central.dtype == np.int32
    assert central.tolist() == [
        [16, 16, 224, 224],
        [38, 16, 224, 224],
        [0, 249, 1, 1],
        [16, 16, 224, 224],
        [23, 86, 328, 328],
    ]
    square = EvalTransform("square", 224 / 256).boxes(keys, heights, widths)
    assert square.tolist()[:3] == [[16, 16, 224, 224], [19, 16, 262, 224], [0, 31, 1, 438]]
    whole = EvalTransform("square", 1.0).boxes(keys, heights, widths)
    assert whole.tolist() == [[0, 0, h, w] for h, w in zip(heights.tolist(), widths.tolist(), strict=True)]
    assert not EvalTransform().flips(keys).any()


@given(st.integers(1, 65535), st.integers(1, 65535), st.floats(0.001, 1), st.sampled_from(["central", "square"]))
@settings(max_examples=100, deadline=None)
def test_evaluation_boxes_lie_within_the_picture(height, width, fraction, kind):
    box = EvalTransform(kind, fraction).boxes(np.zeros(1, np.uint64), np.array([height]), np.array([width]))
    top, left, h, w = box[0].tolist()
    assert top >= 0 and left >= 0 and h >= 1 and w >= 1 and top + h <= height and left + w <= width


def test_model_input_and_another_normalisation_as_torchvision_computes_it():
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    of_imagenet = Normalise(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    images = torch.arange(256, dtype=torch.uint8).repeat(3).reshape(1, 16, 16, 3)
    found = to_model_input(images, torch.device("cpu"), torch.float32, of_imagenet)
    pixels = functional.to_dtype(images.permute(0, 3, 1, 2), torch.float32, scale=True)
    expected = functional.normalize(pixels, of_imagenet.mean, of_imagenet.std)
    torch.testing.assert_close(found.permute(0, 3, 1, 2), expected, rtol=0, atol=1e-6)
    for normalise in ([], [Normalise(mean=[0.5] * 3, std=[0.5] * 3)]):
        for dtype in (torch.float32, torch.bfloat16):
            found = to_model_input(images, torch.device("cpu"), dtype, *normalise)
            assert torch.equal(found, (images.float() / 127.5 - 1).to(dtype)) and found.dtype == dtype
