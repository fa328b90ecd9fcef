"""Saves of two real DeepSpeed ranks: the background writes what the foreground writes, and a run outlives failures."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from outcomes import assert_same_run, checkpoint, column, equal, error_of, printed, store
from rank_faults import before_step, delete, fail_writing, put_a_file_in_its_place, take_the_file_away, write_slowly
from ranks import STEPS, asked, job, launch, quick_of

STAGES = quick_of(range(4), (0, 1, 3))  # 1 and 2 are one optimizer of DeepSpeed's


def blocks(every: int = 2, stage: int = 1, **checkpoint: Any) -> dict[str, Any]:
    return {
        **{"model": {"dropout": 0.2}, "batch": {"micro_max": 4}, "parallelism": {"zero_stage": stage}},
        **{"ema": {"decay": 0.9}, "evaluation": {"validation": None}},
        "checkpoint": {"every": {"steps": every}, **checkpoint},
    }


def failing(name: str, content: dict[str, Any], *faults: Any) -> dict[str, Any]:
    return job(name, content, faults=faults)


def best() -> dict[str, Any]:
    return {
        **blocks(1, keep=1),
        "evaluation": {"validation": "test", "every": {"steps": 1}},
        "selection": {"metric": "validation/loss", "mode": "min"},
    }


@contextmanager
def evaluations(trainer: Any, losses: list[float]) -> Iterator[None]:
    """What the evaluation of each step finds."""

    class Told:
        name = "validation"

        def run(self, predict: Any) -> Iterator[tuple[str, float]]:
            yield "loss", float(losses[trainer.state.step - 1])

    trainer.plan.evaluators[:] = [Told()]
    yield


SLOWLY = partial(write_slowly, seconds=0.1)  # the next step begins meanwhile
TAIL = {**blocks(1), "checkpoint": {"keep": 1, "tail": {"steps": 2}}}
JOBS = [
    job("kept", blocks(1, keep=1, keep_every={"steps": 2})),
    job("tail", TAIL),
    job("tail-resumed", TAIL, 3, 5, None),
    failing("fails-once", blocks(), partial(fail_writing, steps=[4])),
    failing("fails-once-in-the-foreground", blocks(background=False), partial(fail_writing, steps=[4])),
    failing("fails-in-turns", blocks(1, keep=20, max_failures=1), partial(fail_writing, steps=[1, 3, 5], rank=0)),
    failing("fails-too-often", blocks(1, keep=20, max_failures=1), partial(fail_writing, steps=[2, 4, 5, 6])),
    failing("fails-at-once", blocks(1, max_failures=0, background=False), partial(fail_writing, steps=[3])),
    failing("best-fails", best(), partial(evaluations, losses=[3, 2, 1, 2, 2, 2]), partial(fail_writing, steps=[3])),
    failing("fails-at-the-end", blocks(), partial(fail_writing, steps=[6])),
    job("fails-at-the-end-on", blocks(), directory="fails-at-the-end"),
    failing(
        "folder-is-a-file",
        blocks(keep=20),
        partial(before_step, step=3, act=put_a_file_in_its_place),
        partial(before_step, step=5, act=take_the_file_away),
    ),
    failing("deleted", blocks(), partial(before_step, step=3, act=delete)),
    failing("deleted-unsaved", {**blocks(), "checkpoint": {}}, partial(before_step, step=3, act=delete)),
]
UNDISTURBED = "foreground-zero1"


@pytest.fixture(scope="module")
def root(root: Path, request: pytest.FixtureRequest) -> Path:
    """Every training that the tests below look at."""
    jobs = JOBS.copy()
    for stage in sorted({1, *(params["stage"] for params in asked(request) if "stage" in params)}):
        jobs.append(job(f"foreground-zero{stage}", blocks(1, stage, keep=20, background=False)))
        jobs.append(failing(f"background-zero{stage}", blocks(1, stage, keep=20), SLOWLY))
    launch(root, jobs, 2)
    return root


def is_done(root: Path, name: str) -> bool:
    return (root / "runs" / name / "DONE").exists()


@pytest.mark.parametrize("stage", STAGES)
def test_the_background_writes_the_same_bytes(root, stage):
    one, other = f"background-zero{stage}", f"foreground-zero{stage}"
    assert_same_run(root, one, other)
    for step in range(1, STEPS + 1):
        assert checkpoint(root, one, step).index.files == checkpoint(root, other, step).index.files


def test_some_checkpoints_are_kept_for_good(root):
    assert store(root, "kept").steps() == [2, 4, 6]


def test_a_checkpoint_shortly_before_the_end_is_kept(root):
    """Beside the newest one, by a run that is not interrupted and by one that is, before and after that step."""
    assert store(root, "tail").steps() == store(root, "tail-resumed").steps() == [4, 6]
    assert_same_run(root, "tail", "tail-resumed")


def test_the_best_checkpoint_is_one_that_exists(root):
    """Step 3 is the best, and is lost: step 2 is kept in its place, and not deleted for a checkpoint that never was."""
    assert store(root, "best-fails").steps() == [2, 6]
    assert json.loads((root / "runs" / "best-fails" / "DONE").read_text())["best_step"] == 2


@pytest.mark.parametrize("name", ["fails-once", "fails-once-in-the-foreground"])
def test_a_save_that_fails_costs_that_checkpoint_alone(root, name):
    said = printed(root, name)
    assert said.count("WITHOUT THIS CHECKPOINT") == 1
    assert all(part in said for part in ("step 4", "rank 1: OSError: [Errno 27] File too large"))
    assert is_done(root, name) and store(root, name).steps() == [2, 6]
    assert column(root, name, "loss") == column(root, UNDISTURBED, "loss")
    assert equal(checkpoint(root, name), checkpoint(root, UNDISTURBED))
    assert not list((root / "runs" / name / "checkpoints").glob(".building-*"))


def test_failures_are_counted_in_a_row(root):
    assert is_done(root, "fails-in-turns") and store(root, "fails-in-turns").steps() == [2, 4, 6]
    assert printed(root, "fails-in-turns").count("WITHOUT THIS CHECKPOINT") == 3


@pytest.mark.parametrize(("name", "saved", "row"), [("fails-too-often", [1, 3], 2), ("fails-at-once", [1, 2], 1)])
def test_too_many_in_a_row_end_all_ranks(root, name, saved, row):
    error = error_of(root, name)
    assert error["kind"] == "CheckpointError" and error["code"] == 3 and error["saved"] == saved
    assert f"checkpoint.max_failures is {row - 1}" in error["message"]
    assert "rank 1: OSError: [Errno 27] File too large" in error["message"]
    assert not is_done(root, name)


def test_a_last_save_that_fails_is_an_error_and_the_command_goes_on_from_the_one_before(root):
    error = error_of(root, "fails-at-the-end")
    assert error["kind"] == "CheckpointError" and error["saved"] == [2, 4]
    assert "step 6" in error["message"]
    assert f"resumed from {root}" in printed(root, "fails-at-the-end-on")
    assert_same_run(root, "fails-at-the-end", UNDISTURBED)
    assert is_done(root, "fails-at-the-end")


def test_a_folder_that_cannot_be_written_is_used_again_when_it_can(root):
    said = printed(root, "folder-is-a-file")
    assert said.count("WITHOUT THIS CHECKPOINT") == 1 and "saving step 4 failed" in said
    assert store(root, "folder-is-a-file").steps() == [2, 6] and is_done(root, "folder-is-a-file")
    assert_same_run(root, "folder-is-a-file", UNDISTURBED)


@pytest.mark.parametrize(("name", "saved"), [("deleted", [4, 6]), ("deleted-unsaved", [6])])
def test_a_run_whose_directory_is_deleted_trains_to_its_end_and_says_so(root, name, saved):
    assert printed(root, name).count("METRICS ARE BEING LOST") == 1
    assert printed(root, name).count("was moved or deleted") == 1
    if name == "deleted":
        assert column(root, name, "step") == [5, 6]  # after the save that made it anew
    assert (root / "runs" / name / "recipe.yaml").exists()
    assert store(root, name).steps() == saved
    assert equal(checkpoint(root, name), checkpoint(root, UNDISTURBED))
    assert json.loads((root / "runs" / name / "DONE").read_text())["step"] == STEPS
