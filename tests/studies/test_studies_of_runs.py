"""Real studies of tiny runs: killed and repeated, told to end, with an entry that fails or has changed."""

import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from processes import wait_until
from studies.tiny import SPLITS, write_study

from vitscale.data.shards.generated import write_generated_dataset
from vitscale.runs.metrics import MetricsLog

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
CANDIDATES = ["a-colours-lr0.001", "a-colours-lr0.3"]
REFITS = ["a-colours-full-seed0", "a-colours-full-seed1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data")
    for seed, (split, samples) in enumerate({"train": 64, "dev": 35, "full": 96, "test": 42}.items()):
        write_generated_dataset(root / "colours" / split, [samples], seed=seed)
    return root


def selecting(data: Path, **more) -> dict:
    """A part of two candidates whose winner is run twice more."""
    return {
        "settings": {"data.root": str(data), **more},
        "grid": [{"optimizer.lr": [0.001, 0.3]}],
        "datasets": {"colours": SPLITS},
        "selection": {"metric": "dev/loss", "mode": "min"},
        "refit": {"seeds": [0, 1]},
    }


def plain(data: Path) -> dict:
    """Settings of a part without splits."""
    return {"data.root": str(data), "data.train": "colours/train"}


def command(folder: Path, *arguments: str) -> list[str]:
    program = [sys.executable, "-m", "vitscale", "study"]
    return [*program, str(folder / "study.yaml"), "--dir", str(folder / "out"), *arguments]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command(folder, *arguments), env=ENVIRONMENT, cwd=folder, capture_output=True, text=True)
    assert "Traceback" not in result.stderr, result.stderr
    return result


def results(folder: Path) -> dict:
    return json.loads((folder / "out" / "results.json").read_text())


def states(folder: Path) -> dict[str, str]:
    return {entry["name"]: entry["state"] for entry in results(folder)["entries"]}


def files(run_dir: Path) -> dict[str, tuple[int, str]]:
    """When each file of a run was written, and its digest."""
    found = [path for path in run_dir.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()) for path in found}


def wait_for(path: Path, process: subprocess.Popen) -> None:
    """Until the process has made the file, or has ended."""
    wait_until(lambda: path.exists() or process.poll() is not None, 300)
    assert process.poll() is None


def last_evaluation(run_dir: Path) -> dict:
    log = MetricsLog(run_dir / "metrics.jsonl", whole=True)
    log.refresh()
    return log.evaluations[-1][1]


@pytest.mark.slow
def test_a_study_that_is_killed_and_repeated_ends_as_one_that_is_left_in_peace(data, tmp_path):
    peace, killed = tmp_path / "peace", tmp_path / "killed"
    for folder in (peace, killed):
        folder.mkdir()
        write_study(folder, {"a": selecting(data)})

    with subprocess.Popen(command(killed), env=ENVIRONMENT, cwd=killed, stderr=subprocess.DEVNULL) as process:
        second = killed / "out" / CANDIDATES[1]
        wait_for(second / "recipe.yaml", process)  # its rank has begun
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert children
    psutil.wait_procs(children, 30)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert states(killed)[CANDIDATES[0]] == "done" and not (second / "DONE").exists()
    first = files(killed / "out" / CANDIDATES[0])

    assert run(killed).returncode == 0
    assert files(killed / "out" / CANDIDATES[0]) == first, "a finished entry is not touched"
    assert run(peace, "--slots", "2").returncode == 0
    mine, theirs = results(killed), results(peace)
    for one, other in zip(mine["entries"], theirs["entries"], strict=True):
        assert one["metrics"] == other["metrics"] and one["state"] == "done", one["name"]
    assert [entry["name"] for entry in mine["entries"]] == [*CANDIDATES, *REFITS]

    # What results.json says, from the runs' own files.
    losses = {name: last_evaluation(killed / "out" / name)["validation/loss"] for name in CANDIDATES}
    (choice,) = mine["choices"]
    best = min(losses, key=losses.__getitem__)
    assert choice["winner"] == best.removeprefix("a-colours-")
    assert choice["decided_by"] == {"split": "dev", "datasets": ["colours/dev"]}
    assert {row["entries"][0]: row["mean"] for row in choice["candidates"]} == losses
    tested = [last_evaluation(killed / "out" / name)["validation/top1"] for name in REFITS]
    (summary,) = (row for row in mine["summaries"] if row["split"] == "test")
    assert summary["seeds"] == [0, 1] and summary["metrics"]["validation/top1"] == {
        "mean": pytest.approx(statistics.fmean(tested)),
        "std": pytest.approx(statistics.stdev(tested)),
        "n": 2,
    }
    by_name = {entry["name"]: entry for entry in mine["entries"]}
    assert by_name[REFITS[1]]["evaluated_on"] == {"split": "test", "dataset": "colours/test"}
    assert by_name[REFITS[1]]["grid"] == {"optimizer.lr": float(choice["winner"].removeprefix("lr"))}

    # Once more: nothing is left to do. Then with a field changed, which every begun run of that part has to tell.
    before = {name: files(killed / "out" / name) for name in by_name}
    again = run(killed)
    assert again.returncode == 0 and before == {name: files(killed / "out" / name) for name in by_name}
    write_study(killed, {"a": selecting(data, **{"optimizer.weight_decay": 0.5})})
    changed = run(killed)
    assert changed.returncode == 2 and changed.stdout == ""
    for name in (*CANDIDATES, *REFITS):
        assert f"{name}: optimizer.weight_decay: 0.0 -> 0.5" in changed.stderr
    assert before == {name: files(killed / "out" / name) for name in by_name}


def test_what_entries_read_is_checked_before_the_first_one_starts(data, tmp_path):
    root = tmp_path / "data"
    shutil.copytree(data, root)
    shutil.rmtree(root / "colours" / "test")
    manifest = json.loads((root / "colours" / "dev" / "manifest.json").read_text())
    del manifest["checksum"]
    manifest["class_names"] = manifest["class_names"][::-1]
    (root / "other").mkdir()
    manifest["shards"][0]["path"] = "../colours/dev/" + manifest["shards"][0]["path"]
    (root / "other" / "manifest.json").write_text(json.dumps(manifest))
    (root / "weights.npz").write_bytes(b"no weights")
    parts = {
        "a": selecting(root),
        "b": {"settings": plain(root) | {"evaluation.validation": "other"}},
        "c": {"settings": plain(root) | {"evaluation.validation": "colours/train"}, "seeds": [0, 1, 2, 3, 4]},
        "d": {"settings": plain(root) | {"init.from": str(root / "weights.npz")}},
        "e": {"settings": plain(root) | {"data.train": "nowhere"}},
        "good": {"settings": plain(root)},
        "after": {"from": ["good"], "settings": plain(root)},
    }
    write_study(tmp_path, parts)
    result = run(tmp_path)
    assert result.returncode == 2 and not (tmp_path / "out").exists()
    lines = [line for line in result.stderr.splitlines() if line.startswith("    ")]
    assert len(lines) == 5, result.stderr
    named = ["a-colours-full-seed0, a-colours-full-seed1", "b", "c-seed0, c-seed1, c-seed2 and 2 more", "d", "e"]
    words = ["colours/test", "other", "64 of the 64 samples", "weights.npz", "nowhere"]
    for line, name, word in zip(lines, named, words, strict=True):
        assert line.startswith(f"    {name}: ") and word in line, line


def test_the_choice_is_made_without_the_test_split_and_a_failed_entry_stops_only_its_dependants(data, tmp_path):
    """The test split is not even there: candidates run and the winner is chosen; what evaluates on it fails."""
    root = tmp_path / "data"
    shutil.copytree(data, root)
    shutil.rmtree(root / "colours" / "test")
    refit = REFITS[0]
    parts = {
        "a": selecting(root) | {"refit": {"seeds": [0]}},
        "b": {"from": [refit], "settings": plain(root)},
        "c": {"settings": plain(root)},
    }
    write_study(tmp_path, parts)
    result = run(tmp_path, "--slots", "2", "--no-check")
    assert result.returncode == 3
    assert states(tmp_path) == {**dict.fromkeys(CANDIDATES, "done"), refit: "failed", "b": "not run", "c": "done"}
    (choice,) = results(tmp_path)["choices"]
    assert choice["winner"] in ("lr0.001", "lr0.3")
    by_name = {entry["name"]: entry for entry in results(tmp_path)["entries"]}
    assert by_name[refit]["exit_code"] == 3 and "colours/test" in by_name[refit]["why"]
    assert refit in by_name["b"]["why"] and refit in result.stderr

    # Mended, the repetition does what was left.
    finished = files(tmp_path / "out" / CANDIDATES[0])
    shutil.copytree(data / "colours" / "test", root / "colours" / "test")
    assert run(tmp_path, "--slots", "2").returncode == 0
    assert set(states(tmp_path).values()) == {"done"} and files(tmp_path / "out" / CANDIDATES[0]) == finished
    began_with = (tmp_path / "out" / "b" / "launch.log").read_text()
    assert str(tmp_path / "out" / refit) in began_with


def test_a_study_that_is_told_to_end_saves_and_goes_on(data, tmp_path):
    """And the first seeds of all come before the second ones."""
    settings = {**plain(data), "schedule.duration.steps": 100_000}
    write_study(tmp_path, {name: {"settings": settings, "seeds": [0, 1]} for name in ("a", "b")})
    begun = [tmp_path / "out" / name for name in ("a-seed0", "b-seed0")]
    with subprocess.Popen(
        command(tmp_path, "--slots", "2"), env=ENVIRONMENT, cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as process:
        for run_dir in begun:
            wait_for(run_dir / "metrics.jsonl", process)
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
    assert process.returncode == 85 and "repeat the command" in said
    assert all(list((run_dir / "checkpoints").glob("step-*/index.json")) for run_dir in begun)
    assert set((tmp_path / "out").glob("*-seed*")) == set(begun)
    assert states(tmp_path) == dict.fromkeys(("a-seed0", "a-seed1", "b-seed0", "b-seed1"), "waiting")
