"""The base of every block of a recipe."""

from pydantic import BaseModel, ConfigDict


class Block(BaseModel):
    """Typed, strict and frozen: an unknown key, a wrong type and a number that is not finite are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
