"""System calls that fail: a Python script under strace, which answers some of its calls with an error."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def run_with_fault(
    fault: str, script: str, *arguments: object, path: Path | None = None, log: Path | None = None
) -> str:
    """What the script prints. The test is skipped, with the reason, where nothing can be traced.

    Args:
        fault: as strace's `inject` takes it, such as `fsync:error=EIO:when=2`; "" for none.
        script: Python.
        arguments: those of the script.
        path: only calls for this file or folder fail.
        log: a file for the calls to `fsync`, `syncfs` and `rename`, with paths.
    """
    if shutil.which("strace") is None:
        pytest.skip("strace is missing: sudo apt-get install -y strace")
    trace = ["strace", "-f", "-qq", "-y", "-e", "trace=fsync,syncfs,rename", "-o", str(log or os.devnull)]
    inject = (["-e", f"inject={fault}"] if fault else []) + (["-P", str(path)] if path else [])
    command = [*trace, *inject, sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "Operation not permitted" in done.stderr:
        pytest.skip(f"nothing can be traced here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
