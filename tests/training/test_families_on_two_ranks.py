"""Every family of models through the same trainer, on two real DeepSpeed ranks under every ZeRO stage."""

from pathlib import Path
from typing import Any

import pytest
import torch
from finished_runs import evaluate_run, load_model
from models.weights.exported import described, valued, write
from outcomes import assert_same_run, checkpoint, column
from ranks import STEPS, asked, initial_weights, job, launch, make_recipe, quick_of

from vitscale.cli.export import export
from vitscale.data.shards.generated import CLASS_NAMES
from vitscale.models import build_model
from vitscale.models.weights import describe, load_weights, open_weights
from vitscale.runs.checkpoint.opening import open_run

FAMILIES: dict[str, dict[str, Any]] = {
    "resnet-v2": {"name": "ResNet50x1", "blocks": [1, 1]},
    "resnet-v1": {"name": "ResNet50x1", "blocks": [1, 1], "variant": "v1"},
    "axial-resnet": {"name": "AxialResNet50", "blocks": [1, 1]},
    "swin": {"name": "Swin-T", "width": 24, "num_heads": 2, "blocks": [2, 2], "window": 4, "drop_path": 0.3},
    "hybrid": {"blocks": [1, 1], "patch_size": 2},
    "axial": {"attention": "axial"},
    "relative": {"position": {"kind": "relative"}},
    "2d-shared": {"position": {"kind": "2d", "at": "shared"}},
    "2d-every-layer": {"position": {"kind": "2d", "at": "every_layer"}},
    "modern": {
        **{"norm": "rms", "mlp": "swiglu", "qkv_bias": "no_key", "qk_norm": True, "layer_scale": 0.1, "registers": 2},
        **{"pool": "map", "drop_path": 0.3, "position": {"kind": "rope"}},
    },
    "eva-02": {
        **{"mlp": "swiglu", "qkv_bias": "no_key", "sub_norm": "all", "pool": "normed_mean", "drop_path": 0.3},
        **{"position": {"kind": "1d_rope"}, "head": "linear"},
    },
    "sincos": {"position": {"kind": "sincos"}},
    "distilled": {"distilled": True, "head": "linear", "drop_path": 0.3},
}
# Distillation is of a model of its own: the objective belongs to the family here. The teacher is of another one.
TEACHER = {"name": "ResNet50x1", "blocks": [1, 1], "head": "linear"}
DISTILLATION = {
    **{"kind": "distillation", "label_smoothing": 0.1, "mixing": {"mixup": 0.8, "cutmix": 1.0}},
    "teacher": {"from": "teacher.safetensors", "model": TEACHER},
}
# The stage that divides the parameters, beside an uninterrupted run of one that does not; `make test-all` runs all.
STAGES = quick_of(range(4), [3])
# The others differ from one of these in a detail: `make test-all` runs them too.
OF_FAMILIES = quick_of(FAMILIES, ["resnet-v2", "swin", "modern", "distilled"])
# Blocks of a ViT are trained in bf16 by most files of this room.
IN_BF16 = ("resnet-v2", "axial-resnet", "swin", "hybrid")
RECOMPUTED = {"activation_checkpointing": 1}


def blocks_of(root: Path, family: str, stage: int) -> dict[str, Any]:
    teacher = {"teacher": DISTILLATION["teacher"] | {"from": str(root / "teacher.safetensors")}}
    return {
        "model": FAMILIES[family],
        **({"objective": DISTILLATION | teacher} if family == "distilled" else {}),
        "precision": "fp32",
        "parallelism": {"zero_stage": stage, **RECOMPUTED},
        "batch": {"micro_max": 4},
    }


@pytest.fixture(scope="module")
def root(root: Path, request: pytest.FixtureRequest) -> Path:
    """Every training that the tests below look at."""
    teacher = described(TEACHER, 32, class_names=list(CLASS_NAMES))
    write(valued(teacher), teacher, "safetensors", root).rename(root / "teacher.safetensors")
    jobs = {}
    for params in asked(request):
        family, stage = params["family"], params["stage"]
        whole = [stage] if "form" in params else [stage, 1, 3]
        jobs |= {f"{family}-zero{each}": job(f"{family}-zero{each}", blocks_of(root, family, each)) for each in whole}
        if "form" not in params:
            name, blocks = f"{family}-zero{stage}-resumed", blocks_of(root, family, stage)
            jobs[name] = job(name, blocks, 3, None)
            if family in IN_BF16:
                in_bf16 = {**blocks_of(root, family, 3), "precision": "bf16"}
                jobs[f"{family}-bf16"] = job(f"{family}-bf16", in_bf16)
    launch(root, list(jobs.values()), 2)
    return root


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("family", OF_FAMILIES)
def test_a_run_of_any_family_is_the_same_at_every_stage_and_resumes_exactly(root, family, stage):
    name = f"{family}-zero{stage}"
    # Sums are taken in another order at each stage; that grows from step to step (seen: 1.6e-5 after five).
    assert column(root, name, "loss") == pytest.approx(column(root, f"{family}-zero1", "loss"), rel=5e-5)
    assert_same_run(root, f"{name}-resumed", name)


@pytest.mark.parametrize("stage", [3])
@pytest.mark.parametrize("family", OF_FAMILIES)
def test_every_parameter_is_trained_and_evaluated(root, family, stage):
    recipe = make_recipe(root, **blocks_of(root, family, stage))
    trained = checkpoint(root, f"{family}-zero{stage}")
    for name, before in initial_weights(recipe).items():
        assert not torch.equal(trained.parameter(name), before), name
    step, metrics = evaluate_run(root / "runs" / (f"{family}-bf16" if family in IN_BF16 else f"{family}-zero{stage}"))
    assert step == STEPS and 0 <= metrics["validation/top1"] <= 1
    assert not any("teacher" in name for name in trained.index.shapes)
    if family in IN_BF16:  # which keeps 8 bits; six steps of a small model stay close
        losses = column(root, f"{family}-bf16", "loss")
        assert losses == pytest.approx(column(root, f"{family}-zero3", "loss"), rel=0.02)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("family", "form"),
    [
        *(("resnet-v2", "timm"), ("swin", "timm"), ("swin", "hf"), ("distilled", "timm")),
        # Of runs that no other quick test looks at.
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("hybrid", "npz"), ("2d-shared", "safetensors"))),
        pytest.param("eva-02", "timm", marks=pytest.mark.slow),
    ],
)
def test_a_run_of_any_stage_leaves_in_a_format_and_comes_back(root, family, form, stage, tmp_path):
    run_dir = root / "runs" / f"{family}-zero{stage}"
    out = tmp_path / {"npz": "weights.npz", "hf": "folder"}.get(form, "weights.safetensors")
    export(str(run_dir), form, out)
    recipe, reader = open_run(run_dir)
    trained = load_model(recipe, reader)
    source = open_weights(out)
    returned = build_model(recipe, 7).eval()
    assert describe(source, recipe.dump()["model"], 32).build().shape == trained.backbone.shape
    load_weights(returned, source)
    pixels = torch.rand(3, 32, 32, 3, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        assert torch.equal(returned(pixels).logits, trained(pixels).logits)
