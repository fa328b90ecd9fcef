"""Tensors in safetensors files, whole or in shards, and in files of torch.save; safetensors written as a stream."""

import json
import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitscale.ground.errors import CheckpointError
from vitscale.ground.files.pickles import check_pickle
from vitscale.ground.storage import regular
from vitscale.ground.wording import listed, shortened
from vitscale.models.weights.source import Entry, read_json

SAFETENSORS = ".safetensors"
TORCH_SUFFIXES = (".pth", ".pt", ".bin")
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
"""What the weights in a folder of transformers' or timm's are called, beside their `CONFIG`."""
_INDEX = f"{WEIGHTS}.index.json"
_OLD_WEIGHTS = "pytorch_model.bin"
_OLD_PICKLES = 5  # in torch's older format: magic number, version, machine, values, keys of storages
_MOST_PICKLED = 256 << 20
# What torch lets a pickle ask for, though it makes memory of a number or takes minutes over a text (punycode).
_COSTLY = ("Tensor", " bytearray", " UntypedStorage", " TypedStorage", "_codecs encode")
_WRAPPERS = ("state_dict", "model")


def read_safetensors(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """(entries, metadata) of one file. Raises `CheckpointError`."""
    try:
        with FileIO(path, opener=regular), safe_open(path, framework="pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a safetensors file, or damaged: {error}") from None

    def read(key: str, rows: slice | None = None) -> Tensor:
        # Opened for each tensor, so that those read before do not stay mapped into memory.
        try:
            with safe_open(path, framework="pt") as file:
                part = file.get_slice(key)
                shape = tuple(part.get_shape())
                value = file.get_tensor(key) if rows is None else part[rows]
        except (SafetensorError, OSError, TypeError) as error:
            raise CheckpointError(f"{path}: {key} cannot be read any more: {error}") from None
        if shape != shapes[key]:
            raise CheckpointError(f"{path}: {key} has another shape than before: the file was replaced")
        return _floating(value, path, key)

    def piece(key: str, start: int, length: int) -> Tensor:
        row = math.prod(shapes[key][1:])  # elements
        first, end = start // row, -(-(start + length) // row)
        return read(key, slice(first, end)).flatten()[start - first * row :][:length]

    entries = {key: Entry(key, shape, partial(read, key), partial(piece, key)) for key, shape in shapes.items()}
    return entries, metadata


def read_beside_config(folder: Path) -> dict[str, Entry]:
    """The entries of the weights in a folder of transformers' or timm's. Raises `CheckpointError`."""
    if (folder / WEIGHTS).is_file():
        return read_safetensors(folder / WEIGHTS)[0]
    if (folder / _INDEX).is_file():
        return _read_shards(folder / _INDEX)
    if (folder / _OLD_WEIGHTS).is_file():
        return read_torch(folder / _OLD_WEIGHTS)
    raise CheckpointError(f"{folder}: no {WEIGHTS}, {_INDEX} or {_OLD_WEIGHTS} beside {CONFIG}")


def _read_shards(index: Path) -> dict[str, Entry]:
    """The entries of all files that a `*.safetensors.index.json` names. Raises `CheckpointError`."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: not an index of safetensors files: it has no weight_map")
    files = sorted({str(name) for name in weight_map.values()})
    entries: dict[str, Entry] = {}
    for name in files:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise CheckpointError(f"{index}: {shortened(repr(name))} is no file beside it")
        entries |= read_safetensors(index.parent / name)[0]
    if entries.keys() != weight_map.keys():
        differing = sorted(entries.keys() ^ weight_map.keys())
        raise CheckpointError(f"{index}: the index and the files differ in {listed(differing)}")
    return entries


def read_torch(path: Path) -> dict[str, Entry]:
    """The state dict in a file of torch.save, bare or under `state_dict` or `model`. Raises `CheckpointError`."""
    try:
        with FileIO(path, opener=regular) as file:
            is_zip = file.read(4) == b"PK\x03\x04"  # else torch's older format, which cannot be mapped into memory
        _check_pickles(path, is_zip)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle protocols that torch does not write: read, or refused below
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # an unpickler meets damage with whatever error comes first
        raise CheckpointError(f"{path}: cannot be read as tensors alone: {_reason(error)}") from None
    for wrapper in _WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
            break
    if not isinstance(content, dict) or not content:
        raise CheckpointError(f"{path}: expected a state dict, found {type(content).__name__}")
    foreign = [str(key)[:100] for key, value in content.items() if not _is_plain(value)]
    if foreign:
        raise CheckpointError(
            f"{path}: expected a state dict, bare or under {' or '.join(_WRAPPERS)}; no tensors are {listed(foreign)}"
        )
    if nameless := [repr(key) for key in content if not isinstance(key, str)]:
        raise CheckpointError(f"{path}: expected a state dict; keys that are no names: {shortened(listed(nameless))}")
    entries = {
        key: Entry(key, tuple(value.shape), partial(_floating, value, path, key)) for key, value in content.items()
    }
    if all(key.startswith("module.") for key in entries):
        entries = {key.removeprefix("module."): entry for key, entry in entries.items()}
    return entries


def _check_pickles(path: Path, is_zip: bool) -> None:
    """Raise ValueError or another error unless a file's pickles are no more than their bytes, which are its own."""
    if is_zip:
        with zipfile.ZipFile(path) as archive:
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise ValueError("it is compressed, which torch.save does not do")
            # In capitals, too: torch finds them so.
            pickles = [archive.read(info) for info in archive.infolist() if info.filename.lower().endswith(".pkl")]
    else:
        with path.open("rb") as file:
            pickles = [file.read(_MOST_PICKLED)]
    for data in pickles:
        for _ in range(1 if is_zip else _OLD_PICKLES):
            if not data:
                break
            length, names = check_pickle(data)
            data = data[length:]
            if asked := [name for name in names if name.endswith(_COSTLY)]:
                raise ValueError(f"GLOBAL {asked[0].replace(' ', '.')} was not an allowed global")


def _is_plain(value: object) -> bool:
    """Whether a value is a tensor in host memory with a number of its own for each element."""
    return (
        isinstance(value, Tensor)
        and (value.layout, value.device.type, value.is_quantized) == (torch.strided, "cpu", False)
        and value.numel() * value.element_size() <= value.untyped_storage().nbytes()
    )


def _reason(error: Exception) -> str:
    """The reason in our words: torch's own advise to run what a stranger's file asks for."""
    text = str(error)
    if asked := re.search(r"GLOBAL (\S+) was not an allowed", text):
        return f"it asks to run {asked[1]}; save the values alone: torch.save(model.state_dict(), ...)"
    # For bytes that are no pickle, torch's unpickler raises a KeyError whose text is a byte.
    if isinstance(error, pickle.UnpicklingError | KeyError) or "weights_only" in text:
        return "it is damaged, or holds more than tensors"
    return text.partition("\n")[0] or type(error).__name__


def _floating(value: Tensor, path: Path, key: str) -> Tensor:
    if not value.is_floating_point() or "float4" in str(value.dtype):
        raise CheckpointError(f"{path}: {key} has type {value.dtype}, which is no floating-point type that we read")
    return value.float()


class _Writable(Protocol):
    def write(self, content: bytes | memoryview, /) -> object: ...


def write_safetensors(
    file: _Writable, shapes: dict[str, tuple[int, ...]], tensors: Iterable[tuple[str, Tensor]], metadata: dict[str, str]
) -> None:
    """Write fp32 tensors in the order of `shapes`, one at a time: the library's own writer wants all of them at once.

    The format: 8 bytes of the header's length, a JSON header of types, shapes and positions, the values.
    Raises OSError.
    """
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for key, shape in shapes.items():
        end = position + 4 * math.prod(shape)
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the values are aligned
    file.write(len(text).to_bytes(8, "little") + text)
    for (expected, shape), (key, value) in zip(shapes.items(), tensors, strict=True):
        assert key == expected and tuple(value.shape) == shape and value.dtype == torch.float32
        file.write(value.contiguous().numpy().data.cast("B"))
