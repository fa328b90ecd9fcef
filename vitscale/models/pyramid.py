"""Maps of several strides made of a model's last one, for detectors: the simple feature pyramid (ViTDet).

Li et al., 2022, "Exploring Plain Vision Transformer Backbones for Object Detection", section 3; the layers are those of
detectron2's `SimpleFeaturePyramid`.

Shape legend: B batch, S side of the model's input, C channels of its last map, O channels of the pyramid.
"""

from typing import ClassVar

from torch import Tensor, nn

from vitscale.ground.errors import RecipeError, check_numbers
from vitscale.models.model import Model


class ChannelNorm(nn.Module):
    """Layer norm over the channels of a map (B, C, h, w)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, x_BChw: Tensor) -> Tensor:
        return self.norm(x_BChw.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class SimpleFeaturePyramid(nn.Module):
    """A model with a pyramid on its last feature map, as torchvision's detectors take a backbone.

    Images (B, 3, S, S) as `preprocess` makes them -> `{"p2": (B, O, h, w), ..., "p5": ...}` at a quarter, half, once
    and twice the stride of the last map: 4, 8, 16 and 32 for patches of 16. The pyramid's values are torch's own at
    the beginning; it is trained with the detector.

    Args:
        model: a model of any family with feature maps, such as the `backbone` of `vitscale.load`.
        out_channels: O.

    Raises `RecipeError` for anything else.
    """

    names: ClassVar[tuple[str, ...]] = ("p2", "p3", "p4", "p5")

    def __init__(self, model: Model, out_channels: int = 256) -> None:
        super().__init__()
        if not isinstance(model, Model):
            raise RecipeError(f"model is a {type(model).__name__}: expected one such as vitscale.load(...).backbone")
        check_numbers(1, out_channels=out_channels)
        C = model.shape.channels
        self.model, self.out_channels = model, out_channels
        scales: list[list[nn.Module]] = [
            [
                nn.ConvTranspose2d(C, C // 2, 2, stride=2),
                ChannelNorm(C // 2),
                nn.GELU(),
                nn.ConvTranspose2d(C // 2, C // 4, 2, stride=2),
            ],
            [nn.ConvTranspose2d(C, C // 2, 2, stride=2)],
            [],
            [nn.MaxPool2d(2, stride=2)],
        ]
        self.levels = nn.ModuleList(
            nn.Sequential(
                *scale,
                nn.Conv2d(channels, out_channels, 1, bias=False),
                ChannelNorm(out_channels),
                nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
                ChannelNorm(out_channels),
            )
            for scale, channels in zip(scales, (C // 4, C // 2, C, C), strict=True)
        )

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Images (B, 3, S, S) -> the name of a level -> its map. Raises `ValueError` for another size."""
        last = self.model.feature_maps(images.permute(0, 2, 3, 1).contiguous())[-1]
        return {name: level(last) for name, level in zip(self.names, self.levels, strict=True)}
