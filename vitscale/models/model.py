"""The contract of a family's module: what it computes, and what is asked of it.

Shape legend: B batch, T tokens, D width of the representation, K classes, n blocks.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from vitscale.models.anatomy import Anatomy
from vitscale.models.initialise import Initialiser
from vitscale.models.layers import OutputLayer

if TYPE_CHECKING:
    from vitscale.models.weights.foreign import ForeignWeights
    from vitscale.models.weights.source import Source


class Outputs(NamedTuple):
    """On any device and in any floating dtype, the logits in fp32.

    Attributes:
        tokens: (B, T, D), after the final norm; a class token comes first, a distillation token next.
        pooled: (B, D), the representation: what linear read-outs see, before the tanh of the pre-training head.
        logits: (B, K); None from a backbone without a head.
        heads: (B, 2, K), the logits of class and distillation token, whose mean `logits` is; None from other models.
    """

    tokens: Tensor
    pooled: Tensor
    logits: Tensor | None
    heads: Tensor | None = None


class BlockTokens(NamedTuple):
    """What a linear head reads of the last blocks, each after the final norm.

    Attributes:
        tokens: (B, n, D), one of each block, the last block first: the class token, or else the mean of its patches.
        patches: (B, D), the mean of the last block's patches; None if the tokens are such means, or there are none.
    """

    tokens: Tensor
    patches: Tensor | None


class Model(nn.Module):
    """A model: images (B, H, W, 3) in [-1, 1] -> `Outputs` by `forward`, its values unset.

    A family whose block's `check_several_sizes` passes takes images of several sizes, a sequence of such tensors, in
    one call, and returns a list of their `Outputs`: each as if it had been computed alone.

    Attributes:
        shape: the dimensions, a class of the family's own.
        image_size: side of the square input in pixels.
        head: the output layer; None for a backbone without one.
        blocks: the Transformer blocks, in families that have some.
        paths: which branches stay in the next passes of training, bool (B, V, P) of V views of B samples; None lets
            torch draw. See `kept_paths`.
        stretch: (rescale, jitter) of its block's rotations; 1 is off.
        stretches: with those, of the next passes of training: for images of so many patches a side the factors of row
            and column in each block; None for none.
    """

    shape: Any
    image_size: int
    head: OutputLayer | None
    blocks: nn.ModuleList
    paths: Tensor | None = None
    stretch: tuple[float, float] = (1.0, 1.0)
    stretches: Callable[[int], Sequence[Sequence[float]]] | None = None

    @classmethod
    def of(cls, block: Any, *, image_size: int, num_classes: int | None, checkpoint_every: int) -> Self:
        """The model of a recipe's `model` block, which is of this family.

        Args:
            block: the block.
            image_size: side of the square input in pixels.
            num_classes: K; None for a backbone without a head, whatever the block says.
            checkpoint_every: recompute every k-th block's activations in the backward pass; 0 keeps all of them.

        By default for a class that takes all of these, the block's shape in its place, and the block's `drop_path`.
        """
        sizes: dict[str, Any] = {"image_size": image_size, "num_classes": num_classes}
        return cls(block.shape(), **sizes, drop_path=block.drop_path, checkpoint_every=checkpoint_every)

    def initialiser(self, name: str) -> Initialiser:
        """How the parameter `name` is filled at the start of training. Raises `KeyError` for an unknown one."""
        raise NotImplementedError

    def units(self) -> Sequence[nn.Module]:
        """The blocks and residual units: what is compiled, each by itself."""
        raise NotImplementedError

    def foreign(self) -> "ForeignWeights":
        """The names of its parameters in the formats of other libraries, and how their values are laid out there."""
        from vitscale.models.weights.foreign import ForeignWeights  # it imports models itself

        return ForeignWeights()

    @classmethod
    def recognise(cls, source: "Source") -> tuple[dict[str, Any], int | None] | None:
        """The `model` block and image size of a model of this family in another library's format, if this is one.

        Raises `CheckpointError` if what the file says contradicts its tensors, or is not computed here.
        """
        return None

    @property
    def path_shares(self) -> Sequence[float]:
        """For which share of images each of its P branches is left out in training; empty where all stay."""
        return ()

    def kept_paths(self, batches: Sequence[Tensor]) -> list[Tensor] | None:
        """Which branches stay for each of some batches of images, bool (P, B); None where all do.

        `paths` are those of the views of samples: each batch holds the next n views, sample by sample.

        Raises `ValueError` if the batches are no such views.
        """
        shares = self.path_shares
        if not self.training or not any(shares):
            return None
        if self.paths is None:
            keep = [1 - share for share in shares]
            ones = [batch.new_ones(len(batch)) for batch in batches]
            return [torch.stack([all.bernoulli(rate) if rate < 1 else all for rate in keep]) > 0 for all in ones]
        samples, views = self.paths.shape[:2]
        counts = [len(batch) // samples for batch in batches]
        if [count * samples for count in counts] != [len(batch) for batch in batches] or sum(counts) > views:
            raise ValueError(
                f"{[len(batch) for batch in batches]} images are not the first views of {samples} samples, which have "
                f"{views} each"
            )
        return [part.flatten(0, 1).T for part in self.paths[:, : sum(counts)].split(counts, dim=1)]

    def block_tokens(self, images: Tensor, count: int) -> BlockTokens:
        """What linear heads read from the last `count` blocks, or from all if there are fewer.

        By default the representation stands for the last block, and is the only one.
        """
        return BlockTokens(self(images).pooled[:, None], None)

    def feature_maps(self, images: Tensor, layers: Sequence[int] | None = None) -> list[Tensor]:
        """Feature maps of hidden layers, each (B, C, h, w), for detection and segmentation: with no norm after them.

        Args:
            images: (B, H, W, 3) in [-1, 1].
            layers: counted from 1, in the order wanted: the blocks of a Transformer, the stages of a Swin or ResNet. By
                default the last block, or all stages.

        Raises `RecipeError` for a layer that there is none of, and `NotImplementedError` in families without maps.
        """
        raise NotImplementedError

    # ---- Of a model that cuts the picture itself into patches: `patches` of its block --------------------------------
    # Its `forward` takes `edit`: patch embeddings (B, N, D) -> those that are used instead; and `kept`, the patches (B,
    # C) that are used further, unless `operations_of_part` of its block refuses. With a sequence of images both are
    # sequences, with None for those that are left as they are.

    def patchify(self, images_BHWC: Tensor) -> Tensor:
        """The pixels of patches: (B, H, W, 3) -> (B, N, P * P * 3), rows of patches first, in each height first."""
        raise NotImplementedError

    def patch_tokens(self, tokens_BTD: Tensor) -> Tensor:
        """The tokens of patches (B, N, D) among all (B, T, D)."""
        raise NotImplementedError

    # ---- What can be seen of it without a picture, and where to look when it sees one --------------------------------

    def anatomy(self) -> Anatomy:
        """Its parts. By default the units are its layers, and no more is known."""
        return Anatomy({str(index): unit for index, unit in enumerate(self.units(), 1)})

    def filters(self) -> Tensor | None:
        """The filters that see the pixels (F, h, w, 3); None where it has none."""
        return None

    def positions(self) -> dict[str, Tensor]:
        """Position embeddings of the patches (N, D), learned or fixed, by where they are added."""
        return {}
