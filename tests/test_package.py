"""What is installed: every package of the tree, and the recipes."""

import subprocess
import sys
import zipfile
from pathlib import Path

from vitscale.recipe import recipes_dir

REPOSITORY = Path(__file__).resolve().parent.parent


def test_a_wheel_holds_every_package_and_recipe(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    built = subprocess.run(
        [*command, "--wheel-dir", str(tmp_path), str(REPOSITORY)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        path.relative_to(REPOSITORY).as_posix()
        for package in ("vitscale", "data_tools")
        for path in (REPOSITORY / package).rglob("*.py")
    }
    assert modules <= inside
    assert {f"vitscale/recipes/{path.name}" for path in recipes_dir().glob("*.yaml")} <= inside
