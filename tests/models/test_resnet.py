"""The details in which ResNets are wrong most easily: against formulas written out, and against timm in fp64."""

from functools import partial

import pytest
import torch
from models.small_models import build, images, with_large_kernels, with_values
from small_recipes import small_recipe
from torch.nn import functional as F

from vitscale.models import initial_value
from vitscale.models.resnet.model import GroupNorm, ResNet, StdConv
from vitscale.models.weights.foreign import table
from vitscale.objectives import build_objective
from vitscale.recipe.families import ResNetShape, ViTShape


@pytest.mark.parametrize("size", [8, 9])
@pytest.mark.parametrize("kernel_size", [1, 3, 7])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_a_standardised_convolution_by_its_formula(variant, stride, kernel_size, size):
    """Weights so small that the eps decide: 1e-5 on the deviation (v1), 1e-10 on the variance (v2)."""
    conv = StdConv(4, 6, kernel_size, stride, variant)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        conv.weight.normal_(1e-3, 2e-5, generator=generator)
        weight = conv.weight.double()
        mean = weight.mean(dim=(1, 2, 3), keepdim=True)
        variance = (weight - mean).square().mean(dim=(1, 2, 3), keepdim=True)
        scale = variance.sqrt() + 1e-5 if variant == "v1" else (variance + 1e-10).sqrt()
        x = torch.randn(2, 4, size, size, generator=generator)
        # TensorFlow's 'SAME': as much as the outputs need, the odd one at the end; BiT pads k // 2 all around.
        total = max((-(-size // stride) - 1) * stride + kernel_size - size, 0)
        before, after = (total // 2, total - total // 2) if variant == "v1" else (kernel_size // 2, kernel_size // 2)
        padded = F.pad(x.double(), (before, after, before, after))
        expected = F.conv2d(padded, (weight - mean) / scale, stride=stride)
        result = conv(x)
    assert result.shape == expected.shape
    assert (result - expected).abs().max() / expected.abs().max() < 1e-4


@pytest.mark.parametrize(("variant", "eps"), [("v1", 1e-6), ("v2", 1e-5)])
def test_group_norms_have_the_eps_of_their_authors(variant, eps):
    norm = GroupNorm(64, variant)
    x = torch.randn(2, 64, 5, 5, generator=torch.Generator().manual_seed(0)) * 1e-3
    with torch.no_grad():
        norm.weight.fill_(1.0)
        norm.bias.fill_(0.0)
        groups = x.double().view(2, 32, -1)
        variance = groups.var(dim=-1, correction=0, keepdim=True)
        expected = (groups - groups.mean(dim=-1, keepdim=True)) / (variance + eps).sqrt()
        assert torch.allclose(norm(x).double().view_as(expected), expected, atol=1e-4)


def values_for(model, form="timm"):
    ours = dict(model.named_parameters())
    rules = table(model, form)
    return {key: part for rule in rules for key, part in zip(rule.theirs, rule.split(ours[rule.ours]), strict=True)}


def model_and_peer(variant, size, drop_path=0.0):
    """A small ResNet and timm's of the same weights, in fp64."""
    pytest.importorskip("timm")
    from timm.layers import GroupNormAct, StdConv2d, StdConv2dSame
    from timm.models.resnetv2 import ResNetV2

    blocks = (2, 1, 1, 1)
    model = ResNet(ResNetShape(blocks, variant=variant), image_size=size, num_classes=7, drop_path=drop_path)
    model = with_large_kernels(with_values(model)).double()
    norm = partial(GroupNormAct, num_groups=32, eps=1e-6 if variant == "v1" else 1e-5)
    kind = {"preact": False, "stem_type": "same"} if variant == "v1" else {"preact": True, "stem_type": "fixed"}
    conv = partial(StdConv2dSame if variant == "v1" else StdConv2d, eps=1e-10)
    peer = ResNetV2(
        layers=blocks, num_classes=7, norm_layer=norm, conv_layer=conv, drop_path_rate=drop_path, **kind
    ).double()
    peer.load_state_dict(values_for(model))
    return model, peer


@pytest.mark.parametrize("size", [64, 97, 98, 225])
@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_logits_equal_timm_s_at_even_and_odd_sizes(variant, size):
    model, peer = model_and_peer(variant, size)
    with torch.no_grad():
        pixels = images(size).double()
        difference = model.eval()(pixels).logits - peer.eval()(pixels.permute(0, 3, 1, 2))
    assert difference.abs().max() < 2e-5  # logits are fp32


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_units_are_left_out_as_timm_s(variant):
    model, peer = model_and_peer(variant, 64, drop_path=0.5)
    pixels, found = images(64, batch=16).double(), []
    with torch.no_grad():
        for forward in (lambda: model(pixels).logits, lambda: peer(pixels.permute(0, 3, 1, 2))):
            torch.manual_seed(2)
            found.append(forward())
        assert (found[0] - found[1]).abs().max() < 2e-5
        assert (model(pixels).logits - found[0]).abs().amax(1).gt(1e-3).sum() > 5
        assert torch.equal(model.eval()(pixels).logits, model(pixels).logits)


def in_a_recipe(model: dict):
    return build_objective(small_recipe(model, data={"image_size": 64}), 5)


SMALL = {"width": 64, "depth": 1, "mlp_dim": 128, "num_heads": 4}


@pytest.mark.parametrize(
    "block",
    [
        {"blocks": [1, 1]},
        {"blocks": [1, 1], "variant": "v1"},
        {"blocks": [1, 1], "mixing": "axial"},
        {"blocks": [1, 1], "patch_size": 4, **SMALL},
        {"patch_size": 8, "attention": "axial", **SMALL},
        {"patch_size": 8, "position": {"kind": "relative"}, **SMALL},
    ],
)
def test_initial_values_of_every_family(block):
    """Appendix of the authors' code: lecun normal convolutions, identity norms, v1 units begin as their shortcut."""
    objective = in_a_recipe(block)
    values = {name: initial_value(objective, name, p.shape, seed=0) for name, p in objective.named_weights()}
    assert torch.all(values["head.weight"] == 0) and torch.all(values["head.bias"] == -10), "sigmoid pre-training"
    is_v1 = isinstance(objective.backbone.shape, ViTShape) or objective.backbone.shape.variant == "v1"
    for name, value in values.items():
        module, _, kind = name.rpartition(".")
        if value.ndim == 4:
            fan_in = value[0].numel()
            assert value.std().item() == pytest.approx(fan_in**-0.5, rel=0.06), name
            assert value.abs().max().item() < 2.3 * fan_in**-0.5, name
        elif kind == "relative":
            assert value.std().item() == pytest.approx(0.02, rel=0.15), name
        elif "norm" in module:
            of_unit = ".stages." in name and module.endswith("norm3")
            expected = 0.0 if kind == "bias" or (of_unit and is_v1) else 1.0
            assert torch.all(value == expected), name


@pytest.mark.parametrize("shape", [ViTShape(8, 48, 1, 96, 3), ResNetShape((1,), mixing="axial")])
def test_images_of_another_size_are_refused(shape):
    model = with_values(build(shape, image_size=32, num_classes=5))
    for size in ((1, 40, 32, 3), (1, 32, 24, 3), (1, 32, 32, 4)):
        with pytest.raises(ValueError, match=r"\b32, 32, 3\b"):
            model(torch.zeros(size))
