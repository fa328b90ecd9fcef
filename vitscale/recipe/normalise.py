"""How pixels become a model's input, as a recipe says it."""

from typing import Annotated

from pydantic import Field, model_validator

from vitscale.ground.block import Block

_Channels = Annotated[list[Annotated[float, Field(ge=-1e3, le=1e3)]], Field(min_length=3, max_length=3)]


class Normalise(Block):
    """How pixels become the model's input: (x - mean) / std, with x from 0 to 1, for red, green and blue separately.

    The default, [-1, 1], is the paper's. Weights of timm and transformers often use other values, and state them.
    """

    mean: _Channels = Field([0.5, 0.5, 0.5], description="subtracted from each channel")
    std: _Channels = Field([0.5, 0.5, 0.5], description="divisor of each channel; above 0")

    @model_validator(mode="after")
    def _above_zero(self) -> "Normalise":
        if min(self.std) <= 0:
            raise ValueError(f"std {self.std}: expected three numbers above 0")
        return self
