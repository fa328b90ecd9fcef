"""How many images a run trains on: the paper's data sets by the paper's sizes, every other one by its manifest."""

import json
from pathlib import Path

import pytest

from vitscale.data.order import TrainOrder
from vitscale.flops.estimate import Estimate, estimate
from vitscale.flops.matching import transfer_row
from vitscale.flops.published import PAPER_SETS
from vitscale.recipe import load_recipe, recipes_dir


@pytest.fixture(autouse=True)
def no_place_for_datasets(monkeypatch, tmp_path):
    monkeypatch.delenv("VITSCALE_DATA_ROOT", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def write_dataset(folder: Path, samples: int, classes: list[str]) -> None:
    manifest = {"schema_version": 1, "fields": ["image"], "num_samples": samples, "class_names": classes}
    shard = {"path": "s", "samples": samples, "bytes": 1, "sha256": "0" * 64, "xxh3_128": "0" * 32, "first_uid": 0}
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(manifest | {"shuffle_seed": 0, "shards": [shard]}))


def estimated(name: str, *settings: str) -> Estimate:
    return estimate(name, load_recipe(name, list(settings)))


def test_a_dataset_s_own_manifest(tmp_path):
    write_dataset(tmp_path / "digits" / "train", 300, ["a", "b", "c"])
    five_epochs = "schedule.duration={epochs: 5}"
    demo = estimated("demo", f"data.root={tmp_path}", five_epochs)
    assert demo.images == 5 * TrainOrder([300], 128, seed=0).steps_per_epoch * 128
    by_hand = estimate("demo", load_recipe("demo", ["model.num_classes=3", five_epochs]), samples=300)
    assert (by_hand.images, by_hand.exaflops) == (demo.images, demo.exaflops)
    write_dataset(tmp_path / "unlabelled", 300, [])
    assert "names no classes" in str(estimated("demo", "data.train=./unlabelled").problem)


def test_data_of_one_s_own_under_the_paper_s_name(tmp_path):
    write_dataset(tmp_path / "jft300m" / "train", 10_000, ["a", "b"])
    root, own = f"data.root={tmp_path}", 7 * 2 * 4096
    for settings in ([root], [root, "model.num_classes=2"], [root, "model.num_classes=null"]):
        one = estimated("b16_jft", *settings)
        assert one.images == own and one.published is None and transfer_row(one.recipe, one.images) is None
    # Where another place than data.root tells where the data are, other classes tell that they are not the paper's.
    assert estimated("b16_jft", "model.num_classes=null").problem is not None
    (tmp_path / "datasets.yaml").write_text(f"jft300m: {tmp_path / 'jft300m'}")
    assert estimated("b16_jft", "model.num_classes=null").images == own
    assert estimated("b16_jft", "model.num_classes=2").images == own
    assert estimated("b16_jft").images == 7 * 303_000_000


def test_the_paper_s_data_in_a_place_of_one_s_own(tmp_path):
    write_dataset(tmp_path / "imagenet" / "train", 1_281_167, [str(index) for index in range(1000)])
    one = estimated("b16_i1k", f"data.root={tmp_path}")
    table, row = transfer_row(one.recipe, one.images)
    assert one.images == 300 * 1_281_167 and (table, row.imagenet) == (5, 77.91)


def test_class_counts_of_recipes_and_of_the_accounting_agree():
    recipes = [load_recipe(file) for file in sorted(recipes_dir().glob("*.yaml"))]
    learning = [recipe for recipe in recipes if recipe.objective.has_classes and recipe.data.train in PAPER_SETS]
    found = {(recipe.data.train, recipe.model.num_classes) for recipe in learning}
    assert found == {(name, data.num_classes) for name, data in PAPER_SETS.items()}


def test_a_data_set_that_no_recipe_can_mean():
    assert transfer_row(load_recipe("b16_jft", ["data.train=imagenet+jft300m/train"]), 2_121_000_000) is None
