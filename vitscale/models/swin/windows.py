"""Attention within the windows of a feature map, which may be shifted, with a learned bias by relative position.

Shape legend: B batch, h w rows and columns, C channels, A heads, d = C / A, n rows and columns of a window, T = n * n,
W windows.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitscale.models.layers import Linear, attention

_APART = -100.0  # what the authors add to the logits of two positions that a shift has brought into one window


class WindowAttention(nn.Module):
    """Multi-head self-attention within windows of n x n positions (Liu et al., 2021, equation 4).

    A map that windows do not divide is padded with zeros right and below before it is shifted, as in the authors' code
    for detection and in transformers; the padding is attended to like all else. Shifted windows wrap around the border,
    and positions from opposite sides do not attend to each other.

    Attributes:
        relative_bias: what is added to the logits, (2 n - 1, 2 n - 1, A): by the rows, and the columns, from the key to
            the query, plus n - 1.
    """

    def __init__(self, width: int, num_heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.num_heads, self.window, self.shift = num_heads, window, shift
        self.qkv = Linear(width, 3 * width)
        self.out = Linear(width, width)
        offsets = 2 * window - 1
        self.relative_bias = nn.Parameter(torch.empty(offsets, offsets, num_heads))

    def forward(self, x_BhwC: Tensor) -> Tensor:
        """(B, h, w, C) -> (B, h, w, C), for a square map."""
        B, h, w, C = x_BhwC.shape
        n, A, shift = self.window, self.num_heads, self.shift
        side = -(-h // n)
        if pad := side * n - h:
            x_BhwC = F.pad(x_BhwC, (0, 0, 0, pad, 0, pad))
        if shift:
            x_BhwC = x_BhwC.roll((-shift, -shift), (1, 2))
        # Windows are among the heads: so one bias for all images has a mask of their own for each.
        qkv = self.qkv(x_BhwC).view(B, side, n, side, n, 3, A, C // A)
        query, key, value = qkv.permute(5, 0, 1, 3, 6, 2, 4, 7).reshape(3, B, side**2 * A, n**2, C // A)
        mixed = attention(query, key, value, self._bias(side))
        mixed = mixed.view(B, side, side, A, n, n, C // A).permute(0, 1, 4, 2, 5, 3, 6)
        x_BhwC = mixed.reshape(B, side * n, side * n, C)
        if shift:
            x_BhwC = x_BhwC.roll((shift, shift), (1, 2))
        return self.out(x_BhwC[:, :h, :w])

    def _bias(self, side: int) -> Tensor:
        """What is added to the logits of `side` x `side` windows: (W * A, T, T)."""
        n = self.window
        # Entry (y, x, A, i, k) is that of the offsets y + i and x + k, where the key is i rows, and k columns, from the
        # end: no gather, whose backward pass would add in any order.
        by_key = self.relative_bias.unfold(0, n, 1).unfold(1, n, 1).flip(3, 4)
        bias_ATT = by_key.permute(2, 0, 1, 3, 4).reshape(self.num_heads, n**2, n**2)
        if self.shift:
            apart_WTT = strangers(side, n, self.shift, bias_ATT.device)
            return (bias_ATT + apart_WTT[:, None].to(bias_ATT.dtype) * _APART).flatten(0, 1)
        return bias_ATT.expand(side**2, -1, -1, -1).flatten(0, 1)


def strangers(side: int, window: int, shift: int, device: torch.device) -> Tensor:
    """Whether two positions of a window are there because the map was rolled by `shift`: (W, T, T).

    There are `side` x `side` windows of `window` x `window` positions.
    """
    from_the_start = torch.arange(side * window, device=device) >= side * window - shift
    origin = 2 * from_the_start[:, None] + from_the_start.long()
    of_window = origin.view(side, window, side, window).transpose(1, 2).reshape(side**2, window**2)
    return of_window[:, :, None] != of_window[:, None]
