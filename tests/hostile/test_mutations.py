"""A short part of `make hostile`: a few damaged files of every format."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("count", ["3", pytest.param("30", marks=pytest.mark.slow)])
def test_damaged_files_are_read_or_refused(tmp_path, count):
    command = [sys.executable, str(Path(__file__).with_name("mutate.py")), "--count", count, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=300)
    traces = [path.read_text() for path in tmp_path.glob("*.txt")]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr[-2000:], *traces])
