"""The Swin Transformer (Liu et al., 2021): stages of blocks with attention within windows, and patch merging between.

Shape legend: B batch, H W image height and width, P patch size, h w rows and columns of a feature map, C channels, K
classes.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from vitscale.models.anatomy import Anatomy, AttentionLayer, Windows
from vitscale.models.initialise import Initialiser, constant, normal, uniform
from vitscale.models.layers import (
    CHANNELS,
    LayerNorm,
    Linear,
    OutputLayer,
    check_layers,
    check_size,
    cut_patches,
    drop_path,
    no_record,
    run_block,
)
from vitscale.models.model import Model, Outputs
from vitscale.models.swin.weights import SwinWeights, recognise
from vitscale.models.swin.windows import WindowAttention
from vitscale.models.vit.encoder import MLP
from vitscale.models.weights.source import Source
from vitscale.recipe.families import SwinShape, ViTShape
from vitscale.recipe.families.swin import MLP_RATIO

NORM_EPS = 1e-5


class PatchMerging(nn.Module):
    """Four neighbouring positions, side by side, become one of twice the channels; odd maps are padded with zeros."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = LayerNorm(4 * width, NORM_EPS)
        self.reduction = Linear(4 * width, 2 * width, bias=False)

    def forward(self, x_BhwC: Tensor) -> Tensor:
        """(B, h, w, C) -> (B, h / 2, w / 2, 2 C)"""
        B, h, w, C = x_BhwC.shape
        x_BhwC = F.pad(x_BhwC, (0, 0, 0, w % 2, 0, h % 2))
        # In the authors' order: column after column of the four.
        four = x_BhwC.view(B, (h + 1) // 2, 2, (w + 1) // 2, 2, C).permute(0, 1, 3, 4, 2, 5).flatten(3)
        return self.reduction(self.norm(four))


class SwinBlock(nn.Module):
    """One pre-norm block of attention within windows and an MLP; the first of a later stage begins with patch merging.

    `drop_path` is the share of samples for which attention, and the MLP, is left out while training.
    """

    def __init__(self, shape: SwinShape, stage: int, place: int, image_size: int, drop_path: float) -> None:
        super().__init__()
        C, A = shape.width_of(stage), shape.heads_of(stage)
        self.drop_path = drop_path
        self.merging = PatchMerging(C // 2) if stage > 0 and place == 0 else None
        self.norm1 = LayerNorm(C, NORM_EPS)
        window, shift = shape.window_of(stage, image_size), shape.shift_of(stage, place, image_size)
        self.attention = WindowAttention(C, A, window, shift)
        self.norm2 = LayerNorm(C, NORM_EPS)
        self.mlp = MLP(ViTShape(1, C, 1, MLP_RATIO * C, A, mlp="exact_gelu"), dropout=0.0)

    def forward(self, x_BhwC: Tensor, paths: Tensor | None = None) -> Tensor:
        """(B, h, w, C) -> (B, h, w, C), or with patch merging (B, h / 2, w / 2, 2 C).

        `paths` are where attention, and where the MLP, is not left out, bool (2, B, 1, 1, 1); None: everywhere.
        """
        of_attention, of_mlp = (None, None) if paths is None else paths
        if self.merging is not None:
            x_BhwC = self.merging(x_BhwC)
        x_BhwC = x_BhwC + drop_path(self.attention(self.norm1(x_BhwC)), self.drop_path, of_attention)
        return x_BhwC + drop_path(self.mlp(self.norm2(x_BhwC)), self.drop_path, of_mlp)


class Swin(Model):
    """A Swin Transformer: images (B, H, W, 3) in [-1, 1] -> tokens, representation and logits.

    Args:
        shape: the dimensions.
        image_size: side of the square input in pixels; padded with zeros to whole patches.
        num_classes: K; None for a backbone without a head.
        drop_path: share of samples for which the last block's attention, and its MLP, is left out while training; that
            of the blocks before it grows from 0 in equal steps.
        checkpoint_every: recompute every k-th block's activations in the backward pass; 0 keeps all of them.
    """

    def __init__(
        self,
        shape: SwinShape,
        *,
        image_size: int,
        num_classes: int | None,
        drop_path: float = 0.0,
        checkpoint_every: int = 0,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.image_size = image_size
        self.checkpoint_every = checkpoint_every
        self.embedding = Linear(shape.patch_dim, shape.width)
        self.embedding_norm = LayerNorm(shape.width, NORM_EPS)
        self.blocks = nn.ModuleList(
            SwinBlock(shape, stage, place, image_size, shape.drop_path_of(index, drop_path))
            for index, (stage, place) in enumerate(shape.stages())
        )
        self.norm = LayerNorm(shape.channels, NORM_EPS)
        self.head = OutputLayer(shape.channels, num_classes) if num_classes is not None else None

    @classmethod
    def recognise(cls, source: Source) -> tuple[dict[str, Any], int | None] | None:
        return recognise(source)

    def forward(self, images_BHWC: Tensor) -> Outputs:
        """Tokens (B, h w, C): the last feature map, row by row, normed; its mean (B, C); logits (B, K)."""
        tokens_BTC = self.norm(self._last_map(images_BHWC)).flatten(1, 2)
        pooled_BC = tokens_BTC.mean(dim=1)
        return Outputs(tokens_BTC, pooled_BC, None if self.head is None else self.head(pooled_BC))

    def feature_maps(self, images: Tensor, layers: Sequence[int] | None = None) -> list[Tensor]:
        """As `Model.feature_maps`: of the stages, before the patch merging after them."""
        layers = check_layers(layers, len(self.shape.blocks))
        maps: dict[str, Tensor] = {}
        self._last_map(images, maps.__setitem__)
        return [maps[f"stage_{layer}"].permute(0, 3, 1, 2) for layer in layers]

    def _last_map(self, images_BHWC: Tensor, keep: Callable[[str, Tensor], None] = no_record) -> Tensor:
        """The last feature map (B, h, w, C); `keep` is called with that of each stage, `stage_1` ..."""
        check_size(images_BHWC, self.image_size)
        P, side = self.shape.patch_size, self.shape.size_of(0, self.image_size)
        pad = side * P - self.image_size
        whole_BHWC = F.pad(images_BHWC, (0, 0, 0, pad, 0, pad)) if pad else images_BHWC
        patches_BND = cut_patches(whole_BHWC, P)
        x_BhwC = self.embedding_norm(self.embedding(patches_BND)).view(len(images_BHWC), side, side, self.shape.width)
        kept = self.kept_paths([images_BHWC])
        for index, (block, (stage, place)) in enumerate(zip(self.blocks, self.shape.stages(), strict=True)):
            paths = None if kept is None else kept[0][2 * index : 2 * index + 2, :, None, None, None]
            x_BhwC = run_block(self, index, block, x_BhwC, paths)
            if place == self.shape.blocks[stage] - 1:
                keep(f"stage_{stage + 1}", x_BhwC)
        return x_BhwC

    @property
    def path_shares(self) -> Sequence[float]:
        blocks: list[SwinBlock] = list(self.blocks)  # type: ignore[arg-type]
        return [block.drop_path for block in blocks for _ in range(2)]

    def units(self) -> Sequence[nn.Module]:
        return list(self.blocks)

    def anatomy(self) -> Anatomy:
        """As `Model.anatomy`: the positions of the last feature map take the place of patches."""
        layers: dict[str, nn.Module] = {}
        attention = []
        blocks: list[SwinBlock] = list(self.blocks)  # type: ignore[arg-type]
        for block, (stage, place) in zip(blocks, self.shape.stages(), strict=True):
            name, side = f"stage {stage + 1}.{place + 1}", block.attention.window
            size = self.shape.size_of(stage, self.image_size)
            layers[name] = block
            windows = Windows((-(-size // side)) ** 2, side, self.shape.stride_of(stage), size, block.attention.shift)
            attention.append(AttentionLayer(name, block.attention, "windows", windows))
        return Anatomy(
            layers,
            attention,
            channels=-1,
            grid=self.shape.size_of(len(self.shape.blocks) - 1, self.image_size),
            stride=self.shape.stride,
            embedding=(self.embedding,),
        )

    def filters(self) -> Tensor:
        """As `Model.filters`: those of the embedding (C, P, P, 3)."""
        P = self.shape.patch_size
        return self.embedding.weight.view(-1, P, P, CHANNELS)

    def foreign(self) -> SwinWeights:
        return SwinWeights(self)

    def initialiser(self, name: str) -> Initialiser:
        """How the parameter `name` is filled at the start of training: as in the authors' code."""
        layer, _, kind = name.rpartition(".")
        if layer == "embedding":  # a convolution, of which they leave torch's own
            return uniform(self.shape.patch_dim**-0.5)
        if layer.endswith(("norm", "norm1", "norm2")):
            return constant(1.0 if kind == "weight" else 0.0)
        if kind == "bias":
            return constant(0.0)
        if kind == "relative_bias" or layer.endswith(("qkv", "out", "fc1", "fc2", "reduction", "head")):
            return normal(0.02)
        raise KeyError(f"no initial value is defined for the parameter {name!r}")
