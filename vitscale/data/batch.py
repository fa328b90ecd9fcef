"""One rank's part of a global batch, as a loader yields it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One rank's part of one global batch, of b samples."""

    position: int  # its place in the order, from 0. Batches that a run skips are counted, unlike by its steps
    epoch: int  # of the order: how often each sample has been drawn before
    images: Tensor  # uint8 (b, S, S, 3): cropped, flipped, changed by the recipe's operations that the loader applies
    labels: Tensor  # int64 (b,), -1 for none
    uids: Tensor  # int64 (b,)
    keys: Tensor  # int64 (b,), the bits of each sample's randomness in this epoch, different for each view of a sample
    mask: Tensor  # bool (b,), False for fillers, and for damaged samples if the policy is to mask them
    bad_samples: int  # damaged samples in this part, masked or replaced by others
    digest: int | None  # sum of xxh3_64(a sample's `images`, seed = uid) modulo 2^64; None unless requested
