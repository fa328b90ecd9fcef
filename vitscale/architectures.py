"""Model names -> dimensions. Pure data: no torch, importable by everything.

Transformer sizes Ti, S, B, L, H are the paper's (Table 1) and its follow-up's (Steiner et al., 2021); b is B with every
width halved (the paper's Figure 4); g and G are those of "Scaling Vision Transformers" (Zhai et al., 2021).
"""

import difflib
import re
from dataclasses import dataclass, replace
from typing import Literal

RESNET_GROUPS = 32
"""Groups of every group norm of the ResNets: all of their channel counts are multiples of it."""
AXIAL_RESNET_HEADS = 8
"""Heads of every attention of an AxialResNet."""


@dataclass(frozen=True)
class ResNetShape:
    """The dimensions of one ResNet (BiT), or of the stem of a hybrid.

    `blocks` bottleneck units in each stage; the channels of stage s are 256 * 2^s * `width_factor` (a quarter of that
    within a unit). `variant` v2 is pre-activation, as the released BiT weights are; v1 post-activation. `mixing` is
    what mixes positions in a unit: a 3x3 convolution, or row and column attention in its place (AxialResNet).
    """

    blocks: tuple[int, ...]
    width_factor: int = 1
    variant: Literal["v1", "v2"] = "v2"
    mixing: Literal["conv", "axial"] = "conv"

    @property
    def root_channels(self) -> int:
        """Channels behind the 7x7 convolution."""
        return 64 * self.width_factor

    def stage_channels(self, stage: int) -> int:
        """Channels behind a stage, counted from 0."""
        return 256 * 2**stage * self.width_factor

    @property
    def channels(self) -> int:
        """Channels of the last feature map."""
        return self.stage_channels(len(self.blocks) - 1) if self.blocks else self.root_channels

    @property
    def stride(self) -> int:
        """Pixels of the image for one step in the last feature map."""
        return 4 * 2 ** max(len(self.blocks) - 1, 0)

    def feature_size(self, image_size: int) -> int:
        """Side of the last feature map: every halving rounds up."""
        return -(-image_size // self.stride)


@dataclass(frozen=True)
class ViTShape:
    """The dimensions of one Vision Transformer.

    `width` is the hidden size D, `mlp_dim` the hidden size of the MLP. `patch_size` P counts pixels, or in a hybrid,
    which has a `stem`, steps of its feature map. With `attention` axial each of the `depth` blocks is a row and a
    column block.
    """

    patch_size: int
    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    attention: Literal["full", "axial"] = "full"
    stem: ResNetShape | None = None

    def cut_size(self, image_size: int) -> int:
        """Side of what is cut into patches: the image, or the stem's feature map."""
        return image_size if self.stem is None else self.stem.feature_size(image_size)

    def grid(self, image_size: int) -> int:
        """Patches along one side of a square image; what lies beyond the last whole patch is not seen."""
        return self.cut_size(image_size) // self.patch_size

    def describe_border(self, image_size: int) -> str | None:
        """What lies right of and below the last whole patch, in words; None where the image divides into patches."""
        unseen, grid = self.cut_size(image_size) % self.patch_size, self.grid(image_size)
        if unseen == 0:
            return None
        unit = "pixel" if self.stem is None else "feature map step"
        amount = f"1 {unit} right and below is" if unseen == 1 else f"{unseen} {unit}s right and below are"
        return f"{image_size} x {image_size} pixels are {grid} x {grid} patches; {amount} not seen"

    @property
    def stride(self) -> int:
        """Pixels of the image for one patch."""
        return self.patch_size * (1 if self.stem is None else self.stem.stride)

    @property
    def patch_dim(self) -> int:
        """Values in one patch: P * P * channels."""
        return self.patch_size**2 * (3 if self.stem is None else self.stem.channels)


Shape = ViTShape | ResNetShape

#            width  depth  mlp  heads
_VIT_SIZES = {
    "Ti": (192, 12, 768, 3),
    "S": (384, 12, 1536, 6),
    "b": (384, 12, 1536, 6),
    "B": (768, 12, 3072, 12),
    "L": (1024, 24, 4096, 16),
    "H": (1280, 32, 5120, 16),
    "g": (1408, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
}
_RESNET_BLOCKS = {
    "50": (3, 4, 6, 3),
    "101": (3, 4, 23, 3),
    "152": (3, 8, 36, 3),
    "200": (3, 24, 36, 3),
}
# (name of the stem, pixels a token stands for) -> blocks of the stem, patch size on its feature map. At /16 the fourth
# stage is gone and its blocks are in the third (section 4.1). The tiny R is a root without stages; in its published
# name /16 is not what a token stands for, which is 32 pixels.
_STEMS = {
    ("R50", "32"): ((3, 4, 6, 3), 1),
    ("R50", "16"): ((3, 4, 9), 1),
    ("R26", "32"): ((2, 2, 2, 2), 1),
    ("R", "16"): ((), 8),
}

REGISTRY = (
    *("ViT-Ti/16", "ViT-S/32", "ViT-S/16", "ViT-b/32", "ViT-B/32", "ViT-B/16", "ViT-B/8"),
    *("ViT-L/32", "ViT-L/16", "ViT-H/14", "ViT-g/14", "ViT-G/14"),
    *("ResNet50x1", "ResNet50x2", "ResNet50x3", "ResNet101x1", "ResNet101x3"),
    *("ResNet152x1", "ResNet152x2", "ResNet152x4", "ResNet200x3"),
    *("R+ViT-Ti/16", "R26+ViT-S/32", "R26+ViT-B/32"),
    *("R50+ViT-B/32", "R50+ViT-B/16", "R50+ViT-L/32", "R50+ViT-L/16"),
    *("Axial-ViT-B/32", "Axial-ViT-B/16", "AxialResNet50"),
)
"""The models that `vitscale models` lists and the tests cover; other names of the same patterns are known as well."""


def architecture(name: str) -> Shape:
    """Dimensions of a named model such as `ViT-L/16`, `R50+ViT-B/16`, `ResNet152x2` or `Axial-ViT-B/32`.

    Raises `ValueError` naming the nearest known model.
    """
    if match := re.fullmatch(r"(?:(R[0-9]*)(?:x1)?\+|(Axial-))?ViT-([A-Za-z]+)/([1-9][0-9]{0,3})", name):
        stem, axial, size, patch = match.groups()
        if size in _VIT_SIZES and (stem is None or (stem, patch) in _STEMS):
            width, depth, mlp_dim, num_heads = _VIT_SIZES[size]
            shape = ViTShape(int(patch), width, depth, mlp_dim, num_heads, "axial" if axial else "full")
            if stem is not None:
                blocks, patch_size = _STEMS[stem, patch]
                shape = replace(shape, patch_size=patch_size, stem=ResNetShape(blocks, variant="v1"))
            return shape
    if match := re.fullmatch(r"(Axial)?ResNet([0-9]+)(?:x([1-9][0-9]{0,2}))?", name):
        axial, layers, factor = match.groups()
        if layers in _RESNET_BLOCKS:
            return ResNetShape(_RESNET_BLOCKS[layers], int(factor or 1), mixing="axial" if axial else "conv")
    patterns = (
        f"ViT-SIZE/PATCH or Axial-ViT-SIZE/PATCH with SIZE one of {', '.join(_VIT_SIZES)}, "
        f"{', '.join(f'{stem}+ViT-SIZE/{patch}' for stem, patch in _STEMS)}, "
        f"ResNetDEPTHxWIDTH or AxialResNetDEPTHxWIDTH with DEPTH one of {', '.join(_RESNET_BLOCKS)}"
    )
    raise ValueError(f"unknown model {name!r} (did you mean {nearest(name)!r}?); expected {patterns}")


def nearest(name: str) -> str:
    """The registered name that looks most like this one."""
    return max(REGISTRY, key=lambda known: _likeness(name, known))


def _likeness(name: str, known: str) -> tuple[float, float]:
    """Case may be wrong, but where it decides (b or B) it counts."""
    loose = difflib.SequenceMatcher(None, name.lower(), known.lower()).ratio()
    return loose, difflib.SequenceMatcher(None, name, known).ratio()
