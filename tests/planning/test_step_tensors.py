"""Activations are counted without computing them; here they are computed."""

from typing import Any

import pytest
import torch
from torch import nn
from toy_recipes import make_recipe

from vitscale.models import build_model
from vitscale.objectives.classification import CrossEntropy
from vitscale.training.beginning.tensors import step_tensors

NUM_CLASSES = 100
DROPOUT = {"dropout": 0.1}
LINEAR = {"head": "linear"}
MEAN = {"pool": "mean"}
TI = {"name": "ViT-Ti/16", "depth": 3}
AXIAL_RESNET = {"blocks": [1, 2], "mixing": "axial"}
HYBRID = {"name": "R26+ViT-S/32", "blocks": [1, 1, 1, 1], "depth": 2}

QUICK: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "Ti16": (TI, 96, {}),
    "Ti16-fp32": (TI, 96, {"precision": "fp32"}),
    "Ti16-softmax": ({**TI, **LINEAR, **MEAN}, 96, {"objective": {"loss": "softmax"}}),
    "Ti8-dropout": ({**TI, "patch_size": 8, **DROPOUT}, 64, {}),
    "Ti14-border": ({**TI, "patch_size": 14, **LINEAR}, 100, {}),
    "Ti16-every-block-again": ({**TI, **DROPOUT}, 96, {"parallelism": {"activation_checkpointing": 1}}),
    "Ti16-every-other-again": (TI, 96, {"parallelism": {"activation_checkpointing": 2}}),
    "Ti16-2d-every": ({**TI, "position": {"kind": "2d", "at": "every_layer"}}, 96, {}),
    "Ti16-relative": ({**TI, "position": {"kind": "relative"}}, 96, {}),
    "axial": ({**TI, "attention": "axial"}, 96, {}),
    "axial-relative": ({**TI, "attention": "axial", "position": {"kind": "relative"}}, 96, {}),
    "hybrid": (HYBRID, 64, {}),
    "hybrid-again": (HYBRID, 64, {"parallelism": {"activation_checkpointing": 2}}),
    "resnet": ({"blocks": [1, 2]}, 64, {}),
    "resnet-v1-odd": ({"blocks": [1, 1], "variant": "v1"}, 75, {}),
    "axial-resnet": (AXIAL_RESNET, 64, {}),
}
SLOW: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    f"{name}-{'-'.join(map(str, extra.values()))}-{blocks.get('precision', 'bf16')}-again{again}": (
        {"name": name, **extra},
        224,
        {**blocks, "parallelism": {"activation_checkpointing": again}},
    )
    for name in ("ViT-Ti/16", "ViT-S/32", "ViT-S/16", "ViT-B/32", "ViT-B/16", "R26+ViT-S/32", "ResNet50x1")
    for extra in ([{}] if "ResNet" in name else [LINEAR | MEAN, {"head": "pretrain"} | DROPOUT])
    for blocks in ({}, {"precision": "fp32"})
    for again in (0, 1, 2)
}


def saved_in_a_real_pass(model: dict[str, Any], image_size: int, blocks: dict[str, Any], micro_batch: int) -> int:
    """Bytes of the distinct storages that autograd saves, without the parameters."""
    recipe = make_recipe(model, image_size, micro_batch, **blocks)
    built = build_model(recipe, NUM_CLASSES)
    for parameter in built.parameters():
        nn.init.normal_(parameter, std=0.02)
    dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
    built.to(dtype).train()
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor.detach()  # itself would be a circle through the graph, which nobody can free

    images = torch.randn(micro_batch, image_size, image_size, 3).to(dtype)
    objective = CrossEntropy(recipe.objective.loss, recipe.objective.on, recipe.objective.off)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        objective.per_sample_loss(built(images).logits, torch.arange(micro_batch)).sum()
    for parameter in built.parameters():
        saved.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in saved.values())


def check(case: tuple[dict[str, Any], int, dict[str, Any]], micro_batch: int) -> None:
    model, image_size, blocks = case
    counted = step_tensors(make_recipe(model, image_size, micro_batch, **blocks), NUM_CLASSES, micro_batch)
    assert counted.saved == pytest.approx(saved_in_a_real_pass(*case, micro_batch), rel=0.01)
    assert counted.transient >= 0


# One image needs fewer copies than two.
@pytest.mark.parametrize(
    ("name", "images"), [*((name, 3) for name in QUICK), ("Ti16", 1), ("axial", 1), ("axial-resnet", 1)]
)
def test_what_is_saved_is_what_a_computed_pass_saves(name, images):
    check(QUICK[name], images)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_what_is_saved_at_full_size(name):
    check(SLOW[name], micro_batch=2)


def per_image(model: dict[str, Any], image_size: int = 224) -> float:
    return step_tensors(make_recipe(model, image_size), 1000, 64).saved / 64


def test_large_models_are_counted_without_being_computed():
    """Against a sum by hand: 8 D + 2 M values of 2 bytes a token and block, and an fp32 logarithm for each head.

    D each: the block's input, its norm, queries, keys, values, what attention gives, the sum with the input, its norm.
    M each: before and behind the GELU.
    """
    by_hand = 32 * 257 * (2 * (8 * 1280 + 2 * 5120) + 4 * 16)
    assert per_image({"name": "ViT-H/14"}) == pytest.approx(by_hand, rel=0.03)
    of_22b = {"patch_size": 14, "width": 6144, "depth": 48, "mlp_dim": 24576, "num_heads": 48}
    by_hand = 48 * 257 * (2 * (8 * 6144 + 2 * 24576) + 4 * 48)
    assert per_image(of_22b) == pytest.approx(by_hand, rel=0.03)


def test_dropout_keeps_one_byte_an_element_on_cuda():
    plain, dropout = ({"name": "ViT-Ti/16", "dropout": rate} for rate in (0.0, 0.1))

    def saved(model: dict[str, Any], device: Any) -> int:
        return step_tensors(make_recipe(model, 96), 10, 2, device).saved

    assert saved(plain, "cuda") == saved(plain, "cpu")
    on_cpu, on_cuda = (saved(dropout, device) - saved(plain, device) for device in ("cpu", "cuda"))
    # Twice a block over D values and once over M = 4 D; once behind the positions.
    masks = 2 * 37 * 192 * (12 * 6 + 1)
    assert on_cpu >= 2 * masks
    assert on_cpu - on_cuda == masks


def test_counting_leaves_the_process_as_it_was():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    step_tensors(make_recipe({"name": "ViT-Ti/16", **DROPOUT}, 32), 10, 2)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_default_dtype() == torch.float32
