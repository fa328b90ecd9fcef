"""Reading parameters, or any piece of them, from a checkpoint that was written on any number of ranks."""

import math
import shutil
from array import array
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitscale.ground.errors import CheckpointError
from vitscale.ground.files.durable import write_text
from vitscale.ground.storage import regular
from vitscale.runs.checkpoint.directory import Files, LocalFiles
from vitscale.runs.checkpoint.format import Layout, parse_key, read_layout
from vitscale.runs.checkpoint_index import MASTER, CheckpointIndex, index_text, read_index
from vitscale.runs.names import INDEX_FILE

_WORD = 4  # bytes of an element
_NO_PIECES = np.empty((4, 0), np.int64)
_Pieces = NDArray[np.int64]
"""The pieces of one parameter's state of one kind, (4, pieces), by their place in it. Rows: first element, element
after the last, number of the file in the index, byte of the file where they begin. Not Python objects, since every rank
keeps all pieces: 1,024 ranks under ZeRO 3 write a million of them, 33 bytes each instead of some 180."""


class CheckpointReader:
    """Reads one checkpoint's tensors by parameter and position, and only when they are asked for.

    Files at a URL are fetched when the first of their tensors is asked for; the copies are removed with the reader.
    `layouts` are by the file's path in the index; `folder` is the checkpoint's path or URL.

    Raises `CheckpointError` unless the fragments cover every parameter and its state exactly once.
    """

    def __init__(self, files: Files, index: CheckpointIndex, layouts: Mapping[str, Layout]) -> None:
        self.folder = files.where
        self.index = index
        self._files = files
        self._pieces = self._find_pieces(layouts)
        for name in index.shapes:
            for kind in index.kinds:
                shape = index.shape_of(kind, name)
                self._check_cover(kind, name, 0 if shape is None else math.prod(shape))

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """A reader of the checkpoint in a folder, whose files are not verified. Raises `CheckpointError`."""
        index = read_index(folder)
        files = LocalFiles(folder)
        return cls(files, index, {entry.path: read_layout(files.path(entry)) for entry in index.files})

    def _find_pieces(self, layouts: Mapping[str, Layout]) -> dict[tuple[str, str], _Pieces]:
        rows: defaultdict[tuple[str, str], array[int]] = defaultdict(lambda: array("q"))
        for number, entry in enumerate(self.index.files):
            byte = entry.bytes - _WORD * sum(layouts[entry.path].values())
            if byte < 0:
                raise CheckpointError(f"{self.folder}: {entry.path} is longer than {INDEX_FILE} says")
            for key, length in layouts[entry.path].items():
                kind, name, start = parse_key(key)
                rows[kind, name].extend((start, start + length, number, byte))
                byte += _WORD * length
        pieces = {}
        for place in list(rows):
            table = np.array(rows.pop(place)).reshape(-1, 4)
            starts, stops, _, _ = table.T
            pieces[place] = table[np.lexsort((stops, starts))].T.copy()
        return pieces

    def _check_cover(self, kind: str, name: str, length: int) -> None:
        starts, stops, _, _ = self._pieces.get((kind, name), _NO_PIECES)
        position = 0
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            if start != position:
                break
            position = stop
        if position != length or (stops > length).any():
            raise CheckpointError(
                f"{self.folder}: {kind}/{name} should be covered exactly once from 0 to {length}; "
                f"the fragments break off at {position}"
            )

    def copy(self, folder: Path) -> None:
        """Copy this checkpoint into a new folder on this machine, by hard links if possible. Raises OSError."""
        folder.mkdir(parents=True)
        for entry in self.index.files:
            source = self._files.path(entry)
            try:
                (folder / entry.path).hardlink_to(source)
            except OSError:  # another file system
                shutil.copyfile(source, folder / entry.path)
        write_text(folder / INDEX_FILE, index_text(self.index))

    def read(self, kind: str, name: str, start: int, length: int) -> Tensor:
        """Elements [start, start + length) of one flattened parameter's `kind`: fp32, on the CPU.

        Raises `CheckpointError` for a parameter or range that is not there, or no longer; `StorageError`.
        """
        result = np.empty(length, np.float32)
        filled = 0
        pieces = self._pieces.get((kind, name), _NO_PIECES)
        first = max(0, int(np.searchsorted(pieces[0], start, side="right")) - 1)
        end = np.searchsorted(pieces[0], start + length)
        for begin, stop, number, byte in pieces[:, first:end].T.tolist():
            low, high = max(begin, start), min(stop, start + length)
            if low >= high:  # an empty piece
                continue
            path = self._files.path(self.index.files[number])
            try:
                with open(path, "rb", opener=regular) as file:
                    file.seek(byte + _WORD * (low - begin))
                    count = file.readinto(result[low - start : high - start].data.cast("B"))
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read any more: {error}") from None
            if count != _WORD * (high - low):
                raise CheckpointError(f"{path}: cannot be read any more: it ends before its last values")
            filled += high - low
        if filled != length:
            raise CheckpointError(f"{self.folder}: no {kind}/{name}[{start}:{start + length}] in it")
        return torch.from_numpy(result)

    def parameter(self, name: str, kind: str = MASTER) -> Tensor:
        """A whole parameter, or its state of another kind, in its shape: fp32, on the CPU. Raises `CheckpointError`."""
        if name not in self.index.shapes:
            raise CheckpointError(f"{self.folder}: no parameter {name!r} in it")
        shape = self.index.shape_of(kind, name)
        if shape is None:
            raise CheckpointError(f"{self.folder}: no {kind}/{name} in it")
        return self.read(kind, name, 0, math.prod(shape)).view(shape)

    def check_shapes(self, shapes: dict[str, list[int]]) -> None:
        """Raise `CheckpointError` listing every parameter that is missing, unexpected or of another shape."""
        problems = [f"missing {name}" for name in shapes if name not in self.index.shapes]
        problems += [f"unexpected {name}" for name in self.index.shapes if name not in shapes]
        problems += [
            f"{name} has shape {self.index.shapes[name]}, the model's is {shape}"
            for name, shape in shapes.items()
            if name in self.index.shapes and self.index.shapes[name] != shape
        ]
        if problems:
            listed = "\n".join(f"  {line}" for line in problems)
            raise CheckpointError(f"{self.folder} is of another model:\n{listed}").on_all_ranks()
