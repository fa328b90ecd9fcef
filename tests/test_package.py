"""What is installed: every package of the tree, what is compiled, and the recipes."""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def test_a_wheel_holds_every_module_and_recipe_and_nothing_else(tmp_path):
    source = tmp_path / "source"
    for folder in ("vitscale", "data_tools", "recipes"):
        shutil.copytree(REPOSITORY / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / file, source / file)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(tmp_path), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob("vitscale/**/*.py")}
    modules |= {path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob("data_tools/**/*.py")}
    modules |= {path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob("vitscale/**/*.csv")}
    recipes = {f"vitscale/{path.relative_to(REPOSITORY).as_posix()}" for path in REPOSITORY.glob("recipes/**/*.yaml")}
    compiled = {f"vitscale/data/_view{sysconfig.get_config_var('EXT_SUFFIX')}"}
    assert inside == modules | recipes | compiled
