"""The simple feature pyramid, against ViTDet's layers written out, and detectors that are trained on it."""

import pytest
import torch
from models.test_feature_maps import SWIN
from models.weights.exported import TINY, described, valued
from torch.nn import functional as F

from vitscale.ground.errors import RecipeError
from vitscale.models import SimpleFeaturePyramid


def written_out(x: torch.Tensor, values: list[torch.Tensor]) -> list[torch.Tensor]:
    """ViTDet's pyramid on a map (B, C, h, w); its weights in the order of the levels, from fine to coarse."""
    values = list(values)

    def take(count: int) -> list[torch.Tensor]:
        taken, values[:count] = values[:count], []
        return taken

    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        mean, variance = x.mean(dim=1, keepdim=True), x.var(dim=1, keepdim=True, correction=0)
        return (x - mean) / (variance + 1e-6).sqrt() * weight[:, None, None] + bias[:, None, None]

    found = []
    for scale in (4, 2, 1, 0.5):
        y = x
        if scale >= 2:
            y = F.conv_transpose2d(y, *take(2), stride=2)
        if scale == 4:
            y = F.conv_transpose2d(F.gelu(norm(y, *take(2))), *take(2), stride=2)
        if scale == 0.5:
            y = F.max_pool2d(y, 2)
        y = norm(F.conv2d(y, *take(1)), *take(2))
        found.append(norm(F.conv2d(y, *take(1), padding=1), *take(2)))
    assert not values
    return found


@pytest.mark.parametrize("block", [TINY, SWIN, {"name": "ResNet50x1", "blocks": [1, 1]}], ids=["vit", "swin", "resnet"])
def test_its_maps_are_those_of_its_layers_written_out(block):
    model = valued(described(block))
    pyramid = SimpleFeaturePyramid(model, 24)
    with torch.no_grad():
        for name, parameter in pyramid.levels.named_parameters():
            torch.nn.init.normal_(parameter, 0.1, 0.5, generator=torch.Generator().manual_seed(len(name)))
        pixels = torch.rand(2, 3, 64, 64)
        found = pyramid(pixels)
        last = model.feature_maps(pixels.permute(0, 2, 3, 1))[-1]
    expected = written_out(last, [parameter.detach() for parameter in pyramid.levels.parameters()])
    side = model.anatomy().grid
    assert [each.shape for each in found.values()] == [(2, 24, s, s) for s in (4 * side, 2 * side, side, side // 2)]
    for ours, theirs in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("model", "channels"), [(torch.nn.Identity(), 24), (None, 24), ("vit", 0), ("vit", "8")])
def test_what_it_cannot_be_made_of_is_told(model, channels):
    made = valued(described(TINY)) if model == "vit" else model
    with pytest.raises(RecipeError):
        SimpleFeaturePyramid(made, channels)
