"""Masked autoencoders through the same trainer: every ZeRO stage on two real ranks, interrupted, moved, begun with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from outcomes import assert_same_run, checkpoint, column, evaluations
from ranks import SHARDS, STEPS, job, launch, make_recipe
from safetensors.torch import save_file

from vitscale.data.augmentation import TrainTransform
from vitscale.data.image_operations import to_model_input
from vitscale.data.loader import Loader
from vitscale.data.order import TrainOrder
from vitscale.data.shards import Manifest
from vitscale.ground.errors import RecipeError
from vitscale.models import initial_value
from vitscale.models.weights.foreign import table
from vitscale.objectives import Objective, build_objective
from vitscale.training.beginning.found_weights import find_weights
from vitscale.training.beginning.initial_weights import _Assignment, check_initial_weights

STAGES = range(4)
FIRST_STEP = {"duration": {"steps": STEPS}, "warmup": {"steps": 2}}  # of a learning rate of 0
NORMALISE = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
MODEL = {"mlp": "exact_gelu", "position": {"kind": "sincos", "table": "mae"}}
NEIGHBOURS = {"train": "train", "test": "test", "k": [5, 20]}
DECODER = {"decoder_width": 16, "decoder_depth": 2, "decoder_heads": 2}


def blocks(stage: int, precision: str = "bf16", **others: Any) -> dict[str, Any]:
    """Two micro-batches a rank, averages, recomputation, heads of Adafactor: all that has a state."""
    return {
        "precision": precision,
        "objective": {"kind": "mae", **DECODER},
        "model": MODEL,
        "data": {"train": "train", "image_size": 32, "normalise": NORMALISE},
        "batch": {"micro_max": 4},
        "parallelism": {"zero_stage": stage, "activation_checkpointing": 2},
        "ema": {"decay": 0.9},
        "checkpoint": {"every": {"steps": 2}, "keep": 9},
        "evaluation": {"validation": None, "every": {"steps": 2}, "knn": NEIGHBOURS},
        "selection": {"metric": "knn/5nn"},
        **others,
    }


def begins(source: Path, **others: Any) -> dict[str, Any]:
    others |= {"evaluation": {"validation": None}, "selection": None}
    return blocks(3, "fp32", init={"from": str(source)}, ema=None, schedule=FIRST_STEP, **others)


def values(objective: Objective, seed: int) -> dict[str, torch.Tensor]:
    """Values of all parameters of an objective, as of a run with this seed."""
    return {name: initial_value(objective, name, each.shape, seed) for name, each in objective.named_weights()}


@pytest.fixture(scope="module")
def root(root: Path) -> Path:
    jobs = []
    for stage in STAGES:
        jobs.append(job(f"zero{stage}", blocks(stage)))
        jobs.append(job(f"zero{stage}-resumed", blocks(stage), 3, None))
        jobs.append(job(f"zero{stage}-fp32", blocks(stage, "fp32")))
    jobs.append(job("moved", [blocks(3, "fp32"), blocks(0, "fp32")], 3, None))
    factored = blocks(2, optimizer={"name": "adafactor", "lr": 1e-3})
    jobs.append(job("factored", factored))
    jobs.append(job("factored-resumed", factored, 3, None))
    objective = build_objective(make_recipe(root, **blocks(0, "fp32")), 0)
    others = values(objective, seed=1)
    there = {
        key: part.contiguous()
        for rule in (*table(objective.backbone, "timm"), *objective.rules("timm"))
        if rule.ours in others
        for key, part in zip(rule.theirs, rule.split(others[rule.ours]), strict=True)
    }
    save_file(there, root / "whole.safetensors")
    save_file(
        {key: there[key] for key in there if not key.startswith(("mask", "decoder"))}, root / "encoder.safetensors"
    )
    for name in ("whole", "encoder"):
        jobs.append(job(name, [begins(root / f"{name}.safetensors")], 1))
    fine_tuned = {"objective": {"loss": "softmax"}, "model": MODEL | {"head": "linear", "pool": "normed_mean"}}
    for name, source in (
        ("continued", "runs/zero3"),
        ("classes", "runs/zero3"),
        ("classes-of-file", "whole.safetensors"),
    ):
        changed = fine_tuned if name.startswith("classes") else {}
        jobs.append(job(name, [begins(root / source) | changed], 1))
    launch(root, jobs, 2)
    launch(root, [{"name": "alone", "blocks": [blocks(1, "fp32")], "stops": [None]}], 1)
    return root


@pytest.mark.parametrize("name", [*(f"zero{stage}" for stage in STAGES), "factored"])
def test_an_interrupted_run_equals_the_uninterrupted_one_to_the_last_bit(root, name):
    assert_same_run(root, name, f"{name}-resumed")


@pytest.mark.parametrize("other", ["zero0-fp32", "zero2-fp32", "zero3-fp32", "moved", "alone"])
def test_every_stage_and_world_computes_the_same(root, other):
    """Sums are rounded in another order, nothing else: patches drawn by rank would change every digit."""
    assert column(root, other, "loss") == pytest.approx(column(root, "zero1-fp32", "loss"), rel=2e-5)
    assert column(root, other, "grad_norm") == pytest.approx(column(root, "zero1-fp32", "grad_norm"), rel=1e-3)


def test_nearest_neighbours_are_the_same_on_every_world_and_decide(root):
    of_runs = {}
    for name in ("zero1-fp32", "zero0-fp32", "zero3-fp32", "moved", "alone", "zero2", "zero2-resumed"):
        lines = evaluations(root, name)
        of_runs[name] = [(line["step"], line["eval/knn/5nn"], line["eval/knn/20nn"]) for line in lines]
        chosen = checkpoint(root, name).index.selection
        assert chosen["best"] == max(of_five for step, of_five, _ in of_runs[name] if step <= chosen["evaluated"])
    assert [step for step, _, _ in of_runs["alone"]] == [2, 4, 6]
    assert of_runs["zero2-resumed"] == of_runs["zero2"]
    for name in ("zero0-fp32", "zero3-fp32", "moved", "alone"):
        assert of_runs[name] == of_runs["zero1-fp32"], name


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
            images = to_model_input(batch.images, torch.device("cpu"), torch.float32, recipe.data.normalise)
            plan = objective.plan(batch.keys.numpy(), batch.position)
            losses.append(objective([images[:, None]], batch.labels, plan).per_sample.mean().item())
    assert column(root, "zero1-fp32", "loss")[:2] == pytest.approx(losses, rel=1e-5)


def test_something_is_learned_by_every_parameter(root):
    losses = column(root, "zero3-fp32", "loss")
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.01
    objective = build_objective(make_recipe(root, **blocks(0, "fp32")), 0)
    trained, initial = checkpoint(root, "zero3-fp32"), values(objective, 0)
    assert trained.index.shapes.keys() == initial.keys()
    assert [name for name in initial if torch.equal(trained.parameter(name), initial[name])] == []


@pytest.mark.parametrize(("name", "prefixes"), [("whole", ()), ("encoder", ("mask", "decoder."))])
def test_a_file_gives_what_it_holds_and_the_rest_begins_as_ever(root, name, prefixes):
    objective = build_objective(make_recipe(root, **blocks(0, "fp32")), 0)
    of_file, initial, begun = values(objective, 1), values(objective, 0), checkpoint(root, name, 1)
    for each in initial:
        expected = initial[each] if each.startswith(prefixes or "nothing") else of_file[each]
        assert torch.equal(begun.parameter(each), expected), each


def test_a_run_continues_with_its_decoder_and_classes_begin_with_its_encoder(root):
    source = checkpoint(root, "zero3")
    continued, classes = checkpoint(root, "continued", 1), checkpoint(root, "classes", 1)
    for name in source.index.shapes:
        assert torch.equal(continued.parameter(name), source.parameter(name, "ema")), name
    own = {name for name in source.index.shapes if name.startswith(("mask", "decoder."))}
    assert classes.index.shapes.keys() - {"head.weight", "head.bias"} == source.index.shapes.keys() - own
    of_file = values(build_objective(make_recipe(root, **blocks(0, "fp32")), 0), 1)
    of_classes = checkpoint(root, "classes-of-file", 1)
    for name in source.index.shapes.keys() - own:
        assert torch.equal(classes.parameter(name), source.parameter(name, "ema")), name
        assert torch.equal(of_classes.parameter(name), of_file[name]), name


def test_a_decoder_with_other_heads_is_refused(root):
    other = begins(root / "runs" / "zero3") | {"objective": {"kind": "mae", **DECODER, "decoder_heads": 4}}
    with pytest.raises(RecipeError, match=r"objective\.decoder_heads is 4"):
        check_initial_weights(make_recipe(root, **other), [], root / "runs" / "none")


@pytest.mark.parametrize("norm_pix", [True, False])
def test_a_decoder_of_other_targets_is_told_of(root, norm_pix):
    continued = begins(root / "runs" / "zero3") | {"objective": {"kind": "mae", **DECODER, "norm_pix": norm_pix}}
    recipe = make_recipe(root, **continued)
    found = _Assignment(recipe, [], find_weights(recipe.init))
    assert any("norm_pix" in note for note in found.notes) == (not norm_pix)
