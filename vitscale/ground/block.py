"""The base of every block of a recipe, and the error for blocks that contradict themselves."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict


class Block(BaseModel):
    """A typed, strict and frozen block: an unknown key, a wrong type or a number that is not finite is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Contradictions(ValueError):
    """Values in one or more blocks that do not go together; `lines` has a line for each contradiction."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = tuple(lines)
