"""What a study expands to, against lists written by hand; and what is refused before anything runs."""

from pathlib import Path

import pytest
from studies.tiny import SPLITS, write_study

from vitscale.about.studies.expansion import Expansion, expand
from vitscale.about.studies.reading import load_study
from vitscale.ground.errors import RecipeError

SELECTION = {"metric": "dev/top1"}
SELECTS = {"datasets": {"colours": SPLITS}, "selection": SELECTION}
RATES = [{"optimizer.lr": [0.001, 0.01]}]


def expanded(tmp_path: Path, parts: dict, **more) -> Expansion:
    study = write_study(tmp_path, parts, **more)
    return expand(load_study(study), tmp_path / "runs", beside=tmp_path)


def recipe(expansion: Expansion, name: str, label: str = ""):
    entry = expansion.entries[name]
    return entry.option(label or entry.options[0].label).recipe


def test_axes_are_crossed_and_lists_of_one_axis_go_together(tmp_path):
    grid = [*RATES, {"schedule.duration.steps": [4, 6], "schedule.decay": ["linear", "cosine"]}]
    expansion = expanded(tmp_path, {"a": {"grid": grid, "seeds": [7, 8]}})
    assert list(expansion.entries) == [
        *("a-lr0.001-steps4-decaylinear-seed7", "a-lr0.001-steps4-decaylinear-seed8"),
        *("a-lr0.001-steps6-decaycosine-seed7", "a-lr0.001-steps6-decaycosine-seed8"),
        *("a-lr0.01-steps4-decaylinear-seed7", "a-lr0.01-steps4-decaylinear-seed8"),
        *("a-lr0.01-steps6-decaycosine-seed7", "a-lr0.01-steps6-decaycosine-seed8"),
    ]
    found = recipe(expansion, "a-lr0.01-steps6-decaycosine-seed8")
    assert (found.optimizer.lr, found.schedule.duration.steps, found.schedule.decay) == (0.01, 6, "cosine")
    assert found.seed == 8
    assert all(entry.depends_on == () and entry.choice is None for entry in expansion.entries.values())


def test_keys_that_end_alike_are_told_apart(tmp_path):
    axis = {"schedule.duration.steps": [4], "schedule.warmup.steps": [1], "data.crop": [{"area": [0.3, 1.0]}]}
    expansion = expanded(tmp_path, {"a": {"grid": [axis, {"optimizer.name": ["adamw"]}, {"data.flip": [0.5]}]}})
    assert list(expansion.entries) == ["a-duration.steps4-warmup.steps1-crop_0-nameadamw-flip0.5"]


def test_recipes_and_data_sets_with_settings_of_their_own(tmp_path):
    (tmp_path / "of_b.yaml").write_text("extends: tiny.yaml\nseed: 5\n")
    (tmp_path / "of_c.yaml").write_text("extends: tiny.yaml\n")
    splits = {name: {"train": f"{name}/train", "dev": f"{name}/dev"} for name in "bc"}
    splits["c"]["settings"] = {"schedule.duration.steps": 9}
    parts = {"a": {"recipe": "of_{dataset}.yaml", "datasets": splits, "settings": {"schedule.duration.steps": 5}}}
    expansion = expanded(tmp_path, parts, settings={"schedule.duration.steps": 3, "data.flip": 0.25})
    assert list(expansion.entries) == ["a-b", "a-c"]
    b, c = recipe(expansion, "a-b"), recipe(expansion, "a-c")
    assert (b.seed, b.schedule.duration.steps, b.data.train, b.evaluation.validation) == (5, 5, "b/train", "b/dev")
    assert (c.seed, c.schedule.duration.steps, c.data.train, c.evaluation.validation) == (0, 9, "c/train", "c/dev")
    assert b.data.flip == c.data.flip == 0.25

    shown = expand(load_study(tmp_path / "study.yaml"), tmp_path, ["data.flip=0.5", "data.train=x"], tmp_path)
    assert recipe(shown, "a-b").data.flip == 0.5
    assert recipe(shown, "a-b").data.train == "b/train", "the splits are the study's"


def test_the_winner_is_run_again_on_the_full_training_set(tmp_path):
    part = {**SELECTS, "grid": RATES, "seeds": [0, 1], "refit": {"seeds": [3, 4, 5]}}
    expansion = expanded(tmp_path, {"a": part})
    candidates = [f"a-colours-lr{lr}-seed{seed}" for lr in ("0.001", "0.01") for seed in (0, 1)]
    refits = [f"a-colours-full-seed{seed}" for seed in (3, 4, 5)]
    assert list(expansion.entries) == candidates + refits
    (choice,) = expansion.choices.values()
    assert choice.candidates == {"lr0.001": tuple(candidates[:2]), "lr0.01": tuple(candidates[2:])}
    assert (choice.metric, choice.decided_by) == ("validation/top1", ("colours/dev",))
    for name in candidates:
        found = recipe(expansion, name)
        assert (found.data.train, found.evaluation.validation) == ("colours/train", "colours/dev")
    for name in refits:
        entry = expansion.entries[name]
        assert entry.depends_on == tuple(candidates) and entry.choice == choice.name
        for label, lr in {"lr0.001": 0.001, "lr0.01": 0.01}.items():
            found = recipe(expansion, name, label)
            assert (found.data.train, found.evaluation.validation) == ("colours/full", "colours/test")
            assert (found.optimizer.lr, found.seed) == (lr, entry.seed)


def test_one_winner_for_all_data_sets(tmp_path):
    splits = {name: {split: f"{name}/{split}" for split in SPLITS} for name in "bc"}
    part = {"grid": RATES, "datasets": splits, "selection": {**SELECTION, "shared": True}, "refit": {"seeds": [0]}}
    expansion = expanded(tmp_path, {"a": part})
    (choice,) = expansion.choices.values()
    assert choice.candidates == {"lr0.001": ("a-b-lr0.001", "a-c-lr0.001"), "lr0.01": ("a-b-lr0.01", "a-c-lr0.01")}
    assert choice.decided_by == ("b/dev", "c/dev")
    assert {entry.choice for name, entry in expansion.entries.items() if "full" in name} == {"a"}
    assert recipe(expansion, "a-c-full-seed0", "lr0.01").data.train == "c/full"


def test_edges_begin_with_the_runs_of_other_parts(tmp_path):
    (tmp_path / "other.yaml").write_text("extends: tiny.yaml\nmodel: {width: 128}\n")
    parts = {
        # What a part begins with may be told below it.
        "fine": {"from": ["pre"], "take": ["model.width"], "seeds": [0, 1]},
        "pre": {"recipe": ["tiny.yaml", "other.yaml"]},
        "last": {"from": ["fine-pre-tiny-seed1"]},
    }
    expansion = expanded(tmp_path, parts)
    assert list(expansion.entries) == [
        *("pre-tiny", "pre-other", "fine-pre-tiny-seed0", "fine-pre-tiny-seed1", "fine-pre-other-seed0"),
        *("fine-pre-other-seed1", "last"),
    ]
    for name, entry in expansion.entries.items():
        found = recipe(expansion, name)
        assert entry.depends_on == (() if entry.parent is None else (entry.parent,))
        if entry.parent is None:
            assert found.init is None
        else:
            assert found.init.source == str((tmp_path / "runs" / entry.parent).absolute())
    assert recipe(expansion, "fine-pre-other-seed0").model.shape().width == 128
    assert expansion.entries["last"].parent == "fine-pre-tiny-seed1"


FEWSHOT = {"evaluation.fewshot": {"tasks": [{"name": "t", "train": "x", "test": "colours/test"}]}}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"a": {"from": ["b"]}, "b": {"from": ["c"]}, "c": {"from": ["a"]}}, ["cycle", "a -> b -> c -> a"]),
        ({"a": {"from": ["a"]}}, ["cycle", "a -> a"]),
        ({"pre": {}, "a": {"from": ["prr"]}}, ["'prr'", "'pre'"]),
        ({"pre": {}, "a": {"from": ["pre-seed3"]}}, ["'pre-seed3'"]),
        ({"a": {"seeds": [1, 1]}}, ["a-seed1", "twice"]),
        ({"a": {"recipe": ["tiny.yaml", "./tiny.yaml"]}}, ["a-tiny", "twice"]),
        ({"a": {"recipe": "nowhere.yaml"}}, ["nowhere.yaml"]),
        ({"a": {"grid": [{"optimizer.lrr": [1]}]}}, ["optimizer.lrr", "'optimizer.lr'"]),
        ({"a": {"grid": [{"optimizer.lr": [1.0, -1.0]}]}}, ["optimizer.lr", "-1.0"]),
        ({"a": {"grid": [{"optimizer.lr": [-2.0, 1.0, -1.0]}]}}, ["-2.0", "-1.0"]),
        ({"a": {"grid": [{"data.image_size": [16, 4]}]}}, ["image_size", "patch"]),
        ({"a": {"recipe": ["nowhere.yaml", "tiny.yaml", "neither.yaml"]}}, ["nowhere.yaml", "neither.yaml"]),
        ({"a": {"grid": [{"optimizer.lr": [1.0], "seed": [1, 2]}]}}, ["parts.a", "of one length"]),
        ({"a": {"grid": [{"seed": [1]}, {"seed": [2]}]}}, ["seed", "two axes"]),
        ({"a": {"grid": [{"seed": []}]}}, ["parts.a.grid.0.seed", "at least 1"]),
        ({"a": {"gird": []}}, ["parts.a.gird", "'grid'"]),
        ({"a": {"selection": {"metric": "dev/top1", "mod": "max"}}}, ["parts.a.selection.mod", "'mode'"]),
        ({"a-b": {}}, ["'a-b'"]),
        ({"a": {"seeds": ["one"]}}, ["parts.a.seeds.0", "'one'", "an integer"]),
        ({"a": {"take": ["model"]}}, ["parts.a", "take needs from"]),
        ({"pre": {}, "a": {"from": ["pre"], "take": ["model.name"]}}, ["model.name", "pre"]),
        ({"a": {"refit": {}}}, ["refit needs selection"]),
        ({"a": {"selection": SELECTION}}, ["selection needs datasets"]),
        ({"a": {"selection": SELECTION, "refit": {}, "datasets": {"b": {"train": "x", "dev": "y"}}}}, ["b.full"]),
        ({"a": {**SELECTS, "selection": {"metric": "dev/top9"}}}, ["top9", "validation/top1"]),
    ],
)
def test_what_is_refused(tmp_path, parts, words):
    with pytest.raises(RecipeError) as caught:
        expanded(tmp_path, parts)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "Input should" not in str(caught.value)


BEST_OF_REFIT = {"evaluation.every": {"steps": 2}, "selection": {"metric": "validation/top1"}}
BEST = {"evaluation.every": {"steps": 2}, "evaluation.validation": "colours/test", "selection": {}}


@pytest.mark.parametrize(
    "parts",
    [
        {"a": {**SELECTS, "selection": {"metric": "test/top1"}}},
        {"a": {**SELECTS, "datasets": {"colours": {**SPLITS, "dev": "colours/test"}}}},
        {"a": {**SELECTS, "datasets": {"colours": {**SPLITS, "train": "colours/test"}}}},
        {"a": {**SELECTS, "settings": FEWSHOT}},
        {"a": {**SELECTS, "grid": [{key: [value]} for key, value in FEWSHOT.items()]}},
        {"a": {**SELECTS, "refit": {}, "settings": BEST_OF_REFIT}},
        {"a": SELECTS, "b": {"settings": BEST}},
        {"a": SELECTS, "b": {"datasets": {"c": {"train": "x", "dev": "y", "test": "colours/dev"}}}},
    ],
    ids=[
        *("rule", "dev is test", "trains on test", "few-shot", "grid", "best checkpoint of the refit"),
        *("best checkpoint of another part", "test split of another part"),
    ],
)
def test_no_choice_sees_a_test_split(tmp_path, parts):
    with pytest.raises(RecipeError, match="test split"):
        expanded(tmp_path, parts)


def test_a_test_split_by_another_name_is_one(tmp_path):
    (tmp_path / "colours" / "test").mkdir(parents=True)
    (tmp_path / "dev").symlink_to("colours/test")
    settings = {"data.root": str(tmp_path)}
    part = {**SELECTS, "datasets": {"colours": {**SPLITS, "dev": str(tmp_path / "dev")}}}
    with pytest.raises(RecipeError, match="test split"):
        expanded(tmp_path, {"a": part}, settings=settings)
