"""DINO, iBOT and KoLeo: losses against their formulas, the objective against plain torch over the undivided batch."""

import itertools
import math

import numpy as np
import pytest
import torch
from objectives.updates import assert_counted, assert_near, sample_keys, update
from small_recipes import DINO, small_recipe, with_initial_values
from torch.nn import functional as F

from vitscale.data.draws import hashes
from vitscale.ground.ranks import Sums
from vitscale.objectives import build_objective
from vitscale.objectives.block_masks import block_masks
from vitscale.objectives.dino_losses import class_losses, gram_losses, koleo, patch_losses, potentials, targets
from vitscale.objectives.objective import dealt, joined
from vitscale.recipe.dino import masked_counts

VIEWS = [{"name": "first"}, {"name": "second"}, {"name": "local", "count": 3, "size": 16}]
OBJECTIVE = {**DINO, "teacher_temperature": {"from": 0.05, "to": 0.05}}
MODEL = {"patch_size": 8, "width": 32, "depth": 2, "mlp_dim": 48, "num_heads": 2, "head": "linear"}
EMA = {"name": "ema", "decay": 0.99}
MODELS = [{}, {"position": {"kind": "rope"}, "registers": 2, "pool": "cls"}]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seen", [1, 2, 3])
def test_views_are_compared_with_all_targets_but_their_own(seen):
    student, teacher = random(6, 5, 11, seed=1), random(6, seen, 11, seed=2).softmax(dim=2)
    each = [
        -(teacher[:, t].double() * student[:, v].double().log_softmax(dim=1)).sum(dim=1)
        for t in range(seen)
        for v in range(5)
        if t != v
    ]
    assert len(each) == seen * 4
    torch.testing.assert_close(class_losses(student, teacher).double(), sum(each) / len(each), rtol=1e-6, atol=0)


def test_unmasked_views_count_as_no_loss_of_patches():
    """In DINOv2 the sum over views is divided by all of them: with half of them masked, half of a cross-entropy."""
    places = torch.tensor([[0, 3, 4, 10, 30], [1, 2, 11, 20, 35]])  # of groups of 2 images with 2 views of 9 patches
    masks = torch.zeros(2, 36, dtype=torch.bool).scatter(1, places, True).view(4, 2, 9)
    student, teacher = random(places.numel(), 7, seed=1), random(places.numel(), 7, seed=2).softmax(dim=1)
    of_patches, expected = iter(-(teacher * student.log_softmax(dim=1)).sum(dim=1).double()), []
    for image in masks:
        views = [[next(of_patches) for _ in range(int(view.sum()))] for view in image]
        expected.append(sum(float(sum(view)) / max(len(view), 1) for view in views) / 2)
    found = patch_losses(student, teacher, masks, places)
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


def test_koleo_is_the_nearest_neighbour_of_a_group():
    rows, found = random(8, 2, 12), 0.0
    unit = F.normalize(rows.double(), dim=2)
    for start in (0, 4):
        for view in range(2):
            for one in range(4):
                others = [float((unit[start + one, view] - unit[start + i, view]).norm()) for i in range(4) if i != one]
                found -= math.log(min(others)) / 8
    assert koleo(rows, 4).mean().item() == pytest.approx(found, rel=1e-5)
    assert koleo(rows, 8).mean() > koleo(rows, 4).mean()


@pytest.mark.parametrize("apart", [0.0, 1e-4])
def test_koleo_of_copies_is_finite(apart):
    rows = random(1, 1, 16).repeat(4, 1, 1) + apart * random(4, 1, 16, seed=1)
    loss = koleo(rows.requires_grad_(), 2).sum()
    (gradient,) = torch.autograd.grad(loss, rows)
    assert loss.isfinite() and gradient.isfinite().all()
    opposite = torch.tensor([1.0, -1.0]).view(2, 1, 1) * random(1, 1, 16)
    assert koleo(opposite, 2)[0].item() == pytest.approx(-math.log(2), rel=1e-5)


def test_gram_anchoring_is_the_mean_square_over_pairs_of_patches():
    student, teacher, found = random(3, 2, 5, 7), random(3, 2, 5, 7, seed=1), [0.0] * 3
    for image, view, one, other in itertools.product(range(3), range(2), range(5), range(5)):
        pairs = [(each[image, view, one].double(), each[image, view, other].double()) for each in (student, teacher)]
        cosines = [float(a @ b / (a.norm() * b.norm())) for a, b in pairs]
        found[image] += (cosines[0] - cosines[1]) ** 2 / 50
    assert gram_losses(student, teacher).tolist() == pytest.approx(found, rel=1e-5)
    assert gram_losses(student, 3 * student).max() < 1e-12


def built(changes=(), model=()):
    averages = [EMA, {"name": "gram", "every": {"steps": 2}, "of": "ema"}]
    blocks = {"data": {"views": VIEWS}, "objective": OBJECTIVE | dict(changes), "averages": averages}
    recipe = small_recipe(MODEL | dict(model), **blocks)
    objective = with_initial_values(build_objective(recipe, 0), 5)
    if objective.mask is not None:
        objective.mask.data.normal_(generator=torch.Generator().manual_seed(5))
    objective.scalars = {"teacher_temperature": 0.05, "gram.weight": 2.0}
    return recipe, objective


def head(weights, name, rows):
    for number, following in ((0, True), (2, True), (4, False)):
        rows = rows @ weights[f"{name}.layers.{number}.weight"].T + weights[f"{name}.layers.{number}.bias"]
        rows = F.gelu(rows) if following else F.normalize(rows, dim=-1)
    return rows @ weights[f"{name}.last.weight"].T


def whole_batch(objective, views, masks, patches_head):
    """Loss of the undivided batch, one view after another, from the formulas."""
    weights, backbone, mask = dict(objective.named_parameters()), objective.backbone, objective.mask
    globals_, locals_ = [views[0][:, 0], views[1][:, 0]], list(views[2].unbind(1))
    with torch.no_grad():
        teacher = [backbone(each) for each in globals_]
        by_class = published(torch.cat([head(weights, "dino", out.pooled) for out in teacher]) / 0.05).split(8)
        patches = [backbone.patch_tokens(out.tokens) for out in teacher]
        rows = [patches[crop][image][masks[image, crop]] for image in range(8) for crop in range(2)]
        by_patch = iter(
            published(head(weights, patches_head, torch.cat(rows)) / 0.05).split([len(each) for each in rows])
        )
    edits = [lambda x, crop=crop: torch.where(masks[:, crop, :, None], mask, x) for crop in range(2)]
    students = [backbone(each, edit=edit) for each, edit in zip(globals_, edits, strict=True)]
    students += [backbone([each])[0] for each in locals_]
    log_p = [(head(weights, "dino", out.pooled) / 0.1).log_softmax(dim=1).double() for out in students]
    pairs = [(t, v) for t in range(2) for v in range(5) if t != v]
    total = sum(-(by_class[t] * log_p[v]).sum(dim=1).mean() for t, v in pairs) / len(pairs)
    for image in range(8):
        for crop in range(2):
            target, chosen = next(by_patch), masks[image, crop]
            if chosen.any():
                tokens = backbone.patch_tokens(students[crop].tokens)[image][chosen]
                log_q = (head(weights, patches_head, tokens) / 0.1).log_softmax(dim=1).double()
                total = total - (target * log_q).sum(dim=1).mean() / 16
    for out in students[:2]:
        unit = F.normalize(out.pooled.double(), dim=1)
        for group in unit.split(4):
            distances = (group[:, None] - group[None]).norm(dim=2) + torch.eye(4) * 9
            total = total - 0.1 * distances.min(dim=1).values.log().mean() / 2
    return total


@pytest.mark.parametrize("model", MODELS, ids=["1d", "rope"])
@pytest.mark.parametrize("prototypes", [20, None], ids=["own", "shared"])
def test_loss_gradient_and_targets_are_those_of_the_undivided_batch(prototypes, model):
    """For micro-batches of one and of two groups, against the published loop over all of it; in double precision but
    for targets and what is compared, as in single precision large weights leave only four digits of gradients.
    """
    recipe, objective = built({"ibot": {"prototypes": prototypes}}, model)
    objective.double().train()
    views = [random(8, count, side, side, 3, seed=side + count).double() for count, side in ((1, 32), (1, 32), (3, 16))]
    masks, _ = objective.plan(sample_keys(8), 0)
    expected = whole_batch(objective, views, masks, "dino" if prototypes is None else "ibot")
    gradients = torch.autograd.grad(expected, list(objective.parameters()))
    agreed = []
    for size in (4, 8):
        losses, found = update(recipe, objective, views, torch.zeros(8, dtype=torch.int64), size)
        assert losses.per_sample.mean().item() == pytest.approx(expected.item(), rel=1e-6)
        assert_near(objective.parameters(), gradients, 2e-6)
        agreed.append(found.shared)
    for one, other in zip(*agreed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_equal_rows_have_equal_targets_to_the_last_bit():
    """However they are dealt to micro-batches: groups are computed alike everywhere."""
    _, objective = built()
    rows = (F.normalize(random(6, 8, 8), dim=2), F.normalize(random(6, 9, 8, seed=1), dim=2))
    weights = {name: random(count, 8, seed=2) for name, count in (("dino.last.weight", 24), ("ibot.last.weight", 20))}
    labels = torch.zeros(24, dtype=torch.int64)
    whole = objective.agree(rows, labels, Sums(), weights).shared
    for parts in ([5, 0, 3, 1, 4, 2], [2, 3, 0, 1, 5, 4]):
        others = objective.agree(tuple(each[parts] for each in rows), labels, Sums(), weights).shared
        assert all(torch.equal(one, other) for one, other in zip(whole, others, strict=True))
        first = objective._targets(rows[0][parts[:2]], *whole[:2])
        assert torch.equal(first, torch.cat([objective._targets(rows[0][[part]], *whole[:2]) for part in parts[:2]]))


@pytest.mark.parametrize(
    "changes", [{}, {"ibot": {}}, {"ibot": None, "koleo": 0.0}, {"ibot": {"prototypes": 12}}, {"gram": {}}]
)
def test_the_operations_counted_are_those_of_torch(changes):
    recipe, objective = built({"group": 8, **changes}, {"position": {"kind": "rope"}})  # learned ones are resampled
    assert_counted(recipe, objective, 8)


def test_one_global_view_is_enough_beside_local_ones():
    views = [{"name": "global"}, {"name": "local", "count": 2, "size": 16}]
    recipe = small_recipe(MODEL, data={"views": views}, objective=OBJECTIVE, averages=[EMA])
    assert recipe.objective.are_global(recipe.context) == [True, False]


# ---- Sinkhorn's targets ----------------------------------------------------------------------------------------------


def published(logits):
    """facebookresearch/dinov2, dino_clstoken_loss.py: sinkhorn_knopp_teacher, in double precision."""
    Q = logits.double().exp().t()
    B, K = Q.shape[1], Q.shape[0]
    Q /= Q.sum()
    for _ in range(3):
        Q /= Q.sum(dim=1, keepdim=True)
        Q /= K
        Q /= Q.sum(dim=0, keepdim=True)
        Q /= B
    return (Q * B).t()


def rows(count, prototypes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    each = torch.nn.functional.normalize(torch.randn(count, 16, generator=generator), dim=1)
    to = torch.nn.functional.normalize(torch.randn(prototypes, 16, generator=generator), dim=1)
    return each @ to.T


@pytest.mark.parametrize("temperature", [0.04, 0.07])
@pytest.mark.parametrize("count", [1, 5, 256])
def test_targets_are_those_of_the_published_loop(temperature, count):
    logits = rows(count, 48) / temperature
    found = targets(logits, potentials(lambda: [logits], Sums()))
    torch.testing.assert_close(found.double(), published(logits), rtol=0, atol=3e-7)
    torch.testing.assert_close(found.sum(dim=1), torch.ones(count))


def test_any_parts_in_any_order_have_the_same_bits():
    logits = rows(96, 40) / 0.04
    expected = potentials(lambda: [logits], Sums())
    for size in (1, 8, 32):
        parts = list(reversed(logits.split(size)))
        assert torch.equal(potentials(lambda parts=parts: parts, Sums()), expected)


def test_large_logits_and_prototypes_that_nobody_is_near_are_harmless():
    logits = rows(64, 40) / 0.04
    torch.testing.assert_close(
        targets(logits + 300, potentials(lambda: [logits + 300], Sums())),
        targets(logits, potentials(lambda: [logits], Sums())),
        rtol=0,
        atol=2e-5,
    )
    logits[:, 3] = -1e4
    found = targets(logits, potentials(lambda: [logits], Sums()))
    assert torch.isfinite(found).all() and found[:, 3].sum() > 0


# ---- Masks of blocks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "crops", "total"),
    [(8, 8, 88), (8, 64, 615), (14, 16, 507), (14, 32, 974), (14, 128, 3771), (16, 16, 663), (16, 64, 2496)],
)
def test_counts_are_those_of_dinov3(grid, crops, total):
    assert sum(masked_counts(crops, grid**2, 0.5, (0.1, 0.5))) == total


@pytest.mark.parametrize("grid", [1, 2, 3, 4, 7, 8, 16, 32])
def test_counts_are_met_on_every_grid(grid):
    counts = masked_counts(8, grid**2, 0.5, (0.1, 0.5))
    masks = block_masks(hashes(40, 1), grid, 2, counts)
    assert masks.shape == (40, 2, grid**2)
    for group in masks.reshape(10, 8, grid**2):
        assert sorted(group.sum(axis=1)) == sorted(counts)


def test_a_group_has_the_same_masks_in_any_part_of_the_batch():
    keys, counts = hashes(32, 2), masked_counts(8, 196, 0.5, (0.1, 0.5))
    whole = block_masks(keys, 14, 2, counts)
    for size in (4, 8, 16):
        parts = [block_masks(keys[start : start + size], 14, 2, counts) for start in range(0, 32, size)]
        assert np.array_equal(np.concatenate(parts), whole)
    other = block_masks(hashes(32, 3), 14, 2, counts)
    assert not np.array_equal(other, whole)


def test_patches_are_masked_as_often_as_by_the_published_loop():
    """Which masks the middle of 14 x 14 patches in 28.0 %, (3, 3) in 20.0 % and a corner in 2.4 % of 16,384 draws."""
    counts = masked_counts(16, 196, 0.5, (0.1, 0.5))
    masks = block_masks(hashes(2048, 4), 14, 2, counts).reshape(-1, 14, 14)
    assert masks.any(axis=(1, 2)).mean() == 0.5
    often = masks.mean(axis=0)
    assert often[6:8, 6:8].mean() == pytest.approx(0.280, abs=0.02)
    assert often[[3, 3, 10, 10], [3, 10, 3, 10]].mean() == pytest.approx(0.200, abs=0.02)
    assert often[[0, 0, 13, 13], [0, 13, 0, 13]].mean() == pytest.approx(0.024, abs=0.005)
    masked = masks[masks.any(axis=(1, 2))]
    assert masked[:, :, 1:][masked[:, :, :-1]].mean() > 2 * masked.mean()  # neighbours are masked together


# ---- Sums over the global batch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_total_has_the_same_bits_in_any_order_and_any_parts(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(640, 64, generator=generator) / 0.04
    terms = torch.softmax(logits, dim=1).to(dtype)
    total = Sums().total(terms)
    assert total.dtype == dtype
    torch.testing.assert_close(total.double(), terms.double().sum(dim=0), rtol=1e-7, atol=640 * 2**-41)
    shuffled = terms[torch.randperm(640, generator=generator)]
    for parts in (1, 3, 64, 640):
        assert torch.equal(Sums().total(iter(shuffled.chunk(parts))), total)
    assert torch.equal(Sums().total(-terms), -total)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 2.0, 3e7])
def test_what_integers_cannot_hold_is_told_whatever_else_is_added(wrong):
    """Two NaN would add up to 0 in integers of 64 bits."""
    rows = torch.ones(4, 3)
    rows[1, 0] = rows[3, 0] = wrong
    assert Sums().total(rows).isnan().all() and Sums().total(iter(rows.split(1))).isnan().all()
    assert Sums().total(torch.ones(4)).item() == 4 and Sums().total(torch.empty(0, 3)).tolist() == [0, 0, 0]
    most = torch.ones(1).expand(2**22)
    assert Sums().total(most).item() == 2**22
    with pytest.raises(ValueError, match="rows"):
        Sums(0, 2).total(most)


def test_rows_are_each_rank_s_own():
    whole = torch.arange(12).view(6, 2)
    assert [Sums(rank, 3).own(whole).tolist() for rank in range(3)] == [each.tolist() for each in whole.split(2)]


def test_rows_come_back_to_the_micro_batch_that_made_them():
    made = [(torch.full((4, 2), number), torch.full((2, 3), number), torch.empty(0, 5)) for number in range(3)]
    again = dealt(joined(made), 3)
    assert all(
        torch.equal(*each) for one, other in zip(made, again, strict=True) for each in zip(one, other, strict=True)
    )
    assert dealt((), 2) == [(), ()] and torch.equal(joined([made[0][0], made[1][0]])[4:], made[1][0])
    with pytest.raises(AssertionError):
        dealt((torch.zeros(5),), 2)
