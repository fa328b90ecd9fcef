"""The central view against big_vision's two steps: resize_small by area, then a central crop."""

import cv2
import numpy as np
import pytest
from pictures import encoded, make_picture
from views import whole_picture

from vitscale.data.augmentation import EvalTransform, views_of

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


@pytest.mark.parametrize(("height", "width"), [(512, 512), (512, 640), (1024, 512), (768, 1152), (256, 320)])
def test_equal_where_the_crop_begins_at_a_whole_pixel(height, width):
    ours, theirs = both(height, width)
    assert np.abs(ours - theirs).max() <= 1  # where OpenCV's builds round differently


def test_the_crop_of_fine_tuning_too():
    """resize_small(448)|central_crop(384)."""
    ours, theirs = both(896, 1344, small=448, crop=384)
    assert np.abs(ours - theirs).max() <= 1


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 333), (427, 640)])
def test_elsewhere_the_views_differ_by_less_than_a_pixel(height, width):
    """The two steps cut between pixels of the picture, one step at whole ones: a shift of half a pixel at most."""
    ours, theirs = both(height, width)
    apart = np.abs(ours - theirs).mean()
    shifted = np.abs(theirs[:, 1:] - theirs[:, :-1]).mean()
    print(f"{height} x {width}: {apart:.2f} levels in the mean; by a shift of one pixel {shifted:.2f}")
    assert apart < shifted
