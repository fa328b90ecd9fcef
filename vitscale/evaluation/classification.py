"""Accuracy and loss of a classifier over a whole split, exact on any number of ranks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vitscale.evaluation.contract import Evaluator, MakeLoader, Predict
from vitscale.ground.errors import DataError
from vitscale.ground.ranks import reduce_sum


@dataclass(frozen=True)
class Validation(Evaluator):
    """Yields `loss` (the mean, in nats), `top1` and, with more than five classes, `top5` (fractions).

    Each sample of the split counts once: counts are int64 and the loss is summed in float64, over all ranks. With five
    classes or fewer every answer is among the five best, so there is no `top5`.

    `make_loader` starts an exact pass over the split of `num_samples`; another number is an error, and None is where
    damaged samples may be masked. `loss` is the one to report, of logits (B, K) and labels (B,), fp32 (B,).
    """

    name: str
    make_loader: MakeLoader
    loss: Callable[[Tensor, Tensor], Tensor]
    num_samples: int | None = None

    def run(self, predict: Predict) -> Iterator[tuple[str, float]]:
        """Raises `DataError` for an empty split, lost or doubled samples, and labels outside the model's classes."""
        loss_sum, counts, num_classes = self._sums(predict)
        samples, mislabelled, top1, top5 = counts
        if samples == 0:
            raise DataError(f"evaluator {self.name!r} has nothing to evaluate: its split has no samples").on_all_ranks()
        if mislabelled:
            raise DataError(
                f"evaluator {self.name!r}: {mislabelled} of {samples} samples have a label outside "
                f"0..{num_classes - 1} (-1 is unlabelled). Evaluate a split labelled with the model's own classes"
            ).on_all_ranks()
        check_count(f"evaluator {self.name!r}", samples, self.num_samples)
        yield "loss", loss_sum / samples
        yield "top1", top1 / samples
        if num_classes > 5:
            yield "top5", top5 / samples

    @torch.no_grad()
    def _sums(self, predict: Predict) -> tuple[float, list[int], int]:
        """Over all ranks: the sum of losses; numbers of samples, mislabelled, in the top 1, in the top 5; and K."""
        loss_sum: Tensor | None = None
        counts: Tensor | None = None
        num_classes = 0
        for batch in self.make_loader():
            logits = predict(batch.images).logits
            assert logits is not None, "a validation set is for models with classes"
            num_classes = logits.shape[1]
            labels, mask = batch.labels.to(logits.device), batch.mask.to(logits.device)
            valid = mask & (labels >= 0) & (labels < num_classes)
            # A wrong label must not reach an index operation: on CUDA that ends the process without a message.
            labels = torch.where(valid, labels, 0)
            rank = rank_of_label(logits, labels)
            batch_loss = torch.where(valid, self.loss(logits, labels), 0.0).double().sum()
            batch_counts = torch.stack([mask, mask & ~valid, valid & (rank < 1), valid & (rank < 5)]).sum(dim=1)
            loss_sum = batch_loss if loss_sum is None else loss_sum + batch_loss
            counts = batch_counts if counts is None else counts + batch_counts
        if loss_sum is None or counts is None:
            return 0.0, [0, 0, 0, 0], num_classes
        return float(reduce_sum(loss_sum)), reduce_sum(counts).tolist(), num_classes


def check_count(what: str, found: int, expected: int | None) -> None:
    """Raise `DataError` on all ranks if the number of evaluated samples is not the expected one; None accepts any."""
    if expected not in (None, found):
        raise DataError(f"{what}: {found:,} samples were evaluated, but the dataset has {expected:,}").on_all_ranks()


def rank_of_label(logits: Tensor, labels: Tensor) -> Tensor:
    """The number of classes ranked before each sample's label, (B,) int64: 0 is a correct answer.

    Among equal logits the lower class comes first, so that a head of zeros predicts one class and not all of them. Rows
    with a NaN rank last: comparisons with NaN are false and would count as correct.
    """
    logits = logits.float()
    labelled = logits.gather(1, labels[:, None])
    earlier = torch.arange(logits.shape[1], device=logits.device) < labels[:, None]
    rank = ((logits > labelled) | ((logits == labelled) & earlier)).sum(dim=1)
    return torch.where(logits.isnan().any(dim=1), logits.shape[1], rank)
