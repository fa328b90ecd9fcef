"""Model names -> dimensions. Pure data: no torch, importable by everything.

Sizes Ti, S, B, L, H are the paper's (Table 1) and its follow-up's (Steiner et al., 2021); g and G are those of
"Scaling Vision Transformers" (Zhai et al., 2021).
"""

import difflib
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class ViTShape:
    """The dimensions of one Vision Transformer.

    `width` is the hidden size D, `mlp_dim` the hidden size of the MLP, `patch_size` P in pixels.
    """

    patch_size: int
    width: int
    depth: int
    mlp_dim: int
    num_heads: int

    def grid(self, image_size: int) -> int:
        """Patches along one side of a square image; pixels beyond the last whole patch are not seen."""
        return image_size // self.patch_size


#            width  depth  mlp  heads
_VIT_SIZES = {
    "Ti": (192, 12, 768, 3),
    "S": (384, 12, 1536, 6),
    "B": (768, 12, 3072, 12),
    "L": (1024, 24, 4096, 16),
    "H": (1280, 32, 5120, 16),
    "g": (1408, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
}
_COMMON_NAMES = [f"ViT-{size}/{patch}" for size in _VIT_SIZES for patch in (8, 14, 16, 32)]


def vit_shape(name: str) -> ViTShape:
    """Dimensions of a named Vision Transformer such as `ViT-L/16`.

    Raises `ValueError` naming the nearest known model.
    """
    match = re.fullmatch(r"ViT-([A-Za-z]+)/([1-9][0-9]*)", name)
    if match is None or match[1] not in _VIT_SIZES:
        nearest = difflib.get_close_matches(name, _COMMON_NAMES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"unknown model {name!r}; expected ViT-SIZE/PATCH with SIZE one of {', '.join(_VIT_SIZES)} "
            f"and PATCH the patch size in pixels (did you mean {nearest!r}?)"
        )
    width, depth, mlp_dim, num_heads = _VIT_SIZES[match[1]]
    return ViTShape(int(match[2]), width, depth, mlp_dim, num_heads)
