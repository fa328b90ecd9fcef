"""The contract of a model family: everything that can be known about its models without torch.

A family is a `model` block: a subclass whose fields are the block's keys, and whose methods answer what recipes,
accounting, planning and training ask about a model. `implementation` names the class that computes it.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeVar

from pydantic import Field

from vitscale.ground.block import Block
from vitscale.ground.operations import Operation
from vitscale.ground.weight_formats import POSITIONS_RULE

Pool = Literal["cls", "mean", "normed_mean", "map"]


class Patches(NamedTuple):
    """How a model cuts the input image: a patch's side in pixels, patches along a side, the width of an embedding."""

    size: int
    grid: int
    width: int


class Shape(Protocol):
    """The dimensions of one model, as a frozen dataclass that its family defines."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def stride(self) -> int:
        """Image pixels per token, or per step of the last feature map, along one side."""


class Model(Block):
    """The base of every `model` block."""

    implementation: ClassVar[str]  # `module:class` of the `vitscale.models.Model` that computes it
    title: ClassVar[str]  # what messages call a model of this family
    positions_rule: ClassVar[str] = POSITIONS_RULE  # how what is learned of positions becomes that of another size
    # The models that `vitscale models` lists and the tests cover; other names of the same patterns work, too.
    names: ClassVar[tuple[str, ...]] = ()
    dimensions: ClassVar[tuple[str, ...]] = ()  # the keys that each replace one dimension of the named model
    optional: ClassVar[tuple[str, ...]] = ()  # the keys that a resolved recipe has only if they are set

    name: str | None = Field(None, description="ViT-B/16, ResNet50x1, R50+ViT-B/16, ...: `vitscale models` lists them")
    family: str | None = Field(None, pattern=r"\.")
    """a family of another package: the dotted path of its block, whose keys are then written here"""
    num_classes: int | None = Field(None, ge=1, le=2**31)
    """number of classes; default: the number of class names of data.train"""
    head: Literal["pretrain", "linear"] = "pretrain"
    """linear: an output layer; pretrain: a dense layer with tanh before it, which only Transformers with one stage
    have"""
    head_bias: float | None = None
    """initial bias of the output layer; default: -10 with head: pretrain and the sigmoid loss, else 0"""

    @classmethod
    def named(cls, name: str) -> Shape | None:
        """The dimensions that a name of this family implies; None for any other name."""
        return None

    @classmethod
    def refusal(cls, key: str, value: Any, name: str | None) -> str:
        """The message that a model of this family, called `name`, cannot have another family's key."""
        lacks = {"pool": "class token", "dropout": "dropout", "position": "position embeddings"}.get(key, "such key")
        return f"{key} {value!r}: {name or 'this'} is a {cls.title}, which has no {lacks}"

    @abstractmethod
    def shape(self) -> Shape:
        """The dimensions: those of the name, with those that are set replacing them. Raises `ValueError`."""

    def describe(self) -> str:
        """`ViT-B/16`, `ViT-B/16 depth=6`, or for a model without a name `L8 D1024 MLP2048 /32`."""
        if self.name is None:
            return self.describe_dimensions()
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.given(self.dimensions).items())])

    @abstractmethod
    def describe_dimensions(self) -> str:
        """A description of a model without a name."""

    @property
    def kind(self) -> str:
        """The model's kind, as lists of models show it."""
        return self.title.lower()

    def facts(self) -> dict[str, Any]:
        """Key -> value of every setting that decides what the model computes from its weights, without the head."""
        return {**dataclasses.asdict(self.shape()), "pool": self.pool_or_default()}

    def pool_or_default(self) -> Pool:
        """How tokens become one vector: `pool`, or the default of this model."""
        return "mean"

    @property
    def representation_width(self) -> int:
        """D of `vitscale.models.Outputs.pooled`. Raises `ValueError` for families that do not say."""
        raise ValueError(f"a {self.title} does not say how wide its representation is")

    def check_image_size(self, image_size: int) -> None:
        """Raise `ValueError` if images of this size, in pixels, are too small."""

    def check_several_sizes(self) -> None:
        """Raise `ValueError` if the model does not take images of several sizes in one call, as `data.views` may be."""
        raise ValueError(f"a {self.title} takes images of one size in one call; a plain Transformer takes several")

    def describe_border(self, image_size: int) -> str | None:
        """Describe the border of the image that the model does not see; None if it sees everything."""
        return None

    def num_tokens(self, image_size: int) -> int | None:
        """The tokens of one image, including a class token and registers; None for a model with a feature map."""
        return None

    @property
    def extra_tokens(self) -> int:
        """The number of tokens before those of patches: class and distillation token, registers."""
        return 0

    def patches(self, image_size: int) -> Patches | None:
        """The patches cut from the input image; None if the model cuts none from it."""
        return None

    def positions_of(self, image_size: int) -> object:
        """What learned positions are made for: equal for two sizes of images if nothing has to be resampled."""
        return self.patches(image_size) or image_size  # or what a stem makes of such images

    @abstractmethod
    def operations(self, image_size: int, num_classes: int | None) -> Sequence[Operation]:
        """The operations on one image, with their parameters, in order; without the head if `num_classes` is None."""

    def operations_of_part(self, image_size: int, num_classes: int | None, patches: int) -> Sequence[Operation]:
        """As `operations`, with blocks that see only `patches` patches. Raises `ValueError` if they need them all."""
        raise ValueError(f"a {self.title} needs all its patches")

    @property
    def num_blocks(self) -> int:
        """The number of Transformer blocks, named `blocks.I`, which `layer_decay` counts and fp8 covers."""
        return 0

    @property
    def has_equal_blocks(self) -> bool:
        """Whether all blocks have one shape, so that every pair of them costs as much as any other."""
        return self.num_blocks > 0

    def with_blocks(self, count: int) -> Self:
        """The same model with another number of blocks; only for families that have equal blocks."""
        raise NotImplementedError

    def layers_above(self, parameter: str) -> int:
        """The layers from a parameter up to the head, as `layer_decay` counts; only for families that have blocks."""
        raise NotImplementedError

    def axes(self, parameter: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a parameter with every axis apart that ours merges with others: heads, or sides of a patch."""
        return shape

    @property
    def has_attention_bias(self) -> bool:
        """Whether a bias is added to the attention logits."""
        return False

    @property
    def draws(self) -> bool:
        """Whether the forward pass draws from torch in training: dropout does, our drop path does not."""
        return False

    @abstractmethod
    def small(self) -> tuple[dict[str, Any], int]:
        """(keys that make the model small, image side in pixels) for a smoke test.

        It takes the same code path and runs in seconds on any machine.
        """

    def given(self, keys: Sequence[str]) -> dict[str, Any]:
        """The keys that are set, with their values."""
        return {key: value for key in keys if (value := getattr(self, key)) is not None}


_Dimensions = TypeVar("_Dimensions")


def complete(kind: type[_Dimensions], named: _Dimensions | None, given: dict[str, Any]) -> _Dimensions:
    """The dimensions of a name with those in `given` replaced; without a name all must be given.

    Raises `ValueError` naming a dimension that is missing.
    """
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    if named is not None:
        return dataclasses.replace(named, **given)  # type: ignore[type-var]
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING and field.name not in given:
            raise ValueError(f"give a name such as ViT-B/16 or ResNet50x1, or all dimensions ({field.name} is missing)")
    return kind(**given)
