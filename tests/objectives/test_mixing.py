"""Mixup and CutMix: losses against dense targets and timm's, pixels against timm's, draws against scipy's."""

import numpy as np
import pytest
import torch
from messages import refusal
from scipy import stats
from small_recipes import SMALL, keys, small_recipe, with_random_values
from timm.data import mixup as timm_mixup
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch.nn import functional as F

from vitscale.ground.errors import RecipeError
from vitscale.objectives import build_objective
from vitscale.objectives.classification import CrossEntropy
from vitscale.objectives.mixing import Mixer, Partners, partners_of, symmetric_beta
from vitscale.recipe import Mixing

B, K, SIDE = 8, 11, 32


def make_recipe(*settings, **objective):
    return small_recipe(SMALL, *settings, objective=objective)


def mixer(**settings):
    return Mixer(Mixing(**settings), 3, SIDE)


def pictures(count=B, seed=0):
    return 2 * torch.rand(count, SIDE, SIDE, 3, generator=torch.Generator().manual_seed(seed)) - 1


def example():
    """Logits; labels of which pairs 0 are of one class; parts of the target, 0 and 1 among them."""
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(B, K, generator=generator) - 2).requires_grad_()
    labels = torch.tensor([4, 4, 0, K - 1, 7, 2, 5, 6])
    own = torch.tensor([0.3, 0.3, 1.0, 1.0, 0.0, 0.85, 0.15, 0.5])
    return logits, labels, own


def by_timm(labels, own, smoothing):
    """timm's targets (B, K) of pairs of neighbours, made from its own function, whose partners are in reverse order."""
    order = [*range(0, B, 2), *range(B - 1, 0, -2)]
    mixed = timm_mixup.mixup_target(labels[order], K, own[order, None], smoothing)
    targets = torch.empty_like(mixed)
    targets[order] = mixed
    return targets


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("loss", "threshold", "theirs"),
    [
        ("softmax", None, SoftTargetCrossEntropy()),
        ("sigmoid", None, lambda x, t: F.binary_cross_entropy_with_logits(x, t, reduction="none").sum(1).mean()),
        ("bce", None, BinaryCrossEntropy()),
        ("bce", 0.2, BinaryCrossEntropy(target_threshold=0.2)),
        ("bce", 0.0, BinaryCrossEntropy(target_threshold=0.0)),
        ("sigmoid", 0.2, BinaryCrossEntropy(target_threshold=0.2, sum_classes=True)),
    ],
)
def test_loss_and_gradient_equal_timms_on_dense_targets(loss, threshold, theirs, smoothing):
    logits, labels, own = example()
    expected = theirs(logits, by_timm(labels, own, smoothing))
    (their_gradient,) = torch.autograd.grad(expected, logits)
    cross_entropy = CrossEntropy(loss, label_smoothing=smoothing, threshold=threshold)
    found = cross_entropy.per_sample_loss(logits, labels, Partners(partners_of(labels), own))
    assert found.shape == (B,)
    (gradient,) = torch.autograd.grad(found.mean(), logits)
    torch.testing.assert_close(found.mean(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, their_gradient, rtol=1e-5, atol=1e-7)


def test_label_smoothing_alone_equals_timms_and_torchs():
    logits, labels, _ = example()
    found = CrossEntropy("softmax", label_smoothing=0.1).per_sample_loss(logits, labels)
    torch.testing.assert_close(found.mean(), LabelSmoothingCrossEntropy(0.1)(logits, labels))
    torch.testing.assert_close(found, F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="none"))
    found = CrossEntropy("bce", label_smoothing=0.1).per_sample_loss(logits, labels)
    torch.testing.assert_close(found.mean(), BinaryCrossEntropy(0.1)(logits, labels))


def test_an_unlabelled_partner_adds_to_no_class():
    logits, labels, own = example()
    labels = torch.where(torch.arange(B) % 3 == 0, -1, labels)
    targets = torch.full((B, K), 0.05)
    for row in range(B):
        for label, part in ((labels[row], own[row]), (labels[row ^ 1], 1 - own[row])):
            if label >= 0:
                targets[row, label] += 0.85 * part
    expected = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(1)
    found = CrossEntropy("sigmoid", 0.9, 0.05).per_sample_loss(logits, labels, Partners(partners_of(labels), own))
    torch.testing.assert_close(found, expected)


def test_no_tensor_of_targets_is_made():
    """What autograd keeps grows by labels, and not by a (B, K) matrix, when images are mixed."""
    logits, labels, own = example()

    def kept(partners):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            CrossEntropy("softmax", label_smoothing=0.1).per_sample_loss(logits, labels, partners)
        return sum(size >= B * K for size in sizes)

    assert kept(Partners(partners_of(labels), own)) <= kept(None) + 1  # the logits, once more


@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.5, 0.8, 1.0, 4.0, 300.0])
def test_weights_have_the_beta_distribution(alpha):
    uniforms = np.random.default_rng(0).random((2, 40_000))
    drawn = symmetric_beta(np.full(40_000, alpha), *uniforms)
    assert drawn.min() >= 0 and drawn.max() <= 1
    for at in (1e-9, 1e-3, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999):  # near 1 doubles are too far apart for a small alpha
        expected = stats.beta(alpha, alpha).cdf(at)
        assert abs((drawn <= at).mean() - expected) < 4.5 * (expected * (1 - expected) / 40_000) ** 0.5 + 1e-9
    ends = symmetric_beta(np.full(3, alpha), np.array([0.0, 0.0, 1 - 2**-53]), np.array([0.0, 0.5, 0.25]))
    assert np.isfinite(ends).all()


def test_mixup_alone_draws_beta_for_pairs():
    own, blend, boxes = mixer(mixup=0.8, per="pair").plan(keys(40_000), 0)
    assert torch.equal(own, blend) and torch.equal(own[0::2], own[1::2]) and not boxes.any()
    assert stats.kstest(own[0::2].double(), stats.beta(0.8, 0.8).cdf).pvalue > 1e-3


def test_elements_draw_alone_and_a_batch_draws_once():
    of_elements = mixer(mixup=0.8, per="element").plan(keys(B), 0)[0]
    assert len(set(of_elements.tolist())) == B
    batches = [mixer(mixup=0.8).plan(keys(B, step), step)[0] for step in range(50)]
    assert all(len(set(each.tolist())) == 1 for each in batches) and len({each[0].item() for each in batches}) == 50


@pytest.mark.parametrize("per", ["batch", "pair", "element"])
def test_a_part_of_the_batch_is_drawn_as_the_whole(per):
    """So that worlds and micro-batches do not matter."""
    both = mixer(mixup=0.8, cutmix=1.0, per=per)
    whole = both.plan(keys(B), 7)
    for parts in (2, 4):
        pieces = [both.plan(part, 7) for part in np.split(keys(B), parts)]
        for at in range(3):
            assert torch.equal(torch.cat([piece[at] for piece in pieces]), whole[at])
    assert any(not torch.equal(a, b) for a, b in zip(both.plan(keys(B, 1), 8), whole, strict=True))


def test_probability_and_the_share_of_cutmix():
    drawn = mixer(mixup=0.8, cutmix=1.0, probability=0.6, cutmix_share=0.3, per="element").plan(keys(40_000), 0)
    own, blend, boxes = drawn
    is_cut = (boxes[:, 1] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 2])
    is_mixed = (blend < 1) | is_cut
    assert is_mixed.float().mean().item() == pytest.approx(0.6, abs=0.02)  # a box may have no area
    assert (is_cut.sum() / is_mixed.sum()).item() == pytest.approx(0.3, abs=0.03)
    assert (own[~is_mixed] == 1).all()


@pytest.mark.parametrize("sides", [None, [0.2, 0.8]])
def test_boxes_and_weights_are_as_timms(sides):
    """A box is timm's of the same weight and centre, or of given sides; weights and places have timm's distribution."""
    own, blend, boxes = mixer(cutmix=1.0, cutmix_sides=sides, per="element").plan(keys(20_000), 0)
    assert (blend == 1).all()
    heights, widths = boxes[:, 1] - boxes[:, 0], boxes[:, 3] - boxes[:, 2]
    torch.testing.assert_close(own, 1 - (heights * widths).float() / SIDE**2)
    np.random.seed(0)
    shape = (3, SIDE, SIDE)
    if sides is None:
        drawn = (timm_mixup.cutmix_bbox_and_lam(shape, weight) for weight in np.random.beta(1, 1, 20_000))
        theirs = np.array([[*box, weight] for box, weight in drawn]).T
    else:
        theirs = np.stack(timm_mixup.rand_bbox_minmax(shape, tuple(sides), count=20_000))
        theirs = np.stack([*theirs, 1 - (theirs[1] - theirs[0]) * (theirs[3] - theirs[2]) / SIDE**2])
        assert abs(np.corrcoef(heights, widths)[0, 1]) < 0.03  # any height with any width
    for ours, their in zip((*boxes.T, own, heights), (*theirs, theirs[1] - theirs[0]), strict=True):
        assert stats.ks_2samp(ours.numpy(), their).statistic < 0.02  # 1.5 times what 1 of 1,000 draws would exceed


@pytest.mark.parametrize("per", ["batch", "pair", "element"])
@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_pixels_equal_timms_mixing(kind, per, monkeypatch):
    """timm is told what to draw; its partners are in reverse order."""
    ours, images = mixer(**{kind: 1.0}, per=per), pictures()
    own, blend, boxes = ours.plan(keys(B), 5)
    order = [*range(0, B, 2), *range(B - 1, 0, -2)]
    drawn = [order[at] for at in range(B if per == "element" else B // 2 if per == "pair" else 1)]
    boxes_left = iter(boxes[drawn].tolist())
    weights = np.full(len(drawn), 0.5) if kind == "cutmix" else blend[drawn].double().numpy()

    def told(shape, lam, **_):
        top, bottom, left, right = next(boxes_left)
        return (top, bottom, left, right), 1 - (bottom - top) * (right - left) / SIDE**2

    theirs = timm_mixup.Mixup(
        mixup_alpha=float(kind == "mixup"),
        cutmix_alpha=float(kind == "cutmix"),
        mode={"element": "elem"}.get(per, per),
        label_smoothing=0.0,
        num_classes=K,
    )
    monkeypatch.setattr(timm_mixup, "cutmix_bbox_and_lam", told)
    monkeypatch.setattr(np.random, "beta", lambda a, b, size=None: weights if size else weights[0])
    labels = torch.arange(B)
    mixed, targets = theirs(images[order].permute(0, 3, 1, 2).clone(), labels[order])
    found = ours.mix_images(images, blend, boxes)
    torch.testing.assert_close(found[order].permute(0, 3, 1, 2), mixed, rtol=0, atol=2e-7)
    dense = own[:, None] * F.one_hot(labels, K) + (1 - own)[:, None] * F.one_hot(partners_of(labels), K)
    torch.testing.assert_close(dense[order], targets.float(), rtol=0, atol=1e-6)


def test_what_is_not_mixed_keeps_its_bits():
    for dtype in (torch.float32, torch.bfloat16):
        images = pictures().to(dtype)
        found = mixer(cutmix=1.0).mix_images(images, torch.ones(B), torch.zeros(B, 4, dtype=torch.int64))
        assert found.dtype == dtype and torch.equal(found, images)
        whole = torch.tensor([[0, SIDE, 0, SIDE]]).expand(B, 4)
        assert torch.equal(mixer(cutmix=1.0).mix_images(images, torch.ones(B), whole), partners_of(images))


@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_the_objective_mixes_and_drops_patches_in_training_and_not_in_evaluation(keep):
    mixing = {"mixup": 0.8, "cutmix": 1.0, "per": "pair"}
    recipe = make_recipe(loss="softmax", keep=keep, mixing=mixing, label_smoothing=0.1)
    objective = with_random_values(build_objective(recipe, K))
    images, labels = pictures(), torch.arange(B)
    own, blend, boxes, *kept = plan = objective.plan(keys(B), 0)
    assert len(kept) == (keep < 1)
    found = objective([images[:, None]], labels, plan).per_sample
    mixed = objective.mixer.mix_images(images, blend, boxes)
    targets = by_timm(labels, own, 0.1)
    logits = objective.backbone(mixed, kept=kept[0] if kept else None).logits
    torch.testing.assert_close(found.mean(), SoftTargetCrossEntropy()(logits, targets))
    assert torch.equal(objective(images).logits, objective.backbone(images).logits)


@pytest.mark.parametrize(
    ("objective", "settings"),
    [
        ({"mixing": {}}, []),
        ({"mixing": {"mixup": 0.2, "cutmix_share": 0.3}}, []),
        ({"mixing": {"mixup": 0.2, "cutmix_sides": [0.2, 0.8]}}, []),
        ({"mixing": {"cutmix": 1.0, "cutmix_sides": [0.8, 0.2]}}, []),
        ({"mixing": {"cutmix": 1.0, "cutmix_sides": [0.5, 0.51]}}, []),
        ({"mixing": {"mixup": 0.2}}, ["batch.global=7"]),
        ({"mixing": {"mixup": 0.2}}, ["data.bad_samples=mask"]),
        ({"label_smoothing": 0.1, "on": 0.9}, []),
        ({"loss": "softmax", "threshold": 0.1}, []),
        ({"threshold": 0.1, "on": 0.9, "off": 0.2}, []),
    ],
)
def test_what_does_not_go_together_is_refused(objective, settings):
    with refusal(RecipeError, "objectives", f"{objective} {settings}"):
        make_recipe(*settings, **objective)


@pytest.mark.parametrize(
    ("batch", "world"), [({"global": 12, "micro_max": 3}, 2), ({"global": 12, "micro_max": 1}, 1), ({"global": 6}, 2)]
)
def test_micro_batches_that_part_a_pair_are_refused(batch, world):
    recipe = make_recipe(mixing={"mixup": 0.2})
    recipe = recipe.model_copy(update={"batch": type(recipe.batch)(**batch)})
    with refusal(RecipeError, "objectives", f"{batch}, {world} ranks"):
        recipe.split(world)
    assert make_recipe().model_copy(update={"batch": recipe.batch}).split(world)
