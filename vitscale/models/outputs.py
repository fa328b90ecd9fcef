"""The outputs of a forward pass, the same for every family: tokens, representation, logits.

Shape legend: B batch, T tokens, D width of the representation, K classes, n blocks.
"""

from typing import NamedTuple

from torch import Tensor


class Outputs(NamedTuple):
    """On any device and in any floating dtype, the logits in fp32.

    Attributes:
        tokens: (B, T, D), after the final norm; a class token comes first, a distillation token next.
        pooled: (B, D), the representation: what linear read-outs see, before the tanh of the pre-training head.
        logits: (B, K); None from a backbone without a head.
        heads: (B, 2, K), the logits of class and distillation token, whose mean `logits` is; None from other models.
    """

    tokens: Tensor
    pooled: Tensor
    logits: Tensor | None
    heads: Tensor | None = None


class BlockTokens(NamedTuple):
    """What a linear head reads of the last blocks, each after the final norm.

    Attributes:
        tokens: (B, n, D), one of each block, the last block first: the class token, or else the mean of its patches.
        patches: (B, D), the mean of the last block's patches; None if the tokens are such means, or there are none.
    """

    tokens: Tensor
    patches: Tensor | None
