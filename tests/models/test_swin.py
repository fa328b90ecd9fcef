"""What is a Swin's own: windows, shifts, biases by relative position, drop-path; by loops and published figures."""

import math

import numpy as np
import pytest
import torch
from models.small_models import build, images, with_values
from small_recipes import small_recipe

from vitscale.flops import model_work
from vitscale.ground.errors import RecipeError
from vitscale.models import initial_value
from vitscale.models.build import build_of_block
from vitscale.models.swin.windows import WindowAttention
from vitscale.recipe.families import SwinShape, architecture, model_of

TINY = {"width": 16, "num_heads": 2, "blocks": [2, 2, 2], "window": 4}


def attended(layer: WindowAttention, x: np.ndarray, shift: int) -> np.ndarray:
    """One image (h, w, C), position by position: whom it may attend to, and by which bias, in places of the map."""
    n, A = layer.window, layer.num_heads
    h, w, C = x.shape
    values = {name: value.detach().double().numpy() for name, value in layer.named_parameters()}
    size = math.ceil(h / n) * n
    padded = np.zeros((size, size, C))
    padded[:h, :w] = x
    query, key, value = np.split(padded @ values["qkv.weight"].T + values["qkv.bias"], 3, axis=-1)
    places = [(y, x) for y in range(size) for x in range(size)]
    result = np.zeros((h, w, C))
    for y, x in places:
        if y >= h or x >= w:
            continue
        # The window of a place begins at a multiple of n from the shift; it ends at the border.
        top, left = (max(((at - shift) // n) * n + shift, 0) for at in (y, x))
        bottom, right = (((at - shift) // n) * n + shift + n for at in (y, x))
        near = [(a, b) for a, b in places if top <= a < bottom and left <= b < right]
        for head in range(A):
            part = slice(head * C // A, (head + 1) * C // A)
            logits = np.array([query[y, x, part] @ key[a, b, part] / math.sqrt(C // A) for a, b in near])
            logits += [values["relative_bias"][y - a + n - 1, x - b + n - 1, head] for a, b in near]
            weights = np.exp(logits) / np.exp(logits).sum()
            result[y, x, part] = sum(weight * value[a, b, part] for weight, (a, b) in zip(weights, near, strict=True))
    return result @ values["out.weight"].T + values["out.bias"]


@pytest.mark.parametrize(("size", "window", "shift"), [(6, 3, 0), (6, 3, 1), (8, 4, 2), (7, 3, 1), (5, 5, 0)])
def test_attention_within_windows_by_loops(size, window, shift):
    layer = with_values(WindowAttention(8, 2, window, shift))
    x = torch.randn(2, size, size, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = layer(x)
    for ours, image in zip(found.numpy(), x.double().numpy(), strict=True):
        np.testing.assert_allclose(ours, attended(layer, image, shift), atol=1e-5)


# Table 1 of the paper: millions of parameters, GMACs at 224 pixels, and of B with windows of 12 at 384.
@pytest.mark.parametrize(
    ("name", "size", "params", "gmacs"),
    [
        *(("Swin-T", 224, 28.3, 4.5), ("Swin-S", 224, 49.6, 8.7), ("Swin-B", 224, 87.8, 15.4)),
        *(("Swin-L", 224, 196.5, 34.5), ("Swin-B", 384, 87.9, 47.1)),
    ],
)
def test_published_parameters_and_multiply_adds(name, size, params, gmacs):
    work = model_work(model_of(name=name, head="linear", window=12 if size == 384 else 7), size, 1000)
    assert (round(work.params / 1e6, 1), round(work.macs / 1e9, 1)) == (params, gmacs)


def test_drop_path_grows_as_the_authors_has_it():
    model = build(architecture("Swin-T"), drop_path=0.2)
    assert [block.drop_path for block in model.blocks] == pytest.approx(torch.linspace(0, 0.2, 12).tolist())


def test_windows_are_no_larger_than_a_map_and_then_not_shifted():
    shape = SwinShape(8, (2, 2, 2, 2), 1, window=7)
    windows = [(shape.window_of(stage, 96), shape.shift_of(stage, 1, 96)) for stage in range(4)]
    assert windows == [(7, 3), (7, 3), (6, 0), (3, 0)]
    assert [shape.size_of(stage, 100) for stage in range(4)] == [25, 13, 7, 4]


@pytest.mark.parametrize("size", [64, 50, 5])
def test_images_of_any_size_to_tokens_and_logits(size):
    model = with_values(build(architecture("Swin-T"), image_size=size, num_classes=7)).eval()
    with torch.no_grad():
        found = model(images(size))
    side = math.ceil(size / 32)
    assert found.tokens.shape == (2, side**2, 768) and found.logits.shape == (2, 7)
    torch.testing.assert_close(found.pooled, found.tokens.mean(dim=1))
    with pytest.raises(ValueError, match=str(size)):
        model(images(size + 1))


def test_initial_values_are_the_authors():
    """Normal of 0.02 for dense layers and biases of windows; torch's own for the first convolution."""
    model = build_of_block(model_of(name="Swin-T", head="linear"), image_size=224, num_classes=1000)
    value = {name: initial_value(model, name, parameter.shape, 0) for name, parameter in model.named_parameters()}
    for name in ("blocks.0.attention.relative_bias", "blocks.4.merging.reduction.weight", "head.weight"):
        assert value[name].std().item() == pytest.approx(0.02, rel=0.1), name
    theirs = torch.nn.Conv2d(3, 96, 4, 4)
    ours = value["embedding.weight"], value["embedding.bias"]
    for mine, other in zip(ours, (theirs.weight, theirs.bias), strict=True):
        assert mine.abs().max() <= 48**-0.5
        assert mine.std().item() == pytest.approx(other.std().item(), rel=0.2)
    zeros = {name for name, each in value.items() if not each.any()}
    assert zeros == {name for name in value if name.endswith(".bias") and name != "embedding.bias"}


def test_layers_are_counted_from_the_head_as_in_simmim():
    block = model_of(**TINY)
    model = build_of_block(block, image_size=64, num_classes=7)
    found = {name: block.layers_above(name) for name, _ in model.named_parameters()}
    # SimMIM's get_swin_layer: the embedding is layer 0, block i is i + 1, merging that of the block before it.
    for i in range(6):
        own = {count for name, count in found.items() if name.startswith(f"blocks.{i}.") and "merging" not in name}
        assert own == {6 - i}
    assert found["blocks.2.merging.reduction.weight"] == 5 and found["blocks.4.merging.norm.bias"] == 3
    assert found["embedding.weight"] == found["embedding_norm.bias"] == 7
    assert found["norm.weight"] == found["head.bias"] == 0


def test_axes_of_heads_and_patches():
    block = model_of(**TINY)
    model = build_of_block(block, image_size=64, num_classes=7)
    axes = {name: block.axes(name, tuple(each.shape)) for name, each in model.named_parameters()}
    assert axes["blocks.2.attention.qkv.weight"] == (3, 4, 8, 32) and axes["blocks.0.attention.qkv.bias"] == (3, 2, 8)
    assert axes["blocks.5.attention.out.weight"] == (64, 8, 8) and axes["embedding.weight"] == (16, 4, 4, 3)
    for name, each in model.named_parameters():
        assert math.prod(axes[name]) == each.numel()


@pytest.mark.parametrize(
    ("model", "blocks", "words"),
    [
        ({"name": "Swin-T", "depth": 3}, {}, "depth"),
        ({"name": "Swin-T", "pool": "cls"}, {}, "class token"),
        ({"name": "Swin-T", "position": {"kind": "rope"}}, {}, "position"),
        ({"name": "Swin-T", "width": 100}, {}, "num_heads"),
        ({"name": "Swin-T", "blocks": []}, {}, "blocks"),
        ({"name": "ViT-B/16", "window": 7}, {}, "window"),
        ({"name": "Swin-X"}, {}, "Swin-"),
        ({"name": "Swin-T"}, {"objective": {"kind": "masked_patches"}}, "patches"),
        ({"name": "Swin-T"}, {"objective": {"keep": 0.5}}, "patches"),
    ],
)
def test_what_a_swin_does_not_have_is_refused_by_its_key(model, blocks, words):
    with pytest.raises(RecipeError, match=words):
        small_recipe(model, data={"image_size": 64}, **blocks)
