"""Supervised training: sigmoid or softmax cross-entropy, one loss a sample.

The paper pre-trains with the sigmoid loss, summed over classes, on JFT, ImageNet-21k and ImageNet alike, and fine-tunes
with softmax. Label smoothing is given as the two target values the authors' code uses: `on` for the labelled class,
`off` for every other one (ImageNet-21k: 0.9999 and 0.0001).

Both losses are linear in their targets, so neither builds a (B, K) target matrix: that would be 340 MB in fp32 for a
global batch of 4,096 images and ImageNet-21k's 21,843 classes.

Shape legend: B batch, K classes.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from vitscale import recipe as recipes
from vitscale.errors import DataError, RecipeError
from vitscale.models import Initialiser, Model, build_model, constant
from vitscale.objectives.objective import Losses, Objective, Plan
from vitscale.recipe import Recipe

if TYPE_CHECKING:
    from vitscale.data import Batch
    from vitscale.shards import Manifest

UNLABELLED = -1


def sigmoid_cross_entropy(logits: Tensor, labels: Tensor, on: float = 1.0, off: float = 0.0) -> Tensor:
    """Binary cross-entropy in nats, summed over classes: (B, K), (B,) int64 -> (B,) fp32.

    A sample labelled -1 has no class to be `on`: its targets are `off` throughout. Any other label must lie in
    [0, K). A device has no readable way to report one that does not; `CrossEntropy.check_labels` has, on the host.
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
    passing as a zero. `CrossEntropy.check_labels` finds it earlier, on the host.
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
class CrossEntropy:
    """The loss of supervised training.

    Args:
        loss: `sigmoid` (every class on its own; the paper's pre-training) or `softmax` (its fine-tuning).
        on, off: target values of the labelled class and of the others; 1 and 0 without smoothing.
    """

    loss: Literal["sigmoid", "softmax"]
    on: float = 1.0
    off: float = 0.0

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        """That of a recipe whose objective is classification."""
        settings = recipe.objective
        assert isinstance(settings, recipes.Classification), settings.kind
        return cls(settings.loss, settings.on, settings.off)

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


class Classification(Objective):
    """Cross-entropy over the classes of the training data, by the backbone's own head.

    Args:
        backbone: a model with a head of K outputs.
        cross_entropy: the loss.
        num_classes: K.
        head_bias: initial bias of the output layer.
    """

    def __init__(self, backbone: Model, cross_entropy: CrossEntropy, num_classes: int, head_bias: float) -> None:
        super().__init__(backbone)
        self.cross_entropy, self.num_classes, self.head_bias = cross_entropy, num_classes, head_bias

    @classmethod
    def num_outputs(cls, recipe: Recipe, manifest: "Manifest") -> int:
        """As `Objective.num_outputs`."""
        named = len(manifest.class_names)
        if named == 0:
            raise DataError(f"{manifest.where} names no classes; convert the data with class folders or --classes")
        if recipe.model.num_classes not in (None, named):
            raise RecipeError(
                f"{manifest.where} names {named} classes, the recipe's model.num_classes is "
                f"{recipe.model.num_classes}; leave it out (--set model.num_classes=null) to take the dataset's"
            )
        if CrossEntropy.of(recipe).loss == "softmax" and named < 2:
            raise DataError(f"{manifest.where}: softmax needs at least two classes, the dataset names {named}")
        if recipe.selection is not None and recipe.selection.metric == "validation/top5" and named <= 5:
            raise RecipeError(f"selection.metric: with {named} classes there is no top-5 accuracy; use validation/top1")
        return named

    @classmethod
    def of(cls, recipe: Recipe, num_classes: int) -> Self:
        """As `Objective.of`."""
        backbone = build_model(recipe, num_classes)
        return cls(backbone, CrossEntropy.of(recipe), num_classes, initial_head_bias(recipe))

    def check(self, batch: "Batch") -> None:
        """As `Objective.check`: labels outside the classes."""
        self.cross_entropy.check_labels(batch.labels, self.num_classes)

    def losses(self, images: Tensor, labels: Tensor, plan: Plan) -> Losses:
        """As `Objective.losses`."""
        logits = self.backbone(images).logits
        return Losses(self.cross_entropy.per_sample_loss(logits, labels))

    def initialiser(self, name: str) -> Initialiser:
        """As `Objective.initialiser`; the output layer begins with its bias."""
        return constant(self.head_bias) if name == "head.bias" else super().initialiser(name)


def initial_head_bias(recipe: Recipe) -> float:
    """-10 where the sigmoid loss meets the pre-training head, unless the recipe says otherwise; softmax cannot tell.

    With -10, the authors' value, every class starts improbable.
    """
    if recipe.model.head_bias is not None:
        return recipe.model.head_bias
    return -10.0 if recipe.model.head == "pretrain" and CrossEntropy.of(recipe).loss == "sigmoid" else 0.0
