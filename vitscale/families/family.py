"""The contract of a model family: all that is known of its models without torch.

A family is a `model` block: its keys are the fields of a subclass, and the block answers whatever recipes, accounting,
planning and training ask of a model. `implementation` names the class that computes it.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeVar

from pydantic import Field

from vitscale.block import Block
from vitscale.operations import Operation

Pool = Literal["cls", "mean", "normed_mean", "map"]


class Patches(NamedTuple):
    """How a model cuts the picture itself into patches.

    Attributes:
        size: side of a patch in pixels.
        grid: patches along one side of the image.
        width: size of a patch's embedding.
    """

    size: int
    grid: int
    width: int


class Shape(Protocol):
    """The dimensions of one model: a frozen dataclass of its family's."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def stride(self) -> int:
        """Pixels of the image for one token, or one step of the last feature map."""


class Model(Block):
    """The base of every `model` block.

    Attributes:
        implementation: `module:class` of the `vitscale.models.Model` that computes it.
        title: what messages call one of the family.
        names: the models that `vitscale models` lists and the tests cover; more names of the same patterns are known.
        patterns: the names that are known, in words.
        dimensions: keys that replace a part of what the name says.
        optional: keys that a resolved recipe has only where they are set.
    """

    implementation: ClassVar[str]
    title: ClassVar[str]
    names: ClassVar[tuple[str, ...]] = ()
    patterns: ClassVar[str] = ""
    dimensions: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()

    name: str | None = Field(None, description="ViT-B/16, ResNet50x1, R50+ViT-B/16, ...: `vitscale models` lists them")
    family: str | None = Field(
        None,
        pattern=r"\.",
        description="a family of another package: the dotted path of its block, whose keys then stand here",
    )
    num_classes: int | None = Field(
        None, ge=1, le=2**31, description="default: the number of class names of data.train"
    )
    head: Literal["pretrain", "linear"] = Field(
        "pretrain",
        description="linear: an output layer; pretrain: before it a dense layer with tanh, which ResNets do not have",
    )
    head_bias: float | None = Field(
        None,
        description="initial bias of the output layer; default: -10 with head: pretrain and the sigmoid loss, else 0",
    )

    # ---- What it is --------------------------------------------------------------------------------------------------

    @classmethod
    def named(cls, name: str) -> Shape | None:
        """The dimensions that a name of this family stands for; None for any other name."""
        return None

    @classmethod
    def refusal(cls, key: str, value: Any, name: str | None) -> str:
        """Why a model of this family, called `name`, cannot have a key of another family's."""
        return f"{key} {value!r}: this is a {cls.title}, which has no such key"

    @abstractmethod
    def shape(self) -> Shape:
        """The dimensions, from the name and what replaces parts of it. Raises `ValueError`."""

    def describe(self) -> str:
        """`ViT-B/16`, `ViT-B/16 depth=6`, or for a model without a name `L8 D1024 MLP2048 /32`."""
        if self.name is None:
            return self.describe_dimensions()
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.given(self.dimensions).items())])

    @abstractmethod
    def describe_dimensions(self) -> str:
        """What a model without a name is called."""

    @property
    def kind(self) -> str:
        """What lists of models call its kind."""
        return self.title.lower()

    def facts(self) -> dict[str, Any]:
        """Key -> value of what decides which function of its weights it computes, its head aside."""
        return {**dataclasses.asdict(self.shape()), "pool": self.pool_or_default()}

    def pool_or_default(self) -> Pool:
        """How tokens become one representation."""
        return "mean"

    # ---- On images of a size -----------------------------------------------------------------------------------------

    def check_image_size(self, image_size: int) -> None:
        """Raise `ValueError` where images are too small."""

    def describe_border(self, image_size: int) -> str | None:
        """What of the images is not seen, in words; None where all is."""
        return None

    def num_tokens(self, image_size: int) -> int | None:
        """Tokens of one image, a class token and registers included; None where there is a feature map instead."""
        return None

    def patches(self, image_size: int) -> Patches | None:
        """The patches into which it cuts the picture itself; None where it does not."""
        return None

    @abstractmethod
    def operations(self, image_size: int, num_classes: int | None) -> Sequence[Operation]:
        """What one image costs, and the parameters, in order; `num_classes` None: without a head."""

    def operations_of_part(self, image_size: int, num_classes: int | None, patches: int) -> Sequence[Operation]:
        """As `operations`, where blocks see only so many patches. Raises `ValueError` where they need all of them."""
        raise ValueError(f"a {self.title} does not go without some of its patches")

    # ---- What can be done with it ------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Transformer blocks, all alike and called `blocks.I`: what `layer_decay` counts and fp8 computes; 0: none."""
        return 0

    def with_blocks(self, count: int) -> Self:
        """The same model with another number of blocks, of a family that has some."""
        raise NotImplementedError

    def layers_above(self, parameter: str) -> int:
        """Layers from a parameter up to the head, which `layer_decay` counts, of a family that has blocks."""
        raise NotImplementedError

    @property
    def has_attention_bias(self) -> bool:
        """Whether something is added to the logits of attention."""
        return False

    @property
    def draws(self) -> bool:
        """Whether its forward pass draws random numbers while it trains."""
        return False

    @abstractmethod
    def small(self) -> tuple[dict[str, Any], int]:
        """(keys that make it small, side of images that it then sees): the same code path in seconds on any machine."""

    # ---- For subclasses ----------------------------------------------------------------------------------------------

    def given(self, keys: Sequence[str]) -> dict[str, Any]:
        """Those of some keys that are set."""
        return {key: value for key in keys if (value := getattr(self, key)) is not None}


_Dimensions = TypeVar("_Dimensions")


def complete(kind: type[_Dimensions], named: _Dimensions | None, given: dict[str, Any]) -> _Dimensions:
    """Dimensions from those of a name, if there is one, and what replaces parts of them. Raises `ValueError`."""
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    if named is not None:
        return dataclasses.replace(named, **given)  # type: ignore[type-var]
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING and field.name not in given:
            raise ValueError(f"give a name such as ViT-B/16 or ResNet50x1, or all dimensions ({field.name} is missing)")
    return kind(**given)
