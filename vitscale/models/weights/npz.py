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
from tokenize import TokenError
from typing import IO, BinaryIO

import numpy as np
import torch
from torch import Tensor

from vitscale.errors import CheckpointError
from vitscale.models.weights.source import Entry, Source, rename, some
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
# What zipfile and numpy raise; RuntimeError for an encrypted member, NotImplementedError for a compression.
_DAMAGED = (zipfile.BadZipFile, zlib.error, TokenError, ValueError, EOFError, OSError, KeyError, RuntimeError)


def read_npz(path: Path) -> Source:
    """Read one of Google's files. Raises `CheckpointError` for one that is damaged, pickled or none of Google's."""
    found = _members(path)
    prefix = next((p for p in _PREFIXES if any(p + landmark in found for landmark in _LANDMARKS)), None)
    if prefix is None:
        raise CheckpointError(
            f"{path}: not a Vision Transformer's or BiT's .npz: there is none of {' and '.join(_LANDMARKS)}, with or "
            f"without the prefixes {', '.join(p for p in _PREFIXES if p)}; it has {some(sorted(found)) or 'no arrays'}"
        )
    aside = [key for key in found if not key.startswith(prefix) and key.startswith(_PREFIXES[prefix])]
    notes = (f"{len(aside)} arrays beside {prefix} are not of this model: {some(aside, 3)}",) if aside else ()
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
        for i in range(entry.shape[0]):
            layer = f"Transformer/encoderblock_{i}/{name.removeprefix(_STACKED)}"
            result[layer] = Entry(f"{entry.key}[{i}]", entry.shape[1:], partial(_read, path, entry.key, layer=i))
    return result


def _members(path: Path) -> dict[str, Entry]:
    found = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if not info.filename.endswith(".npy"):
                    raise CheckpointError(f"{path}: a zip, but no .npz: it holds {info.filename}")
                key = info.filename.removesuffix(".npy")
                with archive.open(info) as member:
                    shape, _, dtype = _header(member)
                    stated = math.prod(shape) * dtype.itemsize
                    there = info.file_size - member.tell()
                if dtype.hasobject:
                    raise CheckpointError(f"{path}: {key} holds pickled objects, which are not read")
                if stated != there or key in found:
                    raise ValueError(f"{key} is there twice, or has {there} bytes where its header says {stated}")
                found[key] = Entry(key, shape, partial(_read, path, key))
    except _DAMAGED as error:
        raise CheckpointError(f"{path}: not an .npz, or damaged: {error}") from None
    return found


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(member)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(member)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(member)
    raise ValueError(f"an array of numpy's format version {version}")


def _read(path: Path, key: str, layer: int | None = None) -> Tensor:
    """Read one array, or one layer of a stacked one without the others, as fp32."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as member:
            if layer is None:
                return _tensor(np.lib.format.read_array(member, allow_pickle=False))
            shape, column_major, dtype = _header(member)
            if column_major:
                raise ValueError("stacked layers in column-major order")
            size = math.prod(shape[1:]) * dtype.itemsize
            member.seek(member.tell() + layer * size)
            return _tensor(np.frombuffer(bytearray(member.read(size)), dtype).reshape(shape[1:]))
    except _DAMAGED as error:
        raise CheckpointError(f"{path}: {key} cannot be read: {error}") from None


def _tensor(array: np.ndarray) -> Tensor:
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:  # bf16 is void to numpy
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).float()
    if array.dtype.kind != "f":
        raise ValueError(f"its type {array.dtype} is no floating-point type")
    return torch.from_numpy(np.ascontiguousarray(array, np.float32))
