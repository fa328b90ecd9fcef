"""The module of an MLP-Mixer.

Shape legend: B batch, S side in pixels, P patch size, n patches along a side, T tokens, D width, K classes.
"""

from collections.abc import Sequence
from typing import Self

from torch import Tensor, nn
from torch.nn import functional as F

import example_vision
from vitscale.models import Initialiser, Model, Outputs, constant, normal


class Mlp(nn.Module):
    """Two dense layers with GELU between them, over the last dimension."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """An MLP over tokens and one over channels, each behind a norm and beside a residual connection."""

    def __init__(self, shape: example_vision.MixerShape, tokens: int) -> None:
        super().__init__()
        self.norm1, self.tokens = nn.LayerNorm(shape.width), Mlp(tokens, shape.token_dim)
        self.norm2, self.channels = nn.LayerNorm(shape.width), Mlp(shape.width, shape.channel_dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.tokens(self.norm1(x_BTD).transpose(1, 2)).transpose(1, 2)
        return x_BTD + self.channels(self.norm2(x_BTD))


class Mixer(Model):
    """An MLP-Mixer: images (B, S, S, 3) in [-1, 1] -> tokens, representation and logits."""

    def __init__(self, shape: example_vision.MixerShape, image_size: int, num_classes: int | None) -> None:
        super().__init__()
        self.shape, self.image_size = shape, image_size
        tokens = (image_size // shape.patch_size) ** 2
        self.embedding = nn.Linear(3 * shape.patch_size**2, shape.width)
        self.blocks = nn.ModuleList(Block(shape, tokens) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width)
        self.head = None if num_classes is None else nn.Linear(shape.width, num_classes)

    @classmethod
    def of(
        cls, block: example_vision.Mixer, *, image_size: int, num_classes: int | None, checkpoint_every: int
    ) -> Self:
        """As `Model.of`; nothing is recomputed."""
        return cls(block.shape(), image_size, num_classes)

    def forward(self, images: Tensor) -> Outputs:
        """Tokens (B, T, D), representation (B, D), logits (B, K)."""
        B, P = len(images), self.shape.patch_size
        n = self.image_size // P
        patches = images.reshape(B, n, P, n, P, 3).permute(0, 1, 3, 2, 4, 5).reshape(B, n * n, P * P * 3)
        x_BTD = self.embedding(patches)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        tokens = self.norm(x_BTD)
        pooled = tokens.mean(dim=1)
        return Outputs(tokens, pooled, None if self.head is None else self.head(pooled).float())

    def initialiser(self, name: str) -> Initialiser:
        if "norm" in name:
            return constant(1.0 if name.endswith("weight") else 0.0)
        return constant(0.0) if name.endswith("bias") or name.startswith("head.") else normal(0.02)

    def units(self) -> Sequence[nn.Module]:
        return list(self.blocks)
