"""The accounting by hand: breakdowns, taps on padding, and MFU."""

import numpy as np
import pytest
from models.small_models import AUTHORS_COUNTS

from vitscale.flops import mfu, model_work
from vitscale.ground.operations import taps_inside
from vitscale.recipe.families import model_of

# With 1000 classes and the output layer alone: the authors' own test table, and for g, G and the ResNets timm's models.
PUBLISHED_PARAMETERS = AUTHORS_COUNTS | {
    "ViT-g/14": 1_012_611_432,
    "ViT-G/14": 1_844_440_680,
    "ResNet50x1": 25_549_352,
    "ResNet101x3": 387_934_888,
    "ResNet152x4": 936_533_224,
}


@pytest.mark.parametrize(("name", "expected"), PUBLISHED_PARAMETERS.items())
def test_published_parameter_counts(name, expected):
    assert model_work(model_of(name=name, head="linear"), 224, 1000).params == expected


def test_breakdown_of_a_transformer_by_hand():
    model = model_of(patch_size=4, width=6, depth=2, mlp_dim=10, num_heads=1, position={"kind": "relative"})
    work = model_work(model, 9, 7)
    n, t, offsets = 4, 5, 9  # 9 / 4 leaves a 2 x 2 grid and a pixel over; one class token
    assert {part: (of.macs, of.params) for part, of in work.parts().items()} == {
        **{"patch_embedding": (n * 48 * 6, 48 * 6 + 6), "class_token": (0, 6), "norms": (0, 2 * 2 * 12 + 12)},
        **{"qkv": (2 * t * 108, 2 * (108 + 18)), "scores": (2 * 2 * t * t * 6, 0), "out": (2 * t * 36, 2 * (36 + 6))},
        **{"mlp": (2 * t * 120, 2 * (120 + 16)), "relative": (2 * t * offsets * 6, 2 * offsets * 6)},
        **{"pre_logits": (36, 42), "head": (42, 49)},
    }
    assert work.macs == sum(part.macs for part in work.parts().values())
    assert work.backward_macs == 2 * work.macs - n * 48 * 6


def test_breakdown_of_a_resnet_by_hand():
    """The root and one unit of 64 -> 64 -> 64 -> 256 channels on an image of 8 pixels: 4 behind the root, 2 pooled."""
    work = model_work(model_of(blocks=[1], variant="v1"), 8, 5)
    root, stage, head = work.parts().values()
    # 8 pixels, stride 2: the windows of 7 begin at -3, -1, 1 and 3 and see 4, 6, 7 and 5 pixels.
    assert (root.macs, root.accounting_macs) == (3 * 64 * (4 * 7) ** 2, 3 * 64 * (4 + 6 + 7 + 5) ** 2)
    pointwise = 4 * (64 * 64 + 64 * 256 + 64 * 256)  # 2 x 2 positions: in, out, shortcut
    # Two positions: the windows of 3 begin at -1 and 0 and see 2 each.
    assert (stage.macs, stage.accounting_macs) == (pointwise + 64**2 * 6**2, pointwise + 64**2 * 4**2)
    assert stage.params == 64 * (64 + 256 + 256 + 9 * 64) + 2 * (64 + 64 + 256 + 256)
    assert list(work.parts()) == ["root", "stage1", "head"] and head.params == 5 * 257


@pytest.mark.parametrize("kernel_size", [1, 3, 7])
@pytest.mark.parametrize("stride", [1, 2])
def test_taps_inside_by_sliding_a_window(kernel_size, stride):
    for size in range(1, 20):
        same = max((-(-size // stride) - 1) * stride + kernel_size - size, 0)
        symmetric = 2 * (kernel_size // 2)
        for before, after in ((symmetric // 2, symmetric // 2), (same // 2, same - same // 2)):
            padded = np.pad(np.ones(size, int), (before, after))
            windows = np.lib.stride_tricks.sliding_window_view(padded, kernel_size)[::stride]
            assert windows.sum() == taps_inside(size, kernel_size, stride)


def test_mfu_is_a_fraction_of_all_devices():
    assert mfu(images_per_s=1000, macs=10**9, num_devices=8, peak=1e12) == pytest.approx(0.75)
    assert mfu(images_per_s=1000, macs=10**9, num_devices=8, peak=None) is None
