"""What tests share: photos with their index, and what `find` and `apply` are tried on; made once."""

from pathlib import Path

import planted_copies
import pytest
from dedup_data import NAMES, build_here, index_of, source_of, write_photos

from data_tools.dedup.finding import Finding, find
from data_tools.machine import Machine


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> planted_copies.Planted:
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


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    write_photos(folder, NAMES)
    return folder


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    out = tmp_path_factory.mktemp("made") / "index"
    index_of(out, [source_of(photos, level=1)])
    return out


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    build_here(monkeypatch)
