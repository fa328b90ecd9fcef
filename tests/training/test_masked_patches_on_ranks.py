"""Masked patch prediction through the same trainer: every ZeRO stage on two real ranks, interrupted, killed, moved."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finished_runs import evaluate_run
from outcomes import assert_same_run, checkpoint, column
from ranks import SHARDS, STEPS, launch, make_data, make_recipe

from vitscale.cli.export import export
from vitscale.data.augmentation import TrainTransform
from vitscale.data.image_operations import to_model_input
from vitscale.data.loader import Loader
from vitscale.data.order import TrainOrder
from vitscale.data.shards import Manifest
from vitscale.models import initial_value
from vitscale.models.weights import describe, open_weights
from vitscale.objectives import build_objective
from vitscale.runs.checkpoint.opening import open_run

STAGES = range(4)
FEWSHOT = {"tasks": [{"name": "toy", "train": "train", "test": "test"}], "shots": [2]}
FIRST_STEP = {"duration": {"steps": STEPS}, "warmup": {"steps": 2}}  # of a learning rate of 0


def blocks(stage: int, precision: str = "bf16", target: str = "mean_colour", **others: Any) -> dict[str, Any]:
    """Two micro-batches a rank, dropout, averages and recomputation: all that has a state."""
    return {
        "precision": precision,
        "objective": {"kind": "masked_patches", "target": target},
        "model": {"dropout": 0.1 if precision == "bf16" else 0.0},
        "batch": {"micro_max": 4},
        "parallelism": {"zero_stage": stage, "activation_checkpointing": 2},
        "ema": {"decay": 0.9},
        "checkpoint": {"every": {"steps": 2}, "keep": 9},
        "evaluation": {"validation": None, "fewshot": FEWSHOT},
        **others,
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("masked")
    make_data(root)
    jobs = []
    for stage in STAGES:
        name, of_stage = f"zero{stage}", blocks(stage)
        jobs.append({"name": name, "blocks": [of_stage], "stops": [None]})
        jobs.append({"name": f"{name}-resumed", "blocks": [of_stage] * 2, "stops": [3, None]})
        jobs.append({"name": f"{name}-fp32", "blocks": [blocks(stage, "fp32")], "stops": [None]})
    jobs.append({"name": "moved", "blocks": [blocks(3, "fp32"), blocks(0, "fp32")], "stops": [3, None]})
    jobs += [{"name": each, "blocks": [blocks(2, target=each)], "stops": [None]} for each in ("cell_colours", "pixels")]
    begins = {"init": {"from": str(root / "runs" / "zero3"), "head": "zero"}}
    fine_tuned = {**begins, "model": {"head": "linear"}, "schedule": FIRST_STEP}
    jobs.append({"name": "classes", "blocks": [fine_tuned], "stops": [1]})
    launch(root, jobs, 2)
    launch(root, [{"name": "alone", "blocks": [blocks(1, "fp32")], "stops": [None]}], 1)
    return root


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupted_run_equals_the_uninterrupted_one_to_the_last_bit(root, stage):
    assert_same_run(root, f"zero{stage}", f"zero{stage}-resumed")
    accuracies = column(root, f"zero{stage}", "colour_accuracy")
    assert accuracies == column(root, f"zero{stage}-resumed", "colour_accuracy")
    assert all(0 <= value <= 1 for value in accuracies)


@pytest.mark.parametrize("other", ["zero0-fp32", "zero2-fp32", "zero3-fp32", "moved", "alone"])
def test_every_stage_and_world_computes_the_same(root, other):
    """Sums are rounded in another order, nothing else: a mask that depended on the rank would change every digit."""
    for key in ("loss", "colour_accuracy"):
        assert column(root, other, key) == pytest.approx(column(root, "zero1-fp32", key), rel=2e-5)
    assert column(root, other, "grad_norm") == pytest.approx(column(root, "zero1-fp32", "grad_norm"), rel=1e-3)


def test_the_first_losses_equal_those_of_one_process(root):
    """The weights are the initial ones up to the second update, whose learning rate is not 0."""
    recipe = make_recipe(root, **blocks(0, "fp32"))
    objective = build_objective(recipe, 0)
    with torch.no_grad():
        for name, parameter in objective.named_weights():
            parameter.copy_(initial_value(objective, name, parameter.shape, recipe.seed))
    losses = []
    loader = Loader(
        Manifest.load(root / "train"), TrainOrder(SHARDS, 16, 0), image_size=32, transform=TrainTransform(), stop_step=2
    )
    with loader, torch.no_grad():
        for batch in loader:
            images = to_model_input(batch.images, torch.device("cpu"), torch.float32)
            plan = objective.plan(batch.keys.numpy(), batch.position)
            losses.append(objective([images[:, None]], batch.labels, plan).per_sample.mean().item())
    assert column(root, "zero1-fp32", "loss")[:2] == pytest.approx(losses, rel=1e-5)
    assert losses == pytest.approx([np.log(512)] * 2)


@pytest.mark.parametrize("name", ["zero1-fp32", "zero3", "cell_colours", "pixels"])
def test_something_is_learned(root, name):
    losses = column(root, name, "loss")
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.01
    trained = checkpoint(root, name)
    objective = build_objective(make_recipe(root, **blocks(0)), 0)
    own = {"mask", "prediction.weight", "prediction.bias"}
    assert own <= trained.index.shapes.keys() and "head.weight" not in trained.index.shapes
    if name == "zero3":
        for each, parameter in objective.named_weights():
            assert not torch.equal(trained.parameter(each), initial_value(objective, each, parameter.shape, 0)), each


def test_what_it_has_learned_is_evaluated_exported_and_begun_with(root, tmp_path):
    run_dir = root / "runs" / "zero3"
    step, metrics = evaluate_run(run_dir)
    assert step == STEPS and 0 <= metrics["fewshot/toy/2shot"] <= 1
    export(str(run_dir), "safetensors", tmp_path / "weights.safetensors")
    found = describe(open_weights(tmp_path / "weights.safetensors"))
    assert found.num_classes is None
    _, reader = open_run(run_dir)
    begun = checkpoint(root, "classes", 1)
    taken = [name for name in begun.index.shapes if not name.startswith(("head.", "pre_logits."))]
    assert len(taken) == len(begun.index.shapes) - 2
    for name in taken:
        assert torch.equal(begun.parameter(name), reader.parameter(name, "ema")), name
