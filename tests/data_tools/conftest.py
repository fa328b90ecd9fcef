"""What tests of the converter ask for by name."""

from pathlib import Path

import pytest
from datasets_on_disk import convert_here

from data_tools.conversion import convert
from data_tools.machine import Machine
from data_tools.request import Request


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    convert_here(monkeypatch)


@pytest.fixture(scope="session")
def local(image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image folder as a dataset of 6 shards; it is only read."""
    out = tmp_path_factory.mktemp("local") / "out"
    with pytest.MonkeyPatch.context() as patch:
        convert_here(patch)
        convert(Request(str(image_folder), shard_samples=4), out, Machine(workers=1))
    return out
