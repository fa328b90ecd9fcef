"""Ranks of a few lines, which start in milliseconds."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vitscale.launch import RankCommand

_PRELUDE = """
import faulthandler, json, os, signal, subprocess, sys, time
from pathlib import Path
rank, here = int(os.environ["RANK"]), Path(os.environ["HERE"])
faulthandler.register(signal.SIGUSR2)
def beat(step, phase="training"):
    line = json.dumps({"step": step, "phase": phase, "phase_s": 0.0}) + "\\n"
    os.write(int(os.environ["VITSCALE_HEARTBEAT_FD"]), line.encode())
def why(message):
    os.write(int(os.environ["VITSCALE_HEARTBEAT_FD"]), (json.dumps({"why": message}) + "\\n").encode())
def note(name, text=""):
    (here / f".{name}").write_text(str(text))
    (here / f".{name}").replace(here / name)
def wait_for(*names):
    while not all((here / name).exists() for name in names):
        time.sleep(0.01)
def checkpoint(step):
    (here / f"checkpoints/step-{step:08d}").mkdir(parents=True)
    (here / f"checkpoints/step-{step:08d}/index.json").touch()
"""


def ranks(here: Path, *bodies: str) -> list[RankCommand]:
    """One rank for each body, which may use the names of the prelude; `here` is where it leaves files."""
    return [
        RankCommand(rank, [sys.executable, "-I", "-S", "-c", _PRELUDE + body], {"RANK": str(rank), "HERE": str(here)})
        for rank, body in enumerate(bodies)
    ]


@contextlib.contextmanager
def started(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive the test, whatever fails."""
    process = subprocess.Popen(command, text=True, **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(is_so: Callable[[], object], seconds: float = 20.0) -> None:
    """Fails when it never becomes so."""
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether the process still runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def signal_when(files: list[Path], *numbers: int) -> None:
    """From a thread: send this process the signals once all files are there."""
    wait_until(lambda: all(file.exists() for file in files))
    for number in numbers:
        os.kill(os.getpid(), number)
