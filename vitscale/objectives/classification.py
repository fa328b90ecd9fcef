"""Sigmoid and softmax cross-entropy, one loss a sample.

The paper pre-trains with the sigmoid loss, summed over classes, on JFT, ImageNet-21k and ImageNet alike, and fine-tunes
with softmax. Label smoothing is given as the two target values the authors' code uses: `on` for the labelled class,
`off` for every other one (ImageNet-21k: 0.9999 and 0.0001).

Both losses are linear in their targets, so neither builds a (B, K) target matrix: that would be 340 MB in fp32 for a
global batch of 4,096 images and ImageNet-21k's 21,843 classes.

Shape legend: B batch, K classes.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vitscale.errors import DataError

UNLABELLED = -1


def sigmoid_cross_entropy(logits: Tensor, labels: Tensor, on: float = 1.0, off: float = 0.0) -> Tensor:
    """Binary cross-entropy in nats, summed over classes: (B, K), (B,) int64 -> (B,) fp32.

    A sample labelled -1 has no class to be `on`: its targets are `off` throughout. Any other label must lie in
    [0, K). A device has no readable way to report one that does not; `Classification.check_labels` has, on the host.
    """
    logits = logits.float()
    # With targets t: softplus(z) - t z, where t is `off` everywhere but for the labelled class.
    every_class = (F.softplus(logits) - off * logits).sum(dim=1)
    labelled = torch.where(labels == UNLABELLED, 0.0, _labelled_logit(logits, labels))
    return every_class - (on - off) * labelled


def softmax_cross_entropy(logits: Tensor, labels: Tensor, on: float = 1.0, off: float = 0.0) -> Tensor:
    """Cross-entropy of the softmax in nats: (B, K), (B,) int64 -> (B,) fp32.

    The targets need not sum to one: the loss is -sum(target * log p) whatever they are, as in the authors' code.
    Softmax says nothing about a sample without a label (-1): its loss is NaN, so that it stops the run instead of
    passing as a zero. `Classification.check_labels` finds it earlier, on the host.
    """
    logits = logits.float()
    log_normaliser = logits.logsumexp(dim=1)
    loss = (on - off) * (log_normaliser - _labelled_logit(logits, labels))
    if off:
        loss = loss + off * (logits.shape[1] * log_normaliser - logits.sum(dim=1))
    return torch.where(labels == UNLABELLED, torch.nan, loss)


def _labelled_logit(logits: Tensor, labels: Tensor) -> Tensor:
    """The logit of each sample's class, (B,); that of class 0 for the unlabelled, to be masked by the caller."""
    return logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]


@dataclass(frozen=True)
class Classification:
    """The objective of supervised training, as a recipe describes it.

    Args:
        loss: `sigmoid` (every class on its own; the paper's pre-training) or `softmax` (its fine-tuning).
        on, off: target values of the labelled class and of the others; 1 and 0 without smoothing.
    """

    loss: Literal["sigmoid", "softmax"]
    on: float = 1.0
    off: float = 0.0

    def per_sample_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Losses (B,) in fp32 of logits (B, K) and labels (B,) int64."""
        cross_entropy = sigmoid_cross_entropy if self.loss == "sigmoid" else softmax_cross_entropy
        return cross_entropy(logits, labels, self.on, self.off)

    def check_labels(self, labels: Tensor, num_classes: int) -> None:
        """Raise `DataError` for labels (B,) outside the classes; -1 passes with the sigmoid loss only.

        Cheap in host memory. On a device it would wait for everything queued there, so call it before the batch is
        copied.
        """
        lowest = UNLABELLED if self.loss == "sigmoid" else 0
        wrong = labels[(labels < lowest) | (labels >= num_classes)]
        if wrong.numel():
            unlabelled = "" if self.loss == "sigmoid" else " (-1 is an unlabelled sample: softmax cannot learn from it)"
            raise DataError(
                f"{wrong.numel()} of {labels.numel()} labels in a batch lie outside {lowest}..{num_classes - 1}, "
                f"for example {int(wrong[0])}{unlabelled}. "
                "Is the dataset the one that the model's number of classes was set for?"
            )
