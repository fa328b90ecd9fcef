"""DONE: the file that marks a run as finished and holds its result."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitscale.files.durable import write_text
from vitscale.runs.names import DONE_FILE
from vitscale.runs.reading import read_object


def read_done(run_dir: Path) -> dict[str, Any] | None:
    """The summary of a finished run; None if the run is not finished, or its summary is damaged."""
    return read_object(run_dir / DONE_FILE)


def write_done(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Mark a run as finished. Raises OSError.

    Args:
        run_dir: the run's directory.
        summary: `step`, `total_steps`, `stopped_early`, `best_step`, `exaflops`, and `evaluation`, the last
            evaluation's values by evaluator/metric.
    """
    write_text(run_dir / DONE_FILE, json.dumps(summary, indent=1) + "\n")
