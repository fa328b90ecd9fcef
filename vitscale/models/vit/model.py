"""The Vision Transformer of "An Image is Worth 16x16 Words" (section 3.1, appendix B.1), its hybrids and variants.

A hybrid cuts the feature map of a ResNet into patches in the place of the image (section 3.1); an axial model has row
and column blocks (appendix D.5); positions can be told in several ways (appendix D.3).

Shape legend: B batch, H W C image height, width, channels, P patch size, N patches, T tokens (a class token and
registers, where there are some, and the patches), D width, d that of a head, K classes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from vitscale.models.anatomy import Anatomy, AttentionLayer
from vitscale.models.initialise import Initialiser, constant, lecun_normal, normal, xavier_uniform
from vitscale.models.layers import (
    CHANNELS,
    Linear,
    OutputLayer,
    check_layers,
    check_size,
    cut_patches,
    no_record,
    run_block,
)
from vitscale.models.model import BlockTokens, Model, Outputs
from vitscale.models.resnet.model import Features, resnet_initialiser
from vitscale.models.vit.encoder import AttentionPool, AxialBlock, EncoderBlock, norm_of
from vitscale.models.vit.grids import apart, masks_of, side_by_side, sizes_of
from vitscale.models.vit.positions import (
    absolute_positions,
    patch_rotation,
    position_values,
    positions_of_grid,
    sincos_positions,
)
from vitscale.models.vit.recognise import recognise
from vitscale.models.vit.weights import ViTWeights
from vitscale.models.weights.source import Source
from vitscale.recipe import families
from vitscale.recipe.families import Pool, ViTShape

Edit = Callable[[Tensor], Tensor]


class ViT(Model):
    """A Vision Transformer: images (B, H, W, 3) in [-1, 1] -> tokens, representation and logits.

    Args:
        shape: the dimensions.
        image_size: side of the square input in pixels. If the patch size does not divide it, what lies right of and
            below the last whole patch is not seen (the original's VALID convolution).
        num_classes: K; None for a backbone without a head, whatever `head` says.
        pool: `cls` reads the class token; `mean` averages the patches and `map` attends to all tokens, and neither has
            a class token; `normed_mean` has one unless the shape says otherwise, averages the patches, and applies its
            final norm to their mean. Axial models have a grid of tokens, hence neither `cls` nor `normed_mean`.
        head: `pretrain` has a dense layer of width D with tanh before the output layer (section 3.1), `linear` has the
            output layer alone (fine-tuning).
        dropout: rate after position embedding, attention output and both MLP layers (appendix B.1).
        drop_path, drop_path_rule: share of samples for which the last block's attention, and its MLP, is left out while
            training; that of the blocks before it grows from 0 in equal steps, or is the same.
        position: how and where positions are told (appendix D.3), as the recipe's block says it.
        checkpoint_every: recompute every k-th block's activations in the backward pass; 0 keeps all of them. The units
            of a hybrid's stem are counted by themselves.
    """

    def __init__(
        self,
        shape: ViTShape,
        *,
        image_size: int,
        num_classes: int | None,
        pool: Pool = "cls",
        head: Literal["pretrain", "linear"] = "pretrain",
        dropout: float = 0.0,
        drop_path: float = 0.0,
        drop_path_rule: families.DropPathRule = "growing",
        position: families.Position | None = None,
        checkpoint_every: int = 0,
    ) -> None:
        super().__init__()
        D, grid, told = shape.width, shape.grid(image_size), position or families.Position()
        class_token = families.has_class_token(pool) and shape.class_token
        self.shape = shape
        self.image_size = image_size
        self.pool = pool
        self.position, self.position_at, self.position_table = told.kind, told.at, told.table
        self.position_base, self.position_unit = told.base or 0.0, told.unit or "image"
        self.stretch, self.registers_base = (told.rescale, told.jitter), told.registers_base
        self.checkpoint_every = checkpoint_every

        self.stem = None
        if shape.stem is not None:
            self.stem = Features(shape.stem, image_size=image_size, checkpoint_every=checkpoint_every)
        self.embedding = Linear(shape.patch_dim, D)
        self.cls = nn.Parameter(torch.empty(1, 1, D)) if class_token else None
        self.dist = nn.Parameter(torch.empty(1, 1, D)) if shape.distilled else None
        self.registers = nn.Parameter(torch.empty(1, shape.registers, D)) if shape.registers else None
        in_blocks, of_class = told.at == "every_layer", (class_token + shape.distilled) * shape.class_position
        self.pos_embedding = None if in_blocks else absolute_positions(told.kind, grid, D, of_class)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList()
        for index in range(shape.depth):
            own = absolute_positions(told.kind, grid, D, class_token) if in_blocks else None
            relative = told.kind == "relative"
            if shape.attention == "axial":
                self.blocks.append(AxialBlock(shape, dropout, grid=grid, relative=relative, pos_embedding=own))
            else:
                relative_tokens = grid**2 + class_token if relative else None
                share = shape.drop_path_of(index, drop_path, drop_path_rule)
                self.blocks.append(
                    EncoderBlock(shape, dropout, drop_path=share, relative_tokens=relative_tokens, pos_embedding=own)
                )
        self.norm = norm_of(shape, D)
        self.map = AttentionPool(shape) if pool == "map" else None
        self.pre_logits = Linear(D, D) if head == "pretrain" and num_classes is not None else None
        self.head = OutputLayer(D, num_classes) if num_classes is not None else None
        self.head_dist = OutputLayer(D, num_classes) if num_classes is not None and shape.distilled else None

    @classmethod
    def of(cls, block: families.ViT, *, image_size: int, num_classes: int | None, checkpoint_every: int) -> Self:
        return cls(
            block.shape(),
            image_size=image_size,
            num_classes=num_classes,
            pool=block.pool_or_default(),
            head=block.head,
            dropout=block.dropout,
            drop_path=block.drop_path,
            drop_path_rule=block.drop_path_rule,
            position=block.position,
            checkpoint_every=checkpoint_every,
        )

    @classmethod
    def recognise(cls, source: Source) -> tuple[dict[str, Any], int | None] | None:
        return recognise(source)

    @property
    def path_shares(self) -> Sequence[float]:
        blocks: list[EncoderBlock] = [block for block in self.blocks if isinstance(block, EncoderBlock)]
        return [block.drop_path for block in blocks for _ in range(2)]

    def patchify(self, x_BHWC: Tensor) -> Tensor:
        """As `Model.patchify`, of whole patches: (B, H, W, C) -> (B, N, P * P * C)."""
        P = self.shape.patch_size
        covered = x_BHWC.shape[1] // P * P
        return cut_patches(x_BHWC[:, :covered, :covered], P)

    def forward(
        self,
        images: Tensor | Sequence[Tensor],
        *,
        edit: Edit | Sequence[Edit | None] | None = None,
        kept: Tensor | Sequence[Tensor | None] | None = None,
    ) -> Outputs | list[Outputs]:
        """Tokens (B, T, D), representation (B, D), logits (B, K); of several batches of images a list of them.

        Several batches, such as the global and the local views of a picture, are computed in one call of every layer.
        Each may have its own number of square images, of its own size, of at least one patch; two may have the same
        size. Each has its own class token, registers and patches in its outputs, and `patch_tokens` of these are its N
        patches. Learned positions are resampled for grids other than that of `image_size`, as `resample_positions`
        does; fixed ones and rotations are those of the grid. The outputs are those of a call for each batch, up to
        rounding; a sequence of one batch has the bits of that batch. Axial models, hybrids, relative positions and
        those of every layer take one size.

        Args:
            images: (B, S, S, 3) of `image_size`, or a sequence of such batches of any sizes.
            edit: patch embeddings (B, N, D) -> those that are used instead, before class token and positions are added.
                With a sequence of images a sequence as well: one for each batch, or None.
            kept: the patches (B, C) that blocks see, int64, each once; None for all. Positions that are told in every
                block, other than rotations, and axial attention need all of them. A sequence as `edit`.

        Raises `ValueError` for images that it does not take.
        """
        if isinstance(images, Tensor):
            check_size(images, self.image_size)
            return self._outputs([images], [edit], [kept])[0]  # type: ignore[list-item]
        edits, parts = (each or [None] * len(images) for each in (edit, kept))
        self._check_sizes(images)
        return self._outputs(images, edits, parts)  # type: ignore[arg-type]

    def _check_sizes(self, images: Sequence[Tensor]) -> None:
        """Raise `ValueError` for batches of images that it does not take together."""
        P, is_of_one = self.shape.patch_size, self.shape.stem is not None or self.shape.attention == "axial"
        if is_of_one or self.position == "relative" or self.position_at == "every_layer":
            if len(images) != 1:
                raise ValueError(f"{len(images)} batches of images; this model takes one")
            check_size(images[0], self.image_size)
        for shape in (tuple(batch.shape) for batch in images):
            if len(shape) != 4 or shape[1] != shape[2] or shape[1] < P or shape[3] != CHANNELS:
                raise ValueError(
                    f"images of shape {shape}; expected (batch, size, size, {CHANNELS}), {P} pixels or more"
                )

    def _outputs(
        self, images: Sequence[Tensor], edits: Sequence[Edit | None], kept: Sequence[Tensor | None]
    ) -> list[Outputs]:
        embedded = [
            x_BND if edit is None else edit(x_BND) for x_BND, edit in zip(self._embed(images), edits, strict=True)
        ]
        tokens = self._encode(embedded, kept)
        pooled_BD, counts = self.represent(tokens), [len(each) for each in tokens]
        logits: Tensor | None
        heads: Tensor | None = None
        if self.head is not None and self.head_dist is not None:
            first = tokens[0] if len(tokens) == 1 else torch.cat([each[:, :2] for each in tokens])
            heads = torch.stack([self.head(first[:, 0]), self.head_dist(first[:, 1])], dim=1)
            logits = heads.mean(dim=1)
        else:
            logits = self.classify(pooled_BD)
        if self.pool == "normed_mean":
            tokens = [each[:, 1:] for each in tokens]
        if len(tokens) == 1:
            return [Outputs(tokens[0], pooled_BD, logits, heads)]
        found = [[None] * len(tokens) if each is None else each.split(counts) for each in (pooled_BD, logits, heads)]
        return [Outputs(*each) for each in zip(tokens, *found, strict=True)]

    def embed(self, images_BHWC: Tensor) -> Tensor:
        """Patch embeddings (B, N, D), without positions."""
        check_size(images_BHWC, self.image_size)
        return self._embed([images_BHWC])[0]

    def _embed(self, images: Sequence[Tensor]) -> list[Tensor]:
        """As `embed`, for batches of several sizes."""
        if self.stem is not None:  # of one batch
            images = [self.stem(each).permute(0, 2, 3, 1) for each in images]
        patches = [self.patchify(each) for each in images]
        return apart(self.embedding(side_by_side(patches)), sizes_of(patches))

    def encode(
        self, x_BTD: Tensor, keep: Callable[[str, Tensor], None] = no_record, kept_BC: Tensor | None = None
    ) -> Tensor:
        """Patch embeddings (B, N, D) -> tokens (B, T, D) after the final norm: class token, registers, patches.

        With `normed_mean` the normed mean of the patches comes before them.
        """
        return self._encode([x_BTD], [kept_BC], keep)[0]

    def _encode(
        self, embedded: Sequence[Tensor], kept: Sequence[Tensor | None], keep: Callable[[str, Tensor], None] = no_record
    ) -> list[Tensor]:
        """As `encode`, for batches of several sizes."""
        values_1TD = position_values(self.pos_embedding)
        paths = self.kept_paths(embedded)
        grids = [self._enter(x_BND, values_1TD, part) for x_BND, part in zip(embedded, kept, strict=True)]
        rotations = self._rotations(embedded, kept)
        sizes = sizes_of(grids)
        x_BTD = self.dropout(side_by_side(grids))
        shared = None
        if values_1TD is not None and self.position_at == "shared":
            of_grids = [self._positions_for(x_BND, values_1TD) for x_BND in embedded]
            wide = [each.expand(len(x_BND), -1, -1) for x_BND, each in zip(embedded, of_grids, strict=True)]
            shared = side_by_side(wide) if sizes else of_grids[0]
        masks = None if paths is None else masks_of(paths, sizes)
        for index, block in enumerate(self.blocks):
            inputs: list[Any] = [x_BTD, shared]
            if self.shape.attention == "full":
                inputs += [
                    rotations[index % len(rotations)],
                    None if masks is None else masks[2 * index : 2 * index + 2],
                    sizes,
                ]
            x_BTD = run_block(self, index, block, *inputs)
            keep(f"block_{index}", x_BTD)
        if self.pool == "normed_mean":  # among the tokens, as DeepSpeed expects one call of a module
            grids = [
                torch.cat([self.patch_tokens(each).mean(dim=1, keepdim=True), each], dim=1)
                for each in apart(x_BTD, sizes)
            ]
            x_BTD, sizes = side_by_side(grids), sizes_of(grids)
        return apart(self.norm(x_BTD), sizes)

    def _enter(self, x_BTD: Tensor, values_1TD: Tensor | None, kept_BC: Tensor | None) -> Tensor:
        """The tokens (B, T, D) that the first block gets for patch embeddings (B, N, D)."""
        grid, positions_1TD = math.isqrt(x_BTD.shape[1]), None
        if values_1TD is not None and self.position_at == "stem":
            positions_1TD = self._positions_for(x_BTD, values_1TD)
        if self.position == "sincos":  # of patches alone
            x_BTD = x_BTD + sincos_positions(grid, self.shape.width, x_BTD, self.position_table)
        first = [each.expand(len(x_BTD), -1, -1) for each in (self.cls, self.dist) if each is not None]
        if first and self.shape.class_position:
            x_BTD, first = torch.cat([*first, x_BTD], dim=1), []
        if positions_1TD is not None:
            x_BTD = x_BTD + positions_1TD
        if self.registers is not None:
            at = int(self.cls is not None and self.shape.class_position)
            first, x_BTD = [*first, x_BTD[:, :at], self.registers.expand(len(x_BTD), -1, -1)], x_BTD[:, at:]
        if first:
            x_BTD = torch.cat([*first, x_BTD], dim=1)
        if kept_BC is not None:
            patches_BND = self.patch_tokens(x_BTD)
            others_BTD = x_BTD[:, : x_BTD.shape[1] - patches_BND.shape[1]]
            at_BCD = kept_BC[..., None].expand(-1, -1, patches_BND.shape[2])
            x_BTD = torch.cat([others_BTD, patches_BND.gather(1, at_BCD)], dim=1)
        return x_BTD

    def _positions_for(self, x_BND: Tensor, values_1TD: Tensor) -> Tensor:
        """The learned positions (1, T, D) of the grid of patch embeddings (B, N, D)."""
        own = self.shape.grid(self.image_size)
        return positions_of_grid(values_1TD, own, math.isqrt(x_BND.shape[1]), values_1TD.shape[1] - own**2)

    def _rotations(self, embedded: Sequence[Tensor], kept: Sequence[Tensor | None]) -> list[list[Tensor]]:
        """How each block rotates the tokens of several batches, or how all blocks do; empty lists without rotations."""
        if self.position not in ("rope", "1d_rope"):
            return [[]]
        grids = [math.isqrt(x_BND.shape[1]) for x_BND in embedded]
        factors: list[Any] = [[(1.0, 1.0)]] * len(grids)
        if self.training and self.stretches is not None:
            factors = [self.stretches(grid) for grid in grids]
        each = list(zip(grids, embedded, kept, strict=True))
        return [
            [self._rotation(*of_grid, own) for of_grid, own in zip(each, of_block, strict=True)]
            for of_block in zip(*factors, strict=True)
        ]

    def _rotation(self, grid: int, like: Tensor, kept_BC: Tensor | None, stretch: Sequence[float]) -> Tensor:
        """How the last tokens are rotated, (2, N, d) or (2, B, 1, C, d), registers before the patches."""
        head_dim, base, unit = self.shape.head_dim, self.position_base, self.position_unit
        found = [patch_rotation(grid, head_dim, base, like, self.position, unit, stretch)]  # type: ignore[arg-type]
        if self.registers_base is not None:
            side = math.isqrt(self.shape.registers)
            found.insert(0, patch_rotation(side, head_dim, self.registers_base, like, "1d_rope", "patch"))
        rotation = torch.cat(found, dim=1)
        if kept_BC is None:
            return rotation
        if self.registers_base is not None:  # registers are rotated as well, and come before the patches
            of_registers = torch.arange(self.shape.registers, device=kept_BC.device).expand(len(kept_BC), -1)
            kept_BC = torch.cat([of_registers, kept_BC + self.shape.registers], dim=1)
        return rotation[:, kept_BC][:, :, None]

    def block_tokens(self, images: Tensor, count: int) -> BlockTokens:
        """As `Model.block_tokens`; with `pool: mean`, `map` and `normed_mean` the tokens are means of patches."""
        last = [f"block_{index}" for index in reversed(range(len(self.blocks)))][:count]
        kept: dict[str, Tensor] = {}

        def keep(name: str, x_BTD: Tensor) -> None:
            if name in last:
                kept[name] = x_BTD

        self.encode(self.embed(images), keep)
        if self.pool == "normed_mean":
            means = [self.norm(self.patch_tokens(kept[name]).mean(dim=1)) for name in last]
            return BlockTokens(torch.stack(means, dim=1), None)
        normed = [self.norm(kept[name]) for name in last]
        means = [self.patch_tokens(tokens).mean(dim=1) for tokens in normed]
        if self.pool != "cls":
            return BlockTokens(torch.stack(means, dim=1), None)
        return BlockTokens(torch.stack([tokens[:, 0] for tokens in normed], dim=1), means[0])

    def feature_maps(self, images: Tensor, layers: Sequence[int] | None = None) -> list[Tensor]:
        """As `Model.feature_maps`: the tokens of the patches after the blocks, by row and column."""
        layers = check_layers([len(self.blocks)] if layers is None else layers, len(self.blocks))
        kept: dict[str, Tensor] = {}
        self.encode(self.embed(images), kept.__setitem__)
        grid = self.shape.grid(self.image_size)
        tokens = [self.patch_tokens(kept[f"block_{layer - 1}"]) for layer in layers]
        return [tokens_BND.transpose(1, 2).unflatten(2, (grid, grid)) for tokens_BND in tokens]

    def patch_tokens(self, tokens_BTD: Tensor) -> Tensor:
        return tokens_BTD[:, self.num_first_tokens :] if self.num_first_tokens else tokens_BTD

    @property
    def num_first_tokens(self) -> int:
        """Tokens before those of the patches."""
        return (self.cls is not None) + (self.dist is not None) + self.shape.registers

    def represent(self, tokens: Sequence[Tensor]) -> Tensor:
        """The representation (B, D) from what `encode` returns, of several batches one after the other: before the tanh
        of the pre-training head.
        """
        if self.map is not None:
            x_BD = self.map(side_by_side(tokens), sizes_of(tokens))
        else:
            means = self.pool == "mean"
            found = [self.patch_tokens(each).mean(dim=1) if means else each[:, 0] for each in tokens]
            if self.dist is not None:  # as timm's
                found = [(each + of_batch[:, 1]) / 2 for each, of_batch in zip(found, tokens, strict=True)]
            x_BD = found[0] if len(found) == 1 else torch.cat(found)
        return x_BD if self.pre_logits is None else self.pre_logits(x_BD)

    def classify(self, pooled_BD: Tensor) -> Tensor | None:
        """Logits (B, K); None without a head."""
        if self.head is None:
            return None
        return self.head(pooled_BD if self.pre_logits is None else torch.tanh(pooled_BD))

    def units(self) -> Sequence[nn.Module]:
        return [*(self.stem.units() if self.stem is not None else []), *self.blocks]

    def anatomy(self) -> Anatomy:
        """As `Model.anatomy`: a hybrid's units come first, then the embedding, then the blocks, counted from 1."""
        layers: dict[str, nn.Module] = {} if self.stem is None else self.stem.layers()
        layers["embedding"] = self.embedding
        attention = []
        blocks: list[EncoderBlock | AxialBlock] = list(self.blocks)  # type: ignore[arg-type]
        for index, block in enumerate(blocks, 1):
            layers[str(index)] = block
            if isinstance(block, AxialBlock):
                attention.append(AttentionLayer(f"{index} rows", block.rows.attention, "rows"))
                attention.append(AttentionLayer(f"{index} columns", block.columns.attention, "columns"))
            else:
                attention.append(AttentionLayer(str(index), block.attention, "grid"))
        first = self.embedding if self.stem is None else self.stem.root.conv
        positions = (self.pos_embedding, *(block.pos_embedding for block in blocks))
        return Anatomy(
            layers,
            attention,
            self.map,
            "pooling" if self.map is not None else "class token" if self.pool == "cls" else "patches",
            self.shape.grid(self.image_size),
            self.shape.stride,
            self.num_first_tokens,
            (first, *(module for module in positions if isinstance(module, nn.Module))),
        )

    def filters(self) -> Tensor:
        """As `Model.filters`: those of the embedding (D, P, P, 3), or of a hybrid's root."""
        if self.stem is not None:
            return self.stem.filters()
        P = self.shape.patch_size
        return self.embedding.weight.view(-1, P, P, CHANNELS)

    def positions(self) -> dict[str, Tensor]:
        grid = self.shape.grid(self.image_size)
        if self.position == "sincos":
            return {"fixed": sincos_positions(grid, self.shape.width, self.embedding.weight, self.position_table)[0]}
        found: dict[str, Any] = {
            "shared by all blocks" if self.position_at == "shared" else "learned": self.pos_embedding
        }
        found |= {f"of block {index}": block.pos_embedding for index, block in enumerate(self.blocks, 1)}
        values = {where: position_values(own) for where, own in found.items()}
        return {where: value_1TD[0, -(grid**2) :] for where, value_1TD in values.items() if value_1TD is not None}

    def foreign(self) -> ViTWeights:
        return ViTWeights(self)

    def initialiser(self, name: str) -> Initialiser:
        """How the parameter `name` is filled at the start of training: as in the authors' code."""
        layer, _, kind = name.rpartition(".")
        if self.shape.stem is not None and name.startswith("stem."):
            return resnet_initialiser(name, self.shape.stem.variant)
        if layer in ("head", "head_dist") or name == "cls":
            return constant(0.0)
        if "pos_embedding" in name or kind in ("relative", "registers", "dist"):
            return normal(0.02)
        if self.shape.layer_scale is not None and kind.startswith("layer_scale"):
            return constant(self.shape.layer_scale)
        if kind == "probe":
            return lambda tensor, generator: xavier_uniform()(tensor.view(1, -1), generator)
        if layer.endswith(("norm", "norm1", "norm2")):
            return constant(1.0 if kind == "weight" else 0.0)
        if layer.endswith(("mlp.fc1", "mlp.fc2")) and kind == "bias":
            return normal(1e-6)
        if kind in ("bias", "query_bias", "value_bias"):
            return constant(0.0)
        if layer in ("embedding", "pre_logits"):
            return lecun_normal
        if layer.endswith("qkv"):
            return xavier_uniform(3)
        if layer == "map.key_value" or (layer.endswith("mlp.fc1") and self.shape.mlp == "swiglu"):
            return xavier_uniform(2)
        if layer.endswith(("attention.out", "mlp.fc1", "mlp.fc2", "map.query", "map.out")):
            return xavier_uniform()
        raise KeyError(f"no initial value is defined for the parameter {name!r}")
