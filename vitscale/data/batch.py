"""One rank's part of a global batch, as a loader yields it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One rank's part of one global batch.

    Attributes:
        position: its place in the order, from 0. Batches that a run skips are counted, unlike by its steps.
        epoch: the order's epoch, that is, how often each sample has been drawn before.
        images: uint8 (b, S, S, 3), cropped, flipped, and changed by the recipe's operations that the loader applies.
        labels: int64 (b,), -1 for none.
        uids: int64 (b,).
        keys: int64 (b,), the bits of each sample's randomness in this epoch, different for each view of a sample.
        mask: bool (b,), False for fillers, and for damaged samples if the policy is to mask them.
        bad_samples: the number of damaged samples in this part, masked or replaced by others.
        digest: sum over the samples of xxh3_64(pixels of `images`, seed = uid) modulo 2^64; None unless requested.
    """

    position: int
    epoch: int
    images: Tensor
    labels: Tensor
    uids: Tensor
    keys: Tensor
    mask: Tensor
    bad_samples: int
    digest: int | None
