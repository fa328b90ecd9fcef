"""An update of an objective as the learner makes it, without ranks: what several of these tests need."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitscale.data.draws import hashes
from vitscale.flops.work import recipe_work
from vitscale.ground.ranks import Sums
from vitscale.objectives import Agreed, Losses, Objective
from vitscale.objectives.objective import all_rows, dealt, joined
from vitscale.recipe import Recipe


def sample_keys(count: int) -> np.ndarray:
    return hashes(count, 1).view(np.int64)


def update(
    recipe: Recipe,
    objective: Objective,
    views: Sequence[Tensor],
    labels: Tensor,
    size: int | None = None,
    view_keys: Sequence[Tensor] = (),
    step: int = 0,
) -> tuple[Losses, Agreed]:
    """The losses of a batch in micro-batches of `size`, by default in one; the parameters get gradients."""
    block, count = recipe.objective, len(labels)
    parts = [slice(start, start + (size or count)) for start in range(0, count, size or count)]
    plan = objective.plan(sample_keys(count), step)

    def passed(kinds: Sequence[int], part: slice, *others: object) -> object:
        if view_keys:
            objective.choose_paths([keys[part] for keys in view_keys], torch.device("cpu"))
        return objective([views[kind][part] for kind in kinds], *others)

    agreed = Agreed(())
    if block.prepares is not None:
        kinds, was_training = objective.prepared_kinds(len(views)), objective.training
        objective.train(was_training and block.prepares == "weights")
        with torch.no_grad():
            plans = list(zip(parts, dealt(plan, len(parts)), strict=True))
            passes = [
                joined([passed(kinds, part, None, own, average) for part, own in plans])
                for average in (None, *block.besides)
            ]
        objective.train(was_training)
        weights = dict(objective.named_weights())
        agreed = objective.agree(all_rows(passes), labels, Sums(), {name: weights[name] for name in block.reads})
    objective.zero_grad()
    found = []
    for part, own in zip(parts, dealt((*plan, *agreed.rows), len(parts)), strict=True):
        found.append(passed(range(len(views)), part, labels[part], (*own, *agreed.shared)))
        (found[-1].per_sample.sum() / count).backward()
    shown = {name: torch.cat([losses.shown[name] for losses in found]) for name in found[0].shown}
    return Losses(torch.cat([losses.per_sample.detach() for losses in found]), shown), agreed


def assert_near(parameters: Sequence[Tensor], gradients: Sequence[Tensor], relative: float = 3e-6) -> None:
    """Gradients of parameters, each within a part of its own norm."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert float((parameter.grad - gradient).norm()) <= relative * float(gradient.norm()) + 1e-8


def assert_counted(recipe: Recipe, objective: Objective, batch: int, step: int = 0) -> None:
    """The operations and parameters of a recipe are those that torch counts in an update."""
    views = [torch.zeros(batch, view.count, side, side, 3) for view, side in recipe.data.training_views()]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        update(recipe, objective, views, torch.zeros(batch, dtype=torch.int64), step=step)
    work = recipe_work(recipe, 0)
    macs = sum(each.macs + each.backward_macs for each in work.operations)
    assert counter.get_total_flops() == 2 * batch * macs
    assert work.params == sum(parameter.numel() for parameter in objective.parameters())
