"""Ranks and launchers that are killed or stopped: everybody is told which one, nobody waits, nothing is lost."""

import os
import random
import re
import signal

import pytest
from watched_runs import EVALUATED, LONG, MakeRun, Process, Run, assert_same, bare, deepspeed, finish, launch

from vitscale.launch.ends import EXIT_RECIPE, EXIT_RETRY


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
    finish(run, tmp_path / "third", undisturbed)
