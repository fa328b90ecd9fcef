"""One rank's part of a global batch, as a loader yields it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One rank's part of one global batch.

    Attributes:
        step: updates done before this batch, from 0.
        epoch: of the order: how often each sample was there before.
        images: uint8 (b, S, S, 3), cropped, flipped, and changed by what the recipe has the loader do.
        labels: int64 (b,), -1 for none.
        uids: int64 (b,).
        keys: int64 (b,), the bits of each sample's randomness in this epoch, others for each view of it.
        mask: bool (b,), False for fillers, and for damaged samples where the policy is to leave them out.
        bad_samples: of this part, damaged: masked, or replaced by others.
        digest: sum over the samples of xxh3_64(pixels of `images`, seed = uid) modulo 2^64, where it was asked for.
    """

    step: int
    epoch: int
    images: Tensor
    labels: Tensor
    uids: Tensor
    keys: Tensor
    mask: Tensor
    bad_samples: int
    digest: int | None
