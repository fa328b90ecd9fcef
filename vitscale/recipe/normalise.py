"""How pixels become a model's input, as a recipe says it."""

from typing import Annotated

from pydantic import Field, model_validator

from vitscale.block import Block

_Channels = Annotated[list[Annotated[float, Field(ge=-1e3, le=1e3)]], Field(min_length=3, max_length=3)]


class Normalise(Block):
    """How pixels become the model's input: (x - mean) / std, of x from 0 to 1, red, green and blue apart.

    The default, [-1, 1], is the paper's. Weights of timm and transformers are often of others, and say so.
    """

    mean: _Channels = Field([0.5, 0.5, 0.5], description="is subtracted")
    std: _Channels = Field([0.5, 0.5, 0.5], description="divides; each above 0")

    @model_validator(mode="after")
    def _above_zero(self) -> "Normalise":
        if min(self.std) <= 0:
            raise ValueError(f"std {self.std}: expected three numbers above 0")
        return self
