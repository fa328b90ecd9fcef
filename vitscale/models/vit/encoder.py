"""The Transformer encoder's blocks: attention, MLP, and the norms before them (section 3.1, appendix A).

Tokens of several grids lie side by side (`vit.grids`): then B is 1, T that of all, and `sizes` says whose they are.

Shape legend: B batch, T tokens, D width, A heads, d = D / A, N patches.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitscale.models.layers import LayerNorm, Linear, RMSNorm, attention, drop_path, relative_table
from vitscale.models.vit.grids import Sizes, apart, heads_apart, side_by_side
from vitscale.models.vit.positions import TwoDPositions, position_values, relative_logits, rotate
from vitscale.recipe.families import ViTShape

_OF_ONE_QUERY = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def norm_of(shape: ViTShape, width: int) -> nn.Module:
    """The norm of a shape's kind over `width` channels."""
    return (RMSNorm if shape.norm == "rms" else LayerNorm)(width, shape.norm_eps)


class Attention(nn.Module):
    """Multi-head self-attention with one (3D, D) matrix for queries, keys and values (appendix A, eq. 5-8).

    With `relative_tokens` T, products of the queries with an embedding of every offset within T tokens, which play the
    part of keys, are added to the logits (appendix D.3).
    """

    def __init__(self, shape: ViTShape, relative_tokens: int | None = None) -> None:
        super().__init__()
        D = shape.width
        self.num_heads = shape.num_heads
        self.qkv = Linear(D, 3 * D, bias=shape.qkv_bias == "all")
        has_own = shape.qkv_bias == "no_key"
        self.query_bias = nn.Parameter(torch.empty(D)) if has_own else None
        self.value_bias = nn.Parameter(torch.empty(D)) if has_own else None
        self.query_norm = norm_of(shape, shape.head_dim) if shape.qk_norm else None
        self.key_norm = norm_of(shape, shape.head_dim) if shape.qk_norm else None
        self.norm = norm_of(shape, D) if shape.sub_norm == "all" else None
        self.out = Linear(D, D)
        self.relative = relative_table(relative_tokens, D) if relative_tokens is not None else None

    def forward(self, x_BTD: Tensor, rotations: Sequence[Tensor] = (), sizes: Sizes = ()) -> Tensor:
        """(B, T, D) -> (B, T, D); `rotations` (2, N, d), one for each grid, turn the queries and keys of patches."""
        B, T, D = x_BTD.shape
        head_dim = D // self.num_heads
        qkv = self.qkv(x_BTD)
        if self.query_bias is not None and self.value_bias is not None:
            qkv = qkv + torch.cat([self.query_bias, torch.zeros_like(self.query_bias), self.value_bias])
        # Not by `permute`: the three gradients would be put together in its order, and be copied once more for `qkv`.
        parts = qkv.view(B, T, 3, self.num_heads, head_dim).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)  # each (B, A, T, d)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        grids = zip(heads_apart(query, sizes), heads_apart(key, sizes), heads_apart(value, sizes), strict=True)
        x_BTD = side_by_side([self._mixed(*of, rotations[at] if rotations else None) for at, of in enumerate(grids)])
        return self.out(x_BTD if self.norm is None else self.norm(x_BTD))

    def _mixed(self, query: Tensor, key: Tensor, value: Tensor, rotation_2Nd: Tensor | None) -> Tensor:
        """The values (B, T, D) of one grid, mixed by attention, from its heads (B, A, T, d)."""
        B, A, T, head_dim = query.shape
        if rotation_2Nd is not None:
            query, key = rotate(query, rotation_2Nd), rotate(key, rotation_2Nd)
        bias = None
        if self.relative is not None:
            bias = relative_logits(query, (self.relative * head_dim**-0.5).view(-1, A, head_dim))
        mixed = attention(query, key, value, bias)
        return mixed.transpose(1, 2).reshape(B, T, A * head_dim)


class MLP(nn.Module):
    """Two dense layers with a form of GELU between them, dropout after each (as the authors' code has it).

    With SwiGLU the first half of the first layer's outputs gates the second half. With `sub_norm` the second layer
    begins with a norm.
    """

    def __init__(self, shape: ViTShape, dropout: float) -> None:
        super().__init__()
        self.kind = shape.mlp
        self.fc1 = Linear(shape.width, shape.fc1_dim)
        self.norm = norm_of(shape, shape.mlp_dim) if shape.sub_norm != "none" else None
        self.fc2 = Linear(shape.mlp_dim, shape.width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        hidden = self.dropout(self._activated(self.fc1(x_BTD)))
        return self.dropout(self.fc2(hidden if self.norm is None else self.norm(hidden)))

    def _activated(self, x: Tensor) -> Tensor:
        if self.kind == "swiglu":
            gate, value = x.chunk(2, dim=-1)
            return F.silu(gate) * value
        if self.kind == "quick_gelu":
            return x * torch.sigmoid(1.702 * x)
        return F.gelu(x, approximate="tanh" if self.kind == "gelu" else "none")


class EncoderBlock(nn.Module):
    """One pre-norm encoder block (eq. 2 and 3), with position embeddings of its own if it is given some.

    `drop_path` is the share of samples for which attention, and the MLP, is left out while training.
    """

    def __init__(
        self,
        shape: ViTShape,
        dropout: float,
        *,
        drop_path: float = 0.0,
        relative_tokens: int | None = None,
        pos_embedding: nn.Parameter | TwoDPositions | None = None,
    ) -> None:
        super().__init__()
        D, has_scale = shape.width, shape.layer_scale is not None
        self.drop_path = drop_path
        self.pos_embedding = pos_embedding
        self.layer_scale1 = nn.Parameter(torch.empty(D)) if has_scale else None
        self.layer_scale2 = nn.Parameter(torch.empty(D)) if has_scale else None
        self.norm1 = norm_of(shape, D)
        self.attention = Attention(shape, relative_tokens)
        self.norm2 = norm_of(shape, D)
        self.mlp = MLP(shape, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x_BTD: Tensor,
        shared_1TD: Tensor | None = None,
        rotations: Sequence[Tensor] = (),
        paths: Tensor | None = None,
        sizes: Sizes = (),
    ) -> Tensor:
        """(B, T, D) -> (B, T, D).

        Args:
            shared_1TD: position embeddings that all blocks add.
            rotations: as of `Attention`.
            paths: where attention, and where the MLP, is not left out, bool (2, B, 1, 1) or (2, 1, T, 1); None:
                everywhere.
        """
        x_BTD = add_positions(x_BTD, self.pos_embedding, shared_1TD)
        attended = self.dropout(self.attention(self.norm1(x_BTD), rotations, sizes))
        x_BTD = x_BTD + self._branch(attended, self.layer_scale1, None if paths is None else paths[0])
        mapped = self.mlp(self.norm2(x_BTD))
        return x_BTD + self._branch(mapped, self.layer_scale2, None if paths is None else paths[1])

    def _branch(self, x_BTD: Tensor, scale_D: Tensor | None, path: Tensor | None) -> Tensor:
        """What attention or MLP adds to the tokens."""
        if scale_D is not None:
            x_BTD = x_BTD * scale_D
        return drop_path(x_BTD, self.drop_path, path)


class AxialBlock(nn.Module):
    """A row and a column block of attention and MLP instead of one with global attention (appendix D.5)."""

    def __init__(
        self,
        shape: ViTShape,
        dropout: float,
        *,
        grid: int,
        relative: bool = False,
        pos_embedding: nn.Parameter | TwoDPositions | None = None,
    ) -> None:
        super().__init__()
        self.grid = grid
        self.pos_embedding = pos_embedding
        relative_tokens = grid if relative else None
        self.rows = EncoderBlock(shape, dropout, relative_tokens=relative_tokens)
        self.columns = EncoderBlock(shape, dropout, relative_tokens=relative_tokens)

    def forward(self, x_BTD: Tensor, shared_1TD: Tensor | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D); `shared_1TD` are position embeddings that all blocks add."""
        x_BTD = add_positions(x_BTD, self.pos_embedding, shared_1TD)
        B, T, D = x_BTD.shape
        n = self.grid
        x_rows = self.rows(x_BTD.reshape(B * n, n, D))
        x_columns = self.columns(x_rows.view(B, n, n, D).transpose(1, 2).reshape(B * n, n, D))
        return x_columns.view(B, n, n, D).transpose(1, 2).reshape(B, T, D)


class AttentionPool(nn.Module):
    """Pools tokens into one vector by the attention of a learned query, followed by an MLP (big_vision's `map`)."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        D = shape.width
        self.num_heads = shape.num_heads
        self.probe = nn.Parameter(torch.empty(1, 1, D))
        self.query = Linear(D, D)
        self.key_value = Linear(D, 2 * D)
        self.out = Linear(D, D)
        self.norm = norm_of(shape, D)
        self.mlp = MLP(shape, 0.0)

    def forward(self, x_BTD: Tensor, sizes: Sizes = ()) -> Tensor:
        """(B, T, D) -> (B, D); of several grids, one after the other."""
        images, D = sum(B for B, _ in sizes) or len(x_BTD), x_BTD.shape[2]
        queries = self.query(self.probe.expand(images, 1, D)).view(images, 1, self.num_heads, -1).transpose(1, 2)
        pairs = apart(self.key_value(x_BTD), sizes)
        mixed = []
        for query, pair in zip(queries.split([len(each) for each in pairs]), pairs, strict=True):
            parts = pair.unflatten(2, (2, self.num_heads, -1)).unbind(2)
            key, value = (part.transpose(1, 2) for part in parts)
            # cuDNN's gradients for a single query may be no numbers (cudnn-frontend, issue 1072).
            with sdpa_kernel(_OF_ONE_QUERY) if x_BTD.is_cuda else nullcontext():
                mixed.append(attention(query, key, value).reshape(-1, D))
        x_BD = self.out(mixed[0] if len(mixed) == 1 else torch.cat(mixed))
        return x_BD + self.mlp(self.norm(x_BD))


def add_positions(x_BTD: Tensor, own: nn.Parameter | TwoDPositions | None, shared_1TD: Tensor | None = None) -> Tensor:
    """A block's input plus the position embeddings that are its own or shared by all blocks."""
    values_1TD = position_values(own) if own is not None else shared_1TD
    return x_BTD if values_1TD is None else x_BTD + values_1TD
