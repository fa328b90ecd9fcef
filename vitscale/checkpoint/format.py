"""The fragment format: a checkpoint is a folder that any world size and ZeRO stage can read.

    step-00001000/
        rank-00000.safetensors    what rank 0 owned: keys KIND/PARAMETER@START, 1-D fp32 pieces of flattened parameters
        ...
        index.json                written last: what the run was, and size and sha256 of every file

A checkpoint exists if and only if its index.json is there and every file in it verifies. No pickle anywhere.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pydantic
import torch
from safetensors.torch import save_file
from torch import Tensor

from vitscale.durable import write_text
from vitscale.errors import CheckpointError
from vitscale.shards import file_digests

SCHEMA_VERSION = 1
INDEX = "index.json"
MASTER = "master"


@dataclass(frozen=True)
class Fragment:
    """A contiguous piece of one flattened parameter, with the state that the optimizer keeps for it.

    `tensors` maps a kind (`master`, `exp_avg`, `exp_avg_sq`, `momentum_buffer`) to a 1-D fp32 tensor.
    """

    name: str
    start: int
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint; `path` is relative to its folder."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """What index.json holds, besides a checksum of its own.

    `shapes` are the parameters' shapes; `kinds` what is stored for each of them; `optimizer_steps` the number of
    updates behind the moments; `data` identifies the dataset and its order; `selection` is the state of the best
    checkpoint and early stopping; `versions` name the code and libraries that wrote it.
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
    files: list[FileEntry] = field(default_factory=list)
    schema_version: int = SCHEMA_VERSION


_INDEX = pydantic.TypeAdapter(Index)


def step_folder(step: int) -> str:
    """Name of the folder of one checkpoint."""
    return f"step-{step:08d}"


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


def write_rank_file(folder: Path, rank: int, fragments: list[Fragment]) -> FileEntry:
    """Write what one rank owns, force it to disk and hash it."""
    path = folder / f"rank-{rank:05d}.safetensors"
    tensors = {
        fragment_key(kind, fragment.name, fragment.start): tensor.detach().to("cpu", torch.float32).contiguous()
        for fragment in fragments
        for kind, tensor in fragment.tensors.items()
    }
    save_file(tensors, path)
    path.chmod(folder.stat().st_mode & 0o666)  # safetensors makes it the owner's alone; the folder follows the umask
    with path.open("rb") as file:
        os.fsync(file.fileno())
    size, sha256, _ = file_digests(path)
    return FileEntry(path.name, size, sha256)


def write_index(folder: Path, index: Index) -> None:
    """Write index.json, the last file of a checkpoint."""
    content = asdict(index)
    content["checksum"] = _checksum(content)
    write_text(folder / INDEX, json.dumps(content, indent=1, sort_keys=True) + "\n")


def read_index(folder: Path) -> Index:
    """The index of a checkpoint, its structure checked, its files not yet."""
    path = folder / INDEX
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no {INDEX}, so this checkpoint was never finished") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise CheckpointError(f"{path}: schema_version is {version!r}; this vitscale reads {SCHEMA_VERSION}")
    if content.pop("checksum", None) != _checksum(content):
        raise CheckpointError(f"{path}: its content is damaged or was edited (it does not match its own checksum)")
    try:
        index = _INDEX.validate_json(json.dumps(content), strict=True)
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        raise CheckpointError(f"{path}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
    if folder.name.startswith("step-") and folder.name != step_folder(index.step):
        raise CheckpointError(f"{path}: it is the index of step {index.step}, in the folder {folder.name}")
    return index


def _checksum(content: dict[str, Any]) -> str:
    """sha256 of an index's own content: the files' digests in it are worth nothing if it can change unseen."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def file_problem(folder: Path, entry: FileEntry) -> str | None:
    """What is wrong with one file of a checkpoint, if anything."""
    path = folder / entry.path
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            return f"{path}: {size} bytes, expected {entry.bytes}"
        if file_digests(path).sha256 != entry.sha256:
            return f"{path}: its content is damaged (sha256 differs from the index)"
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return None
