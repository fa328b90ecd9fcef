"""A run against its own files, steps and evaluations: sound as it is, and each way of tampering is named."""

import hashlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from ranks import STEPS, job, launch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from vitscale.about.checks.verifying import Asked, verify_run
from vitscale.about.report import gather
from vitscale.about.status import RunReader
from vitscale.cli.main import app
from vitscale.ground.errors import DataError, RecipeError
from vitscale.runs.checkpoint_index import CheckpointIndex, FileEntry, index_text, read_index
from vitscale.runs.done import verification

SAVED = 4  # the checkpoint that is tampered with
NOTHING = ("--steps", 0, "--no-shards", "--no-evaluations")  # is computed again
LAST_LINK = ("--steps", 2, "--no-shards", "--no-evaluations")
NOW = ("--steps", 0, "--no-shards")  # only evaluations


@pytest.fixture(scope="module")
def root(root: Path) -> Path:
    """A run and another of another seed, with checkpoints of all even steps."""
    blocks = {
        "checkpoint": {"every": {"steps": 2}, "keep": 20},
        "evaluation": {"validation": "test", "every": {"steps": 2}},
        "selection": {"metric": "validation/loss", "mode": "min"},
        "ema": {"decay": 0.5},
    }
    launch(root, [job("run", blocks), job("other", {**blocks, "seed": 7})], 1)
    return root


@pytest.fixture
def copied(root, tmp_path, monkeypatch) -> Path:
    """The run and its data, to be tampered with; steps are taken again by as many threads as the run had.

    The current folder has a package of a stranger, called vitscale, which nothing may run.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "here" / "vitscale").mkdir(parents=True)
    (tmp_path / "here" / "vitscale" / "__init__.py").write_text("raise SystemExit('not the installed package')")
    monkeypatch.chdir(tmp_path / "here")
    shutil.copytree(root / "runs" / "run", tmp_path / "run")
    shutil.copytree(root / "train", tmp_path / "data" / "train")
    shutil.copytree(root / "test", tmp_path / "data" / "test")
    return tmp_path


def verified(folder, run="run", *options):
    """What was found to be unsound, by a command that ends as it should."""
    arguments = ["verify", str(folder / run), "--data-root", str(folder / "data"), "--json", *map(str, options)]
    result = CliRunner().invoke(app, arguments)
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    bad = [row["what"] for row in rows if row["is_sound"] is False]
    if bad or ("--all" in options and any(row["is_sound"] is None for row in rows)):
        assert isinstance(result.exception, DataError)
    elif result.exception is not None:
        raise result.exception
    return rows, bad


def lines_of(folder):
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def write_lines(folder, lines):
    (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def edit_line(folder, step, **values):
    lines = lines_of(folder)
    for line in lines:
        if line["step"] == step and "loss" in line:
            line.update({key: change(line[key]) for key, change in values.items()})
    write_lines(folder, lines)


def done_of(folder):
    return json.loads((folder / "run" / "DONE").read_text())


def write_done(folder, content):
    (folder / "run" / "DONE").write_text(json.dumps(content))


def edit_evaluation(folder, step, top1):
    """In every file that has it."""
    is_it = "eval/validation/top1"
    write_lines(
        folder, [line | {is_it: top1} if line["step"] == step and is_it in line else line for line in lines_of(folder)]
    )
    done = done_of(folder)
    if done["step"] == step:
        done["evaluation"]["validation/top1"] = top1
        write_done(folder, done)


def edit_recipe(checkpoint, validation):
    """Have an index name another dataset to evaluate on."""
    index = read_index(checkpoint)
    evaluation = index.recipe["evaluation"] | {"validation": validation}
    (checkpoint / "index.json").write_text(index_text(replace(index, recipe=index.recipe | {"evaluation": evaluation})))


def write_again(checkpoint, path, **others):
    """Have the index say what the file is now, as somebody who knows the format would."""
    index = replace(read_index(checkpoint), **others)
    content = path.read_bytes()
    entry = replace(index.files[0], bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    (checkpoint / "index.json").write_text(index_text(replace(index, files=[entry])))


def test_that_the_weights_were_not_checked_is_said(copied):
    rows, bad = verified(copied, "run", *NOTHING)
    said = {row["what"]: row for row in rows if row["is_sound"] is None}
    assert not bad and list(said) == ["shards", "evaluations", "links", f"weights of the result (step {STEPS})"]
    assert all("NOT CHECKED" in said[what]["detail"] for what in said if what != "links")
    assert "--steps 2" in said[f"weights of the result (step {STEPS})"]["detail"]


@pytest.mark.slow  # takes steps in processes of their own
def test_a_run_as_it_is(copied):
    rows, bad = verified(copied, "run", "--steps", 2 * STEPS)
    assert not bad, rows
    taken = {row["what"]: row["detail"] for row in rows if row["what"].startswith("steps")}
    assert list(taken) == [f"steps {step + 1} to {step + 2}" for step in range(0, STEPS, 2)]
    assert sum("last bit" in row["detail"] for row in rows) == 2 * len(taken) + 1  # the newest one's evaluation
    run = copied / "run"
    outcome = json.loads((run / "verified.json").read_text())
    assert outcome["exit_code"] == 0 and outcome["findings"] == rows and "DONE" in outcome["files"]
    shown = RunReader(str(run)).read().verified, gather([run]).plain()["runs"][0]["verified"]
    assert shown == (verification(run, str(run / "checkpoints")),) * 2 and shown[0].startswith("yes")
    edit_line(copied, 3, loss=lambda loss: loss)  # the same values written again are the same file
    assert RunReader(str(run)).read().verified == shown[0]
    edit_line(copied, 3, loss=lambda loss: loss * 0.999)
    assert RunReader(str(run)).read().verified.startswith("no")
    (run / "verified.json").write_text("[]")
    assert RunReader(str(run)).read().verified == "no"


def test_a_world_that_does_not_divide_the_batch_is_refused_before_anything_is_read(copied):
    with pytest.raises(RecipeError):
        verified(copied, "run", "--world", "7")


def test_one_byte_of_a_shard(copied):
    path = next((copied / "data" / "train").glob("*.beton"))
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)
    assert any(path.name in what for what in verified(copied, "run", "--steps", 0, "--no-evaluations")[1])


@pytest.mark.parametrize(
    ("step", "again", "bad", "others"),
    [
        (5, 2, "steps 5 to 6", {}),
        pytest.param(5, 2, "steps 5 to 6", {"world_size": lambda ranks: [ranks]}, marks=pytest.mark.slow),
        pytest.param(3, STEPS, "steps 3 to 4", {}, marks=pytest.mark.slow),
    ],
)
def test_one_line_of_metrics(copied, step, again, bad, others):
    edit_line(copied, step, loss=lambda loss: loss * 0.999, **others)
    assert verified(copied, "run", "--steps", again, "--no-shards", "--no-evaluations")[1] == [bad]


def test_a_line_that_is_gone_and_one_with_another_rate(copied):
    write_lines(copied, [line for line in lines_of(copied) if line["step"] != 2])
    assert verified(copied, "run", *NOTHING)[1] == ["metrics.jsonl"]
    edit_line(copied, 4, lr=lambda rate: rate * 2)
    assert verified(copied, "run", *NOTHING)[1] == ["metrics.jsonl"]


@pytest.mark.slow  # takes steps in processes of their own
def test_one_weight_and_an_index_that_fits_it(copied):
    checkpoint = copied / "run" / "checkpoints" / f"step-{SAVED:08d}"
    path = checkpoint / "rank-00000.safetensors"
    tensors = load_file(path)
    name = next(key for key in sorted(tensors) if "head" in key and key.startswith("master"))
    tensors[name] = tensors[name].clone()
    tensors[name][0] += 0.01
    save_file(tensors, path)
    assert verified(copied, "run", *NOTHING)[1] == [f"checkpoint {SAVED}"]
    write_again(checkpoint, path)
    assert f"checkpoint {SAVED}" in verified(copied, "run", "--steps", STEPS, "--no-shards")[1]


def test_a_checkpoint_of_another_run(root, copied):
    checkpoint = f"step-{SAVED:08d}"
    shutil.rmtree(copied / "run" / "checkpoints" / checkpoint)
    shutil.copytree(root / "runs" / "other" / "checkpoints" / checkpoint, copied / "run" / "checkpoints" / checkpoint)
    assert verified(copied, "run", *NOTHING)[1] == [f"checkpoint {SAVED}"]


@pytest.mark.parametrize("key", ["exaflops", "images_per_s", "world_size"])
def test_what_a_run_has_cost(copied, key):
    write_lines(copied, [line | ({key: line[key] * 0.5} if key in line else {}) for line in lines_of(copied)])
    assert verified(copied, "run", *NOTHING)[1] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("key", "value"), [("exaflops", 1e-9), ("stopped_early", True), ("total_steps", 4), ("best_step", None)]
)
def test_an_end_with_another_figure(copied, key, value):
    write_done(copied, done_of(copied) | {key: value})
    assert verified(copied, "run", *NOTHING)[1] == ["DONE"]


@pytest.mark.parametrize("stopped_early", [False, True])
def test_an_end_of_an_unfinished_run(copied, stopped_early):
    shutil.rmtree(copied / "run" / "checkpoints" / f"step-{STEPS:08d}")
    write_lines(copied, [line for line in lines_of(copied) if line["step"] < STEPS - 1])
    state = read_index(copied / "run" / "checkpoints" / f"step-{STEPS - 2:08d}").selection
    done = done_of(copied)
    done |= {"step": STEPS - 2, "best_step": state["best_step"], "stopped_early": stopped_early, "evaluation": {}}
    done["exaflops"] *= (STEPS - 2) / STEPS
    write_done(copied, done)
    assert verified(copied, "run", *NOTHING)[1] == ["DONE"]


@pytest.mark.parametrize("line", ["loss", "eval/validation/top1"])
def test_a_line_after_the_end(copied, line):
    lines = lines_of(copied)
    last = next(each for each in reversed(lines) if line in each)
    more = {"lr", "images_seen", "exaflops"}
    write_lines(copied, [*lines, {key: last[key] for key in last if key not in more} | {"step": STEPS + 1}])
    assert "metrics.jsonl" in verified(copied, "run", *NOTHING)[1]


@pytest.mark.parametrize(
    "change", [{}, {"exaflops": 1e-9}, {"hours": 1e-9}, {"metrics": {"validation/top9": 1.0}}, {"name": "it"}]
)
def test_a_report_of_other_figures(copied, change):
    content, folder = gather([copied / "run"]).plain(), copied / "report"
    content["runs"][0] |= change
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(content))
    expected = [str(folder / "results.json")] if change else []
    assert verified(copied, "run", *NOTHING, "--report", folder)[1] == expected


def test_lines_that_became_more_frequent(root, copied):
    """Each process logged as its own recipe said."""
    blocks = {"checkpoint": {"every": {"steps": 2}, "keep": 20}, "evaluation": {"validation": None}}
    every = [{**blocks, "logging": {"every": steps}} for steps in (2, 1)]
    launch(root, [job("more", every, 4, None)], 1)
    shutil.copytree(root / "runs" / "more", copied / "more")
    assert verified(copied, "more", *NOTHING)[1] == []


def test_another_recipe_and_another_end(copied):
    path = copied / "run" / "recipe.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"seed": 9}))
    done = done_of(copied)
    done["evaluation"]["validation/top1"] = 1.0
    write_done(copied, done)
    assert verified(copied, "run", *NOTHING)[1] == ["recipe.yaml", "DONE"]


# ---- Forgeries by somebody who knows the formats ---------------------------------------------------------------------


@pytest.mark.slow  # evaluates in processes of its own
def test_an_accuracy_that_is_edited_in_every_file(copied):
    for step in (STEPS, 2):
        edit_evaluation(copied, step, 0.4855)
    run = copied / "run"
    report = {"runs": [{"name": "run", "state": "done", "step": STEPS, "metrics": {"validation/top1": 0.4855}}]}
    (copied / "report").mkdir()
    (copied / "report" / "results.json").write_text(json.dumps(report))
    rows, bad = verified(copied, "run", *NOW, "--report", copied / "report")
    assert f"evaluation {STEPS}" in bad and "evaluation 2" not in bad
    told = next(row["detail"] for row in rows if row["what"] == f"evaluation {STEPS}")
    assert "validation/top1 0.4855, computed " in told
    skipped = next(row for row in rows if row["what"] == "evaluations")
    assert skipped["is_sound"] is None and "2-4" not in skipped["detail"] and "2, 4" in skipped["detail"]
    assert json.loads((run / "verified.json").read_text())["exit_code"] == 3
    assert verification(run, str(run / "checkpoints")).startswith("no")


@pytest.mark.slow  # takes all steps in processes of their own
def test_an_evaluation_of_a_step_in_between(copied):
    """Of a step whose checkpoint is there, and of one whose checkpoint is gone."""
    shutil.rmtree(copied / "run" / "checkpoints" / "step-00000002")
    for step in (2, 4):
        edit_evaluation(copied, step, 0.4855)
    assert verified(copied, "run", "--all", "--no-shards")[1] == ["evaluation 2", "evaluation 4"]


@pytest.mark.slow  # takes steps in processes of their own
@pytest.mark.parametrize(
    "factors",
    [
        {"master/": 1.0001},
        {"ema/": 1.0001},
        {"exp_avg/": 2},
        {"exp_avg_sq/": 1.0001},
        {"head.": 1.0001},
        {"master/": 2, "exp_avg/": math.nan, "exp_avg_sq/": 1.0001},  # any comparison with NaN is false
    ],
)
def test_the_state_of_the_last_checkpoint(copied, factors):
    """Most of them a little, as other hardware might have left them."""
    checkpoint = copied / "run" / "checkpoints" / f"step-{STEPS:08d}"
    path = checkpoint / "rank-00000.safetensors"
    tensors = load_file(path)
    forged = {
        key: value * math.prod(factor for part, factor in factors.items() if f"/{part}" in f"/{key}")
        for key, value in tensors.items()
    }
    assert any(not forged[key].equal(tensors[key]) for key in tensors)
    save_file(forged, path)
    write_again(checkpoint, path)
    bad = verified(copied, "run", *LAST_LINK)[1]
    assert bad == [f"checkpoint {STEPS}", f"weights of the result (step {STEPS})"]


@pytest.mark.slow  # takes steps in processes of their own
def test_a_moment_of_another_shape(copied):
    """In a file and an index that fit each other."""
    checkpoint = copied / "run" / "checkpoints" / f"step-{STEPS:08d}"
    path = checkpoint / "rank-00000.safetensors"
    tensors = load_file(path)
    key = next(key for key in sorted(tensors) if key.startswith("exp_avg/"))
    name = key.removeprefix("exp_avg/").removesuffix("@0")
    tensors[key] = tensors[key].flatten()[:3].clone()
    save_file(tensors, path)
    write_again(checkpoint, path, state_shapes={"exp_avg": {name: [3]}})
    assert f"weights of the result (step {STEPS})" in verified(copied, "run", *LAST_LINK)[1]


def test_a_checkpoint_of_a_step_that_no_run_reaches(copied):
    """Nothing counts up to it."""
    far, checkpoint = 10**15, copied / "run" / "checkpoints" / f"step-{STEPS:08d}"
    (checkpoint / "index.json").write_text(index_text(replace(read_index(checkpoint), step=far, position=far)))
    checkpoint.rename(checkpoint.with_name(f"step-{far}"))
    assert {"metrics.jsonl", "DONE"} <= set(verified(copied, "run", *NOTHING)[1])


@pytest.mark.parametrize("is_best", [True, False])
def test_an_evaluation_on_another_dataset(copied, is_best):
    """In the index of its checkpoint alone; its metrics are those of that dataset."""
    checkpoints, key = copied / "run" / "checkpoints", "eval/validation/loss"
    edit_recipe(checkpoints / "step-00000002", "easy")
    if is_best:
        lines = [line | {key: 0.0} if line["step"] == 2 and key in line else line for line in lines_of(copied)]
        write_lines(copied, lines)
        index = read_index(checkpoints / f"step-{STEPS:08d}")
        state = index.selection | {"best": 0.0, "best_step": 2, "without_better": STEPS // 2 - 1}
        (checkpoints / f"step-{STEPS:08d}" / "index.json").write_text(index_text(replace(index, selection=state)))
        write_done(copied, done_of(copied) | {"best_step": 2})
    rows, bad = verified(copied, "run", *NOTHING)
    found = {row["what"]: row["is_sound"] for row in rows}
    assert found["recipe of evaluation 2"] is (False if is_best else None)
    assert bad == (["recipe of evaluation 2"] if is_best else [])


@pytest.mark.parametrize("by_path", [True, False])
def test_the_dataset_of_an_evaluation_is_named(copied, by_path):
    """One that the recipe names by a path is none of those under --data-root, which somebody trusts."""
    test, run = copied / "data" / "test", copied / "run"
    if by_path:
        for checkpoint in (run / "checkpoints").glob("step-*"):
            edit_recipe(checkpoint, str(test))
        content = yaml.safe_load((run / "recipe.yaml").read_text())
        content["evaluation"]["validation"] = str(test)
        (run / "recipe.yaml").write_text(yaml.safe_dump(content))
    findings = verify_run(run, Asked(steps=0, shards=False, root=str(copied / "data")))
    found = next(finding for finding in findings if finding.what.startswith("evaluation set"))
    assert found.is_sound is (None if by_path else True)
    assert str(test) in found.detail
    assert json.loads((test / "manifest.json").read_text())["checksum"] in found.detail


def test_weights_that_the_run_did_not_begin_with(root, copied):
    """The recipe names another run's weights, in every file."""
    blocks = {"checkpoint": {"every": {"steps": 2}}, "evaluation": {"validation": None}}
    begin = {**blocks, "init": {"from": str(root / "runs" / "other")}}
    launch(root, [job("begun", begin, 4)], 1)
    shutil.copytree(root / "runs" / "begun", copied / "begun")
    assert verified(copied, "begun", *NOTHING)[1] == []
    paths = [copied / "begun" / "recipe.yaml", *(copied / "begun" / "checkpoints").glob("step-*/index.json")]
    for path in paths:
        text = path.read_text().replace(str(root / "runs" / "other"), str(root / "runs" / "run"))
        path.write_text(text)
        if path.name == "index.json":
            content = json.loads(text)
            del content["schema_version"], content["checksum"]
            path.write_text(
                index_text(CheckpointIndex(**content | {"files": [FileEntry(**each) for each in content["files"]]}))
            )
    assert verified(copied, "begun", *NOTHING)[1] == ["init.from"]


@pytest.mark.slow  # takes steps in processes of their own
def test_a_run_of_two_ranks_on_one(root, copied):
    """Some states are equal to the last bit there, others in all numbers but five, and sums are not."""
    blocks = {"precision": "fp32", "checkpoint": {"every": {"steps": 2}, "keep": 20}, "ema": {"decay": 0.5}}
    launch(root, [job("two", blocks)], 2)
    shutil.copytree(root / "runs" / "two", copied / "two")
    rows, bad = verified(copied, "two", "--world", 1, "--steps", STEPS)
    assert not bad, rows


@pytest.mark.slow  # takes steps in processes of their own
def test_a_checkpoint_of_another_run_that_says_it_is_of_this_one(root, copied):
    name = f"step-{STEPS:08d}"
    own, other = (root / "runs" / run / "checkpoints" / name for run in ("run", "other"))
    target = copied / "run" / "checkpoints" / name
    shutil.copy(other / "rank-00000.safetensors", target)
    (target / "index.json").write_text(index_text(read_index(own)))
    write_again(target, target / "rank-00000.safetensors")
    assert f"checkpoint {STEPS}" in verified(copied, "run", *LAST_LINK)[1]


@pytest.mark.parametrize("change", ["gone", "more"])
def test_lines_of_evaluations_that_are_gone_or_too_many(copied, change):
    lines = lines_of(copied)
    if change == "gone":
        lines = [line for line in lines if line["step"] != 2 or "loss" in line]
    else:
        lines.append({**next(line for line in lines if "eval/validation/top1" in line), "step": 3})
    write_lines(copied, lines)
    assert "metrics.jsonl" in verified(copied, "run", *NOTHING)[1]


def test_another_best_step(copied):
    done = done_of(copied)
    another = {"best_step": 2 if done["best_step"] != 2 else 4}
    write_done(copied, done | another)
    assert verified(copied, "run", *NOTHING)[1] == ["DONE"]
    checkpoint = copied / "run" / "checkpoints" / f"step-{STEPS:08d}"
    index = read_index(checkpoint)
    changed = replace(index, selection=index.selection | another)
    (checkpoint / "index.json").write_text(index_text(changed))
    assert verified(copied, "run", *NOTHING)[1] == [f"checkpoint {STEPS}"]
