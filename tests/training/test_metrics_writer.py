"""The metrics file across crashes, resumes and disks that fail."""

import contextlib
import json
from datetime import datetime
from pathlib import Path

import pytest
from small_disk import small_disk

from vitscale.training.watching.trackers import MetricsWriter


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

    first = MetricsWriter(tmp_path, resume_step=0, trackers=["tensorboard"])
    for step in (1, 2, 3):
        first.training(step, {"loss": float(step), "batch_digest": "00"})
    first.evaluation(3, {"val/top1": 0.5})
    first.close()
    assert not (tmp_path / "trackers").exists()
    resumed = MetricsWriter(tmp_path, resume_step=2, trackers=["tensorboard"])
    resumed.training(3, {"loss": 30.0})
    resumed.close()

    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [(event.step, event.value) for event in accumulator.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert set(accumulator.Tags()["scalars"]) == {"train/loss", "eval/val/top1"}
