"""What another package can bring: a model family, an objective, an optimizer, an evaluator, an operation on images.

Here are the blocks that a recipe names, without torch; what computes them is in the modules beside.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from vitscale import recipe
from vitscale.ground.operations import Operation, block_of, dense, parameters
from vitscale.recipe import families


@dataclass(frozen=True)
class MixerShape:
    """The dimensions of one MLP-Mixer."""

    patch_size: int
    width: int
    depth: int
    token_dim: int
    channel_dim: int

    @property
    def stride(self) -> int:
        """Pixels of the image for one token."""
        return self.patch_size


class Mixer(families.Model):
    """An MLP-Mixer (Tolstikhin et al., 2021): MLPs over tokens and over channels take turns."""

    implementation: ClassVar[str] = "example_vision.mixer:Mixer"
    title: ClassVar[str] = "Mixer"

    patch_size: int = Field(16, ge=1, description="side of a patch in pixels")
    width: int = Field(512, ge=1, description="size of a token")
    depth: int = Field(8, ge=1, description="number of blocks")
    token_dim: int = Field(256, ge=1, description="hidden size of the MLP over tokens")
    channel_dim: int = Field(2048, ge=1, description="hidden size of the MLP over channels")

    @model_validator(mode="after")
    def _possible(self) -> "Mixer":
        if self.head == "pretrain":
            raise ValueError("head: a Mixer has a linear head")
        return self

    def shape(self) -> MixerShape:
        return MixerShape(self.patch_size, self.width, self.depth, self.token_dim, self.channel_dim)

    @property
    def representation_width(self) -> int:
        return self.width

    def describe_dimensions(self) -> str:
        return f"Mixer D{self.width} L{self.depth} /{self.patch_size}"

    def check_image_size(self, image_size: int) -> None:
        if image_size % self.patch_size:
            raise ValueError(f"patches of {self.patch_size} pixels do not divide it")

    def num_tokens(self, image_size: int) -> int:
        return (image_size // self.patch_size) ** 2

    def operations(self, image_size: int, num_classes: int | None) -> Sequence[Operation]:
        D, T = self.width, self.num_tokens(image_size)
        norm = parameters("norms", 2 * D)
        block = [
            norm,
            dense("tokens", D, T, self.token_dim),
            dense("tokens", D, self.token_dim, T),
            norm,
            dense("channels", T, D, self.channel_dim),
            dense("channels", T, self.channel_dim, D),
        ]
        operations = [dense("patch_embedding", T, 3 * self.patch_size**2, D, input_gradient=False)]
        for index in range(self.depth):
            operations += block_of(block, index, needs_output=False)
        operations.append(norm)
        if num_classes is not None:
            operations.append(dense("head", 1, D, num_classes))
        return operations

    def small(self) -> tuple[dict[str, Any], int]:
        return {"width": 32, "depth": 2, "token_dim": 16, "channel_dim": 64}, 4 * self.patch_size


class Rotation(recipe.Objective):
    """By how many quarter turns was an image rotated (Gidaris et al., 2018)? No labels are needed."""

    implementation: ClassVar[str] = "example_vision.rotation:Rotation"
    has_classes: ClassVar[bool] = False
    own: ClassVar[tuple[str, ...]] = ("turns.weight", "turns.bias")

    def operations(self, context: recipe.Context) -> Sequence[Operation]:
        return (dense("turns", 1, context.model.shape().width, 4),)


class Lion(recipe.Optimizer):
    """Steps by the sign of a mean gradient (Chen et al., 2023); keeps half of what AdamW does."""

    implementation: ClassVar[str] = "example_vision.lion:LionRule"

    betas: list[float] = Field([0.9, 0.99], min_length=2, max_length=2, description="of the step, and of the mean")

    @property
    def first_momentum(self) -> float:
        return self.betas[0]

    def kept(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {"exp_avg": shape}


class FeatureNorm(recipe.Evaluator):
    """The mean length of the representations of a dataset."""

    implementation: ClassVar[str] = "example_vision.feature_norm:FeatureNorm"

    data: str = Field(description="a dataset, as data.train")

    def metrics(self) -> Sequence[str]:
        return ("mean",)

    def on_smoke_data(self, train: str, test: str) -> dict[str, Any]:
        return {"data": test}


class Solarize(recipe.ImageOperation):
    """Pixels from a threshold on are inverted, in some images."""

    implementation: ClassVar[str] = "example_vision.solarize:Solarize"
    pixels: ClassVar[Literal["uint8", "float"]] = "uint8"

    share: float = Field(0.2, ge=0, le=1, description="of the images")
    threshold: int = Field(128, ge=0, le=255, description="from which pixels are inverted")
