"""Token dropping: which patches are kept, how many, and that the model computes as if there were no others."""

import pytest
import torch
from small_recipes import SMALL, keys, small_recipe, with_random_values
from timm.layers import PatchDropout
from torch.nn import functional as F

from vitscale.objectives import build_objective

B, K, SIDE, N = 4, 7, 32, 16


def pictures():
    return 2 * torch.rand(B, SIDE, SIDE, 3, generator=torch.Generator().manual_seed(0)) - 1


@pytest.mark.parametrize(
    ("objective", "counts"),
    [
        *[({"loss": "softmax", "keep": keep}, [n]) for keep, n in ((0.5, 8), (0.25, 4), (0.7, 11), (0.99, 16))],
        *(({"loss": "softmax", "keep": 0.05}, [1]), ({"kind": "masked_patches"}, [6, 1, 1, 8])),
        ({"kind": "mae", "decoder_width": 16, "decoder_heads": 4}, [4, 12]),
    ],
)
def test_as_many_are_drawn_of_every_image_each_as_likely_and_by_itself(objective, counts):
    made = build_objective(small_recipe(SMALL, objective=objective), K)
    drawn = torch.cat(made.plan(keys(4000), 0), dim=1)
    assert drawn.shape == (4000, sum(counts)) and drawn.min() >= 0 and drawn.max() < N
    assert (drawn.sort(dim=1).values.diff(dim=1) > 0).all()
    for some, count in zip(drawn.split(counts, dim=1), counts, strict=True):
        often = F.one_hot(some, N).sum(1).float().mean(0)
        assert (often - count / N).abs().max() < 5 * (count / N * (1 - count / N) / 4000) ** 0.5 + 1e-6
    alone = [torch.cat(made.plan(keys(4000)[at : at + 1], at), dim=1) for at in range(50)]
    assert torch.equal(torch.cat(alone), drawn[:50])
    if "kind" in objective:  # in a random order
        assert len(drawn.unique(dim=0)) == 4000
        return
    assert (drawn.diff(dim=1) > 0).all(), "patches keep their order"
    if objective["keep"] in (0.5, 0.25):
        assert counts == [PatchDropout(1 - objective["keep"], num_prefix_tokens=0)(torch.zeros(1, N, 1)).shape[1]]


MODELS = [
    {},
    {"pool": "mean", "position": {"kind": "sincos"}},
    {"registers": 3, "class_position": False},
    {"position": {"kind": "rope"}, "registers": 2},
    {
        "position": {"kind": "1d_rope", "unit": "patch", "registers_base": 100.0},
        "registers": 4,
        "class_position": False,
    },
    {"position": {"kind": "1d_rope"}, "pool": "normed_mean"},
    {"position": {"kind": "2d"}, "pool": "map"},
    {"position": {"kind": "none"}},
]


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_the_kept_compute_as_if_no_token_attended_to_the_others(model, monkeypatch):
    """The others stay in the reference, which masks them wherever somebody attends."""
    recipe = small_recipe(SMALL | model, batch=B, objective={"loss": "softmax", "keep": 0.5})
    objective = with_random_values(build_objective(recipe, K)).eval()
    backbone, (kept,) = objective.backbone, objective.plan(keys(B), 0)
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
