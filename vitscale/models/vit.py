"""The Vision Transformer of "An Image is Worth 16x16 Words" (section 3.1, appendix B.1).

Shape legend: B batch, H W C image height, width, channels, P patch size, N patches, T tokens (N, or N + 1 with a class
token), D width, M MLP width, A heads, K classes.

Parameters are created without values: `models.initialise` and the checkpoint reader are the only two sources of
values, so that what a weight starts as never depends on how or where the module was built.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vitscale.architectures import ViTShape

LAYER_NORM_EPS = 1e-6
CHANNELS = 3


class Linear(nn.Linear):
    """`nn.Linear` that leaves its values unset (see the module's docstring)."""

    def reset_parameters(self) -> None:
        pass


class OutputLayer(Linear):
    """The output layer: logits in fp32.

    With a bias of -10 logits in bf16 would be multiples of 1/16 and many of them equal, so the bias is added in fp32.
    """

    def forward(self, x_BD: Tensor) -> Tensor:
        return F.linear(x_BD, self.weight).float() + self.bias.float()


class LayerNorm(nn.LayerNorm):
    """Layer norm over the last dimension, eps 1e-6, values unset."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=LAYER_NORM_EPS)

    def reset_parameters(self) -> None:
        pass


class Attention(nn.Module):
    """Multi-head self-attention with one (3D, D) matrix for queries, keys and values (appendix A, eq. 5-8)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = Linear(width, 3 * width)
        self.out = Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        qkv = self.qkv(x_BTD).view(B, T, 3, self.num_heads, D // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (B, A, T, D / A)
        mixed = F.scaled_dot_product_attention(query, key, value)
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
    """One pre-norm encoder block (eq. 2 and 3)."""

    def __init__(self, width: int, mlp_dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.norm2 = LayerNorm(width)
        self.mlp = MLP(width, mlp_dim, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.norm1(x_BTD)))
        return x_BTD + self.mlp(self.norm2(x_BTD))


class ViT(nn.Module):
    """A Vision Transformer: images (B, H, W, 3) in [-1, 1] -> logits (B, K).

    Args:
        shape: the dimensions.
        image_size: side of the square input in pixels. Where the patch size does not divide it, the pixels right and
            below of the last whole patch are not seen (the original's VALID convolution).
        num_classes: K.
        pool: `cls` reads the class token; `mean` averages the patches and has no class token.
        head: `pretrain` has a dense layer of width D with tanh before the output layer (section 3.1), `linear` has the
            output layer alone (fine-tuning).
        head_bias: initial bias of the output layer. With the sigmoid loss the authors take -10: every class starts
            improbable.
        dropout: rate after position embedding, attention output and both MLP layers (appendix B.1).
        checkpoint_every: recompute every k-th block's activations in the backward pass; 0 keeps all of them.
    """

    def __init__(
        self,
        shape: ViTShape,
        *,
        image_size: int,
        num_classes: int,
        pool: Literal["cls", "mean"] = "cls",
        head: Literal["pretrain", "linear"] = "pretrain",
        head_bias: float = 0.0,
        dropout: float = 0.0,
        checkpoint_every: int = 0,
    ) -> None:
        super().__init__()
        D = shape.width
        self.shape = shape
        self.image_size = image_size
        self.pool = pool
        self.head_bias = head_bias
        self.checkpoint_every = checkpoint_every
        num_tokens = shape.grid(image_size) ** 2 + (pool == "cls")

        self.embedding = Linear(shape.patch_size**2 * CHANNELS, D)
        self.cls = nn.Parameter(torch.empty(1, 1, D)) if pool == "cls" else None
        self.pos_embedding = nn.Parameter(torch.empty(1, num_tokens, D))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(D, shape.mlp_dim, shape.num_heads, dropout) for _ in range(shape.depth))
        self.norm = LayerNorm(D)
        self.pre_logits = Linear(D, D) if head == "pretrain" else None
        self.head = OutputLayer(D, num_classes)

    def patchify(self, images_BHWC: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, N, P*P*C), patches in row-major order, each flattened as height, width, channel."""
        B, P, n = images_BHWC.shape[0], self.shape.patch_size, self.shape.grid(self.image_size)
        whole = images_BHWC[:, : n * P, : n * P]
        return whole.reshape(B, n, P, n, P, CHANNELS).permute(0, 1, 3, 2, 4, 5).reshape(B, n * n, P * P * CHANNELS)

    def forward(self, images_BHWC: Tensor, intermediates: dict[str, Tensor] | None = None) -> Tensor:
        """Logits (B, K).

        A dictionary passed as `intermediates` is filled with `embedded` (B, T, D), `block_0` ... (B, T, D), `encoded`
        (B, T, D, after the final norm) and `pre_logits` (B, D): the representation, before tanh where there is one.
        """
        keep = _no_record if intermediates is None else intermediates.__setitem__
        x_BTD = self.embedding(self.patchify(images_BHWC))
        if self.cls is not None:
            x_BTD = torch.cat([self.cls.expand(x_BTD.shape[0], -1, -1), x_BTD], dim=1)
        x_BTD = self.dropout(x_BTD + self.pos_embedding)
        keep("embedded", x_BTD)
        for index, block in enumerate(self.blocks):
            if self.training and self.checkpoint_every and index % self.checkpoint_every == 0:
                x_BTD = checkpoint(block, x_BTD, use_reentrant=False)
            else:
                x_BTD = block(x_BTD)
            keep(f"block_{index}", x_BTD)
        x_BTD = self.norm(x_BTD)
        keep("encoded", x_BTD)
        x_BD = x_BTD[:, 0] if self.pool == "cls" else x_BTD.mean(dim=1)
        if self.pre_logits is not None:
            x_BD = self.pre_logits(x_BD)
            keep("pre_logits", x_BD)
            x_BD = torch.tanh(x_BD)
        else:
            keep("pre_logits", x_BD)
        return self.head(x_BD)

    def initialiser(self, name: str) -> Callable[[Tensor, torch.Generator], None]:
        """How the parameter `name` is filled at the start of training: as in the authors' code.

        The returned function fills a whole fp32 CPU tensor of the parameter's shape in place.
        """
        layer, _, kind = name.rpartition(".")
        if layer == "head":
            return _constant(0.0 if kind == "weight" else self.head_bias)
        if name == "cls":
            return _constant(0.0)
        if name == "pos_embedding":
            return _normal(0.02)
        if layer == "norm" or layer.endswith(("norm1", "norm2")):
            return _constant(1.0 if kind == "weight" else 0.0)
        if layer.endswith(("mlp.fc1", "mlp.fc2")) and kind == "bias":
            return _normal(1e-6)
        if kind == "bias":
            return _constant(0.0)
        if layer in ("embedding", "pre_logits"):
            return _lecun_normal
        if layer.endswith("qkv"):
            return _xavier_uniform_thirds
        if layer.endswith(("attention.out", "mlp.fc1", "mlp.fc2")):
            return _xavier_uniform
        raise KeyError(f"no initial value is defined for the parameter {name!r}")


def _no_record(name: str, value: Tensor) -> None:
    pass


def _constant(value: float) -> Callable[[Tensor, torch.Generator], None]:
    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.fill_(value)

    return fill


def _normal(std: float) -> Callable[[Tensor, torch.Generator], None]:
    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.normal_(0.0, std, generator=generator)

    return fill


def _lecun_normal(tensor: Tensor, generator: torch.Generator) -> None:
    """Variance 1 / fan_in from a normal truncated at two standard deviations (flax's default for dense and conv)."""
    truncated_std = 0.87962566103423978  # standard deviation of a unit normal truncated to [-2, 2]
    std = tensor.shape[1] ** -0.5 / truncated_std
    nn.init.trunc_normal_(tensor, std=std, a=-2 * std, b=2 * std, generator=generator)


def _xavier_uniform(tensor: Tensor, generator: torch.Generator) -> None:
    nn.init.xavier_uniform_(tensor, generator=generator)


def _xavier_uniform_thirds(tensor: Tensor, generator: torch.Generator) -> None:
    """Query, key and value each with their own fan: over the stacked matrix the bound would be sqrt(2) too small."""
    for matrix in tensor.chunk(3):
        nn.init.xavier_uniform_(matrix, generator=generator)
