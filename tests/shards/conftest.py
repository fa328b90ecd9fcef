"""What tests of adopted shards ask for by name."""

import shutil

import pytest
from adopted_files import write_small

from vitscale.data.shards.adopt import adopt


@pytest.fixture(scope="session")
def small_original(tmp_path_factory):
    return write_small(tmp_path_factory.mktemp("small") / "val.beton")


@pytest.fixture
def small(small_original, tmp_path):
    return shutil.copy(small_original, tmp_path / "val.beton")


@pytest.fixture
def adopted(small, tmp_path):
    return adopt(str(small), str(tmp_path / "ds"), class_names=["cat", "dog", "owl", "yak"]).manifest
