"""A recipe in steps, worked out before the ranks meet."""

import re

import pytest
import yaml
from ranks import make_recipe

from vitscale.ground.errors import DataError, RecipeError
from vitscale.recipe import load_recipe
from vitscale.training.beginning.automatic import compiling, overlapping, settle
from vitscale.training.beginning.run_plan import plan_run
from vitscale.training.deepspeed.attention import attention_order


def test_epochs_and_examples_become_steps_of_the_global_batch(root):
    plan = plan_run(
        make_recipe(
            root,
            schedule={"duration": {"epochs": 4}},
            evaluation={"every": {"epochs": 1}, "validation": "test"},
            checkpoint={"every": {"examples": 40}},
        ),
        rank=0,
        world_size=2,
    )
    # 105 training images in batches of 16: 6 steps an epoch.
    assert (plan.total_steps, plan.evaluate_every, plan.checkpoint_every) == (24, 6, 2)
    assert (plan.micro_batch, plan.accumulation, plan.num_classes, plan.warnings) == (8, 1, 7, [])


def test_what_is_due_is_a_function_of_the_step(root):
    plan = plan_run(
        make_recipe(
            root,
            schedule={"duration": {"steps": 12}},
            evaluation={"every": {"steps": 4}, "validation": "test"},
            checkpoint={"every": {"steps": 3}},
            logging={"every": 5},
            check={"audit_every": 5, "replicas_every": 6, "recompute_every": None},
        ),
        rank=0,
        world_size=1,
    )
    due = {step: plan.due(step, last=10) for step in range(1, 13)}
    assert {name: [step for step in due if getattr(due[step], name)] for name in due[1]._fields} == {
        "log": [5, 10],
        "audit": [5, 10],
        "compare_replicas": [6, 12],
        "compare_computation": [],
        "save": [3, 6, 9, 10, 12],
        "evaluate": [4, 8, 12],
    }


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ({"model": {"patch_size": 5}}, "32 x 32 pixels are 6 x 6 patches; 2 pixels right and below are not seen"),
        ({"schedule": {"warmup": {"steps": 7}}}, "7 steps.*6"),
        ({"schedule": {"decay": "wsd", "warmup": {"steps": 2}, "cooldown": {"steps": 5}}}, "(?=.*2 steps)(?=.*5).*6"),
    ],
)
def test_what_a_run_does_not_reach_or_see_is_told(root, blocks, words):
    (warning,) = plan_run(make_recipe(root, **blocks), rank=0, world_size=1).warnings
    assert re.search(words, warning), warning


@pytest.mark.parametrize(
    ("blocks", "error", "words"),
    [
        ({"batch": {"global": 4096}}, RecipeError, "105 samples.*4096"),
        ({"model": {"num_classes": 5}}, RecipeError, "7 classes.*5"),
        ({"checkpoint": {"every": {"examples": 15}}}, RecipeError, "checkpoint.every: 15 examples"),
        ({"schedule": {"duration": {"epochs": 0.1}}}, RecipeError, "schedule.duration: 0.1 epochs"),
        ({"schedule": {"decay": "restarts", "cycle": {"epochs": 0.01}}}, RecipeError, r"schedule\.cycle: 0\.01"),
        ({"data": {"train": "nowhere"}}, DataError, "there is no"),
        ({"batch": {"global": 15}}, RecipeError, "15 does not divide"),
    ],
)
def test_what_cannot_be_is_refused(root, blocks, error, words):
    with pytest.raises(error, match=words):
        plan_run(make_recipe(root, **blocks), rank=0, world_size=2)


def test_parameters_and_averages_that_never_begin_are_told(root):
    """Of 6 steps: in time at 5 and at 6, which is the last."""
    for begin, start, count in ((5, 6, 0), (6, 6, 1), (5, 7, 1)):
        groups = {"groups": [{"match": "norm", "begin": {"steps": begin}}]}
        average = {"name": "slow", "every": {"steps": 2}, "from": {"steps": start}}
        plan = plan_run(make_recipe(root, optimizer=groups, averages=[average]), rank=0, world_size=1)
        assert len(plan.warnings) == count and any("never" in warning for warning in plan.warnings) == bool(count)


@pytest.mark.parametrize(
    ("checkpoint", "total", "tail"),
    [
        ({}, 60, 10),
        ({}, 50, None),  # not longer than the tail
        ({"every": {"steps": 51}}, 200, None),  # that of step 153 is near enough
        ({"every": {"steps": 50}}, 200, None),  # the one of step 150 is there
        ({"every": {"steps": 100}}, 220, None),  # so is that of step 200
        ({"every": {"steps": 100}, "tail": {"steps": 19}}, 220, 201),
        ({"tail": None}, 60, None),
    ],
)
def test_a_tail_is_saved_where_no_other_checkpoint_is_near_the_end(root, checkpoint, total, tail):
    recipe = make_recipe(root, schedule={"duration": {"steps": total}}, checkpoint=checkpoint)
    plan = plan_run(recipe, rank=0, world_size=1)
    assert plan.tail == tail
    saves = {step for step in range(1, total + 1) if plan.due(step, total).save}
    every = recipe.checkpoint.every.steps if recipe.checkpoint.every else total
    assert saves == {*range(every, total + 1, every), total, tail} - {None}


def test_a_resumed_run_keeps_what_was_chosen_where_it_can(tmp_path):
    chosen = ["precision=fp32", "parallelism.compile=true", "parallelism.overlap=true"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(load_recipe("b16_i1k", chosen).dump()))
    for settings, expected in (
        ([], (True, True)),
        (["parallelism.zero_stage=3"], (False, False)),
        (["parallelism.zero_stage=0"], (True, False)),
        (["parallelism.offload=optimizer"], (True, False)),
        (["parallelism.compile=false"], (False, True)),
    ):
        settled, _ = settle(load_recipe("b16_i1k", settings), tmp_path, 0, 2)
        assert (settled.parallelism.compile, settled.parallelism.overlap) == expected, settings


def test_what_is_left_to_the_device_is_a_function_of_facts():
    """Off on CPUs, where results stay as they were; on CUDA by compiler, stage and ranks; cuDNN where it is right."""
    ways = {stage: load_recipe("b16_i1k", [f"parallelism.zero_stage={stage}"]) for stage in range(4)}
    assert [compiling(one, None)[0] or overlapping(one, None)[0] for one in ways.values()] == [False] * 4
    assert [compiling(one, "")[0] for one in ways.values()] == [True, True, True, False]
    assert not compiling(ways[1], "Python.h")[0]
    assert [overlapping(one, 8)[0] for one in ways.values()] == [False, True, True, False]
    assert not overlapping(ways[1], 1)[0]
    firsts = {
        (tokens, cudnn): (attention_order("auto", {tokens}, is_hopper=True, cudnn=cudnn) or [None])[0]
        for tokens in (257, 576)
        for cudnn in (91002, 91900)
    }
    assert [key for key, first in firsts.items() if first == "cudnn"] == [(257, 91900)]
    assert attention_order("auto", {257}, is_hopper=False, cudnn=91900) is None
    assert attention_order("math", {257}, is_hopper=True, cudnn=91900)[0] == "math"
