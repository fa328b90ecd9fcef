"""Feature maps for detection and segmentation: equal to those of the libraries that use our exports as backbones."""

import pytest
import torch
from models.small_models import images
from models.weights.exported import TINY, described, valued, write
from models.weights.test_weights_peers import prepared
from safetensors.torch import load_file
from torch.nn import functional as F

from vitscale.models import Model
from vitscale.recipe.families import ViTShape

timm = pytest.importorskip("timm")
SWIN = {"name": "Swin-T", "width": 32, "num_heads": 2, "blocks": [2, 2, 2, 2], "window": 2}


def seen_by(model: Model, layers=None) -> list[torch.Tensor]:
    with torch.no_grad():
        return model.feature_maps(images(model.image_size), layers)


@pytest.mark.parametrize(
    ("block", "layers"),
    [(SWIN, [1, 2, 3, 4]), ({"name": "ResNet50x1"}, [1, 2, 3]), (TINY | {"depth": 4}, [2, 4])],
    ids=["swin", "resnet", "vit"],
)
def test_maps_are_timms(block, layers, tmp_path):
    """Of a ResNet's last stage timm gives what comes after the norm."""
    description, model = prepared(block)
    found = model.foreign().timm()
    peer = timm.create_model(found.name, num_classes=7, **found.arguments).eval()
    peer.load_state_dict(load_file(write(model, description, "timm", tmp_path)), strict=True)
    chosen = [layer - (block.get("name") != "ResNet50x1") for layer in layers]  # of a ResNet the root is timm's first
    with torch.no_grad():
        theirs = peer.forward_intermediates(
            images(64).permute(0, 3, 1, 2), indices=chosen, output_fmt="NCHW", intermediates_only=True
        )
    for ours, other in zip(seen_by(model, layers), theirs, strict=True):
        assert ours.shape == other.shape
        assert (ours - other).abs().max() < 1e-4 * other.abs().max()


def test_maps_are_those_of_transformers_backbones(tmp_path):
    """Which norm each map by a norm of their own. They shift windows in a map of one window, too: here none is."""
    transformers = pytest.importorskip("transformers")
    description = described(SWIN, 128)
    model = valued(description)
    peer = transformers.SwinBackbone.from_pretrained(
        str(write(model, description, "hf", tmp_path)), out_features=["stage1", "stage2", "stage3", "stage4"]
    ).eval()
    with torch.no_grad():
        theirs = peer(images(128).permute(0, 3, 1, 2)).feature_maps
    for stage, (ours, other) in enumerate(zip(seen_by(model), theirs, strict=True)):
        assert ours.shape[2] == 128 // (4 * 2**stage)
        normed = F.layer_norm(ours.permute(0, 2, 3, 1), ours.shape[1:2], eps=1e-5).permute(0, 3, 1, 2)
        torch.testing.assert_close(normed, other, rtol=1e-4, atol=1e-4)


def test_maps_are_those_of_dinov2_as_a_backbone(tmp_path):
    transformers = pytest.importorskip("transformers")
    block = TINY | {"mlp": "exact_gelu", "layer_scale": 1e-5, "head": "linear", "mlp_dim": 192}
    description = described(block)
    model = valued(description)
    folder = tmp_path / "dino"
    from vitscale.models.weights import write_weights

    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write_weights(folder, "hf", description, values.__getitem__, True)
    peer = transformers.Dinov2Backbone.from_pretrained(str(folder), out_features=["stage1", "stage2"]).eval()
    with torch.no_grad():
        theirs = peer(images(64).permute(0, 3, 1, 2)).feature_maps
        ours = [model.norm(each.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) for each in seen_by(model, [1, 2])]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "block",
    [
        {"name": "R50+ViT-B/16", "blocks": [1, 1], "width": 48, "depth": 2, "mlp_dim": 96, "num_heads": 3},
        TINY | {"registers": 3},
        TINY | {"pool": "normed_mean"},
        {"name": "AxialResNet50", "blocks": [1, 1]},
        SWIN,
    ],
)
def test_a_map_has_the_places_of_the_last_tokens(block):
    model = valued(described(block))
    (last,) = seen_by(model, [len(model.blocks) if isinstance(model.shape, ViTShape) else len(model.shape.blocks)])
    side = model.anatomy().grid
    assert last.shape == (
        2,
        model.shape.width if isinstance(model.shape, ViTShape) else model.shape.channels,
        side,
        side,
    )
    assert torch.equal(seen_by(model)[-1], last)
    with pytest.raises(ValueError, match=r"\[0, 9\]"):
        seen_by(model, [0, 1, 9])
