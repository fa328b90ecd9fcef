"""What tests of the converter ask for by name."""

import pytest
from datasets_on_disk import convert_here


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions run in this process."""
    convert_here(monkeypatch)
