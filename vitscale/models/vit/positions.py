"""Ways to tell a Transformer where its tokens are (appendix D.3), and their resampling for another resolution.

Shape legend: T tokens (N patches, and before them the class token where there is one), D width, A heads, d = D / A, h w
rows and columns of the grid of patches.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

PositionKind = Literal["none", "1d", "2d", "sincos", "relative", "rope", "1d_rope"]
SincosTable = Literal["big_vision", "mae"]
_EVA_SIDE = 16  # patches of the images of 224 pixels that EVA-02 was pre-trained on


class TwoDPositions(nn.Module):
    """One embedding of D/2 a column (x) and one a row (y), side by side; the class token has one of its own."""

    def __init__(self, grid: int, width: int, class_token: bool) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.empty(grid, width // 2))
        self.y = nn.Parameter(torch.empty(grid, width // 2))
        self.cls = nn.Parameter(torch.empty(1, width)) if class_token else None

    def forward(self) -> Tensor:
        """(1, T, D)"""
        h, w, half = len(self.y), len(self.x), self.x.shape[1]
        x_hwD = self.x.expand(h, w, half)
        y_hwD = self.y.unsqueeze(1).expand(h, w, half)
        patches = torch.cat([x_hwD, y_hwD], dim=-1).flatten(0, 1)
        if self.cls is None:
            return patches.unsqueeze(0)
        # Of a batch of one image, torch would give this parameter and the class token the same memory as gradient: what
        # the next micro-batch adds, or clipping takes off, would be added and taken twice.
        return torch.cat([self.cls * 1.0, patches]).unsqueeze(0)


def absolute_positions(
    kind: PositionKind, grid: int, width: int, class_token: int
) -> nn.Parameter | TwoDPositions | None:
    """The learned embeddings to add to the tokens of a grid x grid of patches; None if there are none.

    `class_token` is the number of tokens before them: 2 if a distillation token follows the class token.
    """
    if kind in ("1d", "1d_rope"):
        return nn.Parameter(torch.empty(1, grid**2 + class_token, width))
    return TwoDPositions(grid, width, class_token > 0) if kind == "2d" else None


def position_values(positions: nn.Parameter | TwoDPositions | None) -> Tensor | None:
    """(1, T, D) to add to the tokens."""
    return positions() if isinstance(positions, TwoDPositions) else positions


def sincos_positions(grid: int, width: int, like: Tensor, table: SincosTable = "big_vision") -> Tensor:
    """Fixed embeddings of a grid x grid of patches: (1, N, D).

    Of D / 4 frequencies, from 1 down to 1 / 10,000 of a radian a patch, the sines by column, the cosines by column, the
    sines by row, the cosines by row, as in big_vision. With `table` mae the lowest frequency is one step higher, as in
    MAE, MoCo v3 and timm. Computed in fp32, in the dtype and on the device of `like`.
    """
    quarter = width // 4
    last = quarter if table == "mae" else quarter - 1
    steps = torch.arange(quarter, dtype=torch.float32, device=like.device) / last
    angles = torch.arange(grid, dtype=torch.float32, device=like.device)[:, None] * 10_000.0**-steps
    waves = torch.cat([angles.sin(), angles.cos()], dim=-1)  # (n, D / 2)
    by_column = waves[None].expand(grid, grid, -1)
    by_row = waves[:, None].expand(grid, grid, -1)
    return torch.cat([by_column, by_row], dim=-1).flatten(0, 1).unsqueeze(0).to(like.dtype)


def relative_logits(query_BATd: Tensor, table_LAd: Tensor) -> Tensor:
    """Products of every query i with the embedding of every offset j - i.

    Args:
        query_BATd: (B, A, T, d).
        table_LAd: (L, A, d) with L = 2 T - 1; row o belongs to the offset j - i = o - (T - 1).

    Returns:
        (B, A, T, T), for query i and position j.
    """
    B, A, T, _ = query_BATd.shape
    by_offset = torch.einsum("batd,lad->batl", query_BATd, table_LAd)
    if T == 1:
        return by_offset
    # Entry (i, j - i + T - 1) of rows of 2 T - 1 is entry (i, j) of rows one shorter that begin T - 1 later: no gather,
    # whose backward pass would add in any order.
    return by_offset.flatten(-2)[..., T - 1 : T - 1 + T * (2 * T - 2)].view(B, A, T, 2 * T - 2)[..., :T]


def patch_rotation(
    grid: int,
    head_dim: int,
    base: float,
    like: Tensor,
    kind: Literal["rope", "1d_rope"] = "rope",
    unit: Literal["image", "patch"] = "image",
    stretch: Sequence[float] = (1.0, 1.0),
) -> Tensor:
    """Cosines and sines, negative for the first d / 2, of the angles by which `rotate` turns a grid x grid: (2, N, d).

    `rope` as in DINOv3: rows and columns of the patches' centres are numbers in [-1, 1], whatever the resolution, and
    count full turns. `1d_rope` as in EVA-02: they begin at 0, a side is 16 whatever the resolution, and they count
    radians; with the unit `patch`, as in ViT-5, a patch is one. For each of d / 4 frequencies, from 1 down to 1 / base,
    there is an angle by row and one by column, and each rotates two of the d elements; `stretch` are factors of the
    two. Computed in fp32, in the dtype and on the device of `like`.
    """
    frequencies = base ** (-torch.arange(head_dim // 4, dtype=torch.float32, device=like.device) / (head_dim // 4))
    patches = torch.arange(grid, dtype=torch.float32, device=like.device)
    a_patch = 1.0 if unit == "patch" else _EVA_SIDE / grid
    radians = patches * a_patch if kind == "1d_rope" else 2 * math.pi * ((patches + 0.5) * (2 / grid) - 1)
    rows, columns = ((factor * radians)[:, None] * frequencies for factor in stretch)  # (n, d / 4)
    by_row, by_column = rows[:, None].expand(grid, grid, -1), columns[None].expand(grid, grid, -1)
    half_Nd = torch.cat([by_row, by_column], dim=-1).flatten(0, 1)
    sin_Nd = half_Nd.sin()
    return torch.stack([half_Nd.cos().tile(2), torch.cat([-sin_Nd, sin_Nd], dim=-1)]).to(like.dtype)


def rotate(x_BATd: Tensor, rotation_2Nd: Tensor) -> Tensor:
    """Queries or keys (B, A, T, d), the last N of T rotated: elements i and i + d / 2 are a point of a plane.

    `rotation_2Nd` may be (2, B, 1, N, d), if images have patches of their own.
    """
    cos_Nd, sin_Nd = rotation_2Nd
    before = x_BATd.shape[2] - cos_Nd.shape[-2]
    patches = x_BATd[:, :, before:]
    # Not by its two parts: the gradient of each would fill a whole tensor with zeros, which are added.
    rotated = patches * cos_Nd + patches.roll(patches.shape[-1] // 2, -1) * sin_Nd
    return torch.cat([x_BATd[:, :, :before], rotated], dim=2) if before else rotated


def resample_positions(
    positions_1TD: Tensor, old: tuple[int, int], new: tuple[int, int], class_token: int = True
) -> Tensor:
    """Position embeddings for another resolution (section 3.2): the grid is interpolated, the class token kept.

    Bilinear with the corners of both grids in one place, which is what the authors' `scipy.ndimage.zoom(grid, factors,
    order=1)` computes; align_corners=False, as other projects have it, is something else.

    Args:
        positions_1TD: (1, T, D), T = class_token + rows * columns of `old`.
        old, new: (rows, columns) of the grids.
        class_token: whether the first embedding is the class token's; 2 where the next is a distillation token's.

    Returns:
        (1, T', D) in the dtype of `positions_1TD`, computed in fp32.

    Raises `ValueError` if T is not that of `old`.
    """
    head, grid = positions_1TD[:, :class_token], positions_1TD[:, class_token:]
    if grid.shape[1] != old[0] * old[1]:
        raise ValueError(
            f"{grid.shape[1]} position embeddings of patches cannot be a grid of {old[0]} x {old[1]} "
            f"({'with' if class_token else 'without'} a class token)"
        )
    if old == new:
        return positions_1TD
    planes = grid.view(1, *old, -1).permute(0, 3, 1, 2).float()
    planes = F.interpolate(planes, size=new, mode="bilinear", align_corners=True)
    return torch.cat([head, planes.flatten(2).transpose(1, 2).to(head.dtype)], dim=1)


def positions_of_grid(positions_1TD: Tensor, old: int, new: int, class_token: int) -> Tensor:
    """As `resample_positions` for square grids, as a product with a matrix.

    Its gradient is a product as well: that of an interpolation would be added in any order on CUDA.
    """
    if old == new:
        return positions_1TD
    head, grid = positions_1TD[:, :class_token], positions_1TD[:, class_token:]
    matrix = torch.from_numpy(_resampling(old, new)).to(grid.device)
    return torch.cat([head, (matrix @ grid.float()).to(grid.dtype)], dim=1)


@lru_cache(maxsize=16)
def _resampling(old: int, new: int) -> np.ndarray:
    """The weights of the patches of an old grid for those of a new one, fp32 (new * new, old * old)."""
    at = np.linspace(0, old - 1, new)
    weights = np.maximum(1 - np.abs(at[:, None] - np.arange(old)), 0)  # of a row, or a column
    return np.kron(weights, weights).astype(np.float32)
