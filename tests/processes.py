"""Processes that tests start, look at and wait for: scripts that end by themselves, wait to be told, or are killed."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

Found = TypeVar("Found")


def wait_until(found: Callable[[], Found], seconds: float = 60.0) -> Found:
    """What `found` returns as soon as that is true; fails if it never is."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, f"waited {seconds:g} s in vain"
        time.sleep(0.01)
    return value


def start_python(script: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
    """One whose input and outputs are pipes."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", script, *map(str, arguments)], **pipes, **options)


def run_python(script: str, *arguments: object, timeout: float = 120) -> str:
    """What one prints that has to end well."""
    with start_python(script, *arguments) as process:
        printed, errors = process.communicate(timeout=timeout)
    assert process.returncode == 0, errors
    return printed


@contextlib.contextmanager
def started(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive the test, whatever fails."""
    process = subprocess.Popen(command, text=True, **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def is_alive(pid: int) -> bool:
    """Whether the process still runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """The processes that any of its threads has started and that have not been waited for; none if it has ended."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in task.read_text().split()]
    return found


def signal_when(files: list[Path], *numbers: int) -> None:
    """From a thread: send this process the signals once all files are there."""
    wait_until(lambda: all(file.exists() for file in files))
    for number in numbers:
        os.kill(os.getpid(), number)
