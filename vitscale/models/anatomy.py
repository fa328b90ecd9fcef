"""Where to look inside a model: its layers, its attention, its grid of patches. What inspection knows of a family."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import nn

Along = Literal["grid", "rows", "columns", "windows"]
"""What attention mixes: all tokens; the patches of each row of the grid, or of each column; or those of each window."""

Reads = Literal["class token", "patches", "pooling"]
"""What the representation is read from: the first token; the mean of the patches; or attention of a learned query."""


class Windows(NamedTuple):
    """The windows of a layer.

    Attributes:
        number: how many an image has.
        side: positions along a side of one.
        stride: the pixels between two positions.
        size: positions along a side of the map; windows may end beyond it.
        shift: by how many positions they are shifted.
    """

    number: int
    side: int
    stride: int
    size: int
    shift: int


class AttentionLayer(NamedTuple):
    """A module that calls `scaled_dot_product_attention` once in a forward pass, with queries (B, A, T, d).

    With attention along windows these are among the heads: (B, windows * A, T, d).
    """

    name: str
    module: nn.Module
    along: Along
    windows: Windows | None = None


@dataclass(frozen=True)
class Anatomy:
    """The parts of a model.

    Attributes:
        layers: name -> a module whose output is a hidden representation, (B, T, D) or (B, C, h, w), in order.
        channels: the axis of the channels in a map; -1 for (B, h, w, C).
        attention: the attention layers in order; empty for a model without any.
        pooling: the layer whose attention makes one vector of the tokens; None without one.
        reads: what the representation is read from.
        grid: patches, or positions of the last feature map, along one side; None where that is not known.
        stride: pixels of the input from one of them to the next.
        before: tokens that come before the patches: a class token, registers.
        embedding: modules whose parameters `Model.filters` and `Model.positions` read.
    """

    layers: Mapping[str, nn.Module]
    channels: int = field(default=1, kw_only=True)
    attention: Sequence[AttentionLayer] = ()
    pooling: nn.Module | None = None
    reads: Reads = "patches"
    grid: int | None = None
    stride: int = 0
    before: int = 0
    embedding: tuple[nn.Module, ...] = ()
