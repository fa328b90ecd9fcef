"""Contrastive losses against pytorch-metric-learning's, and the recipe's mistakes."""

import pytest
import torch
from pytorch_metric_learning.losses import NTXentLoss, SupConLoss

from vitscale.ground.errors import RecipeError
from vitscale.objectives.contrastive import contrastive_losses
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


MISTAKES = [
    ({"data": {"views": []}}, "data.views"),
    ({"data": {"views": [{"name": "global", "count": 2}, {"name": "global"}]}}, "global"),
    ({"data": {"views": [{"name": "global", "count": 2}, {"name": "local", "size": 16}]}}, "local"),
    ({"data": {"views": [{"name": "global", "size": 16, "count": 2}]}}, "image_size"),
    ({"data": {"views": [{"name": "global", "count": 2}], "flip": 0.0}}, "flip"),
    ({"data": {"views": [{"name": "global", "count": 2}], "dct_scaling": True}}, "dct_scaling"),
    ({"data": {"views": [{"name": "global", "count": 2}], "bad_samples": "mask"}}, "substitute"),
    ({"data": {"views": [{"name": "a/b", "count": 2}]}}, "name"),
    ({"data": {"views": [{"name": "global", "count": 65}]}}, "64"),
    ({"objective": {"kind": "contrastive", "group": 5}}, "4"),
    ({"objective": {"kind": "classification"}}, "data.views"),
    ({"objective": {"kind": "masked_patches"}}, "data.views"),
    ({"model": {"name": "ViT-Ti/16", "num_classes": 10}}, "num_classes"),
]


@pytest.mark.parametrize(("changes", "told"), MISTAKES)
def test_mistakes_name_the_key_and_what_would_do(changes, told):
    content = {
        **RECIPE,
        **{key: {**RECIPE[key], **value} if key == "data" else value for key, value in changes.items()},
    }
    with pytest.raises(RecipeError, match=told):
        validate_recipe(content, "test")


def test_one_view_by_labels_is_enough_for_sup_con():
    content = {**RECIPE, "data": {**RECIPE["data"], "views": [{"name": "only"}]}}
    validate_recipe({**content, "objective": {"kind": "contrastive", "group": 8, "loss": "sup_con"}}, "test")
    with pytest.raises(RecipeError, match=r"data\.views"):
        validate_recipe(content, "test")
