"""Supervised training: sigmoid or softmax cross-entropy, one loss a sample.

The paper pre-trains with the sigmoid loss, summed over classes, on JFT, ImageNet-21k and ImageNet alike, and fine-tunes
with softmax. Label smoothing is given as the two target values the authors' code uses: `on` for the labelled class,
`off` for every other one (ImageNet-21k: 0.9999 and 0.0001).

All losses are linear in their targets, so none builds a (B, K) target matrix: that would be 340 MB in fp32 for a
global batch of 4,096 images and ImageNet-21k's 21,843 classes. Images that are mixed have two labels.

Shape legend: B batch, K classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitscale import recipe as recipes
from vitscale.data.draws import Purpose, orders
from vitscale.ground.errors import DataError
from vitscale.models import Initialiser, Model, Outputs, build_model, constant
from vitscale.objectives.mixing import Mixer, Partners, partners_of
from vitscale.objectives.objective import Losses, Objective, Plan
from vitscale.recipe import Recipe

if TYPE_CHECKING:
    from vitscale.data.batch import Batch
    from vitscale.data.shards import Manifest

UNLABELLED = -1


Share = tuple[Tensor, Tensor | float]
"""Labels (B,) int64, and by how much the targets of these classes exceed those of the others, (B,) or one for all."""


def sigmoid_cross_entropy(logits: Tensor, shares: Sequence[Share], off: float = 0.0) -> Tensor:
    """Binary cross-entropy in nats, summed over classes: (B, K) -> (B,) fp32. All targets are `off` at least.

    A label of -1 adds to no class: targets are `off` throughout. Any other label must lie in [0, K). A device has no
    readable way to report one that does not; `CrossEntropy.check_labels` has, on the host.
    """
    logits = logits.float()
    # With targets t: softplus(z) - t z, where t is `off` everywhere except for labelled classes.
    loss = (F.softplus(logits) - off * logits).sum(dim=1)
    for labels, above in shares:
        loss = loss - above * torch.where(labels == UNLABELLED, 0.0, _labelled_logit(logits, labels))
    return loss


def softmax_cross_entropy(logits: Tensor, shares: Sequence[Share], off: float = 0.0) -> Tensor:
    """Cross-entropy of the softmax in nats: (B, K) -> (B,) fp32. All targets are `off` at least.

    The targets need not sum to one: the loss is -sum(target * log p) whatever they are, as in the authors' code.
    Softmax says nothing about a sample without a label (-1): its loss is NaN, so that it stops the run instead of
    passing as a zero. `CrossEntropy.check_labels` finds it earlier, on the host.
    """
    logits = logits.float()
    log_normaliser = logits.logsumexp(dim=1)
    loss: Tensor | None = None
    for labels, above in shares:
        of_label = above * (log_normaliser - _labelled_logit(logits, labels))
        of_label = torch.where(labels == UNLABELLED, torch.nan, of_label)
        loss = of_label if loss is None else loss + of_label
    assert loss is not None, "no label"
    return loss + off * (logits.shape[1] * log_normaliser - logits.sum(dim=1)) if off else loss


def _labelled_logit(logits: Tensor, labels: Tensor) -> Tensor:
    """The logit of each sample's class, (B,); that of class 0 for the unlabelled, to be masked by the caller."""
    return logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]


@dataclass(frozen=True)
class CrossEntropy:
    """The loss of supervised training.

    Args:
        loss: `sigmoid` (every class on its own, summed; the paper's pre-training), `softmax` (its fine-tuning) or `bce`
            (as sigmoid, but the mean over classes).
        on, off: target values of the labelled class and of the others; 1 and 0 without smoothing.
        label_smoothing: s in place of them: 1 - s + s / K and s / K.
        threshold: targets above it become 1, the others 0.
    """

    loss: Literal["sigmoid", "softmax", "bce"]
    on: float = 1.0
    off: float = 0.0
    label_smoothing: float = 0.0
    threshold: float | None = None

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        """The loss of a recipe whose objective is classification."""
        settings = recipe.objective
        assert isinstance(settings, recipes.Classification), settings.kind
        return cls(settings.loss, settings.on, settings.off, settings.label_smoothing, settings.threshold)

    def per_sample_loss(self, logits: Tensor, labels: Tensor, partners: Partners | None = None) -> Tensor:
        """Losses (B,) in fp32 of logits (B, K) and labels (B,) int64, and of those that images are mixed with."""
        num_classes = logits.shape[1]
        shares, off = self._targets(labels, partners, num_classes)
        if self.loss == "softmax":
            return softmax_cross_entropy(logits, shares, off)
        loss = sigmoid_cross_entropy(logits, shares, off)
        return loss / num_classes if self.loss == "bce" else loss

    def _targets(self, labels: Tensor, partners: Partners | None, num_classes: int) -> tuple[Sequence[Share], float]:
        """By how much the targets of labelled classes exceed those of the others, and those of the others."""
        on, off = self.on, self.off
        if self.label_smoothing:
            off = self.label_smoothing / num_classes
            on = 1 - self.label_smoothing + off
        parts: list[Share] = [(labels, 1.0)]
        if partners is not None:  # partners of one class count as one label
            own = torch.where(labels == partners.labels, 1.0, partners.own)
            parts = [(labels, own), (partners.labels, 1 - own)]
        if self.threshold is None:
            return [(of_class, (on - off) * part) for of_class, part in parts], off
        least, threshold = float(off > self.threshold), self.threshold
        above = [(of_class, (off + (on - off) * part) > threshold) for of_class, part in parts]
        return [(of_class, is_on * 1.0 - least) for of_class, is_on in above], least

    def check_labels(self, labels: Tensor, num_classes: int) -> None:
        """Raise `DataError` for labels (B,) outside the classes; -1 passes, except for softmax.

        Cheap in host memory. On a device it would wait for everything queued there, so call it before the batch is
        copied.
        """
        lowest = 0 if self.loss == "softmax" else UNLABELLED
        wrong = labels[(labels < lowest) | (labels >= num_classes)]
        if wrong.numel():
            unlabelled = " (-1 is an unlabelled sample: softmax cannot learn from it)" if lowest == 0 else ""
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
        mixer: mixes images and their targets; None to leave them alone.
        kept: the number of patches of each image that the backbone sees while it trains; None for all.
    """

    def __init__(
        self,
        backbone: Model,
        cross_entropy: CrossEntropy,
        num_classes: int,
        head_bias: float,
        mixer: Mixer | None = None,
        kept: int | None = None,
    ) -> None:
        super().__init__(backbone)
        self.cross_entropy, self.num_classes, self.head_bias = cross_entropy, num_classes, head_bias
        self.mixer, self.kept = mixer, kept

    @classmethod
    def num_outputs(cls, recipe: Recipe, manifest: "Manifest") -> int:
        named = super().num_outputs(recipe, manifest)
        if CrossEntropy.of(recipe).loss == "softmax" and named < 2:
            raise DataError(f"{manifest.where}: softmax needs at least two classes, the dataset names {named}")
        return named

    @classmethod
    def validation_loss(cls, recipe: Recipe) -> Callable[[Tensor, Tensor], Tensor]:
        """As `Objective.validation_loss`: the recipe's loss, with its smoothing and without mixing."""
        return CrossEntropy.of(recipe).per_sample_loss

    @classmethod
    def of(cls, recipe: Recipe, num_classes: int) -> Self:
        backbone = build_model(recipe, num_classes)
        settings = recipe.objective
        assert isinstance(settings, recipes.Classification), settings.kind
        mixer = None if settings.mixing is None else Mixer(settings.mixing, recipe.seed, recipe.data.image_size)
        head_bias = recipe.model.head_bias
        if head_bias is None:  # with the authors' -10 every class starts improbable; softmax cannot tell
            head_bias = -10.0 if recipe.model.head == "pretrain" and settings.loss == "sigmoid" else 0.0
        return cls(backbone, CrossEntropy.of(recipe), num_classes, head_bias, mixer, settings.kept(recipe.context))

    def check(self, batch: "Batch") -> None:
        self.cross_entropy.check_labels(batch.labels, self.num_classes)

    def plan(self, keys: np.ndarray, step: int) -> Plan:
        """As `Objective.plan`: how images are mixed, and which patches are kept, in order (B, C) int64."""
        plan: Plan = () if self.mixer is None else self.mixer.plan(keys, step)
        if self.kept is None:
            return plan
        patches = self.backbone.shape.grid(self.backbone.image_size) ** 2
        kept = np.sort(orders(keys.view(np.uint64), patches, Purpose.KEPT)[:, : self.kept], axis=1)
        return *plan, torch.from_numpy(kept)

    def losses(self, views: Sequence[Tensor], labels: Tensor, plan: Plan) -> Losses:
        images, partners, plan = self.mixed(views[0][:, 0], labels, plan)
        logits = self.seen(images, plan).logits
        assert logits is not None, "a backbone with a head"
        return Losses(self.cross_entropy.per_sample_loss(logits, labels, partners))

    def mixed(self, images: Tensor, labels: Tensor, plan: Plan) -> tuple[Tensor, Partners | None, Plan]:
        """(images, mixed if need be; the samples' partners, None without mixing; what else is planned)."""
        if self.mixer is None:
            return images, None, plan
        own, blend, boxes, *others = plan
        images = self.mixer.mix_images(images, blend, boxes)
        return images, Partners(partners_of(labels), own), tuple(others)

    def seen(self, images: Tensor, plan: Plan) -> Outputs:
        """The backbone's outputs for the patches that are kept."""
        outputs: Outputs = self.backbone(images) if self.kept is None else self.backbone(images, kept=plan[0])
        return outputs

    def initialiser(self, name: str) -> Initialiser:
        return constant(self.head_bias) if name in ("head.bias", "head_dist.bias") else super().initialiser(name)
