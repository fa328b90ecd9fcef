"""What an update must be, in plain torch: one process, whole tensors, no DeepSpeed.

It is short so that it can be read and believed. It shares with training the model, the objective with what they draw
for a batch, and the operations on pixels. All else is written again: here the mean over the global batch, clipping,
groups and averages, and beside each optimizer the formula of its paper (`Rule.reference`), which training never runs.
The forward and backward pass are in fp32, on the weights and pixels that the engine computes with (rounded to bf16
where it does); an update and its moments are in double precision.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitscale.data.batch import Batch
from vitscale.data.image_operations import TrainingInput
from vitscale.ground.ranks import Sums
from vitscale.objectives import build_objective
from vitscale.objectives.objective import Agreed, Plan, Rows, all_rows, dealt, joined
from vitscale.recipe import Recipe, matches, validate_recipe
from vitscale.runs.checkpoint import EMA, MASTER, average_kind
from vitscale.training.optimizers.rule import Update, rule_of
from vitscale.training.optimizers.schedule import Rates

State = Mapping[str, Mapping[str, Tensor]]  # values of all parameters, by kind and name

Kept = Mapping[str, Tensor]  # what an optimizer keeps for a parameter, by kind


class Gradient(NamedTuple):
    """The gradient of one parameter."""

    value: Tensor  # in double precision and host memory, clipped
    size: float  # the root of the sum of squares of what micro-batches add to it, as rounding errors grow with that
    way: int  # the number of operations on the longest way from the loss to the parameter
    noise: Tensor  # how far off plain torch is in the engine's number format, in the shape of `value`


class Oracle:
    """Computes a recipe's updates by a `module` of its own, on `device`. `dtype` is the engine's."""

    def __init__(self, recipe: Recipe, num_classes: int, dtype: torch.dtype, device: torch.device) -> None:
        self.recipe, self.rule, self._dtype, self._device = recipe, rule_of(recipe.optimizer), dtype, device
        plain = recipe.dump() | {"precision": "fp32", "parallelism": {}, "deepspeed": {}}
        with torch.device("meta"):
            module = build_objective(validate_recipe(plain, "the oracle's recipe"), num_classes)
        self.module = module.float().to_empty(device=device).train()
        self._to_input = TrainingInput(recipe)

    def rounded(self, master: Tensor) -> Tensor:
        """The weights that a forward pass computes with."""
        return master.to(self._dtype)

    def group(self, name: str, waiting: Collection[int] = ()) -> tuple[float, float] | None:
        """(Learning rate's factor, weight decay) of a parameter; None if frozen, also by a group that is `waiting`."""
        settings, factor = self.recipe.optimizer, 1.0
        excluded = settings.decay_exclude is not None and matches(settings.decay_exclude, name)
        decay = 0.0 if excluded else settings.weight_decay
        if settings.layer_decay is not None:
            factor = settings.layer_decay ** self.recipe.model.layers_above(name)
        for number, group in enumerate(settings.groups):
            if matches(group.match, name):
                own = decay if group.weight_decay is None else group.weight_decay
                of_group = 0.0 if number in waiting else group.lr_factor
                return None if group.frozen else (factor * of_group, own)
        return factor, decay

    def gradients(self, state: State, batch: Batch, rows: int, rates: Rates) -> tuple[dict[str, Gradient], float]:
        """Clipped gradients of the mean loss of a global batch, `rows` rows at a time; their norm before clipping.

        `state` has the weights and averages, by kind.
        """
        parts, sizes, ways = self._sums(state, batch, rows, rates, torch.float32)
        norm = math.sqrt(sum(float(part.square().sum()) for part in parts.values()))
        limit = self.recipe.optimizer.clip_norm
        clipping = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))  # as torch clips
        rough = parts if self._dtype == torch.float32 else self._sums(state, batch, rows, rates, self._dtype)[0]
        return {
            name: Gradient(
                (part * clipping).cpu(), sizes[name] * clipping, ways[name], ((rough[name] - part) * clipping).cpu()
            )
            for name, part in parts.items()
        }, norm

    def _sums(
        self, state: State, batch: Batch, rows: int, rates: Rates, dtype: torch.dtype
    ) -> tuple[dict[str, Tensor], dict[str, float], dict[str, int]]:
        """Gradients as computed in one number format, before clipping; their sizes and ways."""
        self.module.scalars = rates.scalars
        self.module.choose_stretches(self.recipe.seed, batch.position)
        weights = dict(self.module.to(dtype).named_weights())
        trained = {name: weight for name, weight in weights.items() if self.group(name) is not None}
        plan = self.module.plan(batch.keys.numpy(), batch.position)
        inputs = [
            view.to(dtype) for view in self._to_input.of_views(batch.views, batch.view_keys, self._device, self._dtype)
        ]
        agreed = Agreed(())
        if self.recipe.objective.prepares is not None:
            agreed = self._agreed(state, inputs, plan, batch, rows, rates)
        plans = dealt((*plan, *agreed.rows), len(batch.labels) // rows)
        self._take(state[MASTER])
        sums = {name: torch.zeros_like(weight, dtype=torch.float64) for name, weight in trained.items()}
        squares, ways = dict.fromkeys(trained, 0.0), dict.fromkeys(trained, 0)
        for start in range(0, len(batch.labels), rows):
            part = slice(start, start + rows)
            labels, mask = (each[part].to(self._device) for each in (batch.labels, batch.mask))
            views = tuple(view[part] for view in inputs)
            planned = (each.to(self._device) for each in (*plans[start // rows], *agreed.shared))
            self.module.choose_paths([keys[part] for keys in batch.view_keys], self._device)
            losses = self.module(views, labels, tuple(planned)).per_sample
            loss = torch.where(mask, losses, 0.0).sum() / int(batch.mask.sum())
            ways = ways if start else _ways(loss, trained)
            gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            for name, gradient in zip(trained, gradients, strict=True):
                if gradient is not None:
                    sums[name] += gradient
                    squares[name] += float(gradient.double().square().sum())
        return sums, {name: math.sqrt(square) for name, square in squares.items()}, ways

    @torch.no_grad()
    def _take(self, values: Mapping[str, Tensor]) -> None:
        for name, weight in self.module.named_weights():
            weight.copy_(self.rounded(values[name]))

    def _agreed(
        self, state: State, inputs: Sequence[Tensor], plan: Plan, batch: Batch, rows: int, rates: Rates
    ) -> Agreed:
        """What the objective has to know of the whole global batch, by passes over it."""
        settings = self.recipe.objective
        self._take(state[EMA if settings.prepares == "average" else MASTER])
        self.module.train(settings.prepares != "average")
        passes = [self._prepared(inputs, plan, batch, rows)]
        weights = {name: each.detach().clone() for name, each in self.module.named_weights() if name in settings.reads}
        for name in settings.besides:
            if name not in rates.unmade:
                self._take(state[average_kind(name)])
                self.module.eval()
                passes.append(self._prepared(inputs, plan, batch, rows, name))
        self.module.train()
        return self.module.agree(all_rows(passes), batch.labels.to(self._device), Sums(), weights)

    @torch.no_grad()
    def _prepared(
        self, inputs: Sequence[Tensor], plan: Plan, batch: Batch, rows: int, average: str | None = None
    ) -> Rows:
        prepared, kinds = [], self.module.prepared_kinds(len(inputs))
        for number, planned in enumerate(dealt(plan, len(batch.labels) // rows)):
            part = slice(number * rows, (number + 1) * rows)
            self.module.choose_paths([keys[part] for keys in batch.view_keys], self._device)
            own = tuple(each.to(self._device) for each in planned)
            prepared.append(self.module([inputs[kind][part] for kind in kinds], None, own, average))
        return joined(prepared)

    def update(self, name: str, weight: Tensor, kept: Kept, gradient: Tensor, rates: Rates) -> tuple[Tensor, Kept]:
        """A parameter and what is kept for it after an update with this gradient; all in double precision."""
        update = self._update(name, weight, rates)
        if update is None:
            return weight, {}
        after = dict(self.rule.reference(update, {MASTER: weight, **kept}, gradient))
        return after.pop(MASTER), after

    def noise(self, name: str, weight: Tensor, kept: Kept, gradient: Tensor, rates: Rates) -> float:
        """As `Rule.noise`, of a parameter before an update with this gradient."""
        update = self._update(name, weight, rates)
        return 0.0 if update is None else self.rule.noise(update, {MASTER: weight, **kept}, gradient)

    def _update(self, name: str, weight: Tensor, rates: Rates) -> Update | None:
        group = self.group(name, rates.waiting)
        if group is None:
            return None
        return Update(
            shape=self.recipe.axes(name, tuple(weight.shape)),
            number=rates.updates + 1,
            rate=rates.learning_rate * group[0],
            decay=group[1] * (1.0 if rates.weight_decay_factor is None else rates.weight_decay_factor),
            momentum=self.recipe.optimizer.first_momentum if rates.momentum is None else rates.momentum,
        )


def _ways(loss: Tensor, weights: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of operations on the longest way from a loss to each of some leaves, in autograd's graph."""
    length: dict[Any, int] = {loss.grad_fn: 0}
    missing: dict[Any, int] = {}  # node -> ways to it that are not known yet
    stack: list[Any] = [loss.grad_fn]
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is not None:
                if following not in missing:
                    stack.append(following)
                missing[following] = missing.get(following, 0) + 1
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        for following, _ in node.next_functions:
            if following is not None:
                length[following] = max(length.get(following, 0), length[node] + 1)
                missing[following] -= 1
                if missing[following] == 0:
                    stack.append(following)
    leaves = {node.variable: of_node for node, of_node in length.items() if hasattr(node, "variable")}
    return {name: leaves.get(weight, 0) for name, weight in weights.items()}
