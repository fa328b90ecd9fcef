"""Whether a run is alive, by locks and journals of real processes; and `vitscale status` while metrics grow."""

import fcntl
import json
import os
import pty
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from processes import started
from status_of_runs import COMMAND, LINES, NOW, shown, status

from vitscale.about.status import RunReader
from vitscale.about.status.liveness import duration, judge
from vitscale.launch import Launch, RankCommand, Supervisor
from vitscale.runs.launches import Event, read_launches


def test_the_lock_of_a_live_process_is_seen_and_left_alone(run_dir):
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held'); input()"
    path = run_dir / ".lock"
    with started([sys.executable, "-u", "-c", hold, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        os.utime(run_dir / "metrics.jsonl", (NOW, NOW))
        assert status(run_dir)[0]["state"] == "running"
    (found,) = status(run_dir)
    assert found["state"] == "not running" and "one is due every 30 s" in found["why"]
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    ("body", "state", "why"),
    [
        ("sys.exit(4)", "failed", "exit code 4: rank 0"),
        ("sys.exit(85)", "preempted", "told to end"),
        ("pass", "stopped", "stopped early, as asked"),
    ],
)
def test_what_a_launch_has_told(run_dir, body, state, why):
    os.utime(run_dir / "metrics.jsonl", (NOW, NOW))
    launch(run_dir, body)
    (found,) = status(run_dir)
    assert found["state"] == state and why in found["why"]
    assert found["restarts"] == {"launches": 1, "count": 0, "last": []}


def test_restarts_and_their_causes(run_dir):
    launch(run_dir, "sys.exit(75)")
    launch(run_dir, "os.kill(os.getpid(), signal.SIGKILL)")
    (found,) = status(run_dir)
    assert (found["restarts"]["launches"], found["restarts"]["count"]) == (2, 4)
    assert "exit code 75" in found["restarts"]["last"][0]["cause"]
    assert "was killed by SIGKILL" in found["restarts"]["last"][-1]["cause"]
    assert found["restarts"]["last"][-1]["host"] == socket.gethostname()
    assert "4 in 2 launches; the last " in shown(run_dir)


def test_launches_of_several_nodes_are_one(run_dir):
    """Three nodes restart once; a minute later the run is continued on one of them, which is still at it."""
    lines = []
    for attempt, what in ((1, "started"), (1, "rank ended"), (1, "restart"), (2, "started"), (2, "finished")):
        for node in range(3):
            at = f"2026-01-01T00:0{attempt}:0{node}+00:00"
            lines.append({"time": at, "event": what, "host": f"node{node}", "attempt": attempt, "cause": "x"})
    lines.append({"time": "2026-01-01T00:03:00+00:00", "event": "started", "host": "node1", "attempt": 1})
    (run_dir / "launch.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = read_launches(run_dir / "launch.jsonl")
    assert (found.count, len(found.restarts), found.unfinished_on, found.damaged) == (2, 1, {"node1"}, 0)


def launch(run_dir: Path, body: str) -> None:
    """A real one, of a rank that does nothing else, with two restarts."""
    rank = RankCommand(0, [sys.executable, "-I", "-S", "-c", f"import os, signal, sys; {body}"], {})
    with Supervisor() as supervisor:
        Launch(run_dir, lambda _: [rank], supervisor, max_restarts=2, stops_early=True, first_pause_s=0.01).run()


def event(what: str, ago: float, host: str = "here", **more) -> Event:
    fields = {"attempt": 1, "cause": "", "exit_code": None, "pause_s": 0.0} | more
    return Event(what, NOW - ago, host, **fields)


@pytest.mark.parametrize(
    ("held", "last_event", "line_age", "state"),
    [
        (True, None, None, "running"),
        (True, event("finished", 100, exit_code=85), 5000, "running"),
        (False, event("started", 20), None, "starting"),
        (False, event("started", 20), 5000, "starting"),  # a run that is continued
        (False, event("started", 9000), None, "not running"),
        (False, event("started", 9000), 20, "not running"),  # here, and nobody holds it
        (False, event("started", 9000, "there"), 20, "running"),
        (None, event("started", 9000, "there"), 5000, "not running"),
        (False, event("restart", 20, cause="x", pause_s=60), 30, "restarting"),
        (False, event("restart", 9000, cause="x"), 9000, "not running"),
        (False, event("finished", 20, exit_code=85), 30, "preempted"),
        (False, event("finished", 9000, "there", exit_code=85), 20, "running"),  # trained since then
        (False, None, 20, "unknown"),
        (None, None, 20, "unknown"),
        (False, None, 5000, "not running"),
        (False, None, None, "not running"),
    ],
)
def test_what_the_signs_amount_to(held, last_event, line_age, state):
    line_at = None if line_age is None else NOW - line_age
    is_here = last_event is not None and last_event.host == "here" and last_event.what != "finished"
    assert judge(held, last_event, is_here, line_at, due_s=50, timeout_s=600, now=NOW)[0] == state


def test_durations():
    seconds = (0, 0.072, 12, 59.7, 61, 600, 3 * 3600 + 720, 2 * 86400 + 4 * 3600)
    words = ["0 s", "0.072 s", "12 s", "1 min 0 s", "1 min 1 s", "10 min", "3 h 12 min", "2 d 4 h"]
    assert [duration(one) for one in seconds] == words


def test_finished_runs(run_dir):
    done = {"step": 60, "total_steps": 100, "stopped_early": True, "best_step": 10, "evaluation": {}}
    (run_dir / "DONE").write_text(json.dumps(done))
    (found,) = status(run_dir)
    assert (found["state"], found["step"], found["total_steps"], found["left_s"]) == ("stopped early", 60, 100, None)
    verified = {"version": 1, "time": "2026-01-01", "findings": [], "files": {}, "versions": {"vitscale": "0"}}
    (run_dir / "verified.json").write_text(json.dumps(verified))
    folder = run_dir / "checkpoints" / "step-x"
    folder.mkdir(parents=True)
    (folder / "index.json").touch()
    os.truncate(folder / "index.json", 1 << 42)  # holes, which it would take an hour to read
    assert status(run_dir)[0]["verified"].startswith("no")
    (run_dir / "DONE").write_text('{"st')
    (found,) = status(run_dir)
    assert found["state"] not in ("done", "stopped early") and found["step"] == 20
    assert found["notes"] == [f"{run_dir}/DONE is damaged and ignored"]


def test_only_whole_lines_count_and_new_ones_are_added(run_dir):
    reader = RunReader(str(run_dir))
    path = run_dir / "metrics.jsonl"
    before = reader.read()
    text = json.dumps(LINES[2] | {"step": 30})
    with path.open("a") as file:
        file.write(text[:50])
    torn = reader.read()
    assert (torn.step, torn.hours, torn.notes) == (20, before.hours, [])
    with path.open("a") as file:
        file.write(text[50:] + "\n")
    after = reader.read()
    assert after.step == 30 and after.hours == pytest.approx((20 + 30 + 30) / 3600)


def test_a_run_that_resumes_begins_its_file_again(run_dir):
    reader = RunReader(str(run_dir))
    reader.read()
    aside = run_dir / "aside"
    aside.write_text(json.dumps(LINES[0]) + "\n" + "".join(json.dumps(LINES[2]) + "\n" for _ in range(10)))
    aside.replace(run_dir / "metrics.jsonl")
    now = reader.read()
    assert (now.step, now.evaluation) == (20, None) and now.hours == pytest.approx(50 / 3600)
    assert now.notes == ["damaged lines of metrics.jsonl left out: 9"]


def test_watching_without_a_terminal_prints_what_is_new(run_dir):
    command = [sys.executable, "-c", COMMAND, "status", "--watch", run_dir]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "step 20  of 100" in process.stdout.readline()
        (run_dir / "DONE").write_text(json.dumps({"step": 100, "total_steps": 100}))
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and errors == ""
    (line,) = rest.splitlines()
    assert "done  step 100  of 100" in line


def test_ctrl_c_ends_watching(run_dir):
    main_end, terminal = pty.openpty()
    command = [sys.executable, "-c", COMMAND, "status", "--watch", run_dir]
    variables = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=variables) as process:
        os.close(terminal)
        seen = b""
        while b"checkpoints" not in seen:
            seen += os.read(main_end, 4096)
        process.send_signal(signal.SIGINT)
        while piece := read_or_end(main_end):
            seen += piece
    os.close(main_end)
    assert process.returncode == 130 and b"Traceback" not in seen and b"20 of 100" in seen


def read_or_end(file: int) -> bytes:
    try:
        return os.read(file, 4096)
    except OSError:  # what Linux says when nobody has the terminal open any more
        return b""
