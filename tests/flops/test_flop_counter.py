"""Padding-counted MACs of both passes, what activation checkpointing repeats of them, and the parameters: exactly as
torch finds them in our models."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from small_recipes import small_recipe
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitscale.flops import recipe_work
from vitscale.models import build_model
from vitscale.objectives import build_objective
from vitscale.recipe import Recipe, validate_recipe
from vitscale.recipe.families import REGISTRY

SMALL = {"name": "ViT-Ti/16", "depth": 2}
AXIAL = SMALL | {"attention": "axial"}
STEM = {"name": "R50+ViT-B/16", "width": 64, "depth": 1, "mlp_dim": 96, "num_heads": 2, "blocks": [2, 1]}
RESNET = {"name": "ResNet50", "blocks": [1, 2, 2]}
SWIN = {"name": "Swin-T", "width": 32, "num_heads": 2, "blocks": [2, 2, 3], "window": 3}
ROPE = {"position": {"kind": "rope"}}
MODERN = [
    *({"norm": "rms"}, {"mlp": "swiglu"}, {"qkv_bias": "no_key", "norm": "rms", "qk_norm": True}),
    *({"qkv_bias": "none", "qk_norm": True}, {"layer_scale": 0.1, "attention": "axial"}),
    *({"registers": 3, "class_position": False}, {"registers": 3, "pool": "mean", "position": {"kind": "2d"}}),
    {"registers": 3, "pool": "map", "norm": "rms", "mlp": "swiglu", **ROPE},
    {"pool": "map", "attention": "axial", "head": "linear"},
    *({"pool": "normed_mean", "sub_norm": "all", "norm": "rms"}, {"pool": "map", "sub_norm": "mlp", "mlp": "swiglu"}),
    {"pool": "normed_mean", "position": {"kind": "1d_rope"}},
    {"pool": "normed_mean", "class_token": False, "registers": 2, "mlp": "quick_gelu"},
]
# One of each kind, the shallow ones; all of them in `make test-all`.
IN_EVERY_RUN = {
    *("ViT-Ti/16", "ViT-b/32", "ViT-B/8", "R+ViT-Ti/16", "R26+ViT-S/32", "R50+ViT-B/32"),
    *("ResNet50x1", "ResNet50x3", "Axial-ViT-B/32", "AxialResNet50"),
    *("EVA02-Ti/14", "Swin-T"),
}


def recipe_of(model: dict, image_size: int, recompute_every: int = 0) -> Recipe:
    parallelism = {"activation_checkpointing": recompute_every}
    return small_recipe(model, data={"image_size": image_size}, batch=1, parallelism=parallelism)


def counted_of(module: torch.nn.Module, compute: Callable[[], torch.Tensor]) -> tuple[int, int, int]:
    """FLOPs of the forward and of the backward pass, and the parameters."""
    # A fused attention is counted by a formula of its own, whose backward pass computes the scores once more.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        result = compute()
        forward = counter.get_total_flops()
        result.sum().backward()
    return forward, counter.get_total_flops() - forward, sum(p.numel() for p in module.parameters())


def counted(recipe: Recipe) -> tuple[int, int, int]:
    size = recipe.data.image_size
    with torch.device("meta"):
        model = build_model(recipe, 1000)
        images = torch.empty(1, size, size, 3)
    return counted_of(model, lambda: model(images).logits)


def check(recipe: Recipe) -> None:
    work = recipe_work(recipe, 1000)
    assert (2 * work.macs, 2 * work.backward_macs, work.params) == counted(recipe)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.slow) for name in REGISTRY]
)
def test_every_registered_model(name):
    check(recipe_of({"name": name}, 224))


@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("head", ["pretrain", "linear"])
def test_pooling_and_heads(pool, head):
    check(recipe_of(SMALL | {"pool": pool, "head": head}, 64))


@pytest.mark.parametrize("model", [SMALL, SMALL | {"pool": "mean"}, AXIAL, STEM], ids=["cls", "mean", "axial", "stem"])
@pytest.mark.parametrize(
    ("kind", "at"),
    [
        ("none", "stem"),
        ("sincos", "stem"),
        ("relative", "stem"),
        *((k, a) for k in ("1d", "2d") for a in ("stem", "every_layer", "shared")),
    ],
)
def test_positions(model, kind, at):
    check(recipe_of(model | {"position": {"kind": kind, "at": at}}, 64))


@pytest.mark.parametrize("model", MODERN, ids=lambda model: "-".join(map(str, model.values())))
def test_modern_parts(model):
    check(recipe_of(SMALL | model, 64))


@pytest.mark.parametrize("size", [64, 75, 81])
@pytest.mark.parametrize("variant", ["v1", "v2"])
@pytest.mark.parametrize("mixing", ["conv", "axial"])
def test_variants_of_resnets_at_even_and_odd_sizes(size, variant, mixing):
    check(recipe_of(RESNET | {"variant": variant, "mixing": mixing}, size))


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (SMALL, 75),
        (SMALL, 16),  # one patch
        (AXIAL | {"position": {"kind": "relative"}}, 16),
        (SMALL | {"patch_size": 14}, 384),
        (STEM, 75),
        (STEM | {"patch_size": 3}, 64),
        (STEM | {"attention": "axial", "width_factor": 2}, 75),
        *((SWIN, 64), (SWIN, 75), (SWIN, 3), (SWIN | {"patch_size": 7, "window": 4}, 96)),
        ({"name": "AxialResNet50"}, 40),  # over one position einsum multiplies, and nothing is counted
    ],
)
def test_sizes_that_do_not_divide(model, size):
    check(recipe_of(model, size))


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "model",
    [
        *(SMALL | {"depth": 5}, SMALL | {"dropout": 0.1}, SMALL | {"pool": "mean", "position": {"kind": "relative"}}),
        SMALL | {"depth": 3, "drop_path": 0.5},
        SMALL | {"layer_scale": 0.1, "mlp": "swiglu", "registers": 2, **ROPE},
        *(SMALL | {"sub_norm": "all", "mlp": "swiglu", "pool": "normed_mean", "position": {"kind": "1d_rope"}}, AXIAL),
        STEM | {"depth": 3},
        *(SWIN, SWIN | {"drop_path": 0.5}),
        *(RESNET | {"variant": "v1"}, RESNET | {"variant": "v2"}, RESNET | {"variant": "v2", "drop_path": 0.5}),
        *(RESNET | {"variant": "v1", "mixing": "axial"}, RESNET | {"variant": "v2", "mixing": "axial"}),
    ],
    ids=lambda model: "-".join(str(value) for value in model.values()),
)
def test_recomputed_activations(model, every):
    plain, recomputing = recipe_of(model, 64), recipe_of(model, 64, every)
    extra = counted(recomputing)[1] - counted(plain)[1]
    assert extra == 2 * recipe_work(plain, 1000).recomputed(every).macs > 0
    assert recipe_work(plain, 1000).recomputed(0).macs == 0


MASKED = {"kind": "masked_patches"}
MAE = {"kind": "mae", "decoder_width": 24, "decoder_depth": 3, "decoder_heads": 2, "removed": 0.7}
OF_SOME_PATCHES = [  # what the model has, the objective, blocks that are recomputed
    # Of patches that are left out all are embedded; blocks and pooling see those that are kept.
    *(
        (model, {"keep": 0.4}, every)
        for model in ({}, {"pool": "map", "registers": 3, "class_position": False}, {"pool": "normed_mean", **ROPE})
        for every in (0, 1)
    ),
    # The prediction is computed for corrupted patches alone; gathering them costs no product.
    *(
        ({"pool": pool}, MASKED | {"target": target, "share": share}, 0)
        for pool, share in (("cls", 0.5), ("mean", 0.15))
        for target in ("mean_colour", "cell_colours", "pixels")
    ),
    # The model's blocks see what is kept, the decoder's all patches; the prediction is computed for removed ones.
    *(({"pool": pool}, MAE, every) for pool in ("cls", "mean") for every in (0, 1, 2)),
]


@pytest.mark.parametrize(("model", "objective", "every"), OF_SOME_PATCHES)
def test_objectives_that_see_or_predict_some_patches(model, objective, every):
    content = recipe_of(SMALL | {"patch_size": 8, **model}, 64, every).dump()
    content["objective"] = objective if "kind" in objective else content["objective"] | objective
    recipe = validate_recipe(content, "this test")
    built, work = build_objective(recipe, 1000).train(), recipe_work(recipe, 1000)
    image, label = torch.zeros(1, 1, 64, 64, 3), torch.zeros(1, dtype=torch.int64)
    found = counted_of(built, lambda: built([image], label, built.plan(np.zeros(1, np.int64), 0)).per_sample)
    assert (2 * work.macs, 2 * (work.backward_macs + work.recomputed(every).macs), work.params) == found
