"""What tests of the converter share."""

import subprocess
import sys
from pathlib import Path


def contents(dataset: Path) -> dict[str, bytes]:
    """Every file of a finished dataset, by path; but for its log, the one that may say when and where."""
    files = [path for path in dataset.rglob("*") if path.is_file()]
    assert not [path for path in files if any(part.startswith(".") for part in path.relative_to(dataset).parts)]
    return {str(path.relative_to(dataset)): path.read_bytes() for path in files if path.name != "convert.log.jsonl"}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "data_tools.convert", *map(str, arguments)]


def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120, **options)
