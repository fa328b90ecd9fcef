"""A run that goes on from a step of another one under another schedule is the run that had its schedule all along."""

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refusal
from outcomes import checkpoint, column, everything, metrics, printed
from rank_faults import poison
from ranks import STEPS, asked, job, launch, make_data, make_recipe, quick_of

from vitscale.ground.errors import CheckpointError, RecipeError, VitscaleError
from vitscale.runs.run import Run
from vitscale.training.beginning.run_plan import plan_run
from vitscale.training.loop.resuming import check_branch

STAGES = quick_of(range(4), [1])
AT = 3
LONG = {"duration": {"steps": 9}, "warmup": {"steps": 2}, "decay": "wsd", "cooldown": {"steps": 3}}
OF_THE_MACHINE = ("WARNING: the machine of ", "WARNING: precision bf16: the processor of ")  # by the preflight
SHORT = {**LONG, "duration": {"steps": STEPS}, "cooldown": {"steps": 2}, "cooldown_shape": "1-sqrt"}


def content(schedule: dict[str, Any], stage: int = 1, **others: Any) -> dict[str, Any]:
    """All that could be forgotten is on: dropout, accumulation, average, groups, a batch that was left out."""
    return {
        **{"model": {"dropout": 0.2}, "batch": {"micro_max": 4}},
        "optimizer": {"lr": 3e-3, "decay_exclude": "bias|norm", "groups": [{"match": "^cls", "frozen": True}]},
        **{"parallelism": {"zero_stage": stage}, "schedule": schedule, "ema": {"decay": 0.4}},
        **{"evaluation": {"validation": None}, "checkpoint": {"every": {"steps": 1}, "keep": 20}},
        "anomalies": {"non_finite": "skip"},
        **others,
    }


def branch(trunk: str | Path, schedule: dict[str, Any] = SHORT, stage: int = 1, **others: Any) -> dict[str, Any]:
    return content(schedule, stage, init={"from": str(trunk), "step": AT, "continue": True}, **others)


@pytest.fixture(scope="module")
def root(root: Path, request: pytest.FixtureRequest) -> Path:
    """Every training that the tests below look at."""
    bad = {"faults": [partial(poison, positions={1: "gradient"})]}
    jobs = []
    for stage in sorted({1, *(params["stage"] for params in asked(request) if "stage" in params)}):
        trunk = root / "runs" / f"trunk-{stage}"
        jobs += [
            job(trunk.name, content(LONG, stage), 5, **bad),  # the branch begins while its trunk is on the way
            job(f"whole-{stage}", content(SHORT, stage), **bad),
            job(f"branch-{stage}", branch(trunk, stage=stage)),
            job(f"killed-{stage}", branch(trunk, stage=stage), 4, 5, None),
        ]
    late = {"checkpoint": {"every": {"steps": 20}}, "anomalies": {"non_finite": "rewind"}}
    trunk = root / "runs" / "trunk-1"
    jobs += [
        job("rewound", branch(trunk, **late), faults=[partial(poison, positions={5: "gradient"})]),
        job("other-past", branch(trunk, {**SHORT, "warmup": {"steps": 1}})),
        job(
            "evaluated",
            branch(
                trunk,
                evaluation={"validation": "test", "batch": 5, "every": {"steps": 1}},
                selection={"metric": "validation/loss", "mode": "min", "patience": 9},
            ),
        ),
        job("other-seed", branch(trunk, seed=1)),
    ]
    launch(root, jobs, 2)
    return root


def state(root: Path, name: str, step: int = STEPS) -> dict[str, torch.Tensor]:
    return everything(checkpoint(root, name, step))


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["branch", "killed"])
def test_a_branch_is_the_run_that_had_its_schedule_all_along(root, name, stage):
    branched, whole = f"{name}-{stage}", f"whole-{stage}"
    assert column(root, branched, "step") == [4, 5, 6]
    for key in ("loss", "lr", "grad_norm", "batch_digest", "epoch", "images_seen", "exaflops"):
        assert column(root, branched, key) == column(root, whole, key)[AT:], key
    for step in (4, 5, 6):
        assert_equal(state(root, branched, step), state(root, whole, step))
        ours, theirs = (checkpoint(root, run, step).index for run in (branched, whole))
        assert (ours.position, ours.anomalies) == (theirs.position, theirs.anomalies)
    assert theirs.position == STEPS + 1, "the batch that was left out is behind all of them"
    assert ours.recipe["schedule"] == theirs.recipe["schedule"]
    warnings = [line for line in printed(root, branched).splitlines() if "WARNING" in line]
    assert [line for line in warnings if not line.startswith(OF_THE_MACHINE)] == []


def test_it_says_what_it_goes_on_from_and_counts_its_own_steps_alone(root):
    index = checkpoint(root, "branch-1").index
    trunk = checkpoint(root, "trunk-1", AT).index
    assert index.data["init"]["step"] == AT and index.data["init"]["continues"] == str(root / "runs" / "trunk-1")
    assert index.data["init"]["files"] == {file.path: file.sha256 for file in trunk.files}
    assert "step 3 of 6" in printed(root, "branch-1")
    run, whole = (Run(root / "runs" / name).cost for name in ("branch-1", "whole-1"))
    assert run is not None and whole is not None
    assert (run.step, run.images) == (6, 3 * 16)
    assert run.exaflops == pytest.approx(whole.exaflops / 2)
    assert run.seconds == pytest.approx(sum(line["step_time_s"] for line in metrics(root, "branch-1")))


def test_a_branch_without_a_checkpoint_of_its_own_goes_back_to_its_trunk(root):
    assert "went back to step 3" in printed(root, "rewound")
    assert column(root, "rewound", "step") == [4, 5, 6]
    assert checkpoint(root, "rewound").index.position > STEPS + 1


def test_a_schedule_that_was_not_the_trunks_is_told(root):
    assert re.search(r"WARNING: up to step 3 the trunk", " ".join(printed(root, "other-past").split()))
    assert_equal(state(root, "trunk-1", AT), state(root, "whole-1", AT))


def test_what_is_best_is_chosen_among_its_own_checkpoints(root):
    selection = checkpoint(root, "evaluated").index.selection
    assert selection["best_step"] >= AT and selection["evaluated"] == STEPS


def test_another_seed_is_refused_on_ranks_too(root):
    assert not (root / "runs" / "other-seed" / "metrics.jsonl").exists()
    assert "seed: 0 -> 1" in (root / "runs" / "other-seed.error").read_text()


@pytest.mark.parametrize(
    ("blocks", "kind", "words"),
    [
        ({"seed": 7}, RecipeError, "seed: 0 -> 7"),
        ({"optimizer": {"lr": 1e-3}}, RecipeError, r"optimizer\.lr"),
        ({"batch": {"global": 8}}, RecipeError, r"batch\.global"),
        ({"ema": None}, RecipeError, "ema"),
        ({"model": {"depth": 2}}, RecipeError, r"model\.depth"),
        ({"data": {"train": "test"}}, CheckpointError, "manifest_sha256"),
        ({"schedule": {**LONG, "duration": {"steps": 3}}}, RecipeError, r"init\.step 3: .*ends at step 3"),
        ({"init": {"step": 4_000}}, CheckpointError, "init.step 4000: .*1, 2, 3, 4, 5"),
        ({"init": {"from": "nowhere"}}, RecipeError, "nowhere"),
        ({"init": {"from": "file.safetensors"}}, RecipeError, "no steps"),
    ],
)
def test_what_may_not_differ_is_refused_before_the_ranks_meet(root, tmp_path, monkeypatch, blocks, kind, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.safetensors").write_bytes(b"")
    usual = branch(root / "runs" / "trunk-1")
    for key, value in blocks.items():
        usual[key] = {**usual[key], **value} if isinstance(value, dict) and key in usual else value
    recipe = make_recipe(root, **usual)
    with pytest.raises(kind, match=words) as caught:
        check_branch(plan_run(recipe, 0, 2), tmp_path / "none")
    assert isinstance(caught.value, VitscaleError)


def test_what_may_differ_passes(root, tmp_path):
    shutil.copytree(root / "train", tmp_path / "other")
    free = {"evaluation": {"validation": "test"}, "checkpoint": {"keep": 1}, "logging": {"every": 2}}
    free |= {"data": {"train": str(tmp_path / "other")}}  # the same data by another name
    recipe = make_recipe(root, **branch(root / "runs" / "trunk-1", **free, parallelism={"zero_stage": 3}))
    check_branch(plan_run(recipe, 0, 2), tmp_path / "none")


def test_other_data_under_the_same_name_are_refused(root, tmp_path):
    make_data(tmp_path)
    shutil.rmtree(tmp_path / "train")
    shutil.copytree(tmp_path / "test", tmp_path / "train")
    recipe = make_recipe(tmp_path, **branch(root / "runs" / "trunk-1"))
    with pytest.raises(CheckpointError, match="manifest_sha256"):
        check_branch(plan_run(recipe, 0, 2), tmp_path / "none")


@pytest.mark.parametrize(
    "init",
    [
        {"continue": True},
        {"continue": True, "step": 3, "head": "keep"},
        {"continue": True, "step": 3, "positions": "keep"},
        {"step": 0},
    ],
)
def test_mistakes_in_the_block_name_their_key(tmp_path, init):
    with refusal(RecipeError, "recipe", f"init {init}", {tmp_path: "FOLDER"}):
        make_recipe(tmp_path, init={"from": "run", **init})
