"""Distillation through a token: its loss and gradients beside timm's models in a plain loop; what a teacher costs."""

import copy

import pytest
import torch
from messages import refusal
from objectives.updates import sample_keys, update
from small_recipes import small_recipe
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitscale.flops import recipe_work
from vitscale.ground.errors import RecipeError
from vitscale.models.weights.foreign import table
from vitscale.objectives import build_objective, build_teacher
from vitscale.objectives.mixing import partners_of
from vitscale.training.beginning.memory import expected_memory

B, K, SIDE = 8, 7, 32
OURS = {"patch_size": 8, "width": 24, "depth": 2, "mlp_dim": 96, "num_heads": 2, "head": "linear", "mlp": "exact_gelu"}
THEIRS = {"img_size": SIDE, "patch_size": 8, "num_heads": 2, "num_classes": K}
TEACHER = OURS | {"width": 32, "mlp_dim": 128, "depth": 1}
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def make_recipe(teacher=None, **others):
    mixing = {"mixup": 0.8, "cutmix": 1.0, "per": "pair"}
    objective = {"kind": "distillation", "label_smoothing": 0.1, "mixing": mixing}
    objective["teacher"] = {"model": TEACHER, **(teacher or {})}
    data = {"normalise": {"mean": MEAN, "std": STD}}
    return small_recipe(**{"model": OURS | {"distilled": True}, "data": data, "objective": objective} | others)


def with_values(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.3, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
            if name == "head.bias":
                parameter.zero_()  # or the teacher names one class for all images
    return model


def as_timms(ours: nn.Module, peer: nn.Module) -> nn.Module:
    """timm's model with the values of ours."""
    values, state = dict(ours.named_parameters()), {}
    for rule in table(ours, "timm"):
        parts = (part.detach().clone() for part in rule.split(values[rule.ours]))
        state.update(zip(rule.theirs, parts, strict=True))
    peer.load_state_dict(state)
    return peer


@pytest.fixture
def made():
    """(objective, teacher, timm's student, timm's teacher, images in units of the student, labels)"""
    recipe = make_recipe({"normalise": {}})  # [-1, 1], where the student's is ImageNet's
    objective, teacher = with_values(build_objective(recipe, K), 0), with_values(build_teacher(recipe, K), 1)
    objective.train().learn_from(teacher)
    student = VisionTransformerDistilled(embed_dim=24, depth=2, **THEIRS)
    student.set_distilled_training(True)
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(B, SIDE, SIDE, 3, generator=generator)
    labels = torch.randint(K, (B,), generator=generator)
    return (
        *(objective, teacher, as_timms(objective.backbone, student).train()),
        as_timms(teacher, VisionTransformer(embed_dim=32, depth=1, **THEIRS)).eval(),
        *(images, labels),
    )


def test_prediction_is_the_mean_of_both_heads(made):
    objective, _, student, _, images, _ = made
    objective.eval(), student.eval()
    with torch.no_grad():
        found, expected = objective(images).logits, student(images.permute(0, 3, 1, 2))
    assert (found - expected).abs().max() < 1e-5


def test_loss_and_gradients_are_those_of_a_plain_loop_with_timms_models(made):
    objective, _, student, teacher, images, labels = made
    own, blend, boxes = objective.plan(sample_keys(B), 0)
    mixed = images.clone()
    for row, (top, bottom, left, right) in enumerate(boxes.tolist()):
        mixed[row] = blend[row] * images[row] + (1 - blend[row]) * images[row ^ 1]
        mixed[row, top:bottom, left:right] = images[row ^ 1, top:bottom, left:right]
    smooth = F.one_hot(labels, K) * 0.9 + 0.1 / K
    targets = own[:, None] * smooth + (1 - own)[:, None] * partners_of(smooth)
    pixels = mixed * torch.tensor(STD) + torch.tensor(MEAN)
    with torch.no_grad():
        taught = teacher(((pixels - 0.5) / 0.5).permute(0, 3, 1, 2)).argmax(dim=1)
    by_labels, by_teacher = student(mixed.permute(0, 3, 1, 2))
    expected = 0.5 * F.cross_entropy(by_labels, targets) + 0.5 * F.cross_entropy(by_teacher, taught)
    expected.backward()
    losses, _ = update(make_recipe(), objective, [images[:, None]], labels)
    assert len(set(taught.tolist())) > 1 and boxes.any()
    assert losses.per_sample.mean().item() == pytest.approx(expected.item(), rel=1e-5)
    assert losses.shown["teacher_agreement"].tolist() == (by_teacher.argmax(dim=1) == taught).float().tolist()
    theirs = dict(student.named_parameters())
    ours = dict(objective.backbone.named_parameters())
    for rule in table(objective.backbone, "timm"):
        gradient = rule.join(tuple(theirs[key].grad for key in rule.theirs))
        torch.testing.assert_close(ours[rule.ours].grad, gradient, rtol=1e-4, atol=1e-5)


def test_the_teacher_is_no_part_of_the_objective_and_stays_as_it_is(made):
    objective, teacher, _, _, images, labels = made
    before = copy.deepcopy(teacher.state_dict())
    update(make_recipe(), objective, [images[:, None]], labels)
    assert all(parameter.grad is None for parameter in teacher.parameters()) and not teacher.training
    own = {id(parameter) for parameter in objective.parameters()}
    assert not any(id(parameter) in own for parameter in teacher.parameters())
    assert objective.state_dict().keys() == build_objective(make_recipe(), K).state_dict().keys()
    objective.train()
    assert not teacher.training
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())


def test_what_is_counted_is_what_a_step_computes(made):
    objective, teacher, _, _, images, labels = made
    recipe = make_recipe()
    work = recipe_work(recipe, K)
    assert work.params == sum(parameter.numel() for parameter in objective.parameters())
    plain = make_recipe(objective={"loss": "softmax"})
    with sdpa_kernel(SDPBackend.MATH):  # the counter sees no products inside the other
        with FlopCounterMode(display=False) as counter:
            update(recipe, objective, [images[:, None]], labels)
        with FlopCounterMode(display=False) as of_student:
            objective.backbone(images).logits.sum().backward()
        with FlopCounterMode(display=False) as of_teacher, torch.no_grad():
            teacher(images)
    assert counter.get_total_flops() == of_student.get_total_flops() + of_teacher.get_total_flops()
    taught = of_teacher.get_total_flops() / (2 * B)
    assert work.macs - recipe_work(plain, K).macs == round(taught / 3)
    assert work.parts()["teacher"].backward_macs == 0


def test_every_rank_has_room_for_the_whole_teacher():
    of_teacher = sum(parameter.numel() for parameter in build_teacher(make_recipe(), K).parameters())
    for stage in (0, 3):
        parallelism = {"zero_stage": stage}
        plain = expected_memory(make_recipe(objective={"loss": "softmax"}, parallelism=parallelism), K, 2)
        assert expected_memory(make_recipe(parallelism=parallelism), K, 2).weights == plain.weights + 4 * of_teacher


@pytest.mark.parametrize(
    "changes",
    [
        {"model": OURS},
        {"model": OURS | {"distilled": True, "head": "pretrain"}},
        {"model": OURS | {"distilled": True, "pool": "mean"}},
        {"model": OURS | {"distilled": True, "registers": 2}},
        {"teacher": {"from": "s3://bucket/weights.npz"}},
        {"teacher": {"step": 3}},
        {"teacher": {"model": TEACHER | {"patch_size": 64}}},
    ],
)
def test_what_does_not_go_together(changes):
    with refusal(RecipeError, "objectives", str(changes)):
        make_recipe(**changes)
