"""The directory that a conversion writes: taken, checked, and left without traces of the work."""

import fcntl
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vitscale.errors import RecipeError
from vitscale.shards import MANIFEST_NAME

REJECTS_NAME = "rejects.parquet"
LOG_NAME = "convert.log.jsonl"
_WORK_NAME = ".vitscale-convert"
_OURS = re.compile(r"\.?(shard-\d{5,}\.(beton|idx\.parquet)|rejects\.parquet|manifest\.json)(\.[0-9a-f]{8}\.part)?")


@contextmanager
def claimed(out: Path) -> Iterator[Path]:
    """Take the directory `out` for one conversion; yields a folder for temporary files in it, gone in the end.

    What an unfinished conversion left there is removed.

    Raises:
        RecipeError: `out` holds a dataset or anything else, is in use, or cannot be written.
    """
    work = out / _WORK_NAME
    if out.exists() and not out.is_dir():
        raise RecipeError(f"OUT {out}: is a file. Choose a new or empty directory")
    try:
        out.mkdir(parents=True, exist_ok=True)
        _refuse_foreign(out)
        work.mkdir(exist_ok=True)
        lock = (work / "lock").open("w")
    except OSError as error:
        raise RecipeError(f"OUT {out}: cannot be written ({error.strerror})") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecipeError(f"OUT {out}: another vitscale-convert is writing there") from None
        try:
            _refuse_foreign(out)  # once more: another converter may have finished since
            for leftover in out.iterdir():
                if _OURS.fullmatch(leftover.name):
                    leftover.unlink()
            yield work
        finally:
            for part in out.glob(".*.part"):  # of workers that were killed
                part.unlink(missing_ok=True)
            shutil.rmtree(work, ignore_errors=True)


def _refuse_foreign(out: Path) -> None:
    if (out / MANIFEST_NAME).exists():
        raise RecipeError(f"OUT {out}: already holds a dataset. Choose another directory, or remove this one first")
    names = sorted(path.name for path in out.iterdir())
    begun = LOG_NAME in names  # our own unfinished work is recognised by its log
    foreign = [name for name in names if name not in (LOG_NAME, _WORK_NAME) and not (begun and _OURS.fullmatch(name))]
    if foreign:
        shown = ", ".join(map(repr, foreign[:5])) + (" ..." if len(foreign) > 5 else "")
        raise RecipeError(
            f"OUT {out}: not empty ({len(foreign)} other files: {shown}). Choose a new or empty directory"
        )


def log(out: Path, event: str, **what: Any) -> None:
    """Append to the log what must not stand in the manifest: when, where, how fast. Raises OSError."""
    line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **what}
    with (out / LOG_NAME).open("a") as file:
        file.write(json.dumps(line) + "\n")
