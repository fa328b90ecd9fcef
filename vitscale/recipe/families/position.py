"""The position embeddings of a Transformer (appendix D.3): the `position` block of a model."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from vitscale.ground.block import Block

ROPE_BASES = {"rope": 100.0, "1d_rope": 10_000.0}


class Position(Block):
    """How positions are encoded in a Transformer, and where (appendix D.3); `relative` and `rope` act in every
    attention layer. `1d_rope` is EVA-02's, which combines 1d and rotations, and with unit and registers_base ViT-5's.
    """

    _later_keys: ClassVar[tuple[str, ...]] = ("base", "unit", "registers_base", "table", "rescale", "jitter")

    kind: Literal["none", "1d", "2d", "sincos", "relative", "rope", "1d_rope"] = "1d"
    """learned embeddings by patch (1d) or by row and column (2d), fixed ones of sines and cosines (sincos, as in
    big_vision and MAE), a learned bias by distance (relative), queries and keys of patches rotated by row and column
    (rope, as in DINOv3), learned embeddings and rotations (1d_rope, as in EVA-02), or none"""
    at: Literal["stem", "every_layer", "shared"] = "stem"
    """for 1d and 2d: added before the first block (stem), before every block (every_layer), or the same embeddings
    before every block (shared)"""
    table: Literal["big_vision", "mae"] = "big_vision"
    """for sincos: the frequencies, width / 4 from 1 to 1 / 10,000 of a radian a patch (big_vision), or the same number
    of which the last is one step higher (mae, as also in MoCo v3 and timm)"""
    base: float | None = Field(None, gt=1)
    """frequencies of rotations fall to nearly 1 / base of the first one. For rope, default 100, the first is one turn
    per unit, with 2 units per side; for 1d_rope, default 10,000, one radian per unit, with 16 units per side"""
    unit: Literal["image", "patch"] | None = None
    """for 1d_rope, the unit of one radian: image (default): a side is 16 units; patch: a patch is one unit (as in
    ViT-5)"""
    registers_base: float | None = Field(None, gt=1)
    """for 1d_rope: registers, whose number must be a square, are rotated like the patches of a square, with frequencies
    that fall to 1 / this (as in ViT-5); default: not rotated"""

    rescale: float = Field(1.0, ge=1, le=1000)
    """for rope, in training: the numbers of rows and columns are multiplied by a factor from 1 / rescale to rescale,
    uniform in the logarithm, drawn at each update for each block and size of images; 1: off (DINOv3's 7B: 2)"""
    jitter: float = Field(1.0, ge=1, le=1000)
    """for rope, in training: likewise, but with a factor for rows and another for columns; 1: off"""

    @model_validator(mode="before")
    @classmethod
    def _with_base(cls, content: Any) -> Any:
        kind = content.get("kind") if isinstance(content, dict) else None
        if not isinstance(kind, str) or kind not in ROPE_BASES or content.get("base") is not None:
            return content
        return content | {"base": ROPE_BASES[kind]}

    def _contradictions(self) -> Iterator[str]:
        if self.kind not in ("1d", "2d") and self.at != "stem":
            yield f"at: {self.at} belongs to kind: 1d and 2d, and kind is {self.kind}"
        if self.kind != "sincos" and self.table != "big_vision":
            yield f"table: {self.table} belongs to kind: sincos, and kind is {self.kind}"
        if self.kind not in ROPE_BASES and self.base is not None:
            kinds = " and ".join(ROPE_BASES)
            yield f"base: {self.base:g} belongs to kind: {kinds}, and kind is {self.kind}"
        for key in ("rescale", "jitter"):
            if self.kind != "rope" and getattr(self, key) != 1:
                yield f"{key}: {getattr(self, key):g} belongs to kind: rope, and kind is {self.kind}"
        for key in ("unit", "registers_base"):
            if self.kind != "1d_rope" and getattr(self, key) is not None:
                yield f"{key} belongs to kind: 1d_rope, and kind is {self.kind}"
