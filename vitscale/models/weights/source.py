"""Weights on disk as names and shapes, read one tensor at a time."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitscale.ground.errors import CheckpointError, turned
from vitscale.ground.safe_text import printable
from vitscale.ground.storage import read_bytes
from vitscale.ground.weight_formats import Format
from vitscale.ground.wording import shortened
from vitscale.recipe import EvalCrop, Normalise

Shapes = dict[str, tuple[int, ...]]
_MOST_JSON = 64 << 20
_LONGEST_NAME = 1000
_INDICES = (".relative_position_index", ".attn_mask")
MASK = "mask_token"  # the mask of self-distillation or of a decoder, in the names of the authors of DINOv2 and of MAE
MOST_PIXELS = 8192  # the largest side of an image


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
        image_size: the side of a folder's images in pixels, if it says so.
        normalise: how the images that the weights are for are normalised, if the format or a folder says so.
        notes: what people should know: what was left unread, and what the file says that we compute otherwise.
        seen_otherwise: likewise, of pictures, which a run that begins with the weights prepares its own way.
        beside: as `entries`, what is no part of the model but of the objective that it was pre-trained with.
    """

    path: Path
    form: Format
    entries: dict[str, Entry]
    metadata: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    class_names: list[str] | None = None
    eval_crop: EvalCrop | None = None
    image_size: int | None = None
    normalise: Normalise | None = None
    notes: tuple[str, ...] = ()
    seen_otherwise: tuple[str, ...] = ()
    beside: dict[str, Entry] = field(default_factory=dict)


def rename(path: Path, entries: dict[str, Entry], new_name: Callable[[str], str]) -> dict[str, Entry]:
    """The same entries under other names. Raises `CheckpointError` if two of them would have the same."""
    result: dict[str, Entry] = {}
    for name, entry in entries.items():
        other = result.setdefault(new_name(name), entry)
        if other is not entry:
            raise CheckpointError(f"{path}: {other.key} and {entry.key} are two names of one parameter")
    return result


def without_indices(entries: dict[str, Entry]) -> dict[str, Entry]:
    """The same entries without those of a Swin that follow from its dimensions, and are computed here."""
    return {name: entry for name, entry in entries.items() if not name.endswith(_INDICES)}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of at most 64 MiB. Raises `CheckpointError`."""
    with turned(f"{path}: cannot be read", CheckpointError, OSError, ValueError, RecursionError):
        if path.stat().st_size > _MOST_JSON:
            raise ValueError(f"longer than {_MOST_JSON >> 20} MiB")
        content = json.loads(read_bytes(path))
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def contradicted(source: Source, key: str, value: Any, expected: str) -> CheckpointError:
    """The error for a value in a folder's config.json with which its tensors are no model of ours."""
    return CheckpointError(f"{source.path / 'config.json'}: {key} is {shortened(repr(value))}; expected {expected}")


def names_of(listed: Any) -> list[str] | None:
    """The class names that a folder lists, in their order or by their number, made printable; None if it does not."""
    if isinstance(listed, dict):
        listed = [listed.get(str(i)) for i in range(len(listed))]
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        return None
    return [printable(name)[:_LONGEST_NAME] for name in listed]
