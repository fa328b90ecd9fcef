"""What tests of the loader ask for by name."""

import gc

import pytest
from loaders import loader_threads, open_files
from picture_shards import write_pictures
from processes import wait_until


@pytest.fixture(scope="module")
def manifest(request, tmp_path_factory):
    """Of a dataset of the module's SHARDS."""
    return write_pictures(tmp_path_factory.mktemp("loader") / "data", request.module.SHARDS)


@pytest.fixture
def nothing_stays():
    files = open_files()
    yield
    if loader_threads() or open_files() > files:
        gc.collect()
        assert wait_until(lambda: not loader_threads() and open_files() <= files)
