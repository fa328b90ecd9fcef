"""Each way of resizing against another implementation: Pillow, PyTorch, and a plain mean over areas."""

import cv2
import numpy as np
import pytest
import torch
from pictures import encoded, make_picture
from PIL import Image
from views import area_mean, kernel_views, whole_picture

from vitscale.data.augmentation import EvalTransform, views_of
from vitscale.ground.images import OK, REFUSED, Resize
from vitscale.recipe import EvalCrop

# Height and width of the picture, and a box in it: shrinking by a lot and a little, growing, one of each, one pixel.
BOXES = [
    *(((120, 201), (0, 0, 120, 201)), ((120, 201), (7, 30, 90, 161)), ((61, 47), (3, 2, 50, 44))),
    *(((20, 25), (0, 0, 20, 25)), ((20, 25), (5, 6, 9, 8)), ((130, 12), (4, 1, 126, 11)), ((9, 9), (4, 4, 1, 1))),
]
SIDES = (32, 31)


def noisy(height, width):
    """A picture of which much is lost, so that the ways of decoding and of resizing differ."""
    smooth = np.asarray(make_picture(3, height, width)).astype(int)
    noise = np.random.default_rng(height).integers(-60, 61, smooth.shape)
    return Image.fromarray((smooth + noise).clip(0, 255).astype(np.uint8))


def by_pillow(pixels, box, side, resample):
    """Across, then down, as Pillow 12 does in one call; 13 chooses the order by the picture's shape."""
    top, left, height, width = box
    picture = Image.fromarray(pixels)
    across = picture.resize((side, pixels.shape[0]), resample, (left, 0, left + width, pixels.shape[0]))
    found = np.asarray(across.resize((side, side), resample, (0, top, side, top + height))).astype(int)
    at_once = np.asarray(picture.resize((side, side), resample, (left, top, left + width, top + height))).astype(int)
    assert np.abs(found - at_once).max() <= 4  # where a first pass overshoots 0 or 255
    return found


def by_torch(pixels, box, side):
    """`grid_sample` between the four nearest pixels at the centres of the output's, as TensorFlow 2 places them."""
    top, left, height, width = box
    rows = top + (torch.arange(side, dtype=torch.float64) + 0.5) * height / side
    columns = left + (torch.arange(side, dtype=torch.float64) + 0.5) * width / side
    picture = torch.from_numpy(pixels.astype(float)).permute(2, 0, 1)[None]
    grid = torch.stack(torch.meshgrid(columns / pixels.shape[1], rows / pixels.shape[0], indexing="xy"), -1) * 2 - 1
    found = torch.nn.functional.grid_sample(picture, grid[None], "bilinear", "border", align_corners=False)
    return found[0].permute(1, 2, 0).numpy()


REFERENCES = {
    Resize.AREA: lambda pixels, box, side: area_mean(
        pixels[box[0] : box[0] + box[2], box[1] : box[1] + box[3]].astype(float), side
    ),
    Resize.TF_BILINEAR: by_torch,
    Resize.PIL_BILINEAR: lambda *view: by_pillow(*view, Image.Resampling.BILINEAR),
    Resize.PIL_BICUBIC: lambda *view: by_pillow(*view, Image.Resampling.BICUBIC),
}


@pytest.mark.parametrize("resize", Resize)
def test_pixels_are_those_of_another_implementation(resize):
    for (height, width), box in BOXES:
        jpeg = encoded(noisy(height, width), quality=90)
        pixels = whole_picture(jpeg, height, width)
        for side in SIDES:
            expected = REFERENCES[resize](pixels, box, side)
            status, views = kernel_views(jpeg, height, width, [box, box], side, flips=[False, True], resize=resize)
            assert (status == OK).all()
            if resize in (Resize.PIL_BILINEAR, Resize.PIL_BICUBIC):
                assert np.array_equal(views[0], expected), (height, width, box)
            else:  # in two steps of 8 bits, and in floats
                most = 0.51 if resize is Resize.AREA else 1.01
                assert np.abs(views[0] - expected).max() <= most, (height, width, box)
            assert np.array_equal(views[1], views[0][:, ::-1])
            raw, stored = kernel_views(pixels.tobytes(), height, width, [box], side, raw=True, resize=resize)
            assert raw[0] == OK and np.array_equal(stored[0], views[0])


@pytest.mark.parametrize("resize", Resize)
def test_a_view_of_the_whole_has_the_verdict_of_the_whole(resize):
    """Also by a kernel that leaves out the last rows."""
    jpeg = encoded(noisy(400, 400), quality=95)
    for content, expected in ((jpeg, OK), (jpeg[:-40], REFUSED)):
        assert kernel_views(content, 400, 400, [(0, 0, 400, 400)], 8, resize=resize)[0][0] == expected


@pytest.mark.parametrize("resize", Resize)
def test_crops_of_recipes_resize_so(resize):
    height, width = 90, 70
    jpeg = encoded(noisy(height, width))
    pixels = whole_picture(jpeg, height, width)
    transform = EvalTransform.of(EvalCrop(kind="square", fraction=0.8, resize=resize.name.lower()))
    expected = REFERENCES[resize](pixels, (9, 7, 72, 56), 32)
    assert EvalTransform.of(EvalCrop()).resize is Resize.AREA
    for stored, is_raw in ((pixels.tobytes(), True), (jpeg, False)):
        views = views_of([(stored, height, width)], transform, 32, are_raw=is_raw)
        assert np.abs(views[0].numpy() - expected).max() <= 1.01


SMALL, CROP = 256, 224


def two_steps(pixels, small, crop):
    """resize_small(small)|central_crop(crop), with OpenCV's resizing by area."""
    height, width = (round(side * small / min(pixels.shape[:2])) for side in pixels.shape[:2])
    resized = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA)
    top, left = (height - crop) // 2, (width - crop) // 2
    return resized[top : top + crop, left : left + crop]


def both(height, width, small=SMALL, crop=CROP):
    jpeg = encoded(make_picture(1, height, width), quality=92)
    ours = views_of([(jpeg, height, width)], EvalTransform("central", crop / small), crop)[0].numpy()
    return ours.astype(int), two_steps(whole_picture(jpeg, height, width), small, crop).astype(int)


@pytest.mark.parametrize("sides", [(512, 512), (512, 640), (1024, 512), (768, 1152), (256, 320), (896, 1344, 448, 384)])
def test_the_central_view_is_resize_small_and_a_crop_where_that_begins_at_a_whole_pixel(sides):
    ours, theirs = both(*sides)
    assert np.abs(ours - theirs).max() <= 1  # where OpenCV's builds round differently


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 333), (427, 640)])
def test_elsewhere_the_views_differ_by_less_than_a_pixel(height, width):
    """The two steps cut between pixels of the picture, one step at whole ones: a shift of half a pixel at most."""
    ours, theirs = both(height, width)
    apart = np.abs(ours - theirs).mean()
    shifted = np.abs(theirs[:, 1:] - theirs[:, :-1]).mean()
    print(f"{height} x {width}: {apart:.2f} levels in the mean; by a shift of one pixel {shifted:.2f}")
    assert apart < shifted
