"""Ranks and launchers that are killed or stopped: everybody is told which one, nobody waits, nothing is lost."""

import os
import random
import re
import signal
from pathlib import Path

import pytest
from watched_runs import EVALUATED, LONG, MakeRun, Process, Run, assert_same, bare, deepspeed, launch, write_recipe

from vitscale.launch.ends import EXIT_RECIPE, EXIT_RETRY


@pytest.mark.slow
def test_a_launch_goes_on_when_ranks_are_killed(make_run: MakeRun, undisturbed: Run, tmp_path):
    """Rank 0, too, at which the others meet."""
    run = make_run(**EVALUATED)
    moments = [(random.randint(1, 45), 0), (random.randint(46, 90), 1)]
    print("steps and ranks:", moments)
    with Process(launch(run), tmp_path / "log") as process:
        for step, rank in moments:
            process.until(lambda step=step: run.step() >= step)
            pid = process.ranks()[rank]
            os.kill(pid, signal.SIGKILL)
            named = f"launch: rank {rank} (pid {pid}) was killed by SIGKILL"
            process.until(lambda named=named: named in process.text(), 60)
        assert process.end() == 0, process.text()
    assert len(run.events("started")) == 3
    assert_same(run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_averages_and_what_is_learned_from_them_outlive_kills(fault_data, tmp_path, stage):
    """A loss whose targets are one average's, while another is a copy that is made now and then."""
    tree = Path(__file__).resolve().parents[2]
    environment = {"VITSCALE_EXTENSIONS": "averaged_target", "PYTHONPATH": f"{tree}{os.pathsep}{tree}/tests/training"}
    blocks = {
        "objective": {"kind": "averaged_target.AveragedTarget"},
        "parallelism": {"zero_stage": stage},
        "ema": None,
        "averages": [
            {"name": "ema", "decay": 0.9, "to": 1.0},
            {"name": "still", "every": {"steps": 7}, "from": {"steps": 3}, "of": "ema"},
        ],
    }
    runs = []
    for kills in (0, 3):
        folder = tmp_path / str(kills)
        folder.mkdir()
        runs.append(Run(write_recipe(folder / "recipe.yaml", fault_data, **blocks), folder / "run"))
        with Process(launch(runs[-1]), folder / "log", environment) as process:
            for number in range(kills):
                at = random.randint(30 * number, 30 * number + 29)
                print("killed after step", at)
                process.until(lambda at=at, run=runs[-1]: run.step() >= at)
                os.kill(process.ranks()[number % 2], signal.SIGKILL)
                process.until(lambda count=number + 2, run=runs[-1]: len(run.events("started")) == count, 90)
            assert process.end() == 0, process.text()
    assert_same(*runs)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_without_a_launch_the_survivor_says_whom_it_has_lost(make_run: MakeRun, tmp_path, killed):
    run = make_run(**LONG)
    processes = bare(run, tmp_path / "log")
    survivor = processes[1 - killed]
    at = random.randint(1, 50)
    print("killed after step", at)
    with processes[0], processes[1]:
        survivor.until(lambda: run.step() >= at)
        processes[killed].signal(signal.SIGKILL)
        assert survivor.end(60) == EXIT_RETRY
        assert f"error: rank {1 - killed} lost rank {killed}" in survivor.text()


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_stands_still(make_run: MakeRun, undisturbed: Run, tmp_path, stopped):
    """Seen by the other rank, which waits for it, long before the launch would miss its heartbeats."""
    run = make_run(**EVALUATED, check={"step_timeout_s": 30.0})
    at = random.randint(1, 90)
    print("stopped after step", at)
    with Process(launch(run), tmp_path / "log") as process:
        process.until(lambda: run.step() >= at)
        pid = process.ranks()[stopped]
        os.kill(pid, signal.SIGSTOP)
        assert process.end(400) == 0, process.text()
        text = process.text()
    other = 1 - stopped
    assert re.search(
        rf"error: rank {other} has made no progress .* for rank {stopped}\b.*Stacks of rank {other}:", text
    )
    left = re.search(rf"launch: rank {stopped} \(pid {pid}\) .*\(its process: stopped, T\)", text)
    assert left and "most recent call first" in text[left.end() :].partition("launch: restart")[0]
    assert_same(run, undisturbed)


@pytest.mark.slow
def test_ranks_outlive_deepspeed_s_launcher_and_keep_the_run_directory(make_run: MakeRun, undisturbed: Run, tmp_path):
    run = make_run(**EVALUATED)
    with Process(deepspeed(run), tmp_path / "log") as process:
        process.until(lambda: run.step() >= 5)
        ranks = process.ranks()
        for pid in ranks.values():
            os.kill(pid, signal.SIGSTOP)
        process.signal(signal.SIGKILL)
        with Process(launch(run), tmp_path / "second") as second:
            assert second.end() == EXIT_RECIPE and "in use by another launch" in second.text()
        for pid in ranks.values():
            os.kill(pid, signal.SIGCONT)
        os.kill(ranks[0], signal.SIGTERM)
        process.end()
        assert "SIGTERM: saved at step" in process.text()
    with Process(launch(run), tmp_path / "third") as third:
        assert third.end() == 0, third.text()
    assert_same(run, undisturbed)
