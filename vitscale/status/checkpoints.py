"""What the indices of checkpoints in a folder tell. Their bytes are not read."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vitscale.run_directory import step_folder

_INDEX = "index.json"

_Count = Annotated[int, Field(ge=0, lt=2**60)]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _File(_Record):
    path: str
    bytes: _Count


class _Data(_Record):
    num_samples: _Count
    class_names: list[str]


class Index(_Record):
    """What is read here of a checkpoint's index."""

    data: _Data
    files: list[_File]
    selection: dict[str, Any] = {}

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints in a folder.

    Attributes:
        steps: that there are checkpoints of, oldest first.
        saved_at: when the newest was written, in seconds since 1970.
        newest, newest_step: index of the newest that has a readable one, and its step.
        problems: of this one and later ones.
    """

    steps: list[int]
    saved_at: float | None
    newest: Index | None
    newest_step: int | None
    problems: list[str]


def read_checkpoints(folder: Path) -> Checkpoints:
    """What is in a folder of this machine. Raises nothing: what cannot be read is a problem."""
    found: dict[int, int] = {}
    problems: list[str] = []
    try:
        for name in os.listdir(folder):  # noqa: PTH208 (names are enough)
            digits = name.removeprefix("step-")
            if digits.isdecimal() and name == step_folder(int(digits)):
                with suppress(OSError):  # being removed, or never finished
                    found[int(digits)] = (folder / name / _INDEX).stat().st_mtime_ns
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(f"{folder} cannot be read: {error.strerror}")
    steps = sorted(found)
    saved_at = found[steps[-1]] / 1e9 if steps else None
    for step in reversed(steps):
        index, wrong = _read(folder / step_folder(step), found[step])
        problems += wrong
        if index is not None:
            return Checkpoints(steps, saved_at, index, step, problems)
    return Checkpoints(steps, saved_at, None, None, problems)


@lru_cache(maxsize=64)
def _read(folder: Path, modified_ns: int) -> tuple[Index | None, tuple[str, ...]]:
    """The index of a checkpoint that was written at `modified_ns`, and what is wrong."""
    path = folder / _INDEX
    try:
        index = Index.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return None, (f"{path} is damaged: {f'{where}: ' if where else ''}{first['msg']}",)
    except OSError as error:
        return None, (f"{path} cannot be read: {error.strerror}",)
    return index, tuple(_wrong_sizes(folder, index))


def _wrong_sizes(folder: Path, index: Index) -> Iterator[str]:
    """The first file that is missing or of another size."""
    for file in index.files:
        try:
            size = (folder / file.path).stat().st_size
        except OSError as error:
            yield f"{folder / file.path}: {error.strerror}"
            return
        if size != file.bytes:
            yield f"{folder / file.path}: {size:,} bytes, expected {file.bytes:,}"
            return
