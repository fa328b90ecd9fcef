"""The base of every block of a recipe, and what a block says that contradicts itself."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict


class Block(BaseModel):
    """Typed, strict and frozen: an unknown key, a wrong type and a number that is not finite are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Contradictions(ValueError):
    """Several things in a block, or in several, that do not go together: a line each, in `lines`."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = tuple(lines)
