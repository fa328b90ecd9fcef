"""A run's checkpoints: saving them, finding the newest that verifies, deleting old ones, reading any piece of one.

All ranks save and find together. A checkpoint that was written on any number of ranks can be read on any other.
"""

import logging
import math
import shutil
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitscale.ground.errors import CheckpointError, VitscaleError, as_plain, from_plain
from vitscale.ground.files.durable import write_text
from vitscale.ground.storage import regular
from vitscale.runs.checkpoint.directory import Directory, Files, LocalDirectory
from vitscale.runs.checkpoint.format import Fragment, Layout, parse_key, rank_file, read_layout
from vitscale.runs.checkpoint_index import MASTER, CheckpointIndex, FileEntry, index_text, parse_index
from vitscale.runs.names import INDEX_FILE

Gather = Callable[[object], list]
"""Collects one value, plain data, from every rank, in rank order, on every rank; also a barrier."""

Share = Callable[[Any], Any]
"""Broadcasts rank 0's value, plain data, to every rank; the arguments of the other ranks are ignored."""

_log = logging.getLogger(__name__)

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


def alone(value: object) -> list:
    """The `Gather` of a single process."""
    return [value]


class CheckpointStore:
    """A run's checkpoints in one directory. Every method but `steps` is collective: all ranks must call it.

    A failure on one rank raises an error of the same class on all of them, and never hangs.

    Args:
        directory: the directory of the checkpoints; a path means a folder that all ranks share.
        gather: gathers over all ranks, 0, 1, ...; by default for a single process.
        share: broadcasts over the same ranks. By default it is a `gather`, in which every rank sends every other one as
            many bytes as the longest object has: for an index, which grows with the number of ranks, that is too much
            with a thousand ranks.
    """

    def __init__(
        self, directory: Directory | Path, *, rank: int = 0, gather: Gather = alone, share: Share | None = None
    ) -> None:
        self.directory = LocalDirectory(directory) if isinstance(directory, Path) else directory
        self.root, self.rank, self.gather = self.directory.root, rank, gather
        self._share = share or (lambda value: gather(value)[0])

    def steps(self) -> list[int]:
        """The steps of the checkpoints, oldest first; not yet verified. Any rank may call it alone."""
        return self.directory.steps()

    def save(self, index: CheckpointIndex, fragments: list[Fragment]) -> None:
        """Write one checkpoint; every rank passes the fragments that it owns.

        Raises `CheckpointError`, or the error of vitscale.ground.errors that caused the failure, if any rank could not
        write. Older checkpoints are then untouched, and nothing is left of this one.
        """
        doing = f"saving step {index.step} failed; earlier checkpoints are untouched"
        try:
            self._on_first_rank(doing, lambda: self.directory.begin(index.step))
            name = rank_file(self.rank)
            written = self._together(doing, lambda: asdict(self.directory.write(index.step, name, fragments)))
            files = [FileEntry(**entry) for entry in written]
            self._on_first_rank(doing, lambda: self.directory.finish(replace(index, files=files)))
        except Exception:
            if self.rank == 0:
                self.directory.abandon(index.step)
            raise

        def set_aside_later() -> None:
            for later in self.directory.steps():
                if later > index.step:  # unusable, or this run would have resumed from it
                    self.directory.set_aside(later)

        doing = f"step {index.step} is saved, but newer checkpoints, which are unusable, cannot be set aside"
        self._on_first_rank(doing, set_aside_later)

    def newest(self, report: Callable[[str], None]) -> CheckpointReader | None:
        """The newest checkpoint of which every byte verifies; None if there are no checkpoints at all.

        Each rank verifies its share of the files. A damaged checkpoint is skipped and `report`ed.

        Raises `CheckpointError` if there are checkpoints but none can be read (a run never starts over silently), or
        the directory cannot be read at all, and `StorageError` if a URL does not answer, which says nothing about them.
        """
        first_problem = ""
        steps: list[int] = self._on_first_rank("its checkpoints cannot be listed", self.directory.steps)
        for step in reversed(steps):
            try:
                reader = self.open(step)
            except _Unusable as error:
                for problem in error.problems:
                    report(f"checkpoint of step {step} is unusable: {problem}")
                first_problem = first_problem or error.problems[0]
                continue
            if first_problem:
                report(f"falling back to the checkpoint of step {step}")
            return reader
        if first_problem:
            raise CheckpointError(
                f"{self.root}: none of the {len(steps)} checkpoints can be read; the newest fails with: "
                f"{first_problem}. Restore one, or start over in another --run-dir"
            ).on_all_ranks()
        return None

    def open(self, step: int) -> CheckpointReader:
        """The checkpoint of one step, verified. Raises as `newest`, and `CheckpointError` if it does not exist."""
        doing = f"the checkpoint of step {step} cannot be read now"
        read = self._on_first_rank(doing, lambda: _or_problem(lambda: [index_text(self.directory.read_index(step))]))
        if isinstance(read, str):
            raise _Unusable([read])
        index = parse_index(read[0].encode(), f"{self.root}, step {step}")
        files = self.directory.files(step)
        own = index.files[self.rank :: len(self.gather(None))]
        layouts: dict[str, Layout | str] = {}
        for of_rank in self._together(doing, lambda: {entry.path: _verify(files, entry) for entry in own}):
            layouts |= of_rank
        whole = {path: layout for path, layout in layouts.items() if not isinstance(layout, str)}
        try:
            if len(whole) < len(layouts):
                raise _Unusable([problem for problem in layouts.values() if isinstance(problem, str)])
            return CheckpointReader(files, index, whole)
        except CheckpointError as error:
            files.release()
            raise error if isinstance(error, _Unusable) else _Unusable([str(error)]) from None

    def amend(self, step: int, selection: dict[str, Any]) -> None:
        """Replace the selection's state in a checkpoint's index. Raises as `save` does."""

        def write() -> None:
            self.directory.write_index(replace(self.directory.read_index(step), selection=selection))

        self._on_first_rank(f"the index of step {step} cannot be amended", write)

    def retain(self, keep: int, best: int | None, keep_every: int | None = None, tail: int | None = None) -> None:
        """Delete all but the newest `keep`, `best`, `tail` and multiples of `keep_every`. Raises as `save` does."""

        def delete() -> None:
            for step in self.directory.steps()[:-keep]:
                if step not in (best, tail) and (keep_every is None or step % keep_every):
                    self.directory.remove(step)

        self._on_first_rank("old checkpoints cannot be removed", delete)

    def _on_first_rank(self, doing: str, work: Callable[[], Any]) -> Any:
        """Rank 0's result of `work`, on every rank, so that ranks never see different states of a slow file system."""
        outcome = self._share(self._outcome(doing, work) if self.rank == 0 else None)
        return self._results(doing, [outcome])[0]

    def _together(self, doing: str, work: Callable[[], object]) -> list:
        """Every rank's result of `work`, on every rank; a failure on any rank raises on all of them and never hangs."""
        return self._results(doing, self.gather(self._outcome(doing, work)))

    def _outcome(self, doing: str, work: Callable[[], object]) -> dict[str, object]:
        try:
            return {"result": work()}
        except Exception as error:
            if not isinstance(error, VitscaleError | OSError):
                _log.exception("rank %d: %s", self.rank, doing)  # a bug: other ranks get only its message
            if not isinstance(error, VitscaleError):
                error = CheckpointError(f"{type(error).__name__}: {error}")
            kind, message = as_plain(error)
            return {"kind": kind, "message": f"rank {self.rank}: {message}"}

    def _results(self, doing: str, outcomes: list[dict[str, Any]]) -> list:
        failures = [outcome for outcome in outcomes if "message" in outcome]
        if failures:
            kinds = {failure["kind"] for failure in failures}
            kind = kinds.pop() if len(kinds) == 1 else CheckpointError.__name__
            messages = "; ".join(failure["message"] for failure in failures)
            raise from_plain(kind, f"{self.root}: {doing}. {messages}").on_all_ranks()
        return [outcome["result"] for outcome in outcomes]


class _Unusable(CheckpointError):
    """A checkpoint is missing or damaged; collects what every rank has found."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems
        self.on_all_ranks()


def _or_problem(read: Callable[[], Any]) -> Any:
    """The result of `read`, or in its place text: what is wrong with the checkpoint."""
    try:
        return read()
    except CheckpointError as error:
        return str(error)


def _verify(files: Files, entry: FileEntry) -> Layout | str:
    return _or_problem(lambda: read_layout(files.verified(entry)))
