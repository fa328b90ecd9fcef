"""Contrastive losses against pytorch-metric-learning's, and the recipe's mistakes."""

import pytest
import torch
from objectives.updates import assert_counted, assert_near, update
from pytorch_metric_learning.losses import NTXentLoss, SupConLoss
from small_recipes import with_initial_values

from vitscale.ground.errors import RecipeError
from vitscale.objectives import build_objective
from vitscale.objectives.contrastive import contrastive_losses
from vitscale.objectives.joint_embedding import collapse_figures
from vitscale.recipe import validate_recipe

RECIPE = {
    "model": {"name": "ViT-Ti/16", "head": "linear"},
    "data": {"train": "train", "image_size": 32, "views": [{"name": "global", "count": 2}]},
    "batch": {"global": 16},
    "objective": {"kind": "contrastive", "group": 8},
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "schedule": {"duration": {"steps": 4}},
}


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


TWO_SIZES = {"views": [{"name": "global", "count": 2}, {"name": "local", "size": 16}]}


def test_one_view_by_labels_is_enough_for_sup_con():
    content = {**RECIPE, "data": {**RECIPE["data"], "views": [{"name": "only"}]}}
    with pytest.raises(RecipeError, match=r"data\.views"):
        validate_recipe(content, "test")
    validate_recipe({**content, "objective": {"kind": "contrastive", "group": 8, "loss": "sup_con"}}, "test")


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("loss", ["nt_xent", "sup_con"])
@pytest.mark.parametrize("size", [32, 16])
def test_in_parts_loss_and_gradients_are_those_of_the_whole_batch(loss, micro, size):
    """With a first pass over all of it; against autograd through the undivided batch, each view by itself."""
    views = [{"name": "global", "count": 2}, {"name": "more", "size": size}]
    data = {"train": "train", "image_size": 32, "views": views}
    model = {"patch_size": 16, "width": 32, "depth": 2, "mlp_dim": 48, "num_heads": 2, "head": "linear"}
    settings = {"kind": "contrastive", "group": "global", "loss": loss, "hidden": 24, "outputs": 8}
    recipe = validate_recipe({**RECIPE, "data": data, "model": model, "objective": settings}, "test")
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


@pytest.mark.parametrize(("group", "data"), [(2, {}), ("global", {}), ("global", TWO_SIZES), (4, TWO_SIZES)])
def test_the_operations_counted_are_those_of_torch(group, data):
    content = {**RECIPE, "batch": {"global": 4}, "objective": {"kind": "contrastive", "group": group}}
    content |= {"data": {**RECIPE["data"], **data}}
    content["model"] = {**RECIPE["model"], "position": {"kind": "rope"}}  # learned ones are resampled by a product
    recipe = validate_recipe(content, "test")
    assert_counted(recipe, build_objective(recipe, 0), 4)


@pytest.mark.parametrize(("kind", "views"), [("contrastive", 2), ("lejepa", 3)])
def test_collapse_and_a_run_that_learns_nothing_are_told_apart(kind, views):
    """By projections of which it is known; the standard deviation is numpy's."""
    block = validate_recipe({**RECIPE, "objective": {"kind": kind}}, "test").objective
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
    content = {**RECIPE, "batch": {"global": 768}, "objective": {"kind": "contrastive", "group": 192}}
    assert validate_recipe(content, "test").split(1) == (192, 4)
