"""The Transformer encoder's blocks: attention, MLP, and the layer norms before them (section 3.1, appendix A).

Shape legend: B batch, T tokens, D width, A heads.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from vitscale.models.layers import LayerNorm, Linear, relative_table
from vitscale.models.vit.positions import TwoDPositions, position_values, relative_logits


class Attention(nn.Module):
    """Multi-head self-attention with one (3D, D) matrix for queries, keys and values (appendix A, eq. 5-8).

    With `relative_tokens` T, products of the queries with an embedding of every offset within T tokens, which play the
    part of keys, are added to the logits (appendix D.3).
    """

    def __init__(self, width: int, num_heads: int, relative_tokens: int | None = None) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = Linear(width, 3 * width)
        self.out = Linear(width, width)
        self.relative = relative_table(relative_tokens, width) if relative_tokens is not None else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        head_dim = D // self.num_heads
        qkv = self.qkv(x_BTD).view(B, T, 3, self.num_heads, head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (B, A, T, D / A)
        bias = None
        if self.relative is not None:
            bias = relative_logits(query, (self.relative * head_dim**-0.5).view(-1, self.num_heads, head_dim))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.out(mixed.transpose(1, 2).reshape(B, T, D))


class MLP(nn.Module):
    """Two dense layers with the tanh form of GELU between them, dropout after each (as the authors' code has it)."""

    def __init__(self, width: int, mlp_dim: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = Linear(width, mlp_dim)
        self.fc2 = Linear(mlp_dim, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        hidden = self.dropout(F.gelu(self.fc1(x_BTD), approximate="tanh"))
        return self.dropout(self.fc2(hidden))


class Block(nn.Module):
    """One pre-norm encoder block (eq. 2 and 3), with position embeddings of its own where it is given some."""

    def __init__(
        self,
        width: int,
        mlp_dim: int,
        num_heads: int,
        dropout: float,
        *,
        relative_tokens: int | None = None,
        pos_embedding: nn.Parameter | TwoDPositions | None = None,
    ) -> None:
        super().__init__()
        self.pos_embedding = pos_embedding
        self.norm1 = LayerNorm(width)
        self.attention = Attention(width, num_heads, relative_tokens)
        self.norm2 = LayerNorm(width)
        self.mlp = MLP(width, mlp_dim, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor, shared_1TD: Tensor | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D); `shared_1TD` are position embeddings that all blocks add."""
        x_BTD = add_positions(x_BTD, self.pos_embedding, shared_1TD)
        x_BTD = x_BTD + self.dropout(self.attention(self.norm1(x_BTD)))
        return x_BTD + self.mlp(self.norm2(x_BTD))


class AxialBlock(nn.Module):
    """A row block and a column block, each of attention and MLP, in the place of one block with global attention
    (axial attention, appendix D.5).
    """

    def __init__(
        self,
        width: int,
        mlp_dim: int,
        num_heads: int,
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
        self.rows = Block(width, mlp_dim, num_heads, dropout, relative_tokens=relative_tokens)
        self.columns = Block(width, mlp_dim, num_heads, dropout, relative_tokens=relative_tokens)

    def forward(self, x_BTD: Tensor, shared_1TD: Tensor | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D); `shared_1TD` are position embeddings that all blocks add."""
        x_BTD = add_positions(x_BTD, self.pos_embedding, shared_1TD)
        B, T, D = x_BTD.shape
        n = self.grid
        x_rows = self.rows(x_BTD.reshape(B * n, n, D))
        x_columns = self.columns(x_rows.view(B, n, n, D).transpose(1, 2).reshape(B * n, n, D))
        return x_columns.view(B, n, n, D).transpose(1, 2).reshape(B, T, D)


def add_positions(x_BTD: Tensor, own: nn.Parameter | TwoDPositions | None, shared_1TD: Tensor | None = None) -> Tensor:
    """What a block's input becomes by the position embeddings that are its own or shared by all blocks."""
    values_1TD = position_values(own) if own is not None else shared_1TD
    return x_BTD if values_1TD is None else x_BTD + values_1TD
