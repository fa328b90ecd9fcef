"""What a study is planned to cost, against its recipes one by one."""

import json

import pytest
from commands import Ended, command
from studies.tiny import SPLITS, write_study

from vitscale.data.shards.generated import write_generated_dataset
from vitscale.flops.estimate import estimate
from vitscale.ground.errors import RecipeError
from vitscale.recipe import load_recipe

AXIAL = ("axial_b32_jft", "axial_b16_jft", "axial_r50_jft", "b32_jft", "b16_jft", "r50x1_jft")


def plan(*arguments: object) -> Ended:
    return command("study", "plan", *arguments, "--hardware", "h100", "--json")


def planned(*arguments: object) -> dict:
    result = plan(*arguments)
    assert result.returncode == 0, result.message
    return json.loads(result.stdout)


@pytest.mark.slow
def test_a_plan_adds_up_what_its_runs_cost():
    plan = planned("axial", "--price", "2")
    alone = {stem: estimate(stem, load_recipe(stem)).exaflops for stem in AXIAL}
    assert {one["name"].removeprefix("axial-"): one["exaflops"] for one in plan["entries"]} == pytest.approx(alone)
    assert plan["exaflops"] == pytest.approx(sum(alone.values()))
    assert plan["device_hours"] == pytest.approx(plan["cost"] / 2) == pytest.approx(plan["energy_kwh"] / 0.7)


def test_sizes_come_from_manifests_else_from_the_study_else_from_the_command_line(tmp_path):
    write_generated_dataset(tmp_path / "here" / "train", [64])
    told = {"samples": 320, "classes": 7}
    datasets = {
        "here": {**SPLITS, "train": "here/train"},
        "told": {**SPLITS, "train": "away/train", **told},
        "asked": {**SPLITS, "train": "away/train", "classes": 7},
        "not": {**SPLITS, "train": "away/train"},
    }
    settings = {"data.root": str(tmp_path), "schedule.duration": {"epochs": 2}, "precision": "bf16"}
    part = {"grid": [{"optimizer.lr": [0.1, 0.2]}], "selection": {}, "refit": {"seeds": [0]}}
    study = write_study(tmp_path, {"a": {**part, "settings": settings, "datasets": datasets}})
    found = planned(study, "--samples", "160")
    images = {one["name"]: one["images"] for one in found["entries"]}
    for lr in ("0.1", "0.2"):
        assert images[f"a-here-lr{lr}"] == 128
        assert images[f"a-told-lr{lr}"] == 640
        assert images[f"a-asked-lr{lr}"] == 320
        assert images[f"a-not-lr{lr}"] is None
    assert found["device_hours"] == pytest.approx(sum(one["device_hours"] or 0 for one in found["entries"]))
    unknown = {"a": {"settings": settings, "datasets": {"not": datasets["not"]}}}
    result = plan(write_study(tmp_path, unknown))  # an error, not a sum of nothing
    assert result.returncode == RecipeError.exit_code and "away/train" in result.message and not result.stdout
