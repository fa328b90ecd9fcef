"""Scripts in processes of their own: some end by themselves, others wait to be told, or are killed."""

import subprocess
import sys
import time
from collections.abc import Callable
from typing import TypeVar

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
