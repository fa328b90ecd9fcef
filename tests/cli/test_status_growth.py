"""`vitscale status` while metrics grow, and as a process that watches."""

import json
import os
import pty
import signal
import subprocess
import sys

import pytest
from status_of_runs import COMMAND, LINES

from vitscale.about.status import RunReader


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


def test_it_starts_without_torch(run_dir):
    command = [sys.executable, "-c", COMMAND, "status"]
    result = subprocess.run([*command, run_dir], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and result.stderr == ""


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


def test_watching_ends_when_nobody_reads_any_more(run_dir):
    line = 'set -o pipefail; "$@" | head -1'
    command = ["bash", "-c", line, "bash", sys.executable, "-c", COMMAND, "status", "--watch", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "step 20" in process.stdout.readline()
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({**LINES[0], "step": 30}) + "\n")
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and errors == ""


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
