"""A run to ask `vitscale status` about."""

from pathlib import Path

import pytest
from status_of_runs import LINES, write_metrics, write_recipe


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of ViT-B/16, 20 of 100 steps done."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write_recipe(run_dir)
    write_metrics(run_dir, LINES)
    return run_dir
