"""What is wrong with a teacher is found before the ranks meet, from names and shapes; and another one is not taken."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from messages import refusal
from models.weights.exported import described, valued, write
from ranks import make_recipe

from vitscale.ground.errors import CheckpointError, RecipeError
from vitscale.recipe import Normalise, smoke_form
from vitscale.training.beginning.initial_weights import check_same_teacher, check_teacher, load_teacher
from vitscale.training.deepspeed.distributed import World

NAMES = [f"kind {i}" for i in range(7)]
MODEL = {"patch_size": 8, "width": 48, "depth": 2, "mlp_dim": 96, "num_heads": 3, "head": "linear"}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Ours, which say what they are of."""
    description = replace(described(MODEL, 32, class_names=NAMES), normalise=Normalise())
    return write(valued(description), description, "safetensors", tmp_path)


def checked(root: Path, source: Path, model=MODEL, names=NAMES, **teacher) -> None:
    objective = {"kind": "distillation", "teacher": {"from": str(source), "model": model, **teacher}}
    check_teacher(make_recipe(root, model={"distilled": True}, objective=objective), names)


def test_weights_of_the_same_model_and_classes_are_taken(tmp_path, weights):
    checked(tmp_path, weights)


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (CheckpointError, {"model": MODEL | {"width": 24}}),
        (RecipeError, {"model": MODEL | {"num_heads": 2}}),
        (CheckpointError, {"names": NAMES[:6]}),
        (RecipeError, {"names": [*NAMES[:6], "another"]}),
        (RecipeError, {"normalise": {"std": [0.2, 0.2, 0.2]}}),
        (RecipeError, {"step": 3}),
        (RecipeError, {"model": MODEL | {"num_classes": 10}}),
    ],
)
def test_others_are_refused_with_what_differs(tmp_path, weights, error, changes):
    with refusal(error, "teacher", str(changes), {weights: "WEIGHTS", tmp_path: "FOLDER"}):
        checked(tmp_path, weights, **changes)


def test_weights_that_are_not_there_are_named_by_their_key(tmp_path):
    with pytest.raises(RecipeError, match=r"objective\.teacher\.from"):
        checked(tmp_path, tmp_path / "none.npz")


def test_values_that_are_not_finite_are_named(tmp_path):
    description = replace(described(MODEL, 32, class_names=NAMES), normalise=Normalise())
    model = valued(description)
    torch.nn.init.constant_(model.norm.weight, torch.inf)
    path = write(model, description, "safetensors", tmp_path)
    objective = {"kind": "distillation", "teacher": {"from": str(path), "model": MODEL}}
    recipe = make_recipe(tmp_path, model={"distilled": True}, objective=objective)
    with pytest.raises(CheckpointError, match=r"objective\.teacher\.from: norm\.weight"):
        load_teacher(recipe, NAMES, World(0, 1, torch.device("cpu")), lambda line: None)


def test_a_run_goes_on_with_the_teacher_that_it_began_with():
    one, other = {"form": "npz", "files": {"a.npz": "12"}}, {"form": "npz", "files": {"a.npz": "34"}}
    check_same_teacher(None, None)
    check_same_teacher(one, dict(one))
    for now, before in ((one, other), (one, None), (None, one)):
        with pytest.raises(CheckpointError, match=r"objective\.teacher\.from"):
            check_same_teacher(now, before)


def test_in_its_smoke_form_a_teacher_has_the_classes_of_the_smoke_data(tmp_path):
    objective = {"kind": "distillation", "teacher": {"model": MODEL | {"num_classes": 1000}}}
    recipe = make_recipe(tmp_path, model={"distilled": True}, objective=objective)
    check_teacher(smoke_form(recipe, tmp_path), NAMES)
