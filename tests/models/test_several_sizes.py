"""Images of several sizes in one call of a Transformer, against a model of each size."""

import pytest
import torch
from models.small_models import build, images
from models.weights.exported import TINY, described, loaded, valued, written

from vitscale.models import compile_blocks
from vitscale.recipe.families import ResNetShape, ViTShape

SIZES = [(32, 2), (16, 3), (27, 1), (8, 2), (32, 1)]  # side and images of each batch; 27 is no multiple of a patch
FORMS = {
    "class token": {},
    "pre-training head": {"head": "pretrain"},
    "mean": {"pool": "mean", "position": {"kind": "2d"}},
    "map": {"sub_norm": "mlp", "pool": "map", "position": {"kind": "sincos"}},
    "normed mean": {"norm": "rms", "pool": "normed_mean"},
    "distilled": {"distilled": True},
    "shared positions": {"position": {"at": "shared"}},
    "dinov2": {"registers": 4, "layer_scale": 0.1, "mlp": "exact_gelu"},
    "dinov3": {"registers": 4, "qkv_bias": "no_key", "layer_scale": 0.1, "position": {"kind": "rope"}},
    "vit5": {
        **{"registers": 4, "mlp": "swiglu", "sub_norm": "all", "qk_norm": True, "class_position": False},
        **{"position": {"kind": "1d_rope", "unit": "patch", "registers_base": 100.0}},
    },
}


def made(form):
    return valued(described(TINY | FORMS[form], 32))


def batches():
    return [images(side, count + at)[at:] for at, (side, count) in enumerate(SIZES)]


def total(outputs):
    """A number that all outputs have a part in, each another one."""
    each = [value.float().sin() for found in outputs for value in found if value is not None]
    return sum((at + 1) * value.sum() for at, value in enumerate(each))


@pytest.mark.parametrize("form", FORMS)
def test_each_batch_is_computed_as_by_a_model_of_its_size(form, tmp_path):
    path, model, _ = written(tmp_path, "safetensors", TINY | FORMS[form], 32)
    pixels = batches()
    with torch.no_grad():
        found = model(pixels)
        for batch, outputs in zip(pixels, found, strict=True):
            expected = loaded(described(TINY | FORMS[form], batch.shape[1]), path)(batch)
            assert outputs.tokens.shape == expected.tokens.shape
            for value, other in zip(outputs, expected, strict=True):
                if value is not None:
                    torch.testing.assert_close(value, other, rtol=1e-5, atol=2e-6)
        alone = model([pixels[0]])[0]
        assert all(torch.equal(a, b) for a, b in zip(alone, model(pixels[0]), strict=True) if a is not None)


@pytest.mark.parametrize("recomputed", [0, 1])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_the_sums_of_those_of_each_batch(form, recomputed):
    model, pixels = made(form).train(), batches()
    model.checkpoint_every = recomputed
    total(model(pixels)).backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    total([model([batch])[0] for batch in pixels]).backward()
    for value, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(value, parameter.grad, rtol=1e-4, atol=1e-5 * float(parameter.grad.abs().max()))


def test_masks_and_kept_patches_are_those_of_a_batch():
    model, pixels = made("dinov3"), batches()[:3]
    masked = lambda x_BND: x_BND.index_fill(1, torch.tensor([1, 3]), 0.5)  # noqa: E731
    kept = torch.tensor([[3, 0], [1, 2], [2, 1]])
    with torch.no_grad():
        found = model(pixels, edit=[masked, None, None], kept=[None, kept, None])
        expected = [model([pixels[0]], edit=[masked]), model([pixels[1]], kept=[kept]), model([pixels[2]])]
    for outputs, (other,) in zip(found, expected, strict=True):
        torch.testing.assert_close(outputs.tokens, other.tokens, rtol=1e-5, atol=2e-6)
    assert not torch.allclose(found[0].tokens, model(pixels)[0].tokens, atol=1e-2)


def test_compiled_blocks_compute_the_same():
    model, pixels = made("dinov2"), batches()
    with torch.no_grad():
        expected = model(pixels)
        compile_blocks(model.units(), backend="aot_eager")
        for outputs, other in zip(model(pixels), expected, strict=True):
            torch.testing.assert_close(outputs.tokens, other.tokens)


def test_float8_takes_tokens_side_by_side():
    float8 = pytest.importorskip("vitscale.models.float8", reason="needs torchao")
    model, pixels = made("dinov2").train(), batches()
    expected = [outputs.tokens.detach() for outputs in model(pixels)]
    float8.train_in_float8(model.blocks, torch.device("cpu"))
    found = model(pixels)
    total(found).backward()
    for outputs, other in zip(found, expected, strict=True):
        error = float((outputs.tokens.detach() - other).norm() / other.norm())
        assert 1e-4 < error < 0.1


@pytest.mark.parametrize(
    ("parts", "options"),
    [
        ({"attention": "axial"}, {}),
        ({"stem": ResNetShape((1,), variant="v1")}, {}),
        ({}, {"position": {"kind": "relative"}}),
        ({}, {"position": {"at": "every_layer"}}),
    ],
)
def test_models_of_one_size_refuse_several(parts, options):
    model = build(ViTShape(8, 48, 2, 96, 3, **parts), image_size=32, num_classes=7, **options)
    with pytest.raises(ValueError, match="takes one"):
        model([images(32), images(32)])


@pytest.mark.parametrize("shape", [(2, 7, 7, 3), (2, 16, 8, 3), (2, 16, 16, 4), (16, 16, 3)])
def test_images_that_are_no_squares_of_whole_patches_are_refused(shape):
    with pytest.raises(ValueError, match="8 pixels or more"):
        made("class token")([images(32), torch.zeros(shape)])
    with pytest.raises(ValueError, match="32"):
        made("class token")(images(16))
