"""Token dropping: which patches are kept, how many, and that the model computes as if there were no others."""

import numpy as np
import pytest
import torch
from small_recipes import SMALL, keys, small_recipe, with_random_values
from timm.layers import PatchDropout
from torch.nn import functional as F

from vitscale.ground.errors import RecipeError
from vitscale.objectives import build_objective

B, K, SIDE, N = 4, 7, 32, 16


def make_recipe(keep, *, mixing=None, **model):
    return small_recipe(SMALL | model, batch=B, objective={"loss": "softmax", "keep": keep, "mixing": mixing})


def made(keep, **blocks):
    return with_random_values(build_objective(make_recipe(keep, **blocks), K))


def pictures():
    return 2 * torch.rand(B, SIDE, SIDE, 3, generator=torch.Generator().manual_seed(0)) - 1


@pytest.mark.parametrize(("keep", "count"), [(0.5, 8), (0.25, 4), (0.7, 11), (0.99, 16), (0.05, 1)])
def test_as_many_are_kept_of_every_image_each_as_likely(keep, count):
    (kept,) = made(keep).plan(keys(4000), 0)
    assert kept.shape == (4000, count)
    assert (kept.diff(dim=1) > 0).all() and kept.min() >= 0 and kept.max() < N
    often = F.one_hot(kept, N).sum(1).float().mean(0)
    assert (often - count / N).abs().max() < 5 * (count / N * (1 - count / N) / 4000) ** 0.5 + 1e-6
    if keep in (0.5, 0.25):
        assert count == PatchDropout(1 - keep, num_prefix_tokens=0)(torch.zeros(1, N, 1)).shape[1]


def test_samples_draw_alone():
    objective = made(0.5)
    (whole,) = objective.plan(keys(B), 0)
    for parts in (2, 4):
        assert torch.equal(torch.cat([objective.plan(part, 3)[0] for part in np.split(keys(B), parts)]), whole)


MODELS = [
    {},
    {"pool": "mean", "position": {"kind": "sincos"}},
    {"registers": 3, "class_position": False},
    {"position": {"kind": "rope"}, "registers": 2},
    {"position": {"kind": "1d_rope"}, "pool": "normed_mean"},
    {"position": {"kind": "2d"}, "pool": "map"},
    {"position": {"kind": "none"}},
]


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_the_kept_compute_as_if_no_token_attended_to_the_others(model, monkeypatch):
    """The others stay in the reference, which masks them wherever somebody attends."""
    backbone = made(0.5, **model).eval().backbone
    (kept,) = made(0.5, **model).plan(keys(B), 0)
    with torch.no_grad():
        found = backbone.encode(backbone.embed(pictures()), kept_BC=kept)
        assert torch.equal(backbone(pictures(), kept=kept).pooled, backbone.represent([found]))
        others = found.shape[1] - kept.shape[1]
        first = others - (model.get("pool") == "normed_mean")  # which puts the mean before all
        seen = torch.cat([torch.arange(first).expand(B, first), kept + first], dim=1)
        bias = torch.full((B, first + N), -torch.inf).scatter(1, seen, 0.0)[:, None, None]
        plain = F.scaled_dot_product_attention
        monkeypatch.setattr(
            F, "scaled_dot_product_attention", lambda q, k, v, attn_mask=None: plain(q, k, v, attn_mask=bias)
        )
        full = backbone.encode(backbone.embed(pictures()))
    expected = full[:, others - first :].gather(1, seen[..., None].expand(-1, -1, 24))
    torch.testing.assert_close(found[:, others - first :], expected, rtol=1e-4, atol=1e-5)


def test_evaluation_sees_all_and_training_some_of_mixed_images():
    objective = made(0.5, mixing={"mixup": 0.8})
    own, blend, boxes, kept = plan = objective.plan(keys(B), 0)
    images, labels = pictures(), torch.arange(B)
    mixed = objective.mixer.mix_images(images, blend, boxes)
    logits = objective.backbone(mixed, kept=kept).logits
    targets = own[:, None] * F.one_hot(labels, K) + (1 - own)[:, None] * F.one_hot(labels.view(2, 2).flip(1).view(4), K)
    found = objective([images[:, None]], labels, plan).per_sample
    torch.testing.assert_close(found, F.cross_entropy(logits, targets, reduction="none"))
    assert torch.equal(objective(images).logits, objective.backbone(images).logits)
    assert not torch.equal(objective(images).logits, objective.backbone(images, kept=kept).logits)


@pytest.mark.parametrize(
    ("model", "keep", "key"),
    [
        ({"attention": "axial", "pool": "mean"}, 0.5, "model.attention: axial"),
        ({"position": {"kind": "relative"}}, 0.5, "model.position.kind: relative"),
        ({"position": {"kind": "1d", "at": "shared"}}, 0.5, "model.position.at: shared"),
        ({"patch_size": 1, "blocks": [1]}, 0.5, "objective.keep"),
        ({}, 0.01, "objective.keep"),
        ({}, 0.0, "objective.keep"),
    ],
)
def test_what_needs_all_patches_is_refused(model, keep, key):
    with pytest.raises(RecipeError, match=key):
        make_recipe(keep, **model)
