"""Reading parameters, or any piece of them, from a checkpoint that was written on any number of ranks."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitscale.checkpoint.format import MASTER, parse_key, read_index
from vitscale.errors import CheckpointError


@dataclass(frozen=True)
class _Piece:
    start: int
    stop: int
    path: Path
    key: str


class CheckpointReader:
    """One checkpoint's fragments, found by parameter and position. Tensors are read when asked for, not before.

    Raises `CheckpointError` where the fragments do not cover every parameter exactly once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = read_index(folder)
        self._pieces: dict[tuple[str, str], list[_Piece]] = {}
        for entry in self.index.files:
            self._register(folder / entry.path)
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece.start)
        for name, shape in self.index.shapes.items():
            for kind in self.index.kinds:
                self._check_cover(kind, name, math.prod(shape))

    def _register(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a dictionary)
                    kind, name, start = parse_key(key)
                    (length,) = file.get_slice(key).get_shape()
                    self._pieces.setdefault((kind, name), []).append(_Piece(start, start + length, path, key))
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(f"{path}: not a file of fragments: {error}") from None

    def _check_cover(self, kind: str, name: str, length: int) -> None:
        position = 0
        for piece in self._pieces.get((kind, name), []):
            if piece.start != position:
                break
            position = piece.stop
        if position != length or any(piece.stop > length for piece in self._pieces.get((kind, name), [])):
            raise CheckpointError(
                f"{self.folder}: {kind}/{name} should be covered exactly once from 0 to {length}; "
                f"the fragments break off at {position}"
            )

    def read(self, kind: str, name: str, start: int, length: int) -> Tensor:
        """Elements [start, start + length) of one flattened parameter's `kind`: fp32, on the CPU.

        Raises `CheckpointError` for a parameter or range that is not there, or no longer.
        """
        result = torch.empty(length, dtype=torch.float32)
        filled = 0
        for piece in self._pieces.get((kind, name), []):
            low, high = max(piece.start, start), min(piece.stop, start + length)
            if low < high:
                try:
                    with safe_open(piece.path, framework="pt") as file:
                        result[low - start : high - start] = file.get_slice(piece.key)[
                            low - piece.start : high - piece.start
                        ]
                except (OSError, SafetensorError) as error:
                    raise CheckpointError(f"{piece.path}: cannot be read any more: {error}") from None
                filled += high - low
        if filled != length:
            raise CheckpointError(f"{self.folder}: no {kind}/{name}[{start}:{start + length}] in it")
        return result

    def parameter(self, name: str, kind: str = MASTER) -> Tensor:
        """One whole parameter in its shape: fp32, on the CPU."""
        shape = self.index.shapes.get(name)
        if shape is None:
            raise CheckpointError(f"{self.folder}: no parameter {name!r} in it")
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
