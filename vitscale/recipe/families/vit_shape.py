"""The dimensions of Vision Transformers, the names of the known ones, and the operations of their parts.

Transformer sizes Ti, S, B, L, H are the paper's (Table 1) and its follow-up's (Steiner et al., 2021); b is B with every
width halved (the paper's Figure 4); g and G are from "Scaling Vision Transformers" (Zhai et al., 2021). DINOv2 is the
variant with four registers (Oquab et al., 2023; Darcet et al., 2024); DINOv3 is from Simeoni et al. (2025), EVA-02 from
Fang et al. (2023).
"""

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from vitscale.ground.operations import Operation, dense, parameters, product
from vitscale.recipe.families.resnet import ResNetShape

#            width  depth  mlp  heads
_SIZES = {
    "Ti": (192, 12, 768, 3),
    "S": (384, 12, 1536, 6),
    "b": (384, 12, 1536, 6),
    "B": (768, 12, 3072, 12),
    "L": (1024, 24, 4096, 16),
    "H": (1280, 32, 5120, 16),
    "g": (1408, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
}
# Name -> the settings that all its sizes share.
_PARTS: dict[str, dict[str, Any]] = {
    "DINOv2": {"mlp": "exact_gelu", "layer_scale": 1e-5, "registers": 4},
    "DINOv3": {
        **{"mlp": "exact_gelu", "layer_scale": 1e-5, "registers": 4},
        **{"norm_eps": 1e-5, "qkv_bias": "no_key"},
    },
    "EVA02": {"mlp": "swiglu", "qkv_bias": "no_key"},
}
# Name -> defaults of keys outside the shape, for recipes that use this name and do not set them.
BESIDE: dict[str, dict[str, Any]] = {
    "DINOv3": {"position": {"kind": "rope"}},
    "EVA02": {"position": {"kind": "1d_rope"}, "pool": "normed_mean"},
}
# (name, size) -> patch size, width, depth, MLP width, heads, and the settings in which a size differs. With SwiGLU the
# MLP width is two thirds of 4 * width in DINOv2, rounded up to a multiple of 8, and in EVA-02, rounded down; in DINOv3
# it is 2 * width for 7B and 4 * width for S+ and H+.
_LATER: dict[tuple[str, str], tuple[tuple[int, int, int, int, int], dict[str, Any]]] = {
    **{
        (name, size): ((patch, *_SIZES[size]), {}) for name, patch in (("DINOv2", 14), ("DINOv3", 16)) for size in "SBL"
    },
    ("DINOv2", "g"): ((14, 1536, 40, 4096, 24), {"mlp": "swiglu"}),
    ("DINOv3", "S+"): ((16, *_SIZES["S"]), {"mlp": "swiglu"}),
    ("DINOv3", "H+"): ((16, 1280, 32, 5120, 20), {"mlp": "swiglu"}),
    ("DINOv3", "7B"): ((16, 4096, 40, 8192, 32), {"mlp": "swiglu", "qkv_bias": "none"}),
    ("EVA02", "Ti"): ((14, 192, 12, 512, 3), {}),
    ("EVA02", "S"): ((14, 384, 12, 1024, 6), {}),
    ("EVA02", "B"): ((14, 768, 12, 2048, 12), {"sub_norm": "mlp"}),
    ("EVA02", "L"): ((14, 1024, 24, 2730, 16), {"sub_norm": "mlp"}),
}
# (name of the stem, pixels per token) -> blocks of the stem, patch size on its feature map. At /16 the stem has no
# fourth stage, and that stage's blocks are in the third (section 4.1). The tiny R is a root without stages; the /16 in
# its published name does not count pixels per token, which are 32.
_STEMS = {
    ("R50", "32"): ((3, 4, 6, 3), 1),
    ("R50", "16"): ((3, 4, 9), 1),
    ("R26", "32"): ((2, 2, 2, 2), 1),
    ("R", "16"): ((), 8),
}

DropPathRule = Literal["growing", "uniform"]


@dataclass(frozen=True)
class ViTShape:
    """The dimensions of one Vision Transformer; the keys of `ViT` say what most of them mean."""

    patch_size: int  # P, in pixels, or in a hybrid in steps of the stem's feature map
    width: int  # D
    depth: int
    mlp_dim: int
    num_heads: int
    attention: Literal["full", "axial"] = "full"  # axial: each of the `depth` blocks is a row and a column block
    stem: ResNetShape | None = None  # only in a hybrid
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-6  # of every norm
    sub_norm: Literal["none", "mlp", "all"] = "none"
    mlp: Literal["gelu", "exact_gelu", "quick_gelu", "swiglu"] = "gelu"
    qkv_bias: Literal["all", "no_key", "none"] = "all"
    qk_norm: bool = False
    layer_scale: float | None = None
    registers: int = 0  # between the class token and the patches; no position is added to them
    class_position: bool = True
    distilled: bool = False
    class_token: bool = True

    def cut_size(self, image_size: int) -> int:
        """The side of what is cut into patches: the image, or the stem's feature map."""
        return image_size if self.stem is None else self.stem.feature_size(image_size)

    def grid(self, image_size: int) -> int:
        """Patches along one side of a square image; the model does not see what is beyond the last whole patch."""
        return self.cut_size(image_size) // self.patch_size

    @property
    def channels(self) -> int:
        """Channels of a feature map."""
        return self.width

    @property
    def stride(self) -> int:
        """Image pixels per patch, along one side."""
        return self.patch_size * (1 if self.stem is None else self.stem.stride)

    @property
    def patch_dim(self) -> int:
        """Values in one patch: P * P * channels."""
        return self.patch_size**2 * (3 if self.stem is None else self.stem.channels)

    def drop_path_of(self, index: int, of_last: float, rule: DropPathRule = "growing") -> float:
        """The share of samples for which a branch of block `index` is left out.

        It grows linearly from 0 in the first block to `of_last` in the last, or is `of_last` in all (uniform).
        """
        return of_last if rule == "uniform" else of_last * index / max(self.depth - 1, 1)

    @property
    def head_dim(self) -> int:
        """Size of a head's queries, keys and values."""
        return self.width // self.num_heads

    @property
    def fc1_dim(self) -> int:
        """Outputs of an MLP's first layer."""
        return self.mlp_dim * (2 if self.mlp == "swiglu" else 1)


def shape_of(name: str) -> ViTShape | None:
    """The dimensions of a model named like `ViT-L/16`, `R50+ViT-B/16`, `Axial-ViT-B/32`; None for other names."""
    for (family, size), (dimensions, parts) in _LATER.items():
        if name == f"{family}-{size}/{dimensions[0]}":
            return ViTShape(*dimensions, **(_PARTS[family] | parts))
    match = re.fullmatch(r"(?:(R[0-9]*)(?:x1)?\+|(Axial-))?ViT-([A-Za-z]+)/([1-9][0-9]{0,3})", name)
    if match is None:
        return None
    stem, axial, size, patch = match.groups()
    if size not in _SIZES or (stem is not None and (stem, patch) not in _STEMS):
        return None
    width, depth, mlp_dim, num_heads = _SIZES[size]
    shape = ViTShape(int(patch), width, depth, mlp_dim, num_heads, "axial" if axial else "full")
    if stem is None:
        return shape
    blocks, patch_size = _STEMS[stem, patch]
    return replace(shape, patch_size=patch_size, stem=ResNetShape(blocks, variant="v1"))


def block_operations(shape: ViTShape, *, sequences: int, T: int, relative: bool) -> list[Operation]:
    """One encoder block over independent sequences of T tokens: the whole image, or its rows or columns."""
    D, offsets = shape.width, 2 * T - 1
    told = [product("relative", sequences * T * offsets * D, params=offsets * D)] if relative else []
    scales = [] if shape.layer_scale is None else [parameters("layer_scale", 2 * D)]
    of_heads = 2 * norm_parameters(shape, shape.head_dim) if shape.qk_norm else 0
    biases = {"all": 3, "no_key": 2, "none": 0}[shape.qkv_bias]
    of_attention = norm_parameters(shape, D) if shape.sub_norm == "all" else 0
    return [
        parameters("norms", 2 * norm_parameters(shape, D) + of_heads + of_attention + _mlp_norm(shape)),
        dense("qkv", sequences * T, D, 3 * D, bias=False),
        parameters("qkv", biases * D),
        product("scores", 2 * sequences * T**2 * D),
        *told,
        dense("out", sequences * T, D, D),
        *scales,
        dense("mlp", sequences * T, D, shape.fc1_dim),
        dense("mlp", sequences * T, shape.mlp_dim, D),
    ]


def norm_parameters(shape: ViTShape, width: int) -> int:
    """The number of parameters of a norm: a factor per channel, and for layer norm a bias, too."""
    return width if shape.norm == "rms" else 2 * width


def _mlp_norm(shape: ViTShape) -> int:
    """The number of parameters of the norm inside an MLP."""
    return 0 if shape.sub_norm == "none" else norm_parameters(shape, shape.mlp_dim)


def map_operations(shape: ViTShape, T: int) -> list[Operation]:
    """Pooling by attention of one learned query over T tokens, and the MLP after it."""
    D = shape.width
    return [
        parameters("pool", D + norm_parameters(shape, D) + _mlp_norm(shape)),
        dense("pool", 1, D, D),
        dense("pool", T, D, 2 * D),
        product("pool", 2 * T * D),
        dense("pool", 1, D, D),
        dense("pool", 1, D, shape.fc1_dim),
        dense("pool", 1, shape.mlp_dim, D),
    ]
