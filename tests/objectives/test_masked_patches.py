"""Masked patch prediction against NumPy, counts written out, and the statistics of what is drawn."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_recipes import SMALL, keys, small_recipe, with_initial_values, with_random_values

from vitscale.data.image_operations import to_model_input
from vitscale.objectives import build_objective
from vitscale.objectives.masked_patches import whole_pixels
from vitscale.recipe import load_recipe
from vitscale.recipe.shares import by_largest_remainder

P, SIDE, B = 8, 32, 3
N = (SIDE // P) ** 2
TARGETS = ("mean_colour", "cell_colours", "pixels")


def make_recipe(objective, **model):
    return small_recipe(SMALL | model, batch=B, objective={"kind": "masked_patches", **objective})


def made(objective, **model):
    """An objective with random values, none of them zero."""
    return with_random_values(build_objective(make_recipe(objective, **model), 0)).eval()


def pictures():
    """One of noise, one whose cells have any colours, a white one."""
    generator = torch.Generator().manual_seed(0)
    noise, cells = (torch.randint(256, (side, side, 3), dtype=torch.uint8, generator=generator) for side in (SIDE, 8))
    colours = cells.repeat_interleave(SIDE // 8, 0).repeat_interleave(SIDE // 8, 1)
    return torch.stack([noise, colours, torch.full_like(noise, 255)])


def test_of_196_patches_half_is_78_and_10_and_10():
    recipe = load_recipe("b16_jft_masked")
    assert recipe.objective.counts(recipe.context) == (78, 10, 10)
    fewer = load_recipe("b16_jft_masked_15pct")
    assert fewer.objective.counts(fewer.context).corrupted == 29


@given(st.integers(0, 2000), st.lists(st.integers(1, 50), min_size=1, max_size=5))
def test_largest_remainders_are_whole_sum_up_and_are_near(total, weights):
    shares = [weight / sum(weights) for weight in weights]
    found = by_largest_remainder(total, shares)
    assert sum(found) == total
    assert all(abs(count - total * share) < 1 + 1e-6 for count, share in zip(found, shares, strict=True))


def colour(pixels) -> int:
    """floor(mean / 32) of each channel, red * 64 + green * 8 + blue, by integers of Python."""
    levels = [
        sum(int(value) for value in pixels[..., channel].flat) // (32 * pixels[..., channel].size)
        for channel in range(3)
    ]
    return levels[0] * 64 + levels[1] * 8 + levels[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pixels_come_back_from_what_the_model_sees(dtype):
    every = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(1, 16, 16, 3)
    seen = to_model_input(every, torch.device("cpu"), dtype)
    assert torch.equal(whole_pixels(seen), every.float())


def reference(objective, images, order):
    """The loss of each sample in NumPy and a plain encoder; patches are corrupted one by one."""
    masked, replaced, kept = objective.counts
    vit = objective.backbone
    with torch.no_grad():
        embedded = vit.embed(to_model_input(images, torch.device("cpu"), torch.float32)).numpy()
    changed = embedded.copy()
    for row in range(B):
        places = order[row].tolist()
        for at in range(masked):
            changed[row, places[at]] = objective.mask.detach().numpy()[0, 0]
        for at in range(masked, masked + replaced):
            changed[row, places[at]] = embedded[row, places[(at + replaced + kept) % N]]
    with torch.no_grad():
        tokens = vit.encode(torch.from_numpy(changed)).numpy()[:, -N:]
    weight, bias = objective.prediction.weight.detach().numpy(), objective.prediction.bias.detach().numpy()
    losses = []
    for row in range(B):
        of_patches = []
        for place in order[row, : masked + replaced + kept].tolist():
            y, x = divmod(place, SIDE // P)
            patch = images[row, y * P : (y + 1) * P, x * P : (x + 1) * P].numpy()
            predicted = (tokens[row, place] @ weight.T + bias).astype(np.float64)
            if objective.settings.target == "pixels":
                of_patches.append(np.mean((predicted - (patch.reshape(-1) / 127.5 - 1)) ** 2))
                continue
            cells = 4 if objective.settings.target == "cell_colours" else 1
            side = P // cells
            for index, logits in enumerate(predicted.reshape(cells**2, 512)):
                r, c = divmod(index, cells)
                right = colour(patch[r * side : (r + 1) * side, c * side : (c + 1) * side])
                of_patches.append(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[right])
        losses.append(np.mean(of_patches))
    return losses


@pytest.mark.parametrize(
    "model",
    [{"pool": "cls"}, {"pool": "mean"}, {"registers": 3}, {"registers": 3, "pool": "mean"}, {"pool": "normed_mean"}],
)
@pytest.mark.parametrize("share", [0.5, 0.15, 1.0])
@pytest.mark.parametrize("target", TARGETS)
def test_losses_equal_numpy(target, share, model):
    objective = made({"target": target, "share": share}, **model)
    images, plan = pictures(), objective.plan(keys(B), 0)
    found = objective([to_model_input(images, torch.device("cpu"), torch.float32)[:, None]], torch.full((B,), -1), plan)
    assert found.per_sample.tolist() == pytest.approx(reference(objective, images, plan[0]), rel=2e-5)


def test_a_replaced_patch_is_never_itself_and_no_two_are_the_same():
    objective = made({"share": 1.0})
    masked, replaced, _ = objective.counts
    assert replaced > 1
    (order,) = objective.plan(keys(200), 0)
    identity = torch.arange(N, dtype=torch.float32).view(1, N, 1).expand(200, N, 24)
    with torch.no_grad():
        objective.mask.fill_(-1)
        corrupted = objective._corrupt(identity, order)[..., 0]
    for row in range(200):
        at = order[row, masked : masked + replaced]
        assert (corrupted[row, at] != at).all() and len(corrupted[row, at].unique()) == replaced
        assert (corrupted[row] == -1).sum() == masked


def test_a_new_model_knows_nothing():
    """The output layer is zero: a loss of ln 512, which the first colour wins by being the first."""
    objective = with_initial_values(build_objective(make_recipe({}), 0))
    images = to_model_input(pictures(), torch.device("cpu"), torch.float32)
    found = objective([images[:, None]], torch.full((B,), -1), objective.plan(keys(B), 0))
    assert found.per_sample.tolist() == pytest.approx([np.log(512)] * B)
    assert objective.mask.std().item() == pytest.approx(0.02, rel=0.4)
