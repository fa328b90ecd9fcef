"""What ends a run for good, what does not, and the codes that say so."""

import os
import random
import shutil
import signal
import subprocess

import pytest
from chaos import flip_bit, somewhere_in
from runs import EVALUATED, LONG, MakeRun, Process, Run, assert_same, differences, launch, write_data

from vitscale.launch.ends import EXIT_DATA, EXIT_NON_FINITE, EXIT_PREEMPTED, EXIT_RETRY


def test_a_damaged_picture_ends_a_run_for_good(make_run: MakeRun, tmp_path):
    write_data(tmp_path)
    run = make_run(**LONG, data={"train": str(tmp_path / "train"), "image_size": 32})
    with Process(launch(run), tmp_path / "log") as process:
        process.until(lambda: run.step() >= 5)
        path, place = somewhere_in(tmp_path / "train", random.Random(1))
        flip_bit(path, place)
        assert process.end() == EXIT_DATA
        assert f"{path}: slot " in process.text() and "do not match their checksum" in process.text()
    assert len(run.events("started")) == 1


def test_a_loss_that_is_not_finite_ends_a_run_for_good(make_run: MakeRun, tmp_path):
    run = make_run(optimizer={"lr": 1e30, "clip_norm": None}, schedule={"duration": {"steps": 50}})
    with Process(launch(run), tmp_path / "log") as process:
        assert process.end() == EXIT_NON_FINITE
        assert "is not finite" in process.text() and "Lower optimizer.lr" in process.text()
    assert len(run.events("started")) == 1


def test_a_finished_run_is_left_as_it_is(undisturbed: Run, tmp_path):
    before, curve = undisturbed.state(undisturbed.saved()[-1]), undisturbed.curve()
    with Process(launch(undisturbed), tmp_path / "log") as process:
        assert process.end() == 0 and "holds a finished run; nothing to do" in process.text()
    assert undisturbed.curve() == curve and differences(before, undisturbed.state(undisturbed.saved()[-1])) == []


@pytest.mark.slow
def test_a_run_that_ended_before_it_could_say_so(make_run: MakeRun, undisturbed: Run, tmp_path):
    run = make_run(**EVALUATED)
    shutil.copytree(undisturbed.dir, run.dir)
    (run.dir / "DONE").unlink()
    with Process(launch(run), tmp_path / "log") as process:
        assert process.end() == 0, process.text()
    assert_same(run, undisturbed)
    assert (run.dir / "DONE").read_text() == (undisturbed.dir / "DONE").read_text()


@pytest.mark.slow
def test_no_checkpoint_that_can_be_read(make_run: MakeRun, undisturbed: Run, tmp_path):
    """A run is never started over silently, nor again and again."""
    run = make_run(**EVALUATED)
    shutil.copytree(undisturbed.dir, run.dir)
    (run.dir / "DONE").unlink()
    for file in run.checkpoints.glob("step-*/rank-00001.safetensors"):
        flip_bit(file, file.stat().st_size // 2)
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
        process.until(lambda: "METRICS ARE BEING LOST, training goes on" in process.text())
        lost_from = Run(run.recipe, away).step()
        away.rename(run.dir)
        process.until(lambda: run.step() > lost_from + 10)
        process.signal(signal.SIGTERM)
        assert process.end() == EXIT_PREEMPTED, process.text()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_told_to_end_while_the_disk_is_full(make_run: MakeRun, undisturbed: Run, tmp_path):
    run = make_run(**EVALUATED)
    run.checkpoints.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(run.checkpoints)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no mounts here")
    try:
        with Process(launch(run), tmp_path / "log") as process:
            process.until(lambda: run.step() >= 25 and run.saved())
            with (run.checkpoints / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError):
                while True:
                    filler.write(bytes(1 << 16))
            process.signal(signal.SIGTERM)
            assert process.end() == EXIT_RETRY, process.text()
            assert "ending without a checkpoint of step" in process.text()
        saved = run.saved()[-1]
        (run.checkpoints / "filler").unlink()
        with Process(launch(run), tmp_path / "log") as process:
            assert process.end() == 0, process.text()
            assert f"at step {saved} of 100" in process.text()
        assert_same(run, undisturbed)
    finally:
        subprocess.run(["umount", str(run.checkpoints)], check=True)
