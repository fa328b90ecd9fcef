"""`vitscale status` while metrics grow, and as a process that watches."""

import json
import os
import pty
import random
import signal
import subprocess
import sys
from pathlib import Path

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


def test_a_large_file_is_read_in_part(run_dir):
    """The figures of the end are exact, sums are near, and the process has read a small part."""
    random.seed(0)
    seconds = device_seconds = 0.0
    filler = "x" * 200
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, 120_001):
            world, pace = (64, 1.0) if step < 70_000 else (128, 0.4)
            took = pace * random.lognormvariate(0, 0.2)
            seconds, device_seconds = seconds + took, device_seconds + took * world
            file.write(
                f'{{"step": {step}, "loss": 1.0, "step_time_s": {took}, "world_size": {world}, "x": "{filler}"}}\n'
            )
        file.write('{"step": 120000, "eval/validation/top1": 0.9}\n')
        size = file.tell()
    reader = RunReader(str(run_dir))
    before = read_so_far()
    found = reader.read()
    assert read_so_far() - before < size / 4
    assert found.step == 120_000 and found.step_time_s == took and found.is_estimated
    assert found.hours == pytest.approx(seconds / 3600, rel=0.02)
    assert found.device_hours == pytest.approx(device_seconds / 3600, rel=0.02)
    assert found.best is not None and found.best.value == 0.9 and "is large" in found.notes[0]
    before = read_so_far()
    reader.read()
    assert read_so_far() - before < 1e6


def read_so_far() -> int:
    """Bytes that this process has asked files for."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_it_starts_without_torch(run_dir):
    command = [sys.executable, "-c", COMMAND, "status", "--hardware", "h100"]
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
