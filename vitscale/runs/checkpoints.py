"""Lists the checkpoints in a folder or below a URL, and reads their indices. Tensors are not read."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from vitscale.ground.errors import CheckpointError
from vitscale.ground.storage import is_url, join, names_in
from vitscale.runs.checkpoint_index import CheckpointIndex, read_index
from vitscale.runs.names import CHECKPOINTS, INDEX_FILE, step_folder


def steps_among(names: Iterable[str]) -> list[int]:
    """The steps of the checkpoint folders among `names`, in order."""
    numbers = (int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdecimal())
    return sorted(step for step in numbers if step_folder(step) in names)


def steps_at(root: str) -> list[int]:
    """The steps of the checkpoints in a folder or below a URL, in order; not verified. Raises OSError, StorageError."""
    steps = steps_among(names_in(root))
    if is_url(root):  # a folder at a URL exists from its first file on; a local one is renamed once it is complete
        steps = [step for step in steps if INDEX_FILE in names_in(join(root, step_folder(step)))]
    return steps


def newest_checkpoint_step(run_dir: Path) -> int:
    """The step of the newest complete checkpoint in the run directory, whether or not it verifies; 0 for none."""
    with suppress(OSError):
        return max(_saved(run_dir / CHECKPOINTS), default=0)
    return 0


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints in a folder.

    Attributes:
        steps: the steps of the checkpoints, oldest first.
        saved_at: when the newest was written, in seconds since 1970; None if there is none.
        newest: the newest readable index; None if there is none.
        problems: what is wrong with that checkpoint and newer ones, one message each.
    """

    steps: list[int]
    saved_at: float | None
    newest: CheckpointIndex | None
    problems: list[str]


def read_checkpoints(folder: Path) -> Checkpoints:
    """The checkpoints in a folder of this machine. Raises nothing: what cannot be read is listed as a problem."""
    found: dict[int, int] = {}
    problems: list[str] = []
    try:
        found = _saved(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(f"{folder} cannot be read: {error.strerror}")
    steps = sorted(found)
    saved_at = found[steps[-1]] / 1e9 if steps else None
    for step in reversed(steps):
        index, wrong = _read(folder / step_folder(step), step, found[step])
        problems += wrong
        if index is not None:
            return Checkpoints(steps, saved_at, index, problems)
    return Checkpoints(steps, saved_at, None, problems)


def _saved(folder: Path) -> dict[int, int]:
    """Step -> when its index was written, in nanoseconds since 1970. Raises OSError."""
    found = {}
    for step in steps_among(os.listdir(folder)):  # noqa: PTH208 (names are enough)
        with suppress(OSError):  # being removed, or never finished
            found[step] = (folder / step_folder(step) / INDEX_FILE).stat().st_mtime_ns
    return found


@lru_cache(maxsize=64)
def _read(folder: Path, step: int, modified_ns: int) -> tuple[CheckpointIndex | None, tuple[str, ...]]:
    """The index of a checkpoint, or None, and what is wrong; `modified_ns`, its time of writing, keys the cache."""
    try:
        index = read_index(folder, step)
    except CheckpointError as error:
        return None, (str(error),)
    return index, tuple(_wrong_sizes(folder, index))


def _wrong_sizes(folder: Path, index: CheckpointIndex) -> Iterator[str]:
    """Describe the first file that is missing or has another size than the index says."""
    for file in index.files:
        try:
            size = (folder / file.path).stat().st_size
        except OSError as error:
            yield f"{folder / file.path}: {error.strerror}"
            return
        if size != file.bytes:
            yield f"{folder / file.path}: {size:,} bytes, expected {file.bytes:,}"
            return
