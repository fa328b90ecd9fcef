"""Contrastive losses against pytorch-metric-learning's; LeJEPA's statistic against its formula and measured values."""

import math

import pytest
import torch
from objectives.updates import assert_counted, assert_near, update
from pytorch_metric_learning.losses import NTXentLoss, SupConLoss
from small_recipes import SMALL, small_recipe, with_initial_values

from vitscale.ground.errors import RecipeError
from vitscale.objectives import build_objective
from vitscale.objectives.contrastive import contrastive_losses
from vitscale.objectives.joint_embedding import collapse_figures
from vitscale.objectives.lejepa import sigreg

TI = {"name": "ViT-Ti/16", "head": "linear"}
TWO = {"name": "global", "count": 2}
SMALLER = {"name": "local", "size": 16}


def recipe_of(*views, model=TI, batch=16, **objective):
    objective = {"kind": "contrastive", "group": 8} | objective
    return small_recipe(model, data={"views": list(views or (TWO,))}, batch=batch, objective=objective)


def projections(rows):
    return torch.randn(rows, 12, generator=torch.Generator().manual_seed(0), requires_grad=True)


@pytest.mark.parametrize("temperature", [0.07, 0.5])
@pytest.mark.parametrize(
    ("theirs", "labels"),
    [(NTXentLoss, [0, 0, 1, 1, 2, 2, 3, 3]), (SupConLoss, [0, 0, 0, 1, 1, 1, 2, 2]), (SupConLoss, [4] * 6 + [7] * 2)],
)
def test_losses_and_gradients_are_those_of_pytorch_metric_learning(theirs, labels, temperature):
    ours = projections(len(labels))
    other, labels = ours.detach().clone().requires_grad_(), torch.tensor(labels)
    loss, expected = contrastive_losses(ours, labels, temperature)[0].mean(), theirs(temperature)(other, labels)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    gradient, expected_gradient = torch.autograd.grad(loss, ours)[0], torch.autograd.grad(expected, other)[0]
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


def test_collapse_shows_as_a_cosine_of_one():
    losses, repelled = contrastive_losses(torch.ones(6, 4), torch.tensor([0, 0, 1, 1, 2, 2]), 0.1)
    torch.testing.assert_close(losses, torch.full((6,), torch.tensor(5.0).log().item()))
    torch.testing.assert_close(repelled, torch.ones(6))


def test_one_view_by_labels_is_enough_for_sup_con():
    with pytest.raises(RecipeError, match=r"data\.views"):
        recipe_of({"name": "only"})
    recipe_of({"name": "only"}, loss="sup_con")


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("loss", ["nt_xent", "sup_con"])
@pytest.mark.parametrize("size", [32, 16])
def test_in_parts_loss_and_gradients_are_those_of_the_whole_batch(loss, micro, size):
    """With a first pass over all of it; against autograd through the undivided batch, each view by itself."""
    model = {"patch_size": 16, "width": 32, "depth": 2, "mlp_dim": 48, "num_heads": 2, "head": "linear"}
    more = {"name": "more", "size": size}
    recipe = recipe_of(TWO, more, model=model, group="global", loss=loss, hidden=24, outputs=8)
    objective = with_initial_values(build_objective(recipe, 0))
    generator = torch.Generator().manual_seed(0)
    views = [torch.randn(4, count, side, side, 3, generator=generator) for count, side in ((2, 32), (1, size))]
    labels = torch.tensor([1, 0, 1, 1]) if loss == "sup_con" else torch.arange(4)
    alone = [objective.backbone([view])[0].pooled for kind in views for view in kind.unbind(1)]
    projected = objective.projection(torch.stack(alone, dim=1).flatten(0, 1))
    expected = contrastive_losses(projected, labels.repeat_interleave(3), 0.1)[0].mean()
    gradients = torch.autograd.grad(expected, list(objective.parameters()))
    losses, _ = update(recipe, objective, views, labels, size=micro)
    assert losses.per_sample.mean().item() == pytest.approx(expected.item(), rel=1e-6)
    assert_near(objective.parameters(), gradients)


@pytest.mark.parametrize(
    ("group", "views"), [(2, [TWO]), ("global", [TWO]), ("global", [TWO, SMALLER]), (4, [TWO, SMALLER])]
)
def test_the_operations_counted_are_those_of_torch(group, views):
    model = TI | {"position": {"kind": "rope"}}  # learned ones are resampled by a product
    recipe = recipe_of(*views, model=model, batch=4, group=group)
    assert_counted(recipe, build_objective(recipe, 0), 4)


@pytest.mark.parametrize(("kind", "views"), [("contrastive", 2), ("lejepa", 3)])
def test_collapse_and_a_run_that_learns_nothing_are_told_apart(kind, views):
    """By projections of which it is known; the standard deviation is numpy's."""
    block = recipe_of(kind=kind).objective
    noise = torch.randn(64, views, 16, generator=torch.Generator().manual_seed(0))
    images = noise[:, :1] * 3 + noise.flip(0)
    told = {}
    for name, rows in {"point": 9 + noise / 50, "noise": noise, "learning": images}.items():
        spread, cosine = collapse_figures(rows)
        directions = (rows / rows.norm(dim=2, keepdim=True)).flatten(0, 1).numpy()
        assert spread[0].item() == pytest.approx((directions.std(axis=0) ** 2).sum() ** 0.5, rel=1e-4)
        told[name] = block.complaint({"spread": spread.mean().item(), "view_cosine": cosine.mean().item()})
    assert "collapsed" in told["point"] and "nothing has been learned" in told["noise"] and told["learning"] is None
    assert len(collapse_figures(noise[:, :1])) == 1


def test_an_image_whose_label_no_other_has_attracts_nothing():
    losses, _ = contrastive_losses(projections(3), torch.tensor([5, 7, 7]), 0.1)
    assert losses[0] == 0 and (losses[1:] > 0).all()


def test_micro_batches_that_are_left_to_the_device_hold_whole_groups():
    assert recipe_of(batch=768, group=192).split(1) == (192, 4)


# ---- LeJEPA ----------------------------------------------------------------------------------------------------------


LEJEPA = {"kind": "lejepa", "hidden": 24, "outputs": 6, "directions": 32, "center": ["global"]}
MODEL = SMALL | {"patch_size": 16, "width": 32, "depth": 1, "mlp_dim": 48, "head": "linear"}
VIEWS = [{"name": "global", "count": 2}, {"name": "local"}]


def directions(width, count):
    drawn = torch.randn(width, count, generator=torch.Generator().manual_seed(1))
    return drawn / drawn.norm(dim=0)


def by_the_formula(rows, to):
    """n times the integral over [-3, 3] of the squared error of the characteristic function, by trapezoids, weighted by
    the normal one."""
    total = 0.0
    for direction in to.double().T:
        component = rows.double() @ direction
        for knot in range(-16, 17):
            t = knot * 3 / 16
            normal, width = math.exp(-t * t / 2), 3 / 16 * (0.5 if abs(knot) == 16 else 1)
            error = (torch.exp(1j * t * component).mean() - normal).abs() ** 2
            total += width * normal * float(error)
    return len(rows) * total / to.shape[1]


def test_the_statistic_is_that_of_the_formula():
    rows = 0.7 * torch.randn(40, 5, generator=torch.Generator().manual_seed(0)) + 0.2
    assert sigreg(rows, directions(5, 7)).item() == pytest.approx(by_the_formula(rows, directions(5, 7)), rel=1e-5)


@pytest.mark.parametrize(("count", "collapsed", "narrow"), [(32, 12.9, 5.3), (512, 206, 78), (2048, 823, 310)])
def test_it_has_the_values_measured_of_the_authors_code(count, collapsed, narrow):
    """Collapsed to a point, with a standard deviation of 1 / 2, and of the right distribution."""
    rows, to = torch.randn(count, 16, generator=torch.Generator().manual_seed(0)), directions(16, 256)
    assert sigreg(torch.zeros(count, 16), to).item() == pytest.approx(collapsed, rel=5e-3)
    assert sigreg(rows / 2, to).item() == pytest.approx(narrow, rel=0.1)
    assert sigreg(rows, to).item() == pytest.approx(1.0, abs=0.5)


def test_lejepa_in_parts_has_the_loss_and_gradients_of_the_whole_batch():
    recipe = small_recipe(MODEL, data={"views": VIEWS}, objective=LEJEPA)
    objective = with_initial_values(build_objective(recipe, 0))
    generator = torch.Generator().manual_seed(0)
    views = [torch.randn(8, count, 32, 32, 3, generator=generator) for count in (2, 1)]
    projected = objective.projection(objective.backbone(torch.cat(views, dim=1).flatten(0, 1)).pooled).view(8, 3, 6)
    objective.plan(torch.arange(8).numpy(), 4)
    others = objective.directions(torch.device("cpu"))
    objective.plan(torch.arange(8).numpy(), 3)
    to = objective.directions(torch.device("cpu"))
    torch.testing.assert_close(to.norm(dim=0), torch.ones(32))
    assert not torch.equal(to, others)
    invariance = (projected - projected[:, :2].mean(dim=1, keepdim=True)).square().mean()
    gaussian = sum(sigreg(projected[:, view], to) for view in range(3)) / 3
    expected = 0.95 * invariance + 0.05 * gaussian
    gradients = torch.autograd.grad(expected, list(objective.parameters()))
    losses, _ = update(recipe, objective, views, torch.zeros(8, dtype=torch.int64), size=2, step=3)
    assert losses.per_sample.mean().item() == pytest.approx(expected.item(), rel=1e-6)
    assert_near(objective.parameters(), gradients)
