"""Ranks that fail, hang, ignore and leave children behind, under a supervisor that is told to end or killed itself."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import children, is_alive, signal_when, started, wait_until
from small_ranks import ranks

from vitscale.launch import Supervisor
from vitscale.launch.ends import cause

FOREVER = "beat(7); note(f'ready-{rank}', os.getpid()); time.sleep(100)"


def run(here: Path, *bodies: str, grace_s: float = 0.3, silence_s: float = 60.0):
    with Supervisor(grace_s=grace_s, silence_s=silence_s) as supervisor:
        return supervisor.run(ranks(here, *bodies)), supervisor


def in_thread(*arguments, **options) -> None:
    threading.Thread(target=signal_when, args=arguments, kwargs=options, daemon=True).start()


def test_each_rank_is_a_session_of_its_own_with_signals_as_usual(tmp_path):
    body = "note(f'rank-{rank}', [os.getsid(0) == os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, ())])"
    ends, _ = run(tmp_path, body, body)
    assert [end.returncode for end in ends] == [0, 0]
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == ["[True, set()]"] * 2


def test_who_does_not_end_shows_its_stacks_and_is_killed_with_its_children(tmp_path, capfd):
    stubborn = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); child = subprocess.Popen(['sleep', '100'])\n"
        "note('child', child.pid)\n"
        "def stands_here(): time.sleep(100)\n"
        "stands_here()"
    )
    ends, _ = run(tmp_path, stubborn, "wait_for('child'); sys.exit(3)")
    assert [(end.rank, end.returncode) for end in ends] == [(1, 3), (0, -signal.SIGKILL)]
    assert cause(ends) == ends[0]
    assert "in stands_here" in capfd.readouterr().err
    wait_until(lambda: not is_alive(int((tmp_path / "child").read_text())))


def test_children_of_a_rank_that_ended_well_end_too(tmp_path):
    run(tmp_path, "note('child', subprocess.Popen(['sleep', '100']).pid)")
    wait_until(lambda: not is_alive(int((tmp_path / "child").read_text())))


def test_a_stopped_rank_is_found_by_its_silence(tmp_path, capfd):
    ends, _ = run(
        tmp_path,
        "while True: beat(3); time.sleep(0.05)",
        "beat(4, 'evaluating'); os.kill(os.getpid(), signal.SIGSTOP); time.sleep(100)",
        silence_s=0.8,
    )
    first = cause(ends)
    assert first is not None and first.rank == 1 and "stopped, T" in first.hung
    shown = capfd.readouterr().err
    assert "rank 1" in shown and "gave no sign of life for 1 s (its process: stopped, T) after step 4 (evalua" in shown
    assert shown.count("most recent call first") == 2  # the stacks of both


def test_a_stopped_rank_is_the_cause_where_another_one_notices_first(tmp_path):
    ends, _ = run(
        tmp_path,
        "wait_for('stopped'); time.sleep(0.1); sys.exit(75)",
        "note('stopped'); os.kill(os.getpid(), signal.SIGSTOP); time.sleep(100)",
    )
    first = cause(ends)
    assert first is not None and first.rank == 1 and "stopped, T" in first.hung


def test_silence_while_the_supervisor_was_stopped_too_does_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr("vitscale.launch.supervisor._WAS_AWAY_SECONDS", 0.5)
    before = signal.signal(signal.SIGUSR2, lambda *_: time.sleep(1.2))  # the main thread stands still that long
    try:
        in_thread([tmp_path / "ready"], signal.SIGUSR2)
        ends, _ = run(tmp_path, "beat(1); note('ready'); time.sleep(1.4); beat(2)", silence_s=0.8)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert [end.returncode for end in ends] == [0]


def test_who_has_never_sent_a_heartbeat_is_not_silent(tmp_path):
    ends, _ = run(tmp_path, "time.sleep(0.7)", silence_s=0.2)
    assert [end.returncode for end in ends] == [0]


def test_heartbeats_that_are_none_are_ignored(tmp_path):
    body = "os.write(int(os.environ['VITSCALE_HEARTBEAT_FD']), b'no json\\n{}\\n[1]\\n'); beat(2); beat(5); beat(4)"
    ends, supervisor = run(tmp_path, body)
    assert (ends[0].step, supervisor.highest_step) == (4, 5)


def test_a_rank_that_stays_behind_after_a_good_end_is_no_reason_to_wait_forever(tmp_path):
    ends, _ = run(tmp_path, "pass", "time.sleep(100)", silence_s=0.5)
    assert [(end.rank, end.returncode) for end in ends] == [(0, 0), (1, -signal.SIGKILL)]


@pytest.fixture
def not_under_nohup():
    """Whoever runs the tests may have told them to ignore SIGHUP, which the supervisor would respect."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("sent", "arrives"), [("SIGTERM", "SIGTERM"), ("SIGINT", "SIGTERM"), ("SIGHUP", "SIGTERM"), ("SIGUSR1", "SIGUSR1")]
)
def test_a_signal_reaches_all_ranks_at_once(tmp_path, not_under_nohup, sent, arrives):
    # None of them ends before all of them have got it: passed on one after another, it would never come to an end.
    body = (
        "def told(number, _):\n"
        "    note(f'told-{rank}', signal.Signals(number).name)\n"
        "    wait_for('told-0', 'told-1', 'told-2')\n"
        "    sys.exit(85)\n"
        "signal.signal(signal.SIGTERM, told); signal.signal(signal.SIGUSR1, told)\n" + FOREVER
    )
    in_thread([tmp_path / f"ready-{rank}" for rank in range(3)], getattr(signal, sent))
    ends, supervisor = run(tmp_path, body, body, body)
    assert [end.returncode for end in ends] == [85, 85, 85]
    assert [(tmp_path / f"told-{rank}").read_text() for rank in range(3)] == [arrives] * 3
    assert supervisor.told == getattr(signal, sent) and not supervisor.at_once


def test_a_rank_that_starts_after_the_signal_is_told_too(tmp_path):
    """A process with other threads, such as a notebook's, gets signals even while its main thread starts ranks."""
    body = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))\n" + FOREVER
    now, told = threading.Event(), threading.Event()

    class Starts(list):
        def __iter__(self):
            yield from self[:2]
            now.set()
            told.wait()
            yield from self[2:]

    threading.Thread(target=lambda: (now.wait(), os.kill(os.getpid(), signal.SIGTERM), told.set())).start()
    with Supervisor(silence_s=5) as supervisor:
        ends = supervisor.run(Starts(ranks(tmp_path, body, body, body)))
    assert {end.returncode for end in ends} <= {85, -signal.SIGTERM} and len(ends) == 3


def test_one_request_may_come_twice(tmp_path, monkeypatch):
    monkeypatch.setattr("vitscale.launch.supervisor._SAME_REQUEST_SECONDS", 1000)
    body = (
        "def told(*_):\n"
        "    os.kill(os.getppid(), signal.SIGTERM); sys.exit(85)\n"
        "signal.signal(signal.SIGTERM, told); signal.signal(signal.SIGUSR1, told)\n" + FOREVER
    )
    in_thread([tmp_path / "ready-0"], signal.SIGUSR1)
    ends, supervisor = run(tmp_path, body)
    assert [end.returncode for end in ends] == [85] and not supervisor.at_once


def test_a_rank_that_dies_of_what_was_passed_on_was_told_to(tmp_path):
    in_thread([tmp_path / "ready-0"], signal.SIGTERM)
    ends, _ = run(tmp_path, FOREVER)
    assert ends[0].returncode == -signal.SIGTERM and cause(ends) is None


def test_nohup_is_respected(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        in_thread([tmp_path / "ready"], signal.SIGHUP)
        ends, supervisor = run(tmp_path, "note('ready'); time.sleep(0.3)")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert [end.returncode for end in ends] == [0] and supervisor.told is None


def test_nothing_starts_once_told_to_end(tmp_path):
    with Supervisor() as supervisor:
        os.kill(os.getpid(), signal.SIGTERM)
        assert supervisor.run(ranks(tmp_path, "note('started')")) == []
    assert not (tmp_path / "started").exists()


_SUPERVISOR = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from small_ranks import ranks
from vitscale.launch import Supervisor
with Supervisor() as supervisor:
    supervisor.run(ranks(Path(sys.argv[1]), *sys.argv[2:]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path, number):
    ignores = "for number in set(range(1, 65)) - {9, 19, 32, 33}: signal.signal(number, signal.SIG_IGN)\n"
    with_child = f"{ignores}note('child', subprocess.Popen(['sleep', '100']).pid)\n{FOREVER}"
    stopped = "note(f'ready-{rank}', os.getpid()); os.kill(os.getpid(), signal.SIGSTOP)"
    command = [sys.executable, "-c", _SUPERVISOR, str(tmp_path), with_child, stopped]
    files = [tmp_path / name for name in ("child", "ready-0", "ready-1")]
    with started(command) as process:
        wait_until(lambda: all(file.exists() for file in files))
        guards = [pid for pid in children(process.pid) if pid not in {int(file.read_text()) for file in files}]
        process.send_signal(number)
        process.wait()
    assert len(guards) == 1
    for pid in [int(file.read_text()) for file in files] + guards:
        wait_until(lambda pid=pid: not is_alive(pid))
