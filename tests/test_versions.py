"""What `--version` tells, held against the modules themselves."""

import json
import subprocess
import sys
from pathlib import Path

import vitscale
from vitscale.ground.versions import versions


def test_nothing_heavy_is_imported():
    told = (
        "import json, sys; from vitscale.ground.versions import versions; "
        "print(json.dumps([versions(), [name for name in ('torch', 'numba', 'deepspeed') if name in sys.modules]]))"
    )
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [versions(), []]


def test_what_is_absent_is_said(tmp_path):
    """A checkout with nothing compiled in it, under an interpreter that sees none of the installed packages."""
    shadow = tmp_path / "vitscale"
    (shadow / "ground" / "native").mkdir(parents=True)
    ground = ("__init__.py", "errors.py", "safe_text.py", "native/__init__.py", "versions.py")
    for name in ("__init__.py", *(f"ground/{name}" for name in ground)):
        (shadow / name).symlink_to(Path(vitscale.__file__).parent / name)
    command = [sys.executable, "-S", "-c", "from vitscale.ground.versions import versions; print(versions())"]
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=True)
    assert "'ffcv': 'not installed', 'libjpeg_turbo': 'cannot be loaded'" in done.stdout
