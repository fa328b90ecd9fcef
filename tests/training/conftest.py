"""The data that tests of training share."""

from pathlib import Path

import pytest
from ranks import make_data


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the module's own with the toy datasets; most modules add their runs to it."""
    root = tmp_path_factory.mktemp("toy")
    make_data(root)
    return root
