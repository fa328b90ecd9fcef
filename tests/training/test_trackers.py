"""A run's metrics across crashes, resumes and disks that fail, in its file and with trackers, which never end it."""

import contextlib
import json
import threading
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, register_tracker_class
from ranks import make_recipe
from small_disk import small_disk

from vitscale.ground.errors import RecipeError
from vitscale.recipe.watching import Logging, Tracker
from vitscale.training.watching import trackers
from vitscale.training.watching.trackers import MetricsWriter

RELEASED = threading.Event()
"""Ends what hangs, at the end of its test."""


class Notebook(GeneralTracker):
    """Writes one file a run, notebook-N, with a line for each call."""

    name = "notebook"
    requires_logging_directory = True
    tracker = None

    def __init__(self, project: str, folder: str) -> None:
        super().__init__()
        self._folder = Path(folder)

    def start(self) -> None:
        self._file = self._folder / f"{self.name}-{len(list(self._folder.glob(f'{self.name}-*')))}"
        self._file.touch()

    def log(self, values: dict[str, Any], step: int | None = None, **others: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps([step, values]) + "\n")

    def finish(self) -> None:
        with self._file.open("a") as file:
            file.write('"finished"\n')


class RefusesToStart(Notebook):
    name = "refuses_to_start"

    def start(self) -> None:
        raise ConnectionRefusedError("no server")


class RefusesPoints(Notebook):
    name = "refuses_points"

    def log(self, values: dict[str, Any], step: int | None = None, **others: Any) -> None:
        raise SystemExit("quota exceeded")


class NeverAnswers(Notebook):
    name = "never_answers"

    def start(self) -> None:
        RELEASED.wait()


for kind in (Notebook, RefusesToStart, RefusesPoints, NeverAnswers):
    register_tracker_class(kind)


def notebook(run_dir: Path, number: int = 0) -> list[Any]:
    return [json.loads(line) for line in (run_dir / f"notebook-{number}").read_text().splitlines()]


def write(run_dir: Path, names: list[str], steps: range, resume_step: int, factor: float = 1.0) -> None:
    """What one process logs."""
    writer = MetricsWriter(run_dir, resume_step, names)
    for step in steps:
        writer.training(step, {"loss": factor * step, "slowest_rank": "1 (host)"})
    writer.evaluation(steps[-1], {"validation/top1": factor})
    writer.close()


def test_a_tracker_gets_the_numbers_by_the_names_that_tensorboard_shows(tmp_path):
    write(tmp_path, ["notebook"], range(1, 3), 0)
    assert notebook(tmp_path) == [
        [1, {"train/loss": 1.0}],
        [2, {"train/loss": 2.0}],
        [2, {"eval/validation/top1": 1.0}],
        "finished",
    ]


def test_steps_that_are_done_again_are_there_once(tmp_path):
    """A run that cannot take points back is left, and the next one begins with what counts of it."""
    write(tmp_path, ["notebook"], range(1, 6), 0)
    write(tmp_path, ["notebook"], range(4, 7), 3, factor=-1.0)
    expected = [*range(1, 4), *range(-4, -7, -1)]
    assert [row[1]["train/loss"] for row in notebook(tmp_path, 1) if "train/loss" in row[1]] == expected
    assert [abs(loss) for loss in expected] == [row[0] for row in notebook(tmp_path, 1) if "train/loss" in row[1]]


@pytest.mark.parametrize("name", ["refuses_to_start", "refuses_points", "never_answers"])
def test_what_fails_is_a_warning_and_disturbs_nobody_else(tmp_path, caplog, monkeypatch, name):
    for limit in ("_STARTED_WITHIN_S", "_ENDED_WITHIN_S"):
        monkeypatch.setattr(trackers, limit, 1.0)
    RELEASED.clear()
    write(tmp_path, [name, "notebook"], range(1, 4), 0)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and name in record.getMessage()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4 == len(notebook(tmp_path)) - 1
    RELEASED.set()


def test_every_tracker_of_a_recipe_is_one_of_accelerates():
    assert set(get_args(Tracker)) <= LOGGER_TYPE_TO_CLASS.keys()


def test_mlflow_continues_its_run_or_begins_a_new_one_with_what_counts(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    run_dir = tmp_path / "photos"
    run_dir.mkdir()

    def runs(kind: int = mlflow.entities.ViewType.ACTIVE_ONLY) -> list[Any]:
        (experiment,) = [each for each in client.search_experiments() if each.name == "vitscale"]
        return client.search_runs([experiment.experiment_id], run_view_type=kind)

    client = mlflow.MlflowClient()
    write(run_dir, ["mlflow"], range(1, 4), 0)
    (first,) = runs()
    write(run_dir, ["mlflow"], range(4, 7), 3)  # goes on where it ended
    (continued,) = runs()
    assert continued.info.run_id == first.info.run_id and continued.info.run_name == "photos"
    write(run_dir, ["mlflow"], range(6, 9), 5, factor=-1.0)  # step 6 is done again
    (current,) = runs()
    assert current.info.run_id != first.info.run_id and current.info.status == "FINISHED"
    (deleted,) = runs(mlflow.entities.ViewType.DELETED_ONLY)
    assert deleted.info.run_id == first.info.run_id
    losses = client.get_metric_history(current.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in losses] == [(step, step if step < 6 else -step) for step in range(1, 9)]
    top1 = client.get_metric_history(current.info.run_id, "eval/validation/top1")
    assert [(each.step, each.value) for each in top1] == [(3, 1.0), (8, -1.0)]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({}, ["tensorboard"]),
        ({"trackers": []}, []),
        ({"tensorboard": True}, ["tensorboard"]),
        ({"tensorboard": False}, []),
        ({"tensorboard": False, "trackers": ["tensorboard", "mlflow"]}, ["mlflow"]),
        ({"tensorboard": True, "trackers": ["mlflow"]}, ["tensorboard", "mlflow"]),
    ],
)
def test_recipes_from_before_there_were_trackers_mean_the_same(block, expected):
    assert Logging.model_validate(block).trackers == expected
    assert Logging.model_validate(block).model_dump().keys() == {"every", "trackers", "batch_digest"}


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"trackers": ["mlfow"]}, ["logging.trackers", "did you mean 'mlflow'"]),
        ({"trackers": ["mlflow", "mlflow"]}, ["logging", "twice"]),
        ({"tensorboard": "yes"}, ["logging.tensorboard"]),
    ],
)
def test_mistakes_name_their_key(tmp_path, block, words):
    with pytest.raises(RecipeError) as caught:
        make_recipe(tmp_path, logging=block)
    assert all(word in str(caught.value) for word in words), caught.value


# ---- The file, and TensorBoard ---------------------------------------------------------------------------------------


def rows(run_dir):
    """The lines, without their times, which have to be in order."""
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines() if line]
    times = [datetime.fromisoformat(row.pop("time")) for row in found]
    assert times == sorted(times)
    return found


def test_resuming_drops_later_lines_and_a_torn_one(tmp_path):
    first = MetricsWriter(tmp_path, resume_step=0, trackers=[])
    for step in range(1, 6):
        first.training(step, {"loss": float(step)})
        first.evaluation(step, {"val/top1": 0.1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": null}\n[1]\n{"step": 6, "lo')
    MetricsWriter(tmp_path, resume_step=3, trackers=[]).training(4, {"loss": -4.0})
    assert [row["step"] for row in rows(tmp_path)] == [1, 1, 2, 2, 3, 3, 4]
    assert rows(tmp_path)[-1]["loss"] == -4.0
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    MetricsWriter(tmp_path, resume_step=0, trackers=[])
    assert rows(tmp_path) == []


def test_tensorboard_leaves_no_trace_where_the_directory_vanishes(tmp_path, caplog, capsys):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    writer = MetricsWriter(run_dir, resume_step=0, trackers=["tensorboard"])
    run_dir.rename(tmp_path / "elsewhere")
    for step in range(1, 100):
        writer.training(step, {"loss": 1.0})
        writer.evaluation(step, {"val/top1": 1.0})
    writer.close()
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]  # metrics.jsonl, TensorBoard
    assert str(run_dir) in caplog.text
    assert capsys.readouterr().err == "" and not run_dir.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_does_not_end_training(tmp_path, caplog):
    with small_disk(tmp_path / "run", "16k") as run_dir:
        writer = MetricsWriter(run_dir, resume_step=0, trackers=[])
        (run_dir / "metrics.jsonl").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (run_dir / "other").write_bytes(bytes(1 << 16))
        writer.training(1, {"loss": 1.0})
        writer.training(2, {"loss": 1.0})
    assert len(caplog.records) == 1 and "No space left" in caplog.text


def test_tensorboard_holds_the_same_and_hides_what_is_done_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, ["tensorboard"], range(1, 4), 0)
    assert not (tmp_path / "trackers").exists()
    write(tmp_path, ["tensorboard"], range(3, 4), 2, factor=10.0)
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [(event.step, event.value) for event in accumulator.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert set(accumulator.Tags()["scalars"]) == {"train/loss", "eval/validation/top1"}


def test_a_directory_that_comes_back_is_written_on(tmp_path, caplog):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with contextlib.closing(MetricsWriter(run_dir, resume_step=0, trackers=[])) as writer:
        writer.training(1, {"loss": 1.0})
        run_dir.rename(tmp_path / "away")
        writer.training(2, {"loss": 1.0})
        (tmp_path / "away").rename(run_dir)
        writer.training(3, {"loss": 1.0})
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 3] and caplog.text.count("BEING LOST") == 1
