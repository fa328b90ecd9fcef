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
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitscale.data.draws import Purpose, combine, kept_paths, stretches
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.ranks import Sums
from vitscale.ground.weight_formats import Format
from vitscale.models import Initialiser, Model, Outputs
from vitscale.models.weights.rules import Rule
from vitscale.recipe import Recipe

if TYPE_CHECKING:
    from vitscale.data.batch import Batch
    from vitscale.data.shards import Manifest

Plan = tuple[Tensor, ...]
"""What an objective decides for a batch before it is computed, row by row: tensors (B, ...) on the host.

A tensor may also have one row for each group of samples that are computed together (`together` of the block).
"""

Rows = Tensor | Plan  # what a first pass has computed of samples, row by row as a plan

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


class Agreed(NamedTuple):
    """What `losses` has to know of the global batch: appended to the plan, first `rows`, then `shared`.

    Attributes:
        rows: for this rank's samples, row by row; each micro-batch gets its own.
        shared: tensors of any shape that every micro-batch gets whole, the same on every rank.
    """

    rows: Plan
    shared: Plan = ()


class Objective(nn.Module):
    """What is learned. Subclasses add heads to the backbone and say how its outputs become losses.

    Checkpoints use the parameters' names here, the backbone's without a prefix.

    Attributes:
        scalars: what the block's `courses` are at this update, by name; set before each.
    """

    scalars: Mapping[str, float]

    def __init__(self, backbone: Model) -> None:
        super().__init__()
        self.backbone = backbone
        self.scalars = {}
        self._taught_by: list[nn.Module] = []  # a list, so that it is no submodule

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

    def choose_paths(self, view_keys: Sequence[Tensor], device: torch.device) -> None:
        """Draw which branches of the backbone drop path leaves out in the next passes over some samples.

        Args:
            view_keys: by kind, int64 (B, n), as of `Batch`: each view's draws are a function of its key alone.
            device: where the backbone is.
        """
        if any(self.backbone.path_shares):
            keys = torch.cat(list(view_keys), dim=1).numpy()
            kept = torch.from_numpy(kept_paths(keys, self.backbone.path_shares))
            self.backbone.paths = kept.to(device, non_blocking=True)

    def choose_stretches(self, seed: int, position: int) -> None:
        """Draw by how much the next passes of training stretch the positions that rotate tokens: the same for all
        samples of the batch of the order at this position.
        """
        rescale, jitter = self.backbone.stretch
        if rescale > 1 or jitter > 1:
            key, count = int(combine(seed, Purpose.STRETCH, position)), len(self.backbone.blocks)
            self.backbone.stretches = lambda grid: stretches(key, grid, count, rescale, jitter).tolist()

    def prepared_kinds(self, kinds: int) -> Sequence[int]:
        """Which of so many kinds of views the first pass sees; by default all."""
        return range(kinds)

    def prepare(self, views: Sequence[Tensor], plan: Plan) -> Rows:
        """The first pass over the samples of a micro-batch, if the block's `prepares` asks for one; without gradients.

        With the present weights it has to compute what `losses` computes from the same arguments. With the average in
        their place the module is in evaluation mode: no dropout, no drop path. Under ZeRO 3 it should use modules in
        the order in which `losses` begins with them, so that DeepSpeed knows which weights come next.

        Args:
            views, plan: as of `losses`: the views of `prepared_kinds`, and what `plan` has drawn.
        """
        raise NotImplementedError

    def prepare_besides(self, views: Sequence[Tensor], plan: Plan, average: str) -> Rows:
        """As `prepare`, with one of the averages of the block's `besides` in place of the weights."""
        raise NotImplementedError

    def agree(self, rows: Rows, labels: Tensor, sums: Sums, weights: Mapping[str, Tensor]) -> Agreed:
        """What `losses` has to know, from the first pass over all micro-batches; by default its rows.

        It is called once an update, on every rank, with gradients enabled.

        Args:
            rows: what `prepare` has returned for this rank's samples, in the order of their slots; as a tuple with what
                `prepare_besides` has, if averages of the block's `besides` have been made.
            labels: theirs, (B,) int64.
            sums: what it may do together with the other ranks, and nothing else.
            weights: the parameters that the block `reads`, by name, whole, as the first pass has computed with them.
        """
        return Agreed(_as_plan(rows))

    def losses(self, views: Sequence[Tensor], labels: Tensor, plan: Plan) -> Losses:
        """The losses of samples in training.

        Args:
            views: by kind, in the order of `data.views`, each sample's n views (B, n, S, S, 3) in [-1, 1]. Without
                `data.views` there is one view: `views[0][:, 0]`.
            labels: (B,) int64, -1 for none.
            plan: what `plan` has drawn for these samples, on the device, and what `agree` has returned.
        """
        raise NotImplementedError

    def predict(self, images: Tensor) -> Outputs:
        """What evaluators get for images (B, S, S, 3) in [-1, 1]."""
        return self.backbone(images)

    def forward(
        self,
        images: Tensor | Sequence[Tensor],
        labels: Tensor | None = None,
        plan: Plan = (),
        average: str | None = None,
    ) -> Losses | Outputs | Rows:
        """The engine's only entry: with labels losses, of images as of one view each; without them the outputs for
        images, and the first pass over views, or that with an average of `besides`.
        """
        if average is not None:
            return self.prepare_besides(images, plan, average)  # type: ignore[arg-type]
        if labels is None:
            return self.predict(images) if isinstance(images, Tensor) else self.prepare(images, plan)
        return self.losses((images[:, None],) if isinstance(images, Tensor) else images, labels, plan)

    def learn_from(self, teacher: nn.Module) -> None:
        """Take the teacher or tokenizer that training has made, with its values; it does not become a submodule."""
        self._taught_by = [teacher]

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


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of micro-batches, one after another."""
    if isinstance(parts[0], Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def all_rows(passes: Sequence[Rows]) -> Rows:
    """What several passes over the same samples have computed."""
    return passes[0] if len(passes) == 1 else tuple(each for rows in passes for each in _as_plan(rows))


def _as_plan(rows: Rows) -> Plan:
    return (rows,) if isinstance(rows, Tensor) else rows


def dealt(plan: Plan, count: int) -> list[Plan]:
    """A plan's rows, dealt to so many micro-batches in equal parts."""
    sizes = [len(each) // count for each in plan]
    assert all(size * count == len(each) for size, each in zip(sizes, plan, strict=True)), "micro-batches part rows"
    parts = (
        (each[number * size : (number + 1) * size] for each, size in zip(plan, sizes, strict=True))
        for number in range(count)
    )
    return list(map(tuple, parts))
