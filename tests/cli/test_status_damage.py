"""`vitscale status` on a directory in whatever state."""

import json
import shutil
import threading
from pathlib import Path

import pytest
from messages import assert_messages
from status_of_runs import save_checkpoint, shown, status
from typer.testing import CliRunner

from vitscale.about.status import RunReader
from vitscale.cli.main import app
from vitscale.ground.errors import RecipeError


def as_empty(run_dir: Path) -> None:
    shutil.rmtree(run_dir)
    run_dir.mkdir()


def as_file(run_dir: Path) -> None:
    shutil.rmtree(run_dir)
    run_dir.touch()


def without_recipe(run_dir: Path) -> None:
    shutil.rmtree(run_dir)
    (run_dir / "pictures").mkdir(parents=True)


def with_a_folder_for_metrics(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").unlink()
    (run_dir / "metrics.jsonl").mkdir()


@pytest.mark.parametrize(
    ("spoil", "code"),
    [(shutil.rmtree, 2), (as_empty, 2), (as_file, 2), (without_recipe, 2), (with_a_folder_for_metrics, 3)],
)
def test_what_is_no_run_is_one_line(run_dir, spoil, code):
    spoil(run_dir)
    result = CliRunner().invoke(app, ["status", str(run_dir)])
    assert result.exit_code == code and len(result.stderr.splitlines()) == 1
    assert_messages("status", {spoil.__name__: result.stderr.rstrip()}, {run_dir: "RUN"})


def test_a_url_is_no_run():
    result = CliRunner().invoke(app, ["status", "s3://me:secret@bucket/run"])
    assert result.exit_code == 2 and "secret" not in result.stderr
    assert_messages("status", {"URL": result.stderr.rstrip()})


def newer_recipe(run_dir: Path) -> None:
    with (run_dir / "recipe.yaml").open("a") as file:
        file.write("quantum: true\n")


def damaged_lines(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n[1]\n{"step": true}\n{"step": 1e400, "step_time_s": 1}\n' + b"[" * 100_000 + b"\n")


def damaged_launches(run_dir: Path) -> None:
    (run_dir / "launch.jsonl").write_text(
        '{"event": "started"}\n{"time": 5}\n{"time": "2026-01-01T00:00:00+00:00"}\n{"ti'
    )


@pytest.mark.parametrize(
    ("spoil", "note"),
    [
        (newer_recipe, "quantum: unknown key"),
        (lambda run_dir: (run_dir / "recipe.yaml").write_text("a: ["), "recipe.yaml"),
        (lambda run_dir: (run_dir / "recipe.yaml").unlink(), "recipe.yaml"),
        (damaged_lines, "damaged lines of metrics.jsonl left out: 5"),
        (damaged_launches, "damaged lines of launch.jsonl left out: 2"),
        (lambda run_dir: (run_dir / "checkpoints").touch(), "checkpoints cannot be read: Not a directory"),
    ],
)
def test_what_is_damaged_is_noted_and_the_rest_is_told(run_dir, spoil, note):
    spoil(run_dir)
    (found,) = status(run_dir)
    assert found["step"] == 20 and note in found["notes"][0] and "\n" not in found["notes"][0]
    assert note in shown(run_dir)


def test_before_the_first_step(run_dir):
    (run_dir / "metrics.jsonl").unlink()
    assert "none yet, of 100" in shown(run_dir)
    (run_dir / "metrics.jsonl").touch()
    (found,) = status(run_dir)
    assert (found["step"], found["loss"], found["left_s"], found["hours"]) == (None, None, None, None)
    (run_dir / "recipe.yaml").unlink()
    assert "not running" in shown(run_dir)


def test_a_run_that_is_removed_while_it_is_read(run_dir):
    save_checkpoint(run_dir / "checkpoints", 20)
    kept, ended = run_dir.parent / "kept", threading.Event()
    shutil.copytree(run_dir, kept)

    def come_and_go() -> None:
        while not ended.is_set():
            shutil.rmtree(run_dir)
            shutil.copytree(kept, run_dir)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    reader = RunReader(str(run_dir))
    answers = set()
    try:
        while len(answers) < 2:
            try:
                answers.add(type(reader.read()))
            except RecipeError:
                answers.add(RecipeError)
    finally:
        ended.set()
        thread.join()


def test_names_that_would_steer_a_terminal(run_dir):
    (run_dir / "launch.jsonl").write_text(
        json.dumps({"time": "2026-01-01T00:00:00+00:00", "event": "restart", "host": "\x1b[31m", "cause": "[red]x"})
        + "\n"
    )
    text = shown(run_dir)
    assert "\x1b" not in text and "[red]x" in text


def test_several_runs_one_of_them_missing(run_dir):
    other = run_dir.parent / "other"
    shutil.copytree(run_dir, other)
    result = CliRunner().invoke(app, ["status", str(run_dir), "/no/such", str(other)])
    assert result.exit_code == 2 and "/no/such" in result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[0] for row in rows if "2,048.0" in row] == [str(run_dir), str(other)]
