"""The studies that come with vitscale: what they run, against the paper."""

from pathlib import Path

import pytest
from test_paper_recipes import FIGURE_4, JFT, TABLE_8

from vitscale.errors import RecipeError
from vitscale.recipe import load_recipe, recipes_dir
from vitscale.studies.expansion import expand
from vitscale.studies.reading import find_study, list_studies, load_study

RECIPES = {
    "figure4": {f"{model}_jft{size}" for model in FIGURE_4 for size in ("9m", "30m", "90m", "300m")},
    "figure5": set(JFT),
    "shape_ablation": {path.stem for path in recipes_dir().glob("shape_*_jft.yaml")},
    "position_ablation": {f"b16_{what}_jft" for what in TABLE_8},
    "axial": {"axial_b32_jft", "axial_b16_jft", "axial_r50_jft", "b32_jft", "b16_jft", "r50x1_jft"},
}


def recipes_of(study: str) -> dict:
    """Entry -> recipe of a shipped study."""
    entries = expand(load_study(study), Path("runs")).entries
    return {name: entry.options[0].recipe for name, entry in entries.items()}


@pytest.mark.parametrize("study", RECIPES)
def test_every_recipe_of_a_figure_is_run_once(study):
    entries = expand(load_study(study), Path("runs")).entries
    assert sorted(Path(entry.options[0].source).stem for entry in entries.values()) == sorted(RECIPES[study])
    assert study in list_studies()


def test_figure_4_stops_early_and_is_read_out_by_few_shot_accuracy():
    for recipe in recipes_of("figure4").values():
        assert recipe.selection.metric == "validation/top1" and recipe.selection.patience
        assert [task.name for task in recipe.evaluation.fewshot.tasks] == ["imagenet"]


def test_all_models_of_the_axial_study_are_read_out_alike():
    expected = load_recipe("axial_b16_jft").evaluation
    assert {recipe.evaluation.model_dump_json() for recipe in recipes_of("axial").values()} == {
        expected.model_dump_json()
    }


def test_a_study_is_found_by_path_or_stem():
    assert find_study("figure4") == find_study("studies/figure4.yaml")
    with pytest.raises(RecipeError, match="did you mean 'figure4'"):
        find_study("figur4")
