"""The smoke form of every recipe that comes with vitscale: two steps on two real DeepSpeed ranks."""

from pathlib import Path

import pytest
from outcomes import checkpoint, column, evaluations
from ranks import asked, on_ranks, quick_of, run_smoke_forms

from vitscale.data.shards.generated import write_generated_dataset
from vitscale.recipe import list_recipes, load_recipe, override, smoke_form
from vitscale.recipe.families import ResNetShape, SwinShape

RECIPES = sorted(list_recipes())
# One of each code path in every run of the tests; all of them in `make test-all`.
IN_EVERY_RUN = {
    *("h14_jft", "l16_i1k", "b16_i21k", "r50x1_sgd_jft", "r50_b16_jft", "b32_jft9m"),
    *("axial_b32_jft", "axial_r50_jft", "b16_relpos_jft", "b16_pos2d_every_jft", "b16_jft_masked", "mae_h14_i1k"),
    *("finetune/imagenet_512", "finetune/vtab", "finetune/bit_pets", "deit_s16_i1k"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """All smoke forms that the tests below look at."""
    root = tmp_path_factory.mktemp("smoke")
    write_generated_dataset(root / "train", [96, 96, 64], seed=0)
    write_generated_dataset(root / "test", [40], seed=1)
    on_ranks(2, run_smoke_forms, root, [params["trained"] for params in asked(request) if "trained" in params])
    return root


@pytest.mark.parametrize("trained", quick_of(RECIPES, IN_EVERY_RUN))
def test_two_steps_of_every_recipe(root, trained):
    recipe = load_recipe(trained)
    assert column(root, trained, "step") == [1, 2]
    has_momentum = recipe.optimizer.name in ("sgd", "muon")
    assert ("momentum_buffer" in checkpoint(root, trained, 2).index.kinds) == has_momentum
    tasks = recipe.evaluation.fewshot.tasks if recipe.evaluation.fewshot else []
    found = {key.split("/")[2] for line in evaluations(root, trained) for key in line if "/fewshot/" in key}
    assert found == {task.name for task in tasks}


def test_a_smoke_form_fits_any_world_and_patch(tmp_path):
    recipe = load_recipe("b16_jft")
    assert {world: smoke_form(recipe, tmp_path, world).batch.split(world) for world in (1, 2, 3, 64)} == {
        1: (2, 4),
        2: (2, 2),
        3: (2, 2),
        64: (2, 2),
    }
    large = override(recipe.dump(), ["model.patch_size=96", "data.image_size=192"], "test")
    assert smoke_form(large, tmp_path).data.image_size == 128


@pytest.mark.parametrize("stem", RECIPES)
def test_the_smoke_form_keeps_what_chooses_between_code_paths(stem, tmp_path):
    recipe = load_recipe(stem)
    small = smoke_form(recipe, tmp_path)
    assert small.objective == recipe.objective.smoke_form()
    kinds = ("contrastive", "dino", "distillation", "ijepa", "lejepa", "mae", "masked_patches")
    assert recipe.objective.kind in kinds or small.objective == recipe.objective
    for block in ("parallelism", "precision", "selection", "deepspeed"):
        assert getattr(small, block) == getattr(recipe, block)
    assert small.schedule.decay == recipe.schedule.decay
    one, other = (
        [group.model_copy(update={"begin": None}) for group in each.optimizer.groups] for each in (small, recipe)
    )
    assert one == other
    assert small.optimizer.model_copy(update={"groups": []}) == recipe.optimizer.model_copy(update={"groups": []})
    for key in ("head", "position"):
        assert small.dump()["model"][key] == recipe.dump()["model"][key]
    one, other = small.model.shape(), recipe.model.shape()
    assert type(one) is type(other)
    if isinstance(one, ResNetShape):
        assert (one.variant, one.mixing, len(one.blocks)) == (other.variant, other.mixing, len(other.blocks))
    elif isinstance(one, SwinShape):
        assert (one.patch_size, len(one.blocks)) == (other.patch_size, len(other.blocks))
    else:
        assert (one.attention, one.patch_size) == (other.attention, other.patch_size)
        assert (one.stem is None) == (other.stem is None)


@pytest.mark.parametrize(
    "settings",
    [
        ["schedule.decay=wsd", "schedule.cooldown.epochs=2"],
        ["schedule.decay=rsqrt", "schedule.timescale.epochs=2"],
        ["schedule.decay=restarts", "schedule.cycle.epochs=2"],
        ["schedule.weight_decay={to: 0.5, over: {epochs: 1}}", "schedule.momentum={to: 0.5}"],
    ],
)
def test_no_part_of_a_shrunken_schedule_is_of_the_long_one(tmp_path, settings):
    recipe = override(load_recipe("b16_i1k").dump(), settings, "test")
    small = smoke_form(recipe, tmp_path)
    parts = [small.schedule.duration, small.schedule.cooldown, small.schedule.cycle]
    assert all(part is None or part.to_steps(0, 1) <= 4 for part in parts)
    assert small.schedule.decay == recipe.schedule.decay
    assert (small.schedule.weight_decay is None) == (recipe.schedule.weight_decay is None)
