"""What is done with finished models, for one of each family of registered models."""

import json
from dataclasses import replace

import numpy as np
import pytest
from commands import command
from models.small_models import small_block
from models.weights.exported import described, valued, write
from models.weights.test_round_trip import family

import vitscale as vs
from vitscale.recipe import Normalise
from vitscale.recipe.families import REGISTRY

FAMILIES = {family(name): name for name in sorted(REGISTRY) if family(name) not in ("R+ViT", "R26+ViT")}
QUICK = ("ViT", "Swin")  # `make test-all` runs the others, too


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_it_is_measured_looked_into_planned_and_written(name, home, tmp_path):
    description = replace(described(small_block(FAMILIES[name])), normalise=Normalise())
    weights = write(valued(description), description, "safetensors", tmp_path)
    data = {split: home / "data" / split for split in ("train", "test")}
    model = vs.load(weights)
    anatomy = model.backbone.anatomy()
    has_windows = any(layer.windows is not None for layer in anatomy.attention)
    splits = ["--train", data["train"], "--test", data["test"], "--shots", "2", "--seeds", "1"]
    done = command("fewshot", weights, *splits, "--json")
    (task,) = json.loads(done.stdout)["tasks"].values()
    assert 0 <= task["2shot"]["mean"] <= 1
    done = command("features", weights, data["test"], "--tokens", "--out", tmp_path / "tokens")
    assert done.returncode == 0, done.stderr
    tokens = np.load(tmp_path / "tokens" / "tokens-00000.npy")
    assert tokens.shape == (37, anatomy.grid, anatomy.grid, model.backbone.shape.channels)
    found = vs.inspect(model, vs.Dataset(data["test"]), count=8).findings
    assert {"filters", "alignment", "norms", "colours"} <= set(found.parts)
    assert found.colours.shape == (6, anatomy.grid**2, 3)
    assert len(found.reach) == len(anatomy.attention)
    block = json.dumps({"num_classes": 7, **model.finished.description.model})
    plan = ["--devices", "8", "--samples", "1000000", "--hardware", "h100", "--json"]
    done = command("plan", "r50x1_jft", *plan, "--set", f"model={block}")
    assert done.returncode == 0 and json.loads(done.stdout), done.stderr
    size = ["--image-size", "256"] if has_windows else []
    done = command("export", weights, "--format", "hf", "--backbone", "--out", tmp_path / "out", *size)
    assert done.returncode == (0 if (tmp_path / "out").exists() else 2)
    assert done.returncode == 0 or "safetensors" in done.message
