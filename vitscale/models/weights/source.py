"""Weights on disk as names and shapes, read one tensor at a time."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitscale.ground.errors import CheckpointError
from vitscale.ground.storage import read_bytes
from vitscale.ground.weight_formats import Format
from vitscale.recipe import EvalCrop, Normalise


@dataclass(frozen=True)
class Entry:
    """One array of a file: its key there, its shape, and how to read it (fp32, on the CPU).

    `piece` reads elements [start, start + length) of the flattened array without the others; None where a file cannot.
    """

    key: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    piece: Callable[[int, int], Tensor] | None = None

    def changed(self, shape: tuple[int, ...], change: Callable[[Tensor], Tensor]) -> "Entry":
        """The same array with another layout."""
        return replace(self, shape=shape, read=lambda: change(self.read()), piece=None)


@dataclass(frozen=True)
class Source:
    """The weights in one file or folder, under the names that our table of its format uses.

    Args:
        path: the file or folder.
        form: its format.
        entries: name in the table -> array.
        metadata: what our own files say of their model; empty in other formats.
        config: config.json of a folder of transformers', with its defaults, or of timm's; empty in other formats.
        class_names: the names of the outputs, if a folder has them.
        eval_crop: how a folder's images are cropped, if it says so and we can do the same.
        normalise: how the images that the weights are for are normalised, if the format or a folder says so.
        notes: what people should know: what was left unread, and what the file says that we compute otherwise.
    """

    path: Path
    form: Format
    entries: dict[str, Entry]
    metadata: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    class_names: list[str] | None = None
    eval_crop: EvalCrop | None = None
    normalise: Normalise | None = None
    notes: tuple[str, ...] = ()


def rename(path: Path, entries: dict[str, Entry], new_name: Callable[[str], str]) -> dict[str, Entry]:
    """The same entries under other names. Raises `CheckpointError` if two of them would have the same."""
    result: dict[str, Entry] = {}
    for name, entry in entries.items():
        other = result.setdefault(new_name(name), entry)
        if other is not entry:
            raise CheckpointError(f"{path}: {other.key} and {entry.key} are two names of one parameter")
    return result


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `CheckpointError`."""
    try:
        content = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def differing(path: Path, content: dict[str, Any], ours: dict[str, Any], so: str) -> list[str]:
    """One note on the keys of a folder's file that ask for something else than we compute, or none."""
    found = [f"{key} {content[key]!r} (here {ours[key]!r})" for key in ours if content.get(key, ours[key]) != ours[key]]
    return [f"{path.name} asks for {' and '.join(found)}: {so}"] if found else []


def some(keys: list[str], limit: int = 8) -> str:
    """The first of many keys, for a message."""
    return ", ".join(keys[:limit]) + (f", ... ({len(keys)} in all)" if len(keys) > limit else "")
