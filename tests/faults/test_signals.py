"""Runs that are told to end: at whatever moment, by whomever, they go on as if nothing had happened."""

import os
import signal

import pytest
from watched_runs import (
    EVALUATED,
    LONG,
    MakeRun,
    Process,
    Run,
    assert_same,
    bare,
    deepspeed,
    finish,
    launch,
    pretrain,
    torchrun,
)

from vitscale.launch.ends import EXIT_PREEMPTED, EXIT_RETRY


def codes(run: Run) -> list[int]:
    """Of all ranks of the last launch."""
    events = run.events("rank ended")
    return [event["returncode"] for event in events[-events[-1]["world_size"] :]]


@pytest.mark.slow
def test_a_run_that_is_told_to_end_again_and_again_is_the_undisturbed_one(make_run: MakeRun, undisturbed, tmp_path):
    run = make_run(**EVALUATED)
    with Process(launch(run), tmp_path / "one-rank") as process:
        process.until(lambda: run.step() >= 23)
        os.kill(process.ranks()[1], signal.SIGTERM)
        assert process.end() == EXIT_PREEMPTED, process.text()
        assert f"a signal to another rank: saved at step {run.step()} of 100" in process.text()
    assert codes(run) == [EXIT_PREEMPTED] * 2
    assert run.saved()[-1] == run.step() < 50

    with Process(launch(run), tmp_path / "during-evaluation") as process:
        process.until(lambda: run.step() >= 50)
        process.signal(signal.SIGUSR1)
        assert process.end() == EXIT_PREEMPTED, process.text()
        assert "SIGUSR1: saved at step 50" in process.text()
    assert codes(run) == [EXIT_PREEMPTED] * 2
    assert run.step() == run.saved()[-1] == 50 and not any("eval/validation/loss" in line for line in run.lines())

    assert "at step 50 of 100" in finish(run, tmp_path / "the-rest", undisturbed)


def terminate_twice(run: Run, waiting: Process, stopped: Process) -> None:
    """SIGTERM, and later SIGTERM again, to a rank whose other one is stopped in training."""
    waiting.until(lambda: run.step() >= 5)
    stopped.signal(signal.SIGSTOP)
    waiting.signal(signal.SIGTERM)
    waiting.go_on_for(2.5)
    waiting.signal(signal.SIGTERM)


def test_a_second_signal_ends_a_rank_that_waits_for_another_one(make_run: MakeRun, tmp_path):
    """Its main thread is inside a collective, which no handler written in Python interrupts."""
    run = make_run(**LONG)
    waiting, stopped = bare(run, tmp_path / "log")
    with waiting, stopped:
        terminate_twice(run, waiting, stopped)
        assert waiting.end() == EXIT_RETRY
        assert "SIGTERM again: ending without a checkpoint" in waiting.text()


@pytest.mark.slow
@pytest.mark.parametrize("start", [deepspeed, torchrun])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_other_launchers(make_run: MakeRun, undisturbed, tmp_path, start, number):
    """All ranks end with 85; deepspeed ends with that, too, and torchrun with 1, as it always does."""
    run = make_run(**EVALUATED)
    with Process(start(run), tmp_path / "log") as process:
        process.until(lambda: run.step() >= 10)
        os.kill(process.ranks()[1], number)
        assert process.end() == (EXIT_PREEMPTED if start is deepspeed else 1), process.text()
        assert f"saved at step {run.step()} of 100" in process.text()
        if start is torchrun:
            assert f"exitcode  : {EXIT_PREEMPTED} " in process.text()
    assert run.saved()[-1] == run.step() < 100
    with Process(start(run), tmp_path / "log") as process:
        assert process.end() == 0, process.text()
    assert_same(run, undisturbed)


# torchrun ends with 1, as it always does, and DeepSpeed's launcher by the SIGINT that it does not handle.
@pytest.mark.parametrize(
    ("start", "codes_of_launcher"),
    [
        (pretrain, {EXIT_PREEMPTED}),
        pytest.param(launch, {EXIT_PREEMPTED}, marks=pytest.mark.slow),
        pytest.param(torchrun, {1}, marks=pytest.mark.slow),
        pytest.param(deepspeed, {1, -signal.SIGINT}, marks=pytest.mark.slow),
    ],
)
def test_the_first_ctrl_c_saves_under_every_launcher(make_run: MakeRun, tmp_path, start, codes_of_launcher):
    """Every step up to the one that is saved has its line, though no line was due by their number."""
    run = make_run(**LONG, checkpoint={"every": None}, logging={"every": 10_000})
    with Process(start(run), tmp_path / "log") as process:
        process.until(lambda: run.step() >= 1)
        process.ranks()
        process.press_ctrl_c()
        assert process.end() in codes_of_launcher, process.text()
        assert f"saved at step {run.step()} of 100,000" in process.text()
        assert "without a checkpoint" not in process.text()
    assert run.saved() == [run.step()] and run.lines()[0]["step"] == 1


def test_ctrl_c_before_the_first_step_ends_at_once_without_a_trace(make_run: MakeRun, tmp_path):
    run = make_run(**LONG)
    for moment in (0.3, 2.5):
        with Process(pretrain(run), tmp_path / "log") as process:
            process.go_on_for(moment)
            process.press_ctrl_c()
            assert process.end(60) in (EXIT_PREEMPTED, -signal.SIGINT), process.text()
            assert "Traceback" not in process.text()


@pytest.mark.slow
def test_deepspeeds_launcher_may_send_sigterm_again(make_run: MakeRun, tmp_path):
    """It sends one to each rank in turn, whenever the one before has ended."""
    run = make_run(**LONG)
    waiting, stopped = bare(run, tmp_path / "log", CROSS_RANK="0")
    with waiting, stopped:
        terminate_twice(run, waiting, stopped)
        waiting.go_on_for(0.5)
        stopped.signal(signal.SIGCONT)
        assert waiting.end() == EXIT_PREEMPTED, waiting.text()
    assert run.saved()[-1] == run.step()


@pytest.mark.slow
def test_at_any_moment_of_the_start(make_run: MakeRun, undisturbed, tmp_path):
    run = make_run(**EVALUATED)
    for moment in (0.2, 1.0, 2.0, 3.0, 4.0, 5.0):
        with Process(launch(run), tmp_path / "log") as process:
            process.go_on_for(moment)
            process.signal(signal.SIGTERM)
            assert process.end() in (EXIT_PREEMPTED, -signal.SIGTERM), process.text()  # before anybody listens
    finish(run, tmp_path / "log", undisturbed)


@pytest.mark.slow
def test_a_time_limit(make_run: MakeRun, undisturbed, tmp_path):
    run = make_run(**EVALUATED)
    with Process(launch(run, "--time-limit", "0.1"), tmp_path / "log") as process:
        assert process.end() == EXIT_PREEMPTED, process.text()
        assert f"the time limit: saved at step {run.saved()[-1]}" in process.text()
    assert codes(run) == [EXIT_PREEMPTED] * 2 and run.saved() == [run.step()]
    finish(run, tmp_path / "log", undisturbed)
