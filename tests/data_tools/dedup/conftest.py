"""What tests of `find` and `apply` share: it is made once."""

from pathlib import Path

import planted_copies
import pytest

from data_tools.dedup.finding import Finding, find
from data_tools.machine import Machine


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> planted_copies.Planted:
    """A training set with copies of test images in it."""
    return planted_copies.plant(tmp_path_factory.mktemp("planted"))


@pytest.fixture(scope="session")
def finding(planted: planted_copies.Planted, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finding]:
    """The folder that `find` writes for the planted copies, by two worker processes; other tests need none."""
    out = tmp_path_factory.mktemp("found") / "found"
    runner = Machine(workers=2).runner(str(planted.dataset))
    return out, find(str(planted.dataset), list(map(str, planted.indexes.values())), str(out), runner)


@pytest.fixture(scope="session")
def found(finding: tuple[Path, Finding]) -> Path:
    return finding[0]
