"""Google's `.npz`: every naming of it read, one written, one array in memory at a time.

Its names are those of the paper's authors; the later ones of their Big Vision project are mapped back to them. A
stacked file has the layers of all blocks in one array, with the block as its first axis.
"""

import math
import re
import zipfile
import zlib
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from vitscale.ground.errors import CheckpointError, turned
from vitscale.ground.files.arrays import read_array, read_header
from vitscale.ground.files.unpacked import refuse_growth
from vitscale.ground.wording import listed
from vitscale.models.weights.source import Entry, Source, rename
from vitscale.recipe import Normalise

# Prefix of the weights -> what else the file may hold: the state of the optimizer and of the trainer's clock, and the
# other half of a pair of image and text towers. The longest comes first.
_PREFIXES = {
    "params/img/": ("params/txt/", "params/t", "params/b", "opt/", "chrono/"),
    "opt/target/": ("opt/state/",),
    "params/": ("opt/", "chrono/"),
    "": (),
}
_LANDMARKS = ("embedding/kernel", "resnet/root_block/standardized_conv2d/kernel")
_IN_BLOCK = {
    "MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1",
    "LayerNorm_1": "LayerNorm_2",
    "MlpBlock_0": "MlpBlock_3",
}
_POSITIONS = "Transformer/posembed_input/pos_embedding"
_STACKED = "Transformer/encoderblock/"
_MOST_LAYERS = 128  # in one stacked array; each is read from the beginning of a compressed one
# What zipfile raises; RuntimeError for an encrypted member.
_DAMAGED = (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError, KeyError, RuntimeError, MemoryError)


def read_npz(path: Path) -> Source:
    """Read one of Google's files. Raises `CheckpointError` for one that is damaged, pickled or none of Google's."""
    found = _members(path)
    prefix = next((p for p in _PREFIXES if any(p + landmark in found for landmark in _LANDMARKS)), None)
    if prefix is None:
        raise CheckpointError(
            f"{path}: not a Vision Transformer's or BiT's .npz: there is none of {' and '.join(_LANDMARKS)}, with or "
            f"without the prefixes {', '.join(p for p in _PREFIXES if p)}; it has {listed(sorted(found)) or 'nothing'}"
        )
    aside = [key for key in found if not key.startswith(prefix) and key.startswith(_PREFIXES[prefix])]
    notes = (f"{len(aside)} arrays beside {prefix} are not of this model: {listed(aside, 3)}",) if aside else ()
    entries = {key: entry for key, entry in found.items() if key not in aside}
    entries = rename(path, entries, lambda key: key.removeprefix(prefix))
    entries = _unstacked(path, entries)
    entries = rename(path, entries, _author_s_name)
    own = entries.get(_POSITIONS)
    if own is not None and "cls" in entries and len(own.shape) == 3 and math.isqrt(own.shape[1]) ** 2 == own.shape[1]:
        # Big Vision adds positions before it adds the class token, which so has none: ours is zero.
        rows = (own.shape[0], own.shape[1] + 1, own.shape[2])
        entries[_POSITIONS] = own.changed(rows, lambda value: torch.cat([torch.zeros_like(value[:, :1]), value], 1))
    for name, entry in entries.items():
        if re.search(r"(^|/)(gn\w+|group_norm)/", name) and entry.shape[:-1] == (1, 1, 1):
            entries[name] = entry.changed(entry.shape[-1:], torch.flatten)
    return Source(path, "npz", entries, normalise=Normalise(), notes=notes)  # all of Google's code has [-1, 1]


def write_npz(file: BinaryIO, arrays: Iterable[tuple[str, Tensor]]) -> None:
    """Write arrays (key, fp32 tensor) in the order given, uncompressed as numpy has it. Raises OSError."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for key, value in arrays:
            with archive.open(f"{key}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, value.numpy(), allow_pickle=False)


def _author_s_name(name: str) -> str:
    if name == "pos_embedding":
        return _POSITIONS
    if not name.startswith("Transformer/encoderblock_"):
        return name
    return "/".join(_IN_BLOCK.get(part, part) for part in name.split("/"))


def _unstacked(path: Path, entries: dict[str, Entry]) -> dict[str, Entry]:
    result: dict[str, Entry] = {}
    for name, entry in entries.items():
        if not name.startswith(_STACKED) or not entry.shape:
            result[name] = entry
            continue
        if entry.shape[0] > _MOST_LAYERS:
            raise CheckpointError(f"{path}: {entry.key}: {entry.shape[0]:,} layers; at most {_MOST_LAYERS} are read")
        for i in range(entry.shape[0]):
            layer = f"Transformer/encoderblock_{i}/{name.removeprefix(_STACKED)}"
            result[layer] = Entry(f"{entry.key}[{i}]", entry.shape[1:], partial(_read, path, entry.key, layer=i))
    return result


def _members(path: Path) -> dict[str, Entry]:
    found = {}
    with turned(f"{path}: not an .npz, or damaged", CheckpointError, *_DAMAGED), zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        refuse_growth(str(path), path.stat().st_size, sum(info.file_size for info in members))
        for info in members:
            if not info.filename.endswith(".npy"):
                raise CheckpointError(f"{path}: a zip, but no .npz: it holds {info.filename}")
            key = info.filename.removesuffix(".npy")
            if key in found or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"{key} is there twice, or compressed as numpy does not")
            with turned(key, ValueError, ValueError), archive.open(info) as member:
                shape = read_header(member, info.file_size)[0]
            found[key] = Entry(key, shape, partial(_read, path, key))
    return found


def _read(path: Path, key: str, layer: int | None = None) -> Tensor:
    """Read one array, or one layer of a stacked one without the others, as fp32."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as member:
            size = archive.getinfo(f"{key}.npy").file_size
            if layer is None:
                return _tensor(read_array(member, size))
            shape, column_major, dtype = read_header(member, size)
            if column_major:
                raise ValueError("stacked layers in column-major order")
            size = math.prod(shape[1:]) * dtype.itemsize
            member.seek(member.tell() + layer * size)
            return _tensor(np.frombuffer(bytearray(member.read(size)), dtype).reshape(shape[1:]))
    except _DAMAGED as error:
        raise CheckpointError(f"{path}: {key} cannot be read: {error}") from None


def _tensor(array: np.ndarray) -> Tensor:
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:  # bf16 is void to numpy
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).float()
    if array.dtype.kind != "f":
        raise ValueError(f"its type {array.dtype} is no floating-point type")
    return torch.from_numpy(np.array(array, np.float32, order="C"))
