"""Several views of each sample from one decoding: against Pillow and torchvision, the same on every world."""

import numpy as np
import pytest
import torch
from loaders import SEED, joined, read, same
from picture_shards import picture
from PIL import Image
from scipy.stats import ks_2samp
from torchvision.transforms import RandomResizedCrop
from views import whole_picture

from vitscale.data.augmentation import ResizedTransform
from vitscale.data.order import TrainOrder
from vitscale.data.pixel_programs import PixelPrograms
from vitscale.data.views import ViewKind, draw_views, view_kinds
from vitscale.ground.images import Code
from vitscale.recipe import ColorJitter, Data, GaussianBlur, Gray

SHARDS, BATCH = [11, 6], 8
NOTHING = PixelPrograms([], 24)
KINDS = (ViewKind(2, 24, ResizedTransform((0.3, 1.0)), NOTHING), ViewKind(3, 9, ResizedTransform((0.05, 0.3)), NOTHING))


def batches(manifest, rank=0, world=1, kinds=KINDS):
    return read(manifest, TrainOrder(SHARDS, BATCH, 5), views=kinds, rank=rank, world=world, stop=5)


def boxes(area, height, width, count=4000):
    keys = np.random.default_rng(1).integers(0, 2**64, count, np.uint64)
    return ResizedTransform(area).boxes(keys, np.full(count, height), np.full(count, width))


@pytest.mark.parametrize("area", [(0.08, 1.0), (0.05, 0.32)])
@pytest.mark.parametrize(("height", "width"), [(500, 500), (375, 500), (20, 200)])
def test_boxes_are_distributed_as_torchvisions(height, width, area):
    torch.manual_seed(0)
    image = torch.empty(3, height, width)
    theirs = np.array([RandomResizedCrop.get_params(image, list(area), [3 / 4, 4 / 3]) for _ in range(4000)])
    ours = boxes(area, height, width)
    columns = [(each[:, 0], each[:, 1], each[:, 2] * each[:, 3], each[:, 2] / each[:, 3]) for each in (ours, theirs)]
    for one, other in zip(*columns, strict=True):
        assert ks_2samp(one, other).pvalue > 1e-3


@pytest.mark.parametrize(("height", "width"), [(10, 1000), (1000, 10), (1, 1), (7, 9)])
def test_where_no_draw_fits_the_box_is_torchvisions_fallback(height, width):
    found = boxes((0.999, 1.0), height, width, 200)
    expected = RandomResizedCrop.get_params(torch.empty(3, height, width), [2.0, 2.0], [3 / 4, 4 / 3])
    assert (found == expected).all(axis=1).any() and (found[:, :2] + found[:, 2:] <= [height, width]).all()


def test_boxes_of_thin_pictures_have_a_pixel():
    for aspect, height, width in (((0.1, 0.2), 1, 60), ((3.0, 4.0), 1, 1), ((3.0, 4.0), 60, 1)):
        found = ResizedTransform(aspect=aspect).boxes(
            np.arange(50, dtype=np.uint64), *np.full((2, 50), [[height], [width]])
        )
        assert (found[:, 2:] >= 1).all() and (found[:, :2] + found[:, 2:] <= [height, width]).all()


def test_every_view_is_what_pillow_makes_of_the_picture(manifest):
    for batch in batches(manifest):
        uids = batch.uids.numpy()
        contents = [picture(uid) for uid in uids.tolist()]
        heights, widths = (np.array([content[side] for content in contents]) for side in (1, 2))
        drawn = draw_views(KINDS, SEED, batch.epoch, uids, np.zeros(len(uids), np.int64), heights, widths)
        for kind, views, plan in zip(KINDS, batch.views, drawn, strict=True):
            assert views.shape == (BATCH, kind.count, kind.side, kind.side, 3)
            for row, content in enumerate(contents):
                whole = Image.fromarray(whole_picture(*content))
                for number in range(kind.count):
                    top, left, height, width = plan.boxes[row, number].tolist()
                    box = (left, top, left + width, top + height)
                    expected = whole.resize((kind.side, kind.side), Image.Resampling.BICUBIC, box=box)
                    if plan.flips[row, number]:
                        expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
                    # Pillow goes down first where that is cheaper: then some values are a level apart.
                    assert np.abs(views[row, number].numpy().astype(int) - np.asarray(expected)).max() <= 1
    assert len({tuple(plan.boxes[0, number]) for plan in drawn for number in range(plan.boxes.shape[1])}) > 2


@pytest.mark.parametrize("world", [2, 4])
def test_views_are_the_same_on_every_world(manifest, world):
    assert same(joined(batches(manifest, rank, world) for rank in range(world)), batches(manifest))


def test_a_view_does_not_depend_on_the_others(manifest):
    """Except by its number: the first two kinds' views are the same with a third kind and without."""
    more = (*KINDS, ViewKind(1, 24, ResizedTransform((0.9, 1.0)), NOTHING))
    for ours, others in zip(batches(manifest, kinds=KINDS[:1]), batches(manifest, kinds=more), strict=True):
        assert torch.equal(ours.views[0], others.views[0]) and ours.digest != others.digest


def test_jitter_with_hue_has_all_orders_and_its_range():
    keys = np.random.default_rng(0).integers(0, 2**64, 5000, np.uint64)
    block = ColorJitter(kind="color_jitter", hue=0.1)
    programs = PixelPrograms([block], 32)(keys)
    assert len({tuple(codes) for codes in programs["code"].tolist()}) == 24
    turned = programs["values"][..., 0][programs["code"] == Code.HUE]
    assert set(turned) <= {*range(26), *range(231, 256)} and len(set(turned)) > 45


def test_a_recipe_says_which_views_and_what_is_done_to_them():
    blur = GaussianBlur(kind="gaussian_blur", probability=1.0, kernel=9)
    content = {
        "train": "train",
        "image_size": 32,
        "views": [
            {"name": "global", "count": 2, "operations": [blur.model_dump()]},
            {"name": "local", "count": 4, "size": 16, "operations": [Gray(kind="gray", probability=1.0).model_dump()]},
        ],
    }
    data = Data.model_validate(content)
    assert "views" not in Data(train="train").model_dump()
    blurred, gray = (kind.programs(np.arange(4, dtype=np.uint64)) for kind in view_kinds(data))
    assert (blurred["code"] == Code.KERNEL).all() and (gray["code"] == Code.COLOR).all()
    assert [(kind.count, kind.side) for kind in view_kinds(data)] == [(2, 32), (4, 16)]
