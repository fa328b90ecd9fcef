"""A run against its own files, steps and evaluations: sound as it is, and each way of tampering is named."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from ranks import STEPS, launch, make_data
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

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
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and another of another seed, with checkpoints of all even steps."""
    root = tmp_path_factory.mktemp("verified")
    make_data(root)
    blocks = {
        "checkpoint": {"every": {"steps": 2}, "keep": 20},
        "evaluation": {"validation": "test", "every": {"steps": 2}},
        "selection": {"metric": "validation/loss", "mode": "min"},
        "ema": {"decay": 0.5},
    }
    jobs = [
        {"name": "run", "stops": [None], "blocks": [blocks]},
        {"name": "other", "stops": [None], "blocks": [{**blocks, "seed": 7}]},
    ]
    launch(root, jobs, 1)
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


def edit_line(folder, step, **values):
    path = folder / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["step"] == step and "loss" in line:
            line.update({key: change(line[key]) for key, change in values.items()})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def edit_evaluation(folder, step, top1):
    """In every file that has it."""
    path = folder / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["step"] == step and "eval/validation/top1" in line:
            line["eval/validation/top1"] = top1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = json.loads((folder / "run" / "DONE").read_text())
    if done["step"] == step:
        done["evaluation"]["validation/top1"] = top1
        (folder / "run" / "DONE").write_text(json.dumps(done))


def write_again(checkpoint, path):
    """Have the index say what the file is now, as somebody who knows the format would."""
    index = read_index(checkpoint)
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


def test_one_line_of_metrics(copied):
    edit_line(copied, 3, loss=lambda loss: loss * 0.999)
    assert verified(copied, "run", "--steps", STEPS, "--no-shards", "--no-evaluations")[1] == ["steps 3 to 4"]


def test_a_line_that_is_gone_and_one_with_another_rate(copied):
    path = copied / "run" / "metrics.jsonl"
    lines = [line for line in path.read_text().splitlines() if json.loads(line)["step"] != 2]
    path.write_text("\n".join(lines) + "\n")
    assert verified(copied, "run", *NOTHING)[1] == ["metrics.jsonl"]
    shutil.copy(copied / "run" / "metrics.jsonl", copied / "kept")
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


def edit_lines(folder, change):
    path = folder / "run" / "metrics.jsonl"
    lines = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("key", ["exaflops", "images_per_s", "world_size"])
def test_what_a_run_has_cost(copied, key):
    edit_lines(copied, lambda line: line | ({key: line[key] * 0.5} if key in line else {}))
    assert verified(copied, "run", *NOTHING)[1] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("key", "value"), [("exaflops", 1e-9), ("stopped_early", True), ("total_steps", 4), ("best_step", None)]
)
def test_an_end_with_another_figure(copied, key, value):
    done = json.loads((copied / "run" / "DONE").read_text())
    (copied / "run" / "DONE").write_text(json.dumps(done | {key: value}))
    assert verified(copied, "run", *NOTHING)[1] == ["DONE"]


@pytest.mark.parametrize("stopped_early", [False, True])
def test_an_end_of_an_unfinished_run(copied, stopped_early):
    shutil.rmtree(copied / "run" / "checkpoints" / f"step-{STEPS:08d}")
    path = copied / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines if line["step"] < STEPS - 1))
    state = read_index(copied / "run" / "checkpoints" / f"step-{STEPS - 2:08d}").selection
    done = json.loads((copied / "run" / "DONE").read_text())
    done |= {"step": STEPS - 2, "best_step": state["best_step"], "stopped_early": stopped_early, "evaluation": {}}
    done["exaflops"] *= (STEPS - 2) / STEPS
    (copied / "run" / "DONE").write_text(json.dumps(done))
    assert verified(copied, "run", *NOTHING)[1] == ["DONE"]


@pytest.mark.parametrize("line", ["loss", "eval/validation/top1"])
def test_a_line_after_the_end(copied, line):
    path = copied / "run" / "metrics.jsonl"
    last = next(row for row in map(json.loads, reversed(path.read_text().splitlines())) if line in row)
    more = {"lr", "images_seen", "exaflops"} & last.keys()
    with path.open("a") as file:
        file.write(json.dumps({key: last[key] for key in last if key not in more} | {"step": STEPS + 1}) + "\n")
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
    launch(root, [{"name": "more", "stops": [4, None], "blocks": every}], 1)
    shutil.copytree(root / "runs" / "more", copied / "more")
    assert verified(copied, "more", *NOTHING)[1] == []


def test_another_recipe_and_another_end(copied):
    path = copied / "run" / "recipe.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"seed": 9}))
    done = json.loads((copied / "run" / "DONE").read_text())
    done["evaluation"]["validation/top1"] = 1.0
    (copied / "run" / "DONE").write_text(json.dumps(done))
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
    ("part", "factor"),
    [("master/", 1.0001), ("ema/", 1.0001), ("exp_avg/", 2), ("exp_avg_sq/", 1.0001), ("head.", 1.0001)],
)
def test_the_state_of_the_last_checkpoint(copied, part, factor):
    """Most of them a little, as other hardware might have left them."""
    checkpoint = copied / "run" / "checkpoints" / f"step-{STEPS:08d}"
    path = checkpoint / "rank-00000.safetensors"
    tensors = load_file(path)
    forged = {key: value * factor if f"/{part}" in f"/{key}" else value for key, value in tensors.items()}
    assert any(not forged[key].equal(tensors[key]) for key in tensors)
    save_file(forged, path)
    write_again(checkpoint, path)
    bad = verified(copied, "run", *LAST_LINK)[1]
    assert bad == [f"checkpoint {STEPS}", f"weights of the result (step {STEPS})"]


def test_weights_that_the_run_did_not_begin_with(root, copied):
    """The recipe names another run's weights, in every file."""
    blocks = {"checkpoint": {"every": {"steps": 2}}, "evaluation": {"validation": None}}
    begin = {**blocks, "init": {"from": str(root / "runs" / "other")}}
    launch(root, [{"name": "begun", "stops": [4], "blocks": [begin]}], 1)
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
    launch(root, [{"name": "two", "stops": [None], "blocks": [blocks]}], 2)
    shutil.copytree(root / "runs" / "two", copied / "two")
    rows, bad = verified(copied, "two", "--world", 1, "--steps", STEPS)
    assert not bad, rows


@pytest.mark.slow  # takes steps in processes of their own
def test_every_loss_a_little_lower(copied):
    for step in range(1, STEPS + 1):
        edit_line(copied, step, loss=lambda loss: loss - 0.001)
    assert verified(copied, "run", *LAST_LINK)[1] == [f"steps {STEPS - 1} to {STEPS}"]


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
    path = copied / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if change == "gone":
        lines = [line for line in lines if line["step"] != 2 or "loss" in line]
    else:
        lines.append({**next(line for line in lines if "eval/validation/top1" in line), "step": 3})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "metrics.jsonl" in verified(copied, "run", *NOTHING)[1]


def test_another_best_step(copied):
    done, run = json.loads((copied / "run" / "DONE").read_text()), copied / "run"
    (run / "DONE").write_text(json.dumps(done | {"best_step": 2 if done["best_step"] != 2 else 4}))
    assert verified(copied, "run", *NOTHING)[1] == ["DONE"]
    checkpoint = run / "checkpoints" / f"step-{STEPS:08d}"
    index = read_index(checkpoint)
    changed = replace(index, selection=index.selection | {"best_step": 2 if done["best_step"] != 2 else 4})
    (checkpoint / "index.json").write_text(index_text(changed))
    assert verified(copied, "run", *NOTHING)[1] == [f"checkpoint {STEPS}"]


def test_an_evaluation_set_that_the_checkpoints_do_not_name(copied):
    path = copied / "run" / "recipe.yaml"
    content = yaml.safe_load(path.read_text())
    content["evaluation"]["validation"] = "train"
    path.write_text(yaml.safe_dump(content))
    assert verified(copied, "run", *NOTHING)[1] == ["recipe.yaml"]
