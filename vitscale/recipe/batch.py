"""The `batch` block: how many samples an update sees, and at most how many are computed at a time."""

from typing import Annotated, Literal

from pydantic import Field

from vitscale.ground.block import Block
from vitscale.ground.errors import RecipeError

MICRO_MAX_ON_CPU = 128
"""What `batch.micro_max: auto` is on CPUs, whose memory is not what limits their speed."""


class Batch(Block):
    """The global batch is the experiment; micro-batch and accumulation follow from it and the world size."""

    # `global` is a Python keyword, hence the alias.
    global_size: Annotated[int, Field(ge=1, le=2**31, alias="global", description="images per update, over all ranks")]
    micro_max: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """largest micro-batch a rank computes at once; auto: what fits into a CUDA device by the plan, at most 1024, and
    128 on CPUs, chosen once when the run begins"""

    def split(self, world_size: int) -> tuple[int, int]:
        """(micro-batch, accumulation steps) of each rank; their product times the world size is the global batch.

        Where `micro_max` is `auto` it counts as on CPUs: see training/micro_max.py.
        """
        per_rank, rest = divmod(self.global_size, world_size)
        if rest:
            raise RecipeError(
                f"batch.global {self.global_size} does not divide by the {world_size} ranks of this launch; "
                f"use a world size that divides it"
            )
        most = MICRO_MAX_ON_CPU if self.micro_max == "auto" else self.micro_max
        micro = max(size for size in range(1, min(per_rank, most) + 1) if per_rank % size == 0)
        return micro, per_rank // micro
