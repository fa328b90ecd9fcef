"""Tokens of several grids side by side: one call of a layer for all of them.

DeepSpeed computes wrong gradients for modules that are called twice, so a model sees images of several sizes in one
call. All layers but attention look at single tokens, and do not ask whose they are.

Shape legend: g a grid, B its images, T the tokens of each, D width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Sizes = tuple[tuple[int, int], ...]  # (B, T) of each grid; empty where there is one


def sizes_of(grids: Sequence[Tensor]) -> Sizes:
    """The sizes of tokens (B, T, D) of several grids, or of one."""
    return () if len(grids) == 1 else tuple((len(each), each.shape[1]) for each in grids)


def side_by_side(grids: Sequence[Tensor]) -> Tensor:
    """Tokens (B, T, D) of several grids as (1, sum of B T, D); those of one as they are."""
    return grids[0] if len(grids) == 1 else torch.cat([each.flatten(0, 1) for each in grids]).unsqueeze(0)


def apart(tokens: Tensor, sizes: Sizes) -> list[Tensor]:
    """What `side_by_side` has put together."""
    if not sizes:
        return [tokens]
    parts = tokens[0].split([B * T for B, T in sizes])  # not by slices, whose gradients would be padded and added
    return [part.unflatten(0, size) for part, size in zip(parts, sizes, strict=True)]


def heads_apart(heads_BATd: Tensor, sizes: Sizes) -> list[Tensor]:
    """As `apart`, for queries, keys or values (B, A, T, d)."""
    if not sizes:
        return [heads_BATd]
    parts = heads_BATd[0].split([B * T for B, T in sizes], dim=1)
    return [part.unflatten(1, size).transpose(0, 1) for part, size in zip(parts, sizes, strict=True)]


def masks_of(paths: Sequence[Tensor], sizes: Sizes) -> Tensor:
    """Masks bool (P, B) of each grid, for tokens side by side: (P, 1, T, 1), or (P, B, 1, 1) of one grid."""
    if not sizes:
        return paths[0][:, :, None, None]
    wide = [each[:, :, None].expand(-1, -1, T).flatten(1) for each, (_, T) in zip(paths, sizes, strict=True)]
    return torch.cat(wide, dim=1)[:, None, :, None]
