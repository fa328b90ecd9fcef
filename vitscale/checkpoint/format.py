"""The fragment format: a checkpoint is a folder that any world size and ZeRO stage can read.

    step-00001000/
        rank-00000.safetensors    what rank 0 owned: keys KIND/PARAMETER@START, 1-D fp32 pieces of flattened parameters
        ...
        index.json                written last: what the run was, and size and sha256 of every file

A checkpoint exists if and only if its index.json is there and every file in it verifies. No pickle anywhere.

Version 2 of the index added `anomalies` and `position`. Indices of version 1 are read as having skipped nothing.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pydantic
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitscale.errors import CheckpointError
from vitscale.files.digests import file_digests
from vitscale.models.weights.torch_files import write_safetensors
from vitscale.run_directory import step_folder

SCHEMA_VERSION = 2
INDEX = "index.json"
MASTER = "master"
EMA = "ema"

_READABLE = (1, SCHEMA_VERSION)
_BLOCK_BYTES = 16 << 20
_HEADER_BYTES = 160  # of one key: its name, type, shape and position

Layout = dict[str, int]
"""The keys of a rank's file and the length of each one's tensor."""


@dataclass(frozen=True)
class Fragment:
    """A contiguous piece of one flattened parameter, with the state that is kept for it.

    `tensors` maps a kind (`master`, `ema`, `exp_avg`, `exp_avg_sq`, `momentum_buffer`) to a 1-D fp32 tensor.
    """

    name: str
    start: int
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint; `path` is its name in the checkpoint's folder."""

    path: str
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        # Files at a URL are copied to this machine under this name: it must not lead elsewhere.
        if self.path in ("", ".", "..") or "/" in self.path or "\0" in self.path:
            raise ValueError(f"{self.path!r} is not the name of a file")


@dataclass(frozen=True)
class Index:
    """What index.json holds, besides a checksum of its own.

    `shapes` are the parameters' shapes; `kinds` what is stored for each of them; `optimizer_steps` the number of
    updates behind the moments; `data` identifies the dataset and its order; `selection` is the state of the best
    checkpoint and early stopping; `versions` name the code and libraries that wrote it; `anomalies` is the state of
    what was skipped; `position` the number of batches of the order that were consumed: `step`, unless given, and more
    where some were skipped.
    """

    step: int
    world_size: int
    shapes: dict[str, list[int]]
    kinds: list[str]
    optimizer_steps: int
    recipe: dict[str, Any]
    data: dict[str, Any]
    versions: dict[str, str]
    selection: dict[str, Any] = field(default_factory=dict)
    anomalies: dict[str, Any] = field(default_factory=dict)
    position: int = -1
    files: list[FileEntry] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.position == -1:
            object.__setattr__(self, "position", self.step)
        if self.position < self.step:
            raise ValueError(f"position {self.position} is before step {self.step}")


_INDEX = pydantic.TypeAdapter(Index)


def steps_among(names: Iterable[str]) -> list[int]:
    """The steps that folders of checkpoints among `names` are of, in order."""
    numbers = (int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdecimal())
    return sorted(step for step in numbers if step_folder(step) in names)


def rank_file(rank: int) -> str:
    """Name of the file of what one rank owned."""
    return f"rank-{rank:05d}.safetensors"


def fragment_key(kind: str, name: str, start: int) -> str:
    """Key of one fragment's tensor in a rank's file."""
    return f"{kind}/{name}@{start}"


def parse_key(key: str) -> tuple[str, str, int]:
    """(kind, parameter, start) of a key."""
    kind, _, rest = key.partition("/")
    name, _, start = rest.rpartition("@")
    if not kind or not name or not start.isdigit():
        raise CheckpointError(f"{key!r} is not a fragment's key; expected KIND/PARAMETER@START")
    return kind, name, int(start)


def bytes_needed(shapes: dict[str, list[int]], kinds: list[str]) -> int:
    """Bytes of a checkpoint of these parameters and kinds, its ranks' files together; each cut adds some 100 more."""
    return len(kinds) * sum(4 * math.prod(shape) + _HEADER_BYTES for shape in shapes.values())


class _Hashed:
    """A file to write to, and the sha256 of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def write(self, content: bytes | memoryview) -> None:
        view = memoryview(content)
        for start in range(0, len(view), _BLOCK_BYTES):  # hashed and written while it is in the processor's cache
            block = view[start : start + _BLOCK_BYTES]
            self.sha256.update(block)
            self._file.write(block)


def write_rank_file(path: Path, fragments: list[Fragment]) -> FileEntry:
    """Write what one rank owns as a stream, one tensor at a time, and force it to disk. Raises OSError, file removed.

    Tensors may be on a device; each is copied from there when it is its turn.
    """
    tensors = {
        fragment_key(kind, fragment.name, fragment.start): tensor.detach()
        for fragment in fragments
        for kind, tensor in fragment.tensors.items()
    }
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    try:
        with path.open("wb") as file:
            hashed = _Hashed(file)
            write_safetensors(hashed, shapes, ((key, _fp32(tensor)) for key, tensor in tensors.items()), {})
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return FileEntry(path.name, size, hashed.sha256.hexdigest())


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", torch.float32)


def read_layout(path: Path) -> Layout:
    """What a rank's file holds. Raises `CheckpointError`."""
    layout = {}
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a dictionary)
                parse_key(key)
                (layout[key],) = file.get_slice(key).get_shape()
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path}: not a file of fragments: {error}") from None
    return layout


def verify_file(path: Path, entry: FileEntry) -> None:
    """Raise `CheckpointError` where a file is not the one of the index, byte for byte."""
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            raise CheckpointError(f"{path}: {size} bytes, expected {entry.bytes}")
        if file_digests(path).sha256 != entry.sha256:
            raise CheckpointError(f"{path}: its content is damaged (sha256 differs from the index)")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None


def index_text(index: Index) -> str:
    """The content of index.json."""
    content = asdict(index) | {"schema_version": SCHEMA_VERSION}
    content["checksum"] = _checksum(content)
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def parse_index(text: bytes, where: str, step: int | None = None) -> Index:
    """The index that `text` is, its structure checked, its files not.

    Args:
        text: content of index.json.
        where: it is, for messages.
        step: that it should be of.

    Raises `CheckpointError`.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: cannot be read: {error}") from None
    version = content.pop("schema_version", None) if isinstance(content, dict) else None
    if version not in _READABLE:
        raise CheckpointError(
            f"{where}: schema_version is {version!r}; this vitscale reads {' and '.join(map(str, _READABLE))}"
        )
    if content.pop("checksum", None) != _checksum(content | {"schema_version": version}):
        raise CheckpointError(f"{where}: its content is damaged or was edited (it does not match its own checksum)")
    try:
        index = _INDEX.validate_json(json.dumps(content), strict=True)
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        raise CheckpointError(f"{where}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
    if step is not None and index.step != step:
        raise CheckpointError(f"{where}: it is the index of step {index.step}, in the folder {step_folder(step)}")
    return index


def read_index(folder: Path, step: int | None = None) -> Index:
    """The index of a checkpoint in a folder. Raises as `parse_index`."""
    path = folder / INDEX
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no {INDEX}, so this checkpoint was never finished") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    return parse_index(text, str(path), step)


def _checksum(content: dict[str, Any]) -> str:
    """sha256 of an index's own content: the files' digests in it are worth nothing if it can change unseen."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
