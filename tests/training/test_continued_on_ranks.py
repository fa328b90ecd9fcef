"""Continued pre-training: a run begins with released weights to the last bit, and measures them first."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from outcomes import checkpoint, evaluations, printed
from ranks import job, launch, make_recipe
from safetensors.torch import load_file
from transformers import (
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    ViTMAEConfig,
    ViTMAEForPreTraining,
)

from vitscale.data.shards import Manifest
from vitscale.evaluation import NearestNeighbours, evaluate
from vitscale.evaluation.finished import FinishedModel, OfWeights
from vitscale.evaluation.linear import LinearHeads
from vitscale.models import initialise
from vitscale.models.vit.positions import sincos_positions
from vitscale.models.weights import load_weights, open_weights
from vitscale.objectives import build_objective
from vitscale.recipe import EvalCrop

CROP = EvalCrop(fraction=0.03)  # a pixel in the middle, by which few images are classified rightly
IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
ENCODER = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 8}
DINO = {"registers": 2, "layer_scale": 1e-5, "mlp": "exact_gelu", "mlp_dim": 64, "pool": "cls", "head": "linear"}
HEADS = [{"match": r"^(dino\.|ibot\.|mask$)", "lr_factor": 10}, {"match": ".", "begin": {"steps": 4}}]
SELF_DISTILLATION = {
    "data": {
        "normalise": IMAGENET,
        "views": [{"name": "global", "count": 2}, {"name": "local", "count": 2, "size": 16}],
    },
    "objective": {"kind": "dino", "group": 2, "prototypes": 24, "hidden": 20, "bottleneck": 8},
    "averages": [{"name": "ema", "decay": 0.9}],
    "optimizer": {"name": "adamw", "lr": 3e-3, "weight_decay": 0.1, "groups": HEADS},
}
# name -> how the run differs from the toy's, and the places along one side of the folder's grid of patches.
RUNS: dict[str, tuple[dict[str, Any], int]] = {
    "mae": (
        {
            "model": {"mlp": "exact_gelu", "position": {"kind": "sincos", "table": "mae"}},
            "data": {"normalise": IMAGENET},
            "objective": {"kind": "mae", "decoder_width": 16, "decoder_depth": 2, "decoder_heads": 2},
        },
        4,
    ),
    "dinov2": ({**SELF_DISTILLATION, "model": {**DINO, "class_position": True}}, 8),
    "dinov3": (
        {
            **SELF_DISTILLATION,
            "model": {**DINO, "qkv_bias": "no_key", "norm_eps": 1e-5, "position": {"kind": "rope", "rescale": 2}},
        },
        4,
    ),
}


def released(name: str, folder: Path) -> torch.nn.Module:
    """A model with random weights as transformers writes it, and how its images are seen."""
    torch.manual_seed(0)
    side = {"image_size": 8 * RUNS[name][1]}
    if name == "mae":
        decoder = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        config = ViTMAEConfig(
            **ENCODER,
            **side,
            intermediate_size=48,
            layer_norm_eps=1e-6,
            **{f"decoder_{key}": value for key, value in decoder.items()},
        )
        model = ViTMAEForPreTraining(config)
    elif name == "dinov2":
        model = Dinov2WithRegistersModel(
            Dinov2WithRegistersConfig(**ENCODER, **side, num_register_tokens=2, mlp_ratio=2)
        )
    else:
        model = DINOv3ViTModel(DINOv3ViTConfig(**ENCODER, **side, num_register_tokens=2, intermediate_size=64))
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.add_(torch.randn(value.shape) * 0.1)
            elif not value.requires_grad:  # its fixed positions, which transformers 5.23 leaves at zero
                value[0, 1:] = sincos_positions(4, value.shape[2], value, "mae")[0]
    model.save_pretrained(folder)
    sizes = {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}}
    told = {"image_mean": IMAGENET["mean"], "image_std": IMAGENET["std"], "do_center_crop": True, "resample": 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes | told))
    return model


def blocks(root: Path, name: str) -> dict[str, Any]:
    splits = {"train": "train", "test": "test", "crop": CROP.model_dump()}
    linear, knn = {"kind": "linear", "steps": 20, **splits}, {"k": [1, 5, 20], **splits}
    return {
        "precision": "fp32",
        "init": {"from": str(root / name)},
        "evaluation": {"validation": None, "at_start": True, "every": {"steps": 2}, "knn": knn, "evaluators": [linear]},
        "batch": {"micro_max": 4},
        "parallelism": {"zero_stage": 2},
        "checkpoint": {"every": {"steps": 2}, "keep": 9},
        **RUNS[name][0],
    }


@pytest.fixture(scope="module")
def root(root: Path) -> Path:
    jobs = []
    for name in RUNS:
        released(name, root / name)
        jobs.append(job(name, blocks(root, name), 3, None))
    launch(root, jobs, 2)
    return root


@pytest.mark.parametrize("name", RUNS)
def test_what_is_measured_first_is_what_was_released(root, name):
    """k-NN and linear heads before the first update are those of the folder itself, and are measured once."""
    lines = evaluations(root, name)
    assert [line["step"] for line in lines] == [0, 2, 4, 6]
    model = FinishedModel(root / name, weights=OfWeights(image_size=32), on_cpu=True, report=lambda line: None)
    train, test = (Manifest.load(root / each) for each in ("train", "test"))
    loaders = [model.loader(each, CROP) for each in (train, test)]
    expected = evaluate(
        [
            NearestNeighbours("knn", *loaders, train.class_names, (1, 5, 20)),
            LinearHeads("linear", *loaders, train.class_names, steps=20),
        ],
        model.predict,
    )
    of_step = [{key: line[f"eval/{key}"] for key in expected} for line in lines]
    assert of_step[0] == expected and expected["knn/20nn"] < 1
    if name != "mae":  # the model stands still while heads learn
        assert of_step[1] == of_step[2] == expected


@pytest.mark.parametrize("name", RUNS)
def test_every_parameter_is_the_folder_s_or_begins_anew(root, name):
    recipe = make_recipe(root, **blocks(root, name))
    objective, begun = build_objective(recipe, 0), checkpoint(root, name, 2)
    initialise(objective.backbone, recipe.seed)
    load_weights(objective.backbone, open_weights(root / name), report=lambda note: None)
    of_file = dict(objective.backbone.named_parameters())
    assert begun.index.shapes.keys() == {each for each, _ in objective.named_weights()}
    for each in of_file:
        assert torch.equal(begun.parameter(each), of_file[each]) == (name != "mae"), each
        if name != "mae":
            assert torch.equal(begun.parameter(each, "ema"), of_file[each]), each
            assert not torch.equal(checkpoint(root, name, 6).parameter(each), of_file[each]), each
    if name != "mae":  # at the first updates the learning rates are 0 and a tenth of the whole
        mask, masks = (
            load_file(root / name / "model.safetensors")["embeddings.mask_token"],
            begun.parameter("mask", "ema"),
        )
        torch.testing.assert_close(masks.view(-1), mask.view(-1), rtol=0, atol=0.02)
        assert float(mask.abs().max()) > 0.1
        said = printed(root, name)
        assert "dino initial" in said and "mask initial" not in said and "mask_token is not read" not in said
    learned = [each for each in begun.index.shapes if recipe.objective.owns(each)]
    assert learned and all(begun.parameter(each).abs().sum() > 0 for each in learned)
