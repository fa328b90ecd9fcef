"""One rank's part of a global batch, as a loader yields it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One rank's part of one global batch, of b samples."""

    position: int  # its place in the order, from 0. Batches that a run skips are counted, unlike by its steps
    epoch: int  # of the order: how often each sample has been drawn before
    # By kind of views, of which each sample has n, uint8 (b, n, S, S, 3): cropped, flipped, changed by the recipe's
    # operations that the loader applies. Without `data.views` one kind of one view.
    views: tuple[Tensor, ...]
    labels: Tensor  # int64 (b,), -1 for none
    uids: Tensor  # int64 (b,)
    view_keys: tuple[Tensor, ...]  # by kind, int64 (b, n), the bits of each view's randomness in this epoch
    mask: Tensor  # bool (b,), False for fillers, and for damaged samples if the policy is to mask them
    bad_samples: int  # damaged samples in this part, masked or replaced by others
    # Sum of xxh3_64(a view's pixels, seed = uid + the view's number) modulo 2^64; None unless requested
    digest: int | None

    @property
    def images(self) -> Tensor:
        """The first view of each sample, uint8 (b, S, S, 3)."""
        return self.views[0][:, 0]

    @property
    def keys(self) -> Tensor:
        """The keys of the first views, int64 (b,): those of the samples' other randomness."""
        return self.view_keys[0][:, 0]
