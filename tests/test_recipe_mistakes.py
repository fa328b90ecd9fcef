"""Mistakes in a recipe: each is told at once, with its key, its value and the key that was probably meant."""

from pathlib import Path

import pytest
from messages import assert_messages, causes

from vitscale.ground.errors import RecipeError
from vitscale.recipe import load_recipe

MINIMAL = """
model: {name: ViT-Ti/16}
data: {train: some/where}
batch: {global: 64}
optimizer: {name: adamw, lr: 1e-3}
schedule: {duration: {steps: 10}}
"""
# What is no recipe.
FILES = (
    *("- a\n- b\n", "", "model: {name: a}\nmodel: {name: b}\n", "a: [1, 2\n"),
    *("extends: nothing.yaml\n", "extends: [a]\n", "1: 2\n"),
)


def refused(tmp_path: Path, text: str, *settings: str) -> str:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, settings)
    return str(caught.value)


def test_each_setting_of_the_page_is_told_in_its_words(tmp_path):
    """To add one, put `# SETTING` at the end of the page, and have its message written."""
    settings = causes("recipe-settings")
    assert len(settings) > 70
    said = {setting: refused(tmp_path, MINIMAL, setting) for setting in settings}
    assert_messages("recipe-settings", said, {tmp_path: "FOLDER"})


@pytest.mark.parametrize("more", [(), ("model.dropout=0.5",)])
def test_a_model_by_its_name_alone(tmp_path, more):
    path = tmp_path / "r.yaml"
    path.write_text(MINIMAL)
    (tmp_path / "short.yaml").write_text(MINIMAL.replace("{name: ViT-Ti/16}", "ViT-Ti/16"))
    (tmp_path / "longer.yaml").write_text("extends: short.yaml\n")
    expected = load_recipe(path, more).dump()
    assert load_recipe(tmp_path / "short.yaml", more).dump() == expected
    assert load_recipe(tmp_path / "longer.yaml", more).dump() == expected
    assert load_recipe(path, ("model=ViT-Ti/16", *more)).dump() == expected


def test_no_word_of_a_file_that_is_no_recipe_is_repeated(tmp_path):
    for text in ("root: x:0:SECRET\nSECRET: 1\n", "SECRET\n", "[SECRET]\n", "1: SECRET\n"):
        (tmp_path / "other").write_text(text)
        assert "SECRET" not in refused(tmp_path, "extends: other\n")


def test_float8_needs_dense_layers_of_blocks_that_are_whole(tmp_path):
    resnet = refused(tmp_path, MINIMAL, "precision=fp8", "model={name: ResNet50x1}")
    assert "precision: fp8" in resnet and "ResNet" in resnet
    divided = refused(tmp_path, MINIMAL, "precision=fp8", "parallelism.zero_stage=3")
    assert "precision: fp8" in divided and "parallelism.zero_stage" in divided


# Each alone is an error of another part, or of two parts together.
ACROSS = {
    "data.image_size=8": "data.image_size 8",
    "precision=fp32": "parallelism.reduce_dtype: bf16",
    "parallelism.reduce_dtype=bf16": "parallelism.reduce_dtype: bf16",
    "selection.metric=validation/top9": "selection.metric 'validation/top9'",
    "selection.mode=max": "selection needs evaluation.every",
    "schedule.momentum={to: 2}": "momentum.to 2",
    "schedule.end_lr=0.5": "end_lr",
    "schedule.decay=cosine": "end_lr",
}


@pytest.mark.parametrize(
    ("broken", "hidden"),
    [
        ([], ["end_lr", "momentum.to 2"]),  # a block's own lines come before what it has to do with others
        (["data.image_size=tall"], ["end_lr", "parallelism.reduce_dtype", "selection.metric"]),
        (["selection.mode=most"], ["end_lr", "parallelism.reduce_dtype", "data.image_size 8"]),
        (["model.patch=9", "logging.evry=1"], ["parallelism.reduce_dtype", "selection.metric", "selection needs"]),
    ],
)
def test_a_part_s_mistakes_hide_none_of_the_others(tmp_path, broken, hidden):
    """And nothing is told of parts together with one that is broken itself."""
    message = refused(tmp_path, MINIMAL, *ACROSS, *broken)
    told = [*hidden, *(setting.partition("=")[0] for setting in broken), "momentum.to 2"]
    assert all(word in message for word in told), message
    assert len(set(message.splitlines())) == len(message.splitlines())
    gone = {"data.image_size=tall": "data.image_size 8", "selection.mode=most": "top9", "model.patch=9": "size 8"}
    assert not any(gone[setting] in message for setting in broken if setting in gone), message


def test_what_parts_say_together_is_told_at_once(tmp_path):
    settings = [setting for setting in ACROSS if not setting.startswith("schedule")]
    message = refused(tmp_path, MINIMAL, *settings)
    assert all(word in message for setting, word in ACROSS.items() if setting in settings), message


def test_files_that_are_no_recipes_and_all_mistakes_at_once(tmp_path):
    said = {f"a file: {text!r}": refused(tmp_path, text) for text in FILES}
    said |= {"all at once": refused(tmp_path, MINIMAL, *ACROSS)}
    assert_messages("recipe", said, {tmp_path: "FOLDER"})
