"""Which branches drop path leaves out: a function of each view's key, whatever the world and the micro-batch."""

import numpy as np
import pytest
import torch
from objectives.updates import assert_near, update
from small_recipes import SMALL, small_recipe, with_initial_values

from vitscale.data.draws import kept_paths
from vitscale.objectives import build_objective

SHARES = [0.0, 0.1, 0.5, 0.9]
KEYS = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, (200, 100))
MODEL = SMALL | {"width": 32, "depth": 3, "mlp_dim": 48, "head": "linear", "drop_path": 0.5}
SWIN = {"width": 32, "blocks": [2, 2], "num_heads": 2, "window": 4, "name": "Swin-T", "head": "linear"}
RESNET = {"name": "ResNet50x1", "blocks": [2, 1], "width_factor": 1, "head": "linear"}
VIEWS = [{"name": "global", "count": 2}, {"name": "local", "count": 3, "size": 16}]


def test_branches_are_left_out_as_often_as_they_should_and_independently():
    kept = kept_paths(KEYS, SHARES)
    assert kept.shape == (200, 100, 4) and kept[..., 0].all()
    left = 1 - kept.reshape(-1, 4)
    deviation = np.sqrt(np.array(SHARES) * (1 - np.array(SHARES)) / KEYS.size)
    assert (np.abs(left.mean(axis=0) - SHARES) <= 5 * deviation).all()  # of a binomial distribution
    several = kept_paths(KEYS, [0.5] * 6).reshape(-1, 6)
    correlations = np.corrcoef(several.T) - np.eye(6)
    assert np.abs(correlations).max() < 5 / np.sqrt(KEYS.size)


def made(model, objective, views):
    recipe = small_recipe(model, data={"views": views or []}, objective=objective)
    objective = with_initial_values(build_objective(recipe, 7)).train()
    with torch.no_grad():
        for name, parameter in objective.named_weights():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    return recipe, objective


@pytest.mark.parametrize(
    ("model", "objective", "views"),
    [
        (MODEL, {"loss": "softmax"}, None),
        (SWIN | {"drop_path": 0.5}, {"loss": "softmax"}, None),
        (RESNET | {"drop_path": 0.5}, {"loss": "softmax"}, None),
        (MODEL, {"kind": "contrastive", "hidden": 16, "outputs": 8}, VIEWS[:1]),
        (MODEL, {"kind": "lejepa", "hidden": 16, "outputs": 8}, VIEWS),
    ],
    ids=["vit", "swin", "resnet", "contrastive", "lejepa"],
)
def test_an_update_is_the_same_in_every_micro_batch(model, objective, views):
    """Gradients of a global batch of 8 in parts of 1 to 8; other keys give others."""
    recipe, objective = made(model, objective, views)
    generator = torch.Generator().manual_seed(3)
    counts = [(view.get("count", 1), view.get("size", 32)) for view in views or [{}]]
    images = [torch.rand(8, count, side, side, 3, generator=generator) * 2 - 1 for count, side in counts]
    labels = torch.arange(8) % 7
    keys = [torch.from_numpy(KEYS[:8, 10 * at : 10 * at + count]) for at, (count, _) in enumerate(counts)]

    update(recipe, objective, images, labels, view_keys=keys)
    expected = [parameter.grad.clone() for parameter in objective.parameters()]
    for size in (1, 2, 4):
        update(recipe, objective, images, labels, size, keys)
        assert_near(objective.parameters(), expected)
    update(recipe, objective, images, labels, view_keys=[each + 1 for each in keys])
    found = [parameter.grad for parameter in objective.parameters()]
    assert any(not torch.allclose(each, other, rtol=0.1) for each, other in zip(found, expected, strict=True))


def test_images_that_are_no_views_of_the_samples_are_refused():
    _, objective = made(MODEL, {"loss": "softmax"}, None)
    objective.choose_paths([torch.from_numpy(KEYS[:4, :1])], torch.device("cpu"))
    with pytest.raises(ValueError, match="4 samples"):
        objective.backbone(torch.zeros(6, 32, 32, 3))
    objective.eval().backbone(torch.zeros(6, 32, 32, 3))
