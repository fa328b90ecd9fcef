"""The contract of an objective: a module around a backbone that turns a batch into losses.

DeepSpeed's engine wraps this module, so everything with parameters is computed inside it: ZeRO-3 gathers parameters by
the hooks of modules, and a head that is called beside the engine sees empty ones. For the same reason a backbone is
called as a whole, and once in each micro-batch: DeepSpeed has computed wrong gradients for modules that are used twice
(its issue 8224).

Shape legend: B batch, S side in pixels.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F

from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.weight_formats import Format
from vitscale.models import Initialiser, Model, Outputs
from vitscale.models.weights.rules import Rule
from vitscale.recipe import Recipe

if TYPE_CHECKING:
    from vitscale.data.batch import Batch
    from vitscale.data.shards import Manifest

Plan = tuple[Tensor, ...]
"""What an objective decides for a batch before it is computed, row by row: tensors (B, ...) on the host."""

_BACKBONE = "backbone."


class Losses(NamedTuple):
    """What training minimises: the mean of `per_sample` over the global batch.

    Attributes:
        per_sample: (B,) fp32, in nats if it is a cross-entropy.
        shown: other figures of each sample, (B,) fp32 without gradients; `metrics.jsonl` has their means by these
            names.
    """

    per_sample: Tensor
    shown: Mapping[str, Tensor] = {}


class Objective(nn.Module):
    """What is learned. Subclasses add heads to the backbone and say how its outputs become losses.

    Checkpoints use the parameters' names here, the backbone's without a prefix.
    """

    def __init__(self, backbone: Model) -> None:
        super().__init__()
        self.backbone = backbone

    @classmethod
    def num_outputs(cls, recipe: Recipe, manifest: "Manifest") -> int:
        """The number of classes that a dataset has for this objective. Raises `DataError` and `RecipeError`."""
        named = len(manifest.class_names)
        if not recipe.objective.has_classes:
            return named
        if named == 0:
            raise DataError(f"{manifest.where} names no classes; convert the data with class folders or --classes")
        if recipe.model.num_classes not in (None, named):
            raise RecipeError(
                f"{manifest.where} names {named} classes, the recipe's model.num_classes is "
                f"{recipe.model.num_classes}; leave it out (--set model.num_classes=null) to take the dataset's"
            )
        if recipe.selection is not None and recipe.selection.metric == "validation/top5" and named <= 5:
            raise RecipeError(f"selection.metric: with {named} classes there is no top-5 accuracy; use validation/top1")
        return named

    @classmethod
    def validation_loss(cls, recipe: Recipe) -> Callable[[Tensor, Tensor], Tensor]:
        """What `evaluation.validation` reports as its loss, for objectives with classes: by default softmax.

        Returns a function of the logits (B, K) that `predict` yields and of labels (B,) int64 -> losses (B,) fp32.
        """
        return lambda logits, labels: F.cross_entropy(logits.float(), labels, reduction="none")

    @classmethod
    def of(cls, recipe: Recipe, num_classes: int) -> Self:
        """The objective of a recipe whose training data have `num_classes` classes; its values are unset."""
        raise NotImplementedError

    def check(self, batch: "Batch") -> None:
        """Raise `DataError` for a batch that cannot be learned from. It is still in host memory, where looking is
        cheap.
        """

    def plan(self, keys: np.ndarray, step: int) -> Plan:
        """Draw for samples with these keys: the same on every world and after resuming.

        Args:
            keys: the bits of each sample's randomness in this epoch, int64 (B,), for the functions of
                `vitscale.data.draws`; in the order of the global batch's slots, of which a rank's part begins with a
                multiple of the block's `together`.
            step: which batch of the order this is, from 0.
        """
        return ()

    @property
    def prepares(self) -> bool:
        """Whether losses depend on the whole global batch: then a pass without gradients goes first, over all of it."""
        return False

    def prepare(self, views: Sequence[Tensor], plan: Plan) -> Tensor:
        """What the samples of the whole global batch have to be known by, (B, ...) fp32; arguments as of `losses`.

        It is computed without gradients, and has to be what `losses` computes from the same arguments with them.
        """
        raise NotImplementedError

    def agree(self, rows: Tensor, labels: Tensor) -> Plan:
        """What `losses` has to know of the global batch, row by row: it is appended to the plan.

        Args:
            rows: what `prepare` has computed of the whole global batch, in the order of its slots, on every rank.
            labels: theirs, int64.
        """
        raise NotImplementedError

    def losses(self, views: Sequence[Tensor], labels: Tensor, plan: Plan) -> Losses:
        """The losses of samples in training.

        Args:
            views: by kind, in the order of `data.views`, each sample's n views (B, n, S, S, 3) in [-1, 1]. Without
                `data.views` there is one view: `views[0][:, 0]`.
            labels: (B,) int64, -1 for none.
            plan: what `plan` has drawn for these samples, on the device.
        """
        raise NotImplementedError

    def predict(self, images: Tensor) -> Outputs:
        """What evaluators get for images (B, S, S, 3) in [-1, 1]."""
        return self.backbone(images)

    def forward(
        self, images: Tensor | Sequence[Tensor], labels: Tensor | None = None, plan: Plan = ()
    ) -> Losses | Outputs | Tensor:
        """The engine's only entry: with labels losses, of images as of one view each; without them the outputs for
        images, and what losses of views are prepared by.
        """
        if labels is None:
            return self.predict(images) if isinstance(images, Tensor) else self.prepare(images, plan)
        return self.losses((images[:, None],) if isinstance(images, Tensor) else images, labels, plan)

    def learn_from(self, teacher: nn.Module) -> None:
        """Take the teacher or tokenizer that training has made, with its values; it does not become a submodule."""
        raise NotImplementedError

    def units(self) -> Sequence[nn.Module]:
        """The backbone's units, and those like them that the objective adds: what is compiled, each by itself."""
        return self.backbone.units()

    def rules(self, form: Format) -> Sequence[Rule]:
        """How files of a format call the parameters that the objective adds, if `init` takes them from such weights.

        A run of the same kind of objective has them as ours (safetensors). By default none are taken.
        """
        return ()

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters, by their names in checkpoints."""
        for name, parameter in self.named_parameters():
            yield name.removeprefix(_BACKBONE), parameter

    def initialiser(self, name: str) -> Initialiser:
        """How the parameter that checkpoints call `name` begins."""
        return self.backbone.initialiser(name)
