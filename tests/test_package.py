"""What is installed: every package of the tree, what is compiled, and the recipes; from a wheel that an sdist gave."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from vitscale.data.shards.generated import write_generated_dataset

REPOSITORY = Path(__file__).resolve().parent.parent
_SDIST = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"


def _run(command: list[str], **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def recipes_and_schemas() -> list[Path]:
    return [*REPOSITORY.glob("recipes/**/*.yaml"), *REPOSITORY.glob("recipes/*.schema.json")]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """Built from a copy of the tree without what was compiled in it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("sdist")
    for folder in ("vitscale", "data_tools", "recipes", "tests"):
        shutil.copytree(REPOSITORY / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for file in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / file, source / file)
    _run([sys.executable, "-c", _SDIST, str(out)], cwd=source)
    (archive,) = out.glob("vitscale-*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    _run([*command, "--wheel-dir", str(out), str(sdist)])
    (built,) = out.glob("vitscale-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory) -> Callable[..., str]:
    """Runs a command of an environment that has the wheel, and of the tests' environment all other packages."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, symlinks=True)
    programs, packages = environment / "bin", next(environment.glob("lib/python*/site-packages"))
    # A folder named in a .pth file is searched, its own .pth files are not read: the checkout stays out of sight.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = str(programs / "python")
    _run([python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--ignore-installed", str(wheel)])
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(program: str, *arguments: str, folder: Path) -> str:
        return _run([str(programs / program), *arguments], cwd=folder, env=variables)

    return run


def test_an_sdist_holds_what_the_wheel_is_made_of(sdist):
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    recipes = {path.relative_to(REPOSITORY).as_posix() for path in recipes_and_schemas()}
    sources = {"vitscale/ground/native/images.h", "vitscale/ground/native/jpeg.c"}
    assert inside >= recipes | sources | {"pyproject.toml", "LICENSE"}
    assert not any(name.startswith("tests/") for name in inside)  # setuptools takes some of them by itself


def test_a_wheel_holds_every_module_and_recipe_and_nothing_else(wheel):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    kinds = ("vitscale/**/*.py", "data_tools/**/*.py", "vitscale/**/*.csv")
    found = [path for kind in kinds for path in REPOSITORY.glob(kind)]
    modules = {path.relative_to(REPOSITORY).as_posix() for path in found}
    modules |= {"vitscale/py.typed", "vitscale/ground/page/page.html", "vitscale/evaluation/imagenet_synsets.txt"}
    recipes = {f"vitscale/{path.relative_to(REPOSITORY).as_posix()}" for path in recipes_and_schemas()}
    assert inside == modules | recipes | {"vitscale/ground/native/_images.abi3.so"}
    assert "-cp311-abi3-" in wheel.name  # so that later versions of Python take it


def test_the_commands_run_without_a_checkout(installed, tmp_path):
    told = "import vitscale, vitscale.ground.native; print(vitscale.__file__); vitscale.ground.native.load()"
    assert not Path(installed("python", "-c", told, folder=tmp_path).strip()).is_relative_to(REPOSITORY)
    named = installed("vitscale", "recipe", folder=tmp_path)
    assert all(path.stem in named for path in REPOSITORY.glob("recipes/*.yaml"))
    assert all(f"finetune/{path.stem}" in named for path in REPOSITORY.glob("recipes/finetune/*.yaml"))
    assert "name: ViT-H/14" in installed("vitscale", "recipe", "h14_jft", folder=tmp_path)
    assert "ViT-H/14" in installed("vitscale", "models", folder=tmp_path)
    assert "ViT-H/14" in installed("vitscale-flops", folder=tmp_path)
    installed("vitscale-convert", "--help", folder=tmp_path)
    installed("python", "-m", "vitscale.pretrain", "--help", folder=tmp_path)


def test_another_package_brings_a_family_an_objective_an_optimizer_an_evaluator_and_an_operation(installed, tmp_path):
    example = tmp_path / "example"
    shutil.copytree(REPOSITORY / "tests/example_package", example, ignore=shutil.ignore_patterns("__pycache__"))
    install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", str(example)]
    installed("python", *install, folder=tmp_path)
    write_generated_dataset(tmp_path / "train", [32, 32])
    recipe = str(example / "mixer_rotations.yaml")
    installed("vitscale", "launch", "--ranks", "2", "--run-dir", "run", recipe, folder=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert (tmp_path / "run/DONE").exists()
    assert [line["step"] for line in lines if "eval/features/mean" in line] == [1, 2]
    assert "example_vision.Lion" in installed("vitscale", "prove", recipe, "--world", "2", folder=tmp_path)
    evaluated = installed("vitscale", "evaluate", "run", folder=tmp_path)
    assert "features/mean" in evaluated

    installed("vitscale", "export", "run", "--format", "safetensors", "--out", "out.safetensors", folder=tmp_path)
    with safe_open(tmp_path / "out.safetensors", "pt") as exported:
        values = sum(exported.get_tensor(name).numel() for name in exported.keys())  # noqa: SIM118  # no mapping
    counted = json.loads(installed("vitscale-flops", recipe, "--format", "json", folder=tmp_path))
    # The exported model is without what the objective adds.
    assert counted[0]["params"] == values + 4 * 32 + 4
    again = ["--set", "init.from=out.safetensors", "--set", "init.head=initial"]
    installed("vitscale", "launch", "--ranks", "1", "--run-dir", "again", recipe, *again, folder=tmp_path)
    assert (tmp_path / "again/DONE").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_runs_without_a_checkout(installed, tmp_path):
    installed("vitscale", "demo", folder=tmp_path)
    assert (tmp_path / "runs/demo/run/DONE").exists()
