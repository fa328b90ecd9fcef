"""Views of single pictures: a part decoded is that part of the whole, whatever the JPEG; damage never gets further."""

import io
from itertools import product

import cv2
import numpy as np
import pytest
from damaged_jpegs import small_jpegs
from pictures import encoded
from PIL import Image
from views import area_mean, kernel_views, whole_picture

from vitscale.ground.images import OK, WRONG_SIZE, check, decode, states_size


def noise(seed, height, width):
    """Pixels of which every neighbour has another colour: what is looked up in a wrong place is not right."""
    rng = np.random.default_rng(seed)
    fine = rng.integers(0, 256, (height, width, 3))
    coarse = cv2.resize(rng.integers(0, 256, (3, 3, 3)).astype(np.float32), (width, height))
    return np.clip((fine + coarse) / 2, 0, 255).astype(np.uint8)


def by_pillow(pixels, **options):
    return encoded(Image.fromarray(pixels), **options)


def by_opencv(pixels, sampling, *options):
    sampled = getattr(cv2, "IMWRITE_JPEG_SAMPLING_FACTOR_" + sampling.replace(":", ""))
    flags = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampled, *options]
    return cv2.imencode(".jpg", pixels[:, :, ::-1], flags)[1].tobytes()


KINDS = {
    "4:4:4": lambda p: by_pillow(p, subsampling=0),
    "4:2:2": lambda p: by_pillow(p, subsampling=1),
    "4:2:0": lambda p: by_pillow(p, subsampling=2, quality=95),
    "4:4:0": lambda p: by_opencv(p, "4:4:0"),
    "4:1:1": lambda p: by_opencv(p, "4:1:1"),
    "gray": lambda p: by_pillow(p[:, :, 0]),
    "progressive 4:4:4": lambda p: by_pillow(p, subsampling=0, progressive=True),
    "progressive 4:2:2": lambda p: by_pillow(p, subsampling=1, progressive=True),
    "progressive 4:2:0": lambda p: by_pillow(p, subsampling=2, progressive=True),
    "progressive 4:4:0": lambda p: by_opencv(p, "4:4:0", cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
    "progressive gray": lambda p: by_pillow(p[:, :, 0], progressive=True),
    "restart markers": lambda p: by_opencv(p, "4:2:0", cv2.IMWRITE_JPEG_RST_INTERVAL, 1),
    "restart markers, 4:2:2": lambda p: by_pillow(p, subsampling=1, restart_marker_rows=1),
    "low quality": lambda p: by_pillow(p, subsampling=2, quality=5),
    "optimized": lambda p: by_pillow(p, subsampling=2, optimize=True),
}


MORE = pytest.param([(16, 16), (70, 3), (2, 17)], marks=pytest.mark.slow)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [[(37, 53), (5, 90), (1, 1)], MORE], ids=["some", "more"])
def test_a_part_is_that_part_of_the_whole(kind, sizes):
    """Bit for bit, for boxes of 1, 2 and 5 pixels a side everywhere in it: where rows are skipped, and columns are not
    transformed, the colours of their neighbours are still needed."""
    for (height, width), side in product(sizes, (1, 2, 5)):
        content = KINDS[kind](noise(0, height, width))
        whole = whole_picture(content, height, width)
        places = [(top, left) for top in range(height - side + 1) for left in range(width - side + 1)]
        if places:
            status, seen = kernel_views(content, height, width, [(*place, side, side) for place in places], side)
            assert not status.any()
            expected = np.stack([whole[top : top + side, left : left + side] for top, left in places])
            assert np.array_equal(seen, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_decoded_exactly_pixels_are_pillow_s(kind):
    """To the last bit, by another libjpeg-turbo of its own: the integer DCT, and colours that are interpolated."""
    for height, width in ((61, 83), (16, 16), (1, 9)):
        content = KINDS[kind](noise(2, height, width))
        status, found = decode(content, height, width, exact=True)
        expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        assert status == OK and np.array_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_any_view(kind):
    """Random sizes, boxes and sides against the whole picture's area mean in closed form: no more than rounding."""
    rng = np.random.default_rng(1)
    for seed in range(25):
        height, width = np.exp(rng.uniform(0, np.log(400), 2)).astype(int) + rng.integers(0, 2, 2)
        content = KINDS[kind](noise(seed, height, width))
        whole = whole_picture(content, height, width)
        for _ in range(4):
            h, w = rng.integers(1, height + 1), rng.integers(1, width + 1)
            top, left = rng.integers(0, height - h + 1), rng.integers(0, width - w + 1)
            side = int(rng.choice([1, 2, 3, rng.integers(1, 65), 224, rng.integers(1, 301)]))
            status, seen = kernel_views(content, height, width, [(top, left, h, w)] * 2, side, [False, True])
            assert not status.any()
            expected = area_mean(whole[top : top + h, left : left + w], side)
            assert np.abs(seen[0] - expected).max() <= 0.501, (height, width, top, left, h, w, side)
            assert np.array_equal(seen[1], seen[0][:, ::-1])


def test_raw_pixels_of_another_number():
    pixels = noise(0, 10, 12).tobytes()
    for content, height, width in ((pixels[:-1], 10, 12), (pixels + b"\0", 10, 12), (pixels, 11, 12), (pixels, 10, 11)):
        status, seen = kernel_views(content, height, width, [(0, 0, 2, 2)], 4, raw=True)
        assert status.tolist() == [WRONG_SIZE] and not seen.any()


def overlaps(length, side):
    """How much of each pixel along an axis lies in each output pixel, in parts of 1 / side; (side, length)."""
    ends = np.arange(length + 1) * side
    low = np.arange(side)[:, None] * length
    return np.clip(np.minimum(ends[1:], low + length) - np.maximum(ends[:-1], low), 0, None)


def test_every_processor_gives_the_same_bits():
    """Those of sums in single precision one after the other: no fused operations, no other order in wide vectors."""
    rng = np.random.default_rng(3)
    for seed in range(30):
        height, width = rng.integers(1, 200, 2)
        pixels = noise(seed, height, width)
        side = int(rng.choice([7, 16, 32, 64]))
        _, (seen,) = kernel_views(pixels.tobytes(), height, width, [(0, 0, height, width)], side, raw=True)
        rows = np.einsum("ih,hwc->iwc", overlaps(height, side), pixels.astype(np.int64)).astype(np.float32)
        weights = overlaps(width, side).astype(np.float32) / np.float32(height * width)
        total = np.full((side, side, 3), 0.5, np.float32)
        for column in range(width):
            total += rows[:, column, None, :] * weights[:, column, None]
        assert np.array_equal(seen, total.astype(np.uint8))


@pytest.mark.parametrize("value", [0, 1, 127, 254, 255])
def test_one_colour_stays_one_colour(value):
    """However many pixels are summed: the largest pictures there can be."""
    for height, width in ((1, 65535), (65535, 1), (1000, 3000)):
        pixels = np.full((height, width, 3), value, np.uint8).tobytes()
        for side in (2, 3, 7, 32, 224):
            _, seen = kernel_views(pixels, height, width, [(0, 0, height, width)], side, raw=True)
            assert (seen == value).all(), (height, width, side)


def halved(content, scale):
    """Another program's decoder at 1 / scale."""
    image = Image.open(io.BytesIO(content))
    width, height = image.size
    image.draft("RGB", (width // scale, height // scale))
    assert image.size == (-(-width // scale), -(-height // scale))
    return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "low quality"])
def test_scaled_by_the_decoder(kind):
    """Pillow's own copy of the decoder uses the exact DCT where chroma is not scaled: a few of 255 (seen: 3)."""
    height, width = 8 * 24, 8 * 30
    content = KINDS[kind](noise(3, height, width))
    for scale in (2, 4, 8):
        side, whole = 192 // scale, halved(content, scale).astype(int)
        for top, left in ((0, 0), (0, width - height), (0, 2 * scale)):
            box = (top, left, height, height)
            status, seen = kernel_views(content, height, width, [box] * 2, side, [False, True], may_scale=True)
            assert not status.any()
            expected = whole[top // scale :, left // scale :][:side, :side]
            assert np.abs(seen[0] - expected).max() <= 4
            assert np.array_equal(seen[1], seen[0][:, ::-1])


@pytest.mark.parametrize("kind", ["4:4:4", "4:2:0", "4:2:2", "gray", "progressive 4:2:0"])
def test_scaled_views_of_any_place(kind):
    """Boxes whose edges do not lie on those of the halved pixels: a part of such a pixel counts as that part."""
    rng = np.random.default_rng(4)
    scales = []
    for seed in range(25):
        height, width = rng.integers(40, 300, 2)
        content = KINDS[kind](noise(seed, height, width))
        h, w = rng.integers(20, height + 1), rng.integers(20, width + 1)
        top, left = int(rng.integers(0, height - h + 1)), int(rng.integers(0, width - w + 1))
        side = int(rng.integers(1, 30))
        scale = max(scale for scale in (1, 2, 4, 8) if scale == 1 or min(h, w) >= scale * side)
        scales.append(scale)
        status, seen = kernel_views(content, height, width, [(top, left, h, w)], side, may_scale=True)
        source = whole_picture(content, height, width) if scale == 1 else halved(content, scale)
        # The original's pixels again, each a copy of the halved one that covers it.
        copies = source.repeat(scale, 0).repeat(scale, 1)[top : top + h, left : left + w]
        assert not status.any() and np.abs(seen[0] - area_mean(copies, side)).max() <= 4
    assert set(scales) == {1, 2, 4, 8}


def test_it_scales_only_what_is_twice_as_large_both_ways():
    content = KINDS["4:4:4"](noise(5, 100, 100))
    for h, w, is_scaled in ((40, 40, True), (39, 40, False), (40, 39, False), (100, 39, False), (41, 60, True)):
        box = [(3, 5, h, w)] if max(h, w) < 95 else [(0, 0, h, w)]
        _, exact = kernel_views(content, 100, 100, box, 20)
        _, allowed = kernel_views(content, 100, 100, box, 20, may_scale=True)
        assert np.array_equal(exact, allowed) != is_scaled


def test_it_scales_the_same_wherever_it_begins():
    """Columns that are not transformed, at every scale: bit for bit what the whole picture gives."""
    content = KINDS["4:2:0"](noise(6, 160, 200))
    for scale in (2, 4, 8):
        whole = kernel_views(content, 160, 200, [(0, 0, 160, 160)], 160 // scale, may_scale=True)[1][0]
        for top, left, size in ((0, 16, 32), (64, 0, 96), (32, 48, 64), (128, 128, 32)):
            _, seen = kernel_views(content, 160, 200, [(top, left, size, size)], size // scale, may_scale=True)
            at, beside, side = top // scale, left // scale, size // scale
            assert np.array_equal(seen[0], whole[at : at + side, beside : beside + side])


@pytest.mark.parametrize("kind", [kind for kind in small_jpegs() if kind != "CMYK"])
def test_a_picture_of_another_size_is_none_of_its_pixels(kind):
    """A shard may misstate it, which the checksum of a sample cannot see: also as halved, or as that of a thumbnail."""
    sizes = (56, 40), (41, 56), (39, 56), (40, 55), (80, 112), (80, 56), (40, 112), (20, 28), (5, 7), (16, 16)
    jpeg = small_jpegs()[kind]
    for height, width in (*sizes, (40 + 256, 56)):
        status, seen = kernel_views(jpeg, height, width, [(0, 0, height, width)], 8)
        assert status.tolist() == [WRONG_SIZE] and not seen.any()
        assert decode(jpeg, height, width)[0] == check(jpeg, height, width) == WRONG_SIZE
        assert not states_size(jpeg, height, width)
    for height, width in ((0, 56), (40, 0)):
        assert decode(jpeg, height, width)[0] == check(jpeg, height, width) == WRONG_SIZE
        assert not states_size(jpeg, height, width)
