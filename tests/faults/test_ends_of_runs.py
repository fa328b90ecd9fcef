"""What ends a run for good, what does not, and the codes that say so."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import chaos
import pytest
from small_disk import small_disk
from small_files import flip
from watched_runs import EVALUATED, LONG, MakeRun, Process, Run, finish, launch, pretrain

from vitscale.launch.ends import EXIT_DATA, EXIT_NON_FINITE, EXIT_PREEMPTED, EXIT_RECIPE, EXIT_RETRY


def test_a_loss_that_is_not_finite_ends_a_run_for_good(make_run: MakeRun, tmp_path):
    run = make_run(optimizer={"lr": 1e30, "clip_norm": None}, schedule={"duration": {"steps": 50}})
    with Process(launch(run), tmp_path / "log") as process:
        assert process.end() == EXIT_NON_FINITE
        assert "not finite" in process.text() and "optimizer.lr" in process.text()
    assert len(run.events("started")) == 1


@pytest.mark.slow
def test_no_checkpoint_that_can_be_read(make_run: MakeRun, undisturbed: Run, tmp_path):
    """A run is never started over silently, nor again and again."""
    run = make_run(**EVALUATED)
    shutil.copytree(undisturbed.dir, run.dir, ignore=shutil.ignore_patterns("DONE"))
    for file in run.checkpoints.glob("step-*/rank-00001.safetensors"):
        flip(file, file.stat().st_size // 2)
    with Process(launch(run), tmp_path / "log") as process:
        assert process.end() == EXIT_DATA
        assert f"none of the {len(run.saved())} checkpoints can be read" in process.text()
    assert len(run.events("started")) == len(undisturbed.events("started")) + 1


@pytest.mark.slow
def test_a_run_directory_that_goes_away_for_a_while(make_run: MakeRun, tmp_path):
    run = make_run(**LONG, checkpoint={"every": {"steps": 20}, "dir": str(tmp_path / "elsewhere")})
    away = run.dir.with_name("away")
    with Process(launch(run), tmp_path / "log") as process:
        process.until(lambda: run.step() >= 10)
        run.dir.rename(away)
        process.until(lambda: "METRICS ARE BEING LOST" in process.text())
        lost_from = Run(run.recipe, away).step()
        away.rename(run.dir)
        process.until(lambda: run.step() > lost_from + 10)
        process.signal(signal.SIGTERM)
        assert process.end() == EXIT_PREEMPTED, process.text()


@pytest.mark.slow
def test_told_to_end_while_the_disk_is_full(make_run: MakeRun, undisturbed: Run, tmp_path):
    run = make_run(**EVALUATED)
    log = tmp_path / "log"
    with small_disk(run.checkpoints, "16m"):
        with Process(launch(run), log) as process:
            process.until(lambda: run.step() >= 25 and run.saved())
            with (run.checkpoints / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError):
                while True:
                    filler.write(bytes(1 << 16))
            process.signal(signal.SIGTERM)
            assert process.end() == EXIT_RETRY, process.text()
            assert "ending without a checkpoint of step" in process.text()
        saved = run.saved()[-1]
        with Process(launch(run, "--max-restarts", "0"), log) as process:
            assert process.end() == EXIT_RETRY and "Make room" in process.text(), process.text()
        (run.checkpoints / "filler").unlink()
        assert f"at step {saved} of 100" in finish(run, log, undisturbed)


_MIB = 1 << 20
_LIMIT = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2); "
_LIMITED = [sys.executable, "-c", _LIMIT + "os.execv(sys.argv[2], sys.argv[2:])"]


@pytest.mark.slow
def test_too_large_a_micro_batch_for_the_memory_there_is(make_run: MakeRun, tmp_path):
    """The largest address space of the run in peace, less a third of what the activations of 128 images take."""

    def train(micro_batch: int, limit: int, name: str) -> tuple[int, int, str]:
        model = {"patch_size": 4, "width": 64, "depth": 4, "mlp_dim": 256, "num_heads": 2}
        batch = {"global": 128, "micro_max": micro_batch}
        data = {"train": "train", "image_size": 64}
        run = make_run(model=model, batch=batch, data=data, schedule={"duration": {"steps": 2}})
        run = Run(run.recipe, tmp_path / name)
        peak = 0
        with Process([*_LIMITED, str(limit), *pretrain(run)], tmp_path / f"{name}.log") as process:
            while process.code() is None:
                peak = max(peak, _peak_address_space(process.pid))
                time.sleep(0.01)
            return process.end(), peak, process.text()

    code, peak, _ = train(128, 1 << 40, "in-peace")
    assert code == 0
    limit = peak - 256 * _MIB
    code, _, text = train(128, limit, "too-large")
    assert code == EXIT_RECIPE and text.count("out of memory") == 1 and "Traceback" not in text, text
    advice = re.search(r"micro-batches of 128 images; (\d+) should fit: --set batch.micro_max=\1 ", text)
    assert advice, text
    code, _, text = train(int(advice[1]), limit, "as-advised")
    assert code == 0, text


def _peak_address_space(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return max((1024 * int(line.split()[1]) for line in lines if line.startswith("VmPeak")), default=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "seed"), [(1, 2), (2, 3), (4, 4)])
def test_minutes_of_faults_change_nothing(tmp_path, ranks, seed):
    options = ["--out", tmp_path / "chaos", "--json", "--minutes", 3, "--ranks", ranks, "--seed", seed]
    outcome = subprocess.run([sys.executable, chaos.__file__, *map(str, options)], capture_output=True, text=True)
    print(outcome.stdout, outcome.stderr)
    report = json.loads(outcome.stdout)
    assert report["problems"] == [] and outcome.returncode == 0
    missing = {kind for kind, row in report["faults"].items() if row["injected"] == 0}
    assert missing <= (set() if report["fills_disk"] else {"fill disk"})
