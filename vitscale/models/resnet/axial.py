"""Axial attention in a ResNet (appendix D.5): along the rows of a feature map, then along its columns.

Shape legend: B batch, h w rows and columns, C channels, A heads, L = 2 n - 1 offsets within a row or column of n
positions.
"""

import torch
from torch import Tensor, nn

from vitscale.models.layers import Linear, relative_table
from vitscale.recipe.families.resnet import AXIAL_HEADS


class LineAttention(nn.Module):
    """Attention within lines of n positions, position-sensitive: Wang et al. (2020b), equation 4.

    Learned embeddings of the offset are multiplied with the queries and with the keys, and one is added to the values;
    the heads share them. Queries and keys have half as many channels as values.
    """

    def __init__(self, channels: int, length: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        head_dim = channels // num_heads
        self.sizes = (head_dim // 2, head_dim // 2, head_dim)
        self.qkv = Linear(channels, 2 * channels, bias=False)
        self.relative = relative_table(length, 2 * head_dim)

    def forward(self, x_BnC: Tensor) -> Tensor:
        """Lines (B, n, C) -> (B, n, C)."""
        B, n, C = x_BnC.shape
        qkv = self.qkv(x_BnC).view(B, n, self.num_heads, -1).transpose(1, 2)
        query, key, value = qkv.split(self.sizes, dim=-1)  # (B, A, n, d / 2) twice, (B, A, n, d)
        # Row i, column j: the embedding of the offset j - i.
        of_query, of_key, of_value = self.relative.unfold(0, n, 1).flip(0).split(self.sizes, dim=1)  # (i, ..., j)
        logits = query @ key.transpose(-1, -2)
        logits = logits + torch.einsum("baid,idj->baij", query, of_query)
        logits = logits + torch.einsum("bajd,idj->baij", key, of_key)
        weights = (logits * self.sizes[0] ** -0.5).softmax(dim=-1)
        mixed = weights @ value + torch.einsum("baij,idj->baid", weights, of_value)
        return mixed.transpose(1, 2).reshape(B, n, C)


class AxialAttention2d(nn.Module):
    """Row and then column attention over a feature map, where a ResNet has its 3x3 convolution (AxialResNet).

    A stride of 2 is an average over 2 x 2 positions after the attention.
    """

    def __init__(self, channels: int, size: int, stride: int) -> None:
        super().__init__()
        self.rows = LineAttention(channels, size, AXIAL_HEADS)
        self.columns = LineAttention(channels, size, AXIAL_HEADS)
        self.pool = nn.AvgPool2d(stride, stride, ceil_mode=True) if stride > 1 else None

    def forward(self, x_BChw: Tensor) -> Tensor:
        B, C, h, w = x_BChw.shape
        x_rows = self.rows(x_BChw.permute(0, 2, 3, 1).reshape(B * h, w, C)).view(B, h, w, C)
        x_columns = self.columns(x_rows.transpose(1, 2).reshape(B * w, h, C)).view(B, w, h, C)
        # In the memory order of the feature maps around it.
        x_BChw = x_columns.permute(0, 3, 2, 1).contiguous(memory_format=torch.channels_last)
        return x_BChw if self.pool is None else self.pool(x_BChw)
