"""The fragment format: a checkpoint is a folder that any world size and ZeRO stage can read.

    step-00001000/
        rank-00000.safetensors    what rank 0 owned: keys KIND/PARAMETER@START, 1-D fp32 pieces of flattened parameters
        ...
        index.json                written last: what the run was, and the size and sha256 of every file

A checkpoint exists if and only if its index.json is there and every file in it verifies
(`vitscale.runs.checkpoint_index`). No pickle anywhere.
"""

import hashlib
import math
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitscale.ground.errors import CheckpointError, os_errors
from vitscale.ground.files.digests import file_digests
from vitscale.ground.files.durable import durable_file
from vitscale.models.weights.torch_files import write_safetensors
from vitscale.runs.checkpoint_index import FileEntry

_BLOCK_BYTES = 16 << 20
_START_DIGITS = 18  # fit into 64 bits
_HEADER_BYTES = 160  # header per key: its name, type, shape and position

Layout = dict[str, int]
"""Key -> its tensor's length, in the order in which the tensors follow each other to the end of a rank's file."""


class Fragment(NamedTuple):
    """A contiguous piece of one flattened parameter, with its optimizer state.

    `start` is the piece's offset in elements. `tensors` maps a kind (`master`, `ema`, `exp_avg`, `exp_avg_sq`,
    `momentum_buffer`) to a 1-D tensor, which is written in fp32. State that does not have its parameter's shape is a
    fragment of its own, cut from the flattened state.
    """

    name: str
    start: int
    tensors: dict[str, Tensor]


def rank_file(rank: int) -> str:
    """The name of one rank's file."""
    return f"rank-{rank:05d}.safetensors"


def fragment_key(kind: str, name: str, start: int) -> str:
    """The key of one fragment's tensor in a rank's file."""
    return f"{kind}/{name}@{start}"


def parse_key(key: str) -> tuple[str, str, int]:
    """Split a key into (kind, parameter, start). Raises `CheckpointError`."""
    kind, _, rest = key.partition("/")
    name, _, start = rest.rpartition("@")
    if not kind or not name or not start.isdigit() or len(start) > _START_DIGITS:
        raise CheckpointError(f"{key!r} is not a fragment's key; expected KIND/PARAMETER@START")
    return kind, name, int(start)


def bytes_needed(shapes: dict[str, list[int]], kinds: list[str]) -> int:
    """The total size of a checkpoint's rank files, in bytes; each cut of a parameter adds some 100 more."""
    return len(kinds) * sum(4 * math.prod(shape) + _HEADER_BYTES for shape in shapes.values())


class _Hashed:
    """Writes to a file and computes the sha256 of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def write(self, content: bytes | memoryview) -> None:
        view = memoryview(content)
        for start in range(0, len(view), _BLOCK_BYTES):  # hashed and written while the block is in the CPU's cache
            block = view[start : start + _BLOCK_BYTES]
            self.sha256.update(block)
            self._file.write(block)


def write_rank_file(path: Path, fragments: list[Fragment]) -> FileEntry:
    """Stream what one rank owns to a file, one tensor at a time, and sync it to disk.

    Tensors may be on a device; each is copied to the host when its turn comes. Raises OSError after removing the file.
    """
    tensors = {
        fragment_key(kind, fragment.name, fragment.start): tensor.detach()
        for fragment in fragments
        for kind, tensor in fragment.tensors.items()
    }
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    with durable_file(path) as file:
        hashed = _Hashed(file)
        write_safetensors(hashed, shapes, ((key, each.to("cpu", torch.float32)) for key, each in tensors.items()), {})
        size = file.tell()
    return FileEntry(path.name, size, hashed.sha256.hexdigest())


def read_layout(path: Path) -> Layout:
    """Read which tensors a rank's file holds. Raises `CheckpointError`."""
    layout = {}
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.offset_keys():
                parse_key(key)
                tensor = file.get_slice(key)
                if tensor.get_dtype() != "F32":
                    raise CheckpointError(f"{path}: {key} is {tensor.get_dtype()}, expected F32")
                (layout[key],) = tensor.get_shape()
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path}: not a file of fragments: {error}") from None
    return layout


def verify_file(path: Path, entry: FileEntry) -> None:
    """Raise `CheckpointError` unless a file is byte for byte the one that the index describes."""
    with os_errors(f"{path}: cannot be read", CheckpointError):
        size = path.stat().st_size
        if size != entry.bytes:
            raise CheckpointError(f"{path}: {size} bytes, expected {entry.bytes}")
        if file_digests(path).sha256 != entry.sha256:
            raise CheckpointError(f"{path}: its content is damaged (sha256 differs from the index)")
