"""Data and an undisturbed run that the tests of faults share."""

from pathlib import Path
from typing import Any

import pytest
from watched_runs import EVALUATED, MakeRun, Process, Run, launch, write_data, write_recipe


@pytest.fixture(scope="session")
def fault_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fault_data")
    write_data(root)
    return root


@pytest.fixture
def make_run(tmp_path: Path, fault_data: Path) -> MakeRun:
    def make(**blocks: Any) -> Run:
        return Run(write_recipe(tmp_path / "recipe.yaml", fault_data, **blocks), tmp_path / "run")

    return make


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, fault_data: Path) -> Run:
    """The small recipe with evaluations, trained on two ranks from beginning to end."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run = Run(write_recipe(folder / "recipe.yaml", fault_data, **EVALUATED), folder / "run")
    with Process(launch(run), folder / "log") as process:
        assert process.end() == 0, process.text()
    return run
