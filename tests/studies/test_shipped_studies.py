"""The studies that come with vitscale: what they run, against the paper."""

import json
from pathlib import Path

import pytest
from test_paper_recipes import FIGURE_4, JFT, TABLE_8

from vitscale.about.studies.expansion import Expansion, expand
from vitscale.about.studies.reading import find_study, list_studies, load_study
from vitscale.flops.estimate import estimate
from vitscale.ground.errors import RecipeError
from vitscale.recipe import FREE_ON_BRANCHING, FREE_ON_RESUME, Recipe, differences, load_recipe, recipes_dir
from vitscale.training.beginning.run_plan import schedule_in_steps

RECIPES = {
    "figure4": {f"{model}_jft{size}" for model in FIGURE_4 for size in ("9m", "30m", "90m", "300m")},
    "shape_ablation": {path.stem for path in recipes_dir().glob("shape_*_jft.yaml")},
    "position_ablation": {f"b16_{what}_jft" for what in TABLE_8},
    "axial": {"axial_b32_jft", "axial_b16_jft", "axial_r50_jft", "b32_jft", "b16_jft", "r50x1_jft"},
}


def shipped(study: str) -> Expansion:
    return expand(load_study(study), Path("runs"))


def recipes_of(study: str) -> dict:
    """Entry -> recipe of a shipped study."""
    return {name: entry.options[0].recipe for name, entry in shipped(study).entries.items()}


def check_branch(branch: Recipe, trunk: Recipe, samples: int) -> list[int]:
    """It differs from its trunk by the decay alone, and begins where that keeps a checkpoint. The steps of both."""
    assert differences(trunk.dump(), branch.dump(), free=FREE_ON_BRANCHING) == []
    assert branch.first_step % trunk.checkpoint.keep_every.steps == 0
    (short, ours), (long, theirs) = (schedule_in_steps(one, samples) for one in (branch, trunk))
    steps = [*range(0, branch.first_step, 1 + branch.first_step // 10_000), branch.first_step - 1]
    assert [ours(step) for step in steps] == [theirs(step) for step in steps]
    return [short, long]


@pytest.mark.parametrize("study", RECIPES)
def test_every_recipe_of_a_figure_is_run_once(study):
    entries = shipped(study).entries
    assert sorted(Path(entry.options[0].source).stem for entry in entries.values()) == sorted(RECIPES[study])
    assert study in list_studies()


def test_figure_4_stops_early_and_is_read_out_by_few_shot_accuracy():
    for recipe in recipes_of("figure4").values():
        assert recipe.selection.metric == "validation/top1" and recipe.selection.patience
        assert [task.name for task in recipe.evaluation.fewshot.tasks] == ["imagenet"]


def test_all_models_of_the_axial_study_are_read_out_alike():
    expected = load_recipe("axial_b16_jft").evaluation
    assert all(recipe.evaluation == expected for recipe in recipes_of("axial").values())


def test_a_study_is_found_by_path_or_stem():
    assert find_study("figure4") == find_study("studies/figure4.yaml")
    with pytest.raises(RecipeError, match="'figure4'"):
        find_study("figur4")


# Table 4: steps and learning rates; the development splits of appendix B.1.1, in percent.
TABLE_4 = {
    "imagenet": (20_000, [0.003, 0.01, 0.03, 0.06], 1),
    "cifar10": (10_000, [0.001, 0.003, 0.01, 0.03], 2),
    "cifar100": (10_000, [0.001, 0.003, 0.01, 0.03], 2),
    "pets": (500, [0.001, 0.003, 0.01, 0.03], 10),
    "flowers": (500, [0.001, 0.003, 0.01, 0.03], 10),
}


def check_table_4(expansion: Expansion, dataset: str, parent: str | None) -> None:
    """The candidates of a data set and the runs of the winner."""
    steps, rates, percent = TABLE_4[dataset]
    entries = [one for one in expansion.entries.values() if (one.dataset, one.parent) == (dataset, parent)]
    candidates = [one.options[0].recipe for one in entries if one.split == "dev"]
    assert [recipe.optimizer.lr for recipe in candidates] == rates
    for recipe in candidates:
        assert recipe.schedule.duration.steps == steps
        assert recipe.data.train == f"{dataset}/train-{100 - percent}"
        assert recipe.evaluation.validation == f"{dataset}/train-{percent}"
    refits = [one for one in entries if one.split == "test"]
    assert [one.seed for one in refits] == [0, 1, 2]
    for one in refits:
        assert [option.recipe.optimizer.lr for option in one.options] == rates
        assert {option.recipe.data.train for option in one.options} == {f"{dataset}/train"}
        test = f"{dataset}/{'validation' if dataset == 'imagenet' else 'test'}"
        assert {option.recipe.evaluation.validation for option in one.options} == {test}


def test_fine_tuning_is_table_4():
    expansion = shipped("finetune")
    for dataset in TABLE_4:
        check_table_4(expansion, dataset, None)
    assert len(expansion.entries) == 5 * (4 + 3) and len(expansion.choices) == 5


def test_figure_5_fine_tunes_every_model():
    expansion = shipped("figure5")
    pretrained = [name for name, one in expansion.entries.items() if one.parent is None]
    assert sorted(name.removeprefix("pretrain-") for name in pretrained) == sorted(JFT)
    for name in pretrained:
        for dataset in TABLE_4:
            check_table_4(expansion, dataset, name)
    for one in expansion.entries.values():
        if one.parent is not None:
            model = JFT[one.parent.removeprefix("pretrain-")][0]
            assert {option.recipe.model.name for option in one.options} == {model}
            # As the authors fine-tune: B/16, B/32, L/32 and ResNets without dropout, L/16, H/14 and hybrids with it.
            dropout = {option.recipe.dump()["model"].get("dropout", 0.0) for option in one.options}
            assert dropout == {0.1 if model in ("ViT-L/16", "ViT-H/14") or "+" in model else 0.0}, one.name
            assert one.options[0].recipe.init.source == str(Path("runs", one.parent).absolute())


def test_vtab_1k_has_one_setting_for_19_tasks():
    expansion = shipped("vtab1k")
    (choice,) = expansion.choices.values()
    assert len(choice.candidates) == 4 and {len(entries) for entries in choice.candidates.values()} == {19}
    published = [one for one in expansion.entries if one.endswith("lr0.01-duration.steps2500-warmup.steps250")]
    assert len(published) == 19
    tasks = {one.dataset for one in expansion.entries.values()}
    for one in expansion.entries.values():
        recipe = one.options[0].recipe
        splits = (recipe.data.train, recipe.evaluation.validation)
        parts = ("train800", "val200") if one.split == "dev" else ("train800val200", "test")
        assert splits == tuple(f"vtab/{one.dataset}/{part}" for part in parts)
        assert recipe.data.flip in (0.0, 0.5) and (recipe.data.flip == 0.0) == (recipe.data.crop.fraction == 1.0)
    whole = {one.dataset for one in expansion.entries.values() if one.options[0].recipe.data.flip == 0.0}
    structured = "clevr_count clevr_dist dmlab dspr_loc dspr_ori kitti_dist snorb_azim snorb_elev"
    assert whole == set(structured.split()) and len(tasks) == 19
    assert sum(one.split == "test" for one in expansion.entries.values()) == 19 * 3


def test_one_trunk_buys_the_runs_of_7_epochs_and_saves_11_percent_of_the_18_runs():
    expansion, recipes = shipped("trunk"), recipes_of("trunk")
    branches = {name: recipe for name, recipe in recipes.items() if recipe.first_step}
    assert (len(recipes), len(branches)) == (18, 3)
    for name, recipe in branches.items():
        trunk = recipes[expansion.entries[name].parent]
        assert check_branch(recipe, trunk, 303_000_000) == [517_818, 1_035_636]
        assert trunk.checkpoint.keep_every.steps % trunk.checkpoint.every.steps == 0
        planned = [estimate(name, recipe).own_steps, estimate("trunk", trunk).own_steps]
        assert planned == [517_818 - recipe.first_step, 1_035_636], "as many as the runs take"
    found = [estimate(name, recipe) for name, recipe in recipes.items()]
    paid, all_of_them = sum(one.own_exaflops for one in found), sum(one.exaflops for one in found)
    # Table 6: the sum of its 18 rows, and four fifths of its rows of 783, 563 and 859 exaFLOPs for 7 epochs.
    assert all_of_them == pytest.approx(15_721, rel=0.015)
    assert (all_of_them - paid) / all_of_them == pytest.approx(0.8 * (783 + 563 + 859) / 15_721, abs=0.003)
    assert (all_of_them - paid) / all_of_them == pytest.approx(0.11, abs=0.005)


def test_from_scratch_differs_from_fine_tuning_by_the_first_weights_alone():
    entries = shipped("transfer_small").entries
    pairs = [(entry, entries[name.replace("finetune", "scratch")]) for name, entry in entries.items()]
    pairs = [(tuned, scratch) for tuned, scratch in pairs if tuned is not scratch]
    assert len(pairs) * 2 + 1 == len(entries) == 41, "and the run that they are fine-tuned from"
    for tuned, scratch in pairs:
        for first, second in zip(tuned.options, scratch.options, strict=True):
            assert first.recipe.init is not None and second.recipe.init is None
            assert first.recipe.model_copy(update={"init": None}) == second.recipe


def test_arms_of_todays_training_differ_by_what_their_names_say():
    recipes = recipes_of("today_cifar10")
    assert len(recipes) == 18 and not shipped("today_cifar10").choices
    named = {"augmented": ("data.operations", "objective.mixing"), "muon": ("optimizer",), "trunk": ("schedule",)}
    for part, free in named.items():
        for seed in (0, 1, 2):
            paper, other = recipes[f"paper-seed{seed}"].dump(), recipes[f"{part}-seed{seed}"].dump()
            assert differences(paper, other) != []
            assert differences(paper, other, free=(*free, *FREE_ON_RESUME)) == []
            assert paper["schedule"]["duration"] == other["schedule"]["duration"]
    for part, share in (("quarter", 0.25), ("half", 0.5)):
        for seed in (0, 1, 2):
            trunk, branch = recipes[f"trunk-seed{seed}"], recipes[f"{part}-trunk-seed{seed}"]
            short, long = check_branch(branch, trunk, 50_000)
            assert short == share * long and branch.first_step == 0.8 * short


def test_the_miniature_keeps_the_rules_of_figure_4():
    """As the paper's subsets: a rate for each model, all else alike, early stopping by what is no test split."""
    recipes = {name: recipe for name, recipe in recipes_of("miniature").items() if "-of" in name}
    larger = recipes_of("figure4")["figure4-b32_jft9m"].dump()
    alike, rates = set(), {}
    for name, recipe in recipes.items():
        content = recipe.dump() | {"model": 0, "data": 0, "seed": 0}
        of_model = [content["optimizer"].pop(key) for key in ("lr", "matrices")]
        rates.setdefault(name.partition("-")[0], set()).add(str(of_model))
        alike.add(json.dumps(content, sort_keys=True))
    assert {len(each) for each in rates.values()} == {1}
    (only,) = map(json.loads, alike)
    for block, key in (("optimizer", "weight_decay"), ("schedule", "decay"), ("selection", "metric")):
        assert only[block][key] == larger[block][key], key
    assert {recipe.evaluation.validation for recipe in recipes.values()} == {"cifar10/dev"}
    trained_on = {recipe.data.train.removeprefix("cifar10/fit") for recipe in recipes.values()}
    assert trained_on == {"", "-10000", "-2500"}


def test_no_run_of_the_miniature_sees_the_test_pictures_but_in_few_shot_accuracy():
    for name, recipe in recipes_of("miniature").items():
        content = recipe.dump()
        content["evaluation"]["fewshot"] = None
        assert "cifar10/test" not in json.dumps(content), name
