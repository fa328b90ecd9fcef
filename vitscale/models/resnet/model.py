"""The ResNets of the study: BiT (Kolesnikov et al., 2020), with group norm and weight-standardised convolutions.

Two definitions are in use, and a shape's `variant` says which: v2 is pre-activation, as the released BiT weights are;
v1 post-activation, as in the stems of the authors' hybrids. They differ in order, padding and constants, all of which
are kept as published.

Shape legend: B batch, H W image height and width, C channels, h w rows and columns of a feature map, K classes.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitscale.models.anatomy import Anatomy
from vitscale.models.initialise import Initialiser, Unfilled, constant, lecun_normal, normal
from vitscale.models.layers import CHANNELS, OutputLayer, check_layers, check_size, drop_path, no_record, run_block
from vitscale.models.model import Model, Outputs
from vitscale.models.resnet.axial import AxialAttention2d
from vitscale.models.resnet.weights import ResNetWeights, recognise
from vitscale.models.weights.source import Source
from vitscale.recipe.families.resnet import GROUPS, ResNetShape

GROUP_NORM_EPS = {"v1": 1e-6, "v2": 1e-5}
Variant = Literal["v1", "v2"]


class GroupNorm(Unfilled, nn.GroupNorm):
    """Group norm of 32 groups, values unset."""

    def __init__(self, channels: int, variant: Variant) -> None:
        super().__init__(GROUPS, channels, eps=GROUP_NORM_EPS[variant])


class StdConv(Unfilled, nn.Conv2d):
    """Convolution without bias whose weights are standardised for each output channel (Qiao et al., 2019).

    The statistics are computed in fp32. v2 pads k // 2 on every side; v1 is 'SAME', which with a stride of 2 over an
    even size pads one row and column less at the top and left.
    """

    def __init__(self, inputs: int, outputs: int, kernel_size: int, stride: int, variant: Variant) -> None:
        super().__init__(inputs, outputs, kernel_size, stride, padding=kernel_size // 2, bias=False)
        self.variant = variant

    def forward(self, x_BChw: Tensor) -> Tensor:
        h, w = x_BChw.shape[-2:]
        if self.variant == "v1" and self.stride[0] == 2 and self.kernel_size[0] > 1 and (h % 2 == 0 or w % 2 == 0):
            k = self.kernel_size[0] // 2
            padded = F.pad(x_BChw, (k - (w % 2 == 0), k, k - (h % 2 == 0), k))
            return F.conv2d(padded, self.standardised(), None, self.stride)
        return F.conv2d(x_BChw, self.standardised(), None, self.stride, self.padding)

    def standardised(self) -> Tensor:
        """The weights that it convolves with (outputs, inputs, k, k)."""
        if self.variant == "v2":
            weight = F.layer_norm(self.weight.flatten(1), [self.weight[0].numel()], eps=1e-10)
            return weight.view_as(self.weight)
        weight = self.weight.float()
        variance, mean = torch.var_mean(weight, dim=(1, 2, 3), correction=0, keepdim=True)
        return ((weight - mean) / (variance.sqrt() + 1e-5)).to(self.weight.dtype)


def _mixing(shape: ResNetShape, channels: int, size: int, stride: int) -> nn.Module:
    if shape.mixing == "axial":
        return AxialAttention2d(channels, size, stride)
    return StdConv(channels, channels, 3, stride, shape.variant)


class PreActivationUnit(nn.Module):
    """A bottleneck unit of v2: norm and ReLU before each convolution."""

    def __init__(
        self, shape: ResNetShape, inputs: int, outputs: int, size: int, stride: int, drop_path: float = 0.0
    ) -> None:
        super().__init__()
        self.drop_path = drop_path
        middle = outputs // 4
        self.norm1 = GroupNorm(inputs, "v2")
        self.conv1 = StdConv(inputs, middle, 1, 1, "v2")
        self.norm2 = GroupNorm(middle, "v2")
        self.conv2 = _mixing(shape, middle, size, stride)
        self.norm3 = GroupNorm(middle, "v2")
        self.conv3 = StdConv(middle, outputs, 1, 1, "v2")
        self.proj = StdConv(inputs, outputs, 1, stride, "v2") if inputs != outputs or stride > 1 else None

    def forward(self, x_BChw: Tensor, path: Tensor | None = None) -> Tensor:
        active = F.relu(self.norm1(x_BChw), inplace=True)
        shortcut = x_BChw if self.proj is None else self.proj(active)
        out = self.conv1(active)
        out = self.conv2(F.relu(self.norm2(out), inplace=True))
        out = self.conv3(F.relu(self.norm3(out), inplace=True))
        return shortcut + drop_path(out, self.drop_path, path)


class PostActivationUnit(nn.Module):
    """A bottleneck unit of v1: norm after each convolution, ReLU after the sum."""

    def __init__(
        self, shape: ResNetShape, inputs: int, outputs: int, size: int, stride: int, drop_path: float = 0.0
    ) -> None:
        super().__init__()
        self.drop_path = drop_path
        middle = outputs // 4
        self.conv1 = StdConv(inputs, middle, 1, 1, "v1")
        self.norm1 = GroupNorm(middle, "v1")
        self.conv2 = _mixing(shape, middle, size, stride)
        self.norm2 = GroupNorm(middle, "v1")
        self.conv3 = StdConv(middle, outputs, 1, 1, "v1")
        self.norm3 = GroupNorm(outputs, "v1")
        project = inputs != outputs or stride > 1
        self.proj = StdConv(inputs, outputs, 1, stride, "v1") if project else None
        self.proj_norm = GroupNorm(outputs, "v1") if project else None

    def forward(self, x_BChw: Tensor, path: Tensor | None = None) -> Tensor:
        shortcut = x_BChw
        if self.proj is not None and self.proj_norm is not None:
            shortcut = self.proj_norm(self.proj(x_BChw))
        out = F.relu(self.norm1(self.conv1(x_BChw)), inplace=True)
        out = F.relu(self.norm2(self.conv2(out)), inplace=True)
        out = drop_path(self.norm3(self.conv3(out)), self.drop_path, path)
        return F.relu(shortcut + out, inplace=True)


class Root(nn.Module):
    """The 7x7 convolution and the 3x3 max pooling, each of stride 2."""

    def __init__(self, channels: int, variant: Variant) -> None:
        super().__init__()
        self.conv = StdConv(CHANNELS, channels, 7, 2, variant)
        self.norm = GroupNorm(channels, variant) if variant == "v1" else None

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x_BChw = self.conv(images_BCHW)
        h, w = x_BChw.shape[-2:]
        if self.norm is not None:
            return F.max_pool2d(F.relu(self.norm(x_BChw), inplace=True), 3, 2, (h % 2, w % 2), ceil_mode=True)
        # The released v2 weights were trained with zeros at the border, which compete with negative values: not what
        # torch pads with. The first windows reach beyond the border, and over an odd size the last ones too.
        pooled = F.max_pool2d(x_BChw, 3, 2, 1)
        for side, size in ((2, h), (3, w)):
            for place in (0, -1) if size % 2 else (0,):
                pooled.select(side, place).clamp_(min=0)
        return pooled


class Features(nn.Module):
    """Root and stages: images (B, H, W, 3) -> feature map (B, C, h, w).

    The images come in channels-last memory, and convolutions and CPU norms keep it.
    """

    def __init__(self, shape: ResNetShape, *, image_size: int, checkpoint_every: int, drop_path: float = 0.0) -> None:
        super().__init__()
        self.checkpoint_every = checkpoint_every
        self.root = Root(shape.root_channels, shape.variant)
        unit = PreActivationUnit if shape.variant == "v2" else PostActivationUnit
        inputs, size, before = shape.root_channels, -(-image_size // 4), 0
        self.stages = nn.ModuleList()
        for stage, length in enumerate(shape.blocks):
            outputs = shape.stage_channels(stage)
            units = nn.ModuleList()
            for index in range(length):
                stride = 2 if stage > 0 and index == 0 else 1
                share = shape.drop_path_of(before + index, drop_path)
                units.append(unit(shape, inputs, outputs, size, stride, share))
                inputs, size = outputs, -(-size // stride)
            before += length
            self.stages.append(units)

    def units(self) -> list[nn.Module]:
        return [unit for stage in self.stages for unit in stage.children()]

    def layers(self) -> dict[str, nn.Module]:
        """The units by stage and place, both from 1: `stage 2.1`."""
        return {
            f"stage {at}.{place}": unit
            for at, stage in enumerate(self.stages, 1)
            for place, unit in enumerate(stage.children(), 1)
        }

    def filters(self) -> Tensor:
        """The root's filters (F, 7, 7, 3), standardised."""
        return self.root.conv.standardised().permute(0, 2, 3, 1)

    def forward(
        self,
        images_BHWC: Tensor,
        keep: Callable[[str, Tensor], None] = no_record,
        paths: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """The last feature map; `keep` is called with that of each stage, `stage_1` ...

        `paths`, for each unit bool (B,), are where it is not only its shortcut; None: everywhere.
        """
        x_BChw, index = self.root(images_BHWC.permute(0, 3, 1, 2)), 0
        for number, stage in enumerate(self.stages, 1):
            for unit in stage.children():
                path = None if paths is None else paths[index][:, None, None, None]
                x_BChw, index = run_block(self, index, unit, x_BChw, path), index + 1
            keep(f"stage_{number}", x_BChw)
        return x_BChw


class ResNet(Model):
    """A ResNet: images (B, H, W, 3) in [-1, 1] -> tokens, representation and logits.

    Args:
        shape: the dimensions.
        image_size: side of the square input in pixels.
        num_classes: K; None for a backbone without a head.
        drop_path: share of samples for which the last unit is its shortcut alone while training; that of the units
            before it grows from 0 in equal steps.
        checkpoint_every: recompute every k-th unit's activations in the backward pass; 0 keeps all of them.
    """

    def __init__(
        self,
        shape: ResNetShape,
        *,
        image_size: int,
        num_classes: int | None,
        drop_path: float = 0.0,
        checkpoint_every: int = 0,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.image_size = image_size
        self.features = Features(shape, image_size=image_size, checkpoint_every=checkpoint_every, drop_path=drop_path)
        self.norm = GroupNorm(shape.channels, "v2") if shape.variant == "v2" else None
        self.head = OutputLayer(shape.channels, num_classes) if num_classes is not None else None

    def forward(self, images_BHWC: Tensor) -> Outputs:
        """Tokens (B, h w, C): the last feature map, row by row; its mean (B, C); logits (B, K)."""
        if self.shape.mixing == "axial":
            check_size(images_BHWC, self.image_size)
        kept = self.kept_paths([images_BHWC])
        x_BChw = self.features(images_BHWC, paths=None if kept is None else list(kept[0]))
        if self.norm is not None:
            x_BChw = F.relu(self.norm(x_BChw), inplace=True)
        pooled_BC = x_BChw.mean(dim=(2, 3))
        logits = None if self.head is None else self.head(pooled_BC)
        return Outputs(x_BChw.flatten(2).transpose(1, 2), pooled_BC, logits)

    def feature_maps(self, images: Tensor, layers: Sequence[int] | None = None) -> list[Tensor]:
        layers = check_layers(layers, len(self.shape.blocks))
        maps: dict[str, Tensor] = {}
        self.features(images, maps.__setitem__)
        return [maps[f"stage_{layer}"] for layer in layers]

    @property
    def path_shares(self) -> Sequence[float]:
        return [unit.drop_path for unit in self.features.units()]  # type: ignore[misc]

    def units(self) -> Sequence[nn.Module]:
        return self.features.units()

    def anatomy(self) -> Anatomy:
        """As `Model.anatomy`: the positions of the last feature map take the place of patches."""
        return Anatomy(
            self.features.layers(),
            grid=self.shape.feature_size(self.image_size),
            stride=self.shape.stride,
            embedding=(self.features.root.conv,),
        )

    def filters(self) -> Tensor:
        return self.features.filters()

    @classmethod
    def recognise(cls, source: Source) -> tuple[dict[str, Any], int | None] | None:
        return recognise(source)

    def foreign(self) -> ResNetWeights:
        return ResNetWeights(self)

    def initialiser(self, name: str) -> Initialiser:
        """How the parameter `name` begins: see `resnet_initialiser`; the output layer at zero."""
        return constant(0.0) if name in ("head.weight", "head.bias") else resnet_initialiser(name, self.shape.variant)


def resnet_initialiser(name: str, variant: Variant) -> Initialiser:
    """How a parameter of `Features` or a norm begins, as in the authors' code.

    Convolutions and axial attention have variance 1 / fan_in (standardisation makes the scale of a convolution
    indifferent); norms begin as the identity, except the last of each v1 unit, which begins at zero, so that the unit
    begins as its shortcut.
    """
    layer, _, kind = name.rpartition(".")
    module = layer.rpartition(".")[2]
    if kind == "relative":
        return normal(0.02)
    if "norm" in module:
        return constant(1.0 if kind == "weight" and not (variant == "v1" and module == "norm3") else 0.0)
    if module in ("conv", "conv1", "conv2", "conv3", "proj", "qkv"):
        return lecun_normal
    raise KeyError(f"no initial value is defined for the parameter {name!r}")
