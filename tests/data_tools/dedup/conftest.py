"""What tests of `find` and `apply` share: it is made once."""

import planted_copies
import pytest


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> planted_copies.Planted:
    """A training set with copies of test images in it."""
    return planted_copies.plant(tmp_path_factory.mktemp("planted"))
