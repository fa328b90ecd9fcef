"""A process that ends between a step and its evaluation: the evaluation is made up for, and selects the same."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from outcomes import assert_same_run, checkpoint, error_of, evaluations
from rank_faults import end_in_evaluation, signal_in_evaluation
from ranks import STEPS, job, launch

pytestmark = pytest.mark.slow


def blocks(stage: int, **others: Any) -> dict[str, Any]:
    return {
        "model": {"dropout": 0.2},
        "parallelism": {"zero_stage": stage},
        "ema": {"decay": 0.3},
        "evaluation": {"validation": "test", "batch": 5, "every": {"steps": 2}},
        "selection": {"metric": "validation/loss", "mode": "min", "patience": 3},
        "checkpoint": {"every": {"steps": 2}, "keep": 20},
        **others,
    }


# Nothing is learned: the evaluation of step 2 stays the best, and that of step 6 ends the run.
IMPATIENT = {
    "optimizer": {"lr": 1e-12},
    "schedule": {"duration": {"steps": 20}, "end_lr": 0.0},
    "selection": {"metric": "validation/top1", "patience": 2},
}
RUNS = {
    "zero1": blocks(1),
    "zero3": blocks(3),
    "unsaved": blocks(2, checkpoint={"keep": 20}),
    "impatient": blocks(1, **IMPATIENT),
    "measured first": blocks(3, evaluation={"validation": "test", "batch": 5, "every": {"steps": 2}, "at_start": True}),
}
# Run, step whose evaluation is cut short, and how. "error" ends the process where it stands.
CUT = [
    *(("zero1", 4, "error"), ("zero3", 4, "signal"), ("zero3", 6, "signal")),
    *(("unsaved", 4, "error"), ("unsaved", 4, "signal")),
    *(("impatient", 4, "error"), ("impatient", 6, "error")),
    *(("measured first", 0, "error"), ("measured first", 0, "signal"), ("measured first", 4, "signal")),
]
HOW = {"error": end_in_evaluation, "signal": signal_in_evaluation}


@pytest.fixture(scope="module")
def root(root: Path) -> Path:
    """Every training that the tests below look at."""
    jobs = [job(name, content) for name, content in RUNS.items()]
    for run, step, how in CUT:
        name = f"{run}-{how}-at-{step}"
        jobs.append(job(name, RUNS[run], faults=[partial(HOW[how], step=step)]))
        jobs.append(job(f"{name}-on", RUNS[run], directory=name))
    jobs.append(job("done-is-lost", RUNS["zero3"], begins_as="zero3"))
    launch(root, jobs, 2)
    return root


def done(root: Path, name: str) -> dict[str, Any]:
    return json.loads((root / "runs" / name / "DONE").read_text())


@pytest.mark.parametrize(("run", "step", "how"), CUT)
def test_an_evaluation_that_was_cut_short_is_made_up_for(root, run, step, how):
    name = f"{run}-{how}-at-{step}"
    error = error_of(root, name)
    if how == "signal":
        assert error["kind"] == "PreemptedError" and error["code"] == 85
        if step == 0:
            assert "no update yet" in error["message"] and error["saved"] == []
        else:
            assert f"step {step}" in error["message"] and error["saved"][-1] == step
    else:
        assert error["message"] == "the evaluation is cut short"
    assert evaluations(root, name) == evaluations(root, run)
    assert done(root, name) == done(root, run)
    last = done(root, run)["step"]
    assert_same_run(root, name, run, last)
    assert checkpoint(root, name, last).index.selection == checkpoint(root, run, last).index.selection


def test_the_undisturbed_runs_are_as_meant(root):
    assert [line["step"] for line in evaluations(root, "zero1")] == [2, 4, 6]
    assert done(root, "zero1")["best_step"] in (2, 4, 6) and not done(root, "zero1")["stopped_early"]
    assert [line["step"] for line in evaluations(root, "impatient")] == [2, 4, 6]
    assert done(root, "impatient")["stopped_early"] and done(root, "impatient")["best_step"] == 2


def test_a_run_that_ends_before_it_says_that_it_is_done_says_so_the_next_time(root):
    assert done(root, "done-is-lost") == done(root, "zero3")
    assert evaluations(root, "done-is-lost") == evaluations(root, "zero3")
    assert checkpoint(root, "done-is-lost", STEPS).index.selection["evaluated"] == STEPS
