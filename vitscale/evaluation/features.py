"""Representations of whole datasets: gathered from all processes in the dataset's order, and kept or written to disk.

A folder of features has `features-NNNNN.npy` (float32, rows of at most 65,536 samples), `uids.npy` and `labels.npy`
(int64; a label of -1 is none), and `meta.json`, which says how they were made and has the sha256 of each file. A folder
of tokens has `tokens-NNNNN.npy` instead (float32, rows of (h, w, D), at most 1 GiB each), and `keys.json`, the images'
names in the source in the order of the rows.

Shape legend: B samples of a batch, N samples of a dataset, D width of the representation, h w rows, columns of tokens.
"""

import json
import math
import re
import shutil
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitscale.evaluation.classification import check_count
from vitscale.evaluation.contract import MakeLoader, Predict
from vitscale.ground.errors import DataError, os_errors, turned
from vitscale.ground.files.arrays import map_array
from vitscale.ground.files.digests import file_digests
from vitscale.ground.files.durable import new_folder
from vitscale.ground.ranks import gather_rows, on_rank_zero
from vitscale.ground.storage import read_bytes

META, KEYS = "meta.json", "keys.json"
_VERSION = 1
_ROWS, _TOKEN_BYTES = 65_536, 2**30  # of one file

Rows = tuple[Tensor, ...]
"""Features (B, D) or tokens (B, h, w, D), fp32, labels (B,) and uids (B,) int64, in host memory."""


class Features(NamedTuple):
    """Representations of a whole split, sorted by uid: fp32 (N, D), with labels and uids int64 (N,), in host memory.

    Of tokens (N, T, D).

    Attributes:
        places: each sample's place in the pass, int64 (N,); None for features from files.
    """

    features: Tensor
    labels: Tensor
    uids: Tensor
    places: Tensor | None = None


@torch.no_grad()
def gathered(make_loader: MakeLoader, predict: Predict) -> Iterator[Rows | None]:
    """For each batch, the rows of all processes, in the loader's order, on rank 0; None on the other ranks."""
    for batch in make_loader():
        features = predict(batch.images).pooled.float()
        mask = batch.mask.to(features.device)
        labels, uids = batch.labels.to(features.device), batch.uids.to(features.device)
        yield gather_rows(features[mask], labels[mask], uids[mask])


def extract_features(
    make_loader: MakeLoader, predict: Predict, num_samples: int | None = None, what: str = "features"
) -> Features | None:
    """Representations of every sample that the loader yields, on rank 0; None elsewhere, or if there are no samples.

    Batches are gathered one by one, so that the split only has to fit into the host memory of rank 0. Raises
    `DataError` on all ranks if `num_samples` is given and another number is found; the message begins with `what`.
    """
    parts = [rows for rows in gathered(make_loader, predict) if rows is not None]
    if num_samples is not None:
        on_rank_zero(lambda: check_count(what, sum(len(uids) for _, _, uids in parts), num_samples))
    if not parts:
        return None
    labels, uids = (torch.cat([part[at] for part in parts]) for at in (1, 2))
    order = uids.argsort()
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    features = parts[0][0].new_empty(len(order), *parts[0][0].shape[1:])
    parts.reverse()
    for rows in place.split([len(part[2]) for part in parts][::-1]):  # freed one by one: no second copy of all
        features[rows] = parts.pop()[0]
    return Features(features, labels[order], uids[order], order)


@contextmanager
def shared_folder(out: Path) -> Iterator[Path]:
    """A new folder for rank 0, complete or not at all; all ranks raise if it is not free. Collective."""
    with ExitStack() as stack:
        yield Path(on_rank_zero(lambda: str(stack.enter_context(new_folder(out, "--out")))))
        on_rank_zero(stack.close)


def write_features(
    make_loader: MakeLoader,
    predict: Predict,
    out: Path,
    about: dict[str, Any],
    num_samples: int | None = None,
    names: Callable[[], Mapping[int, str]] | None = None,
) -> int:
    """Write a folder of features, complete or not at all; returns the number of samples. Collective.

    Rank 0 holds one batch of all ranks in memory.

    Args:
        about: further content of meta.json.
        num_samples: as in `extract_features`.
        names: gives the images' names by uid. With it `pooled` of what `predict` returns are tokens, (B, h, w, D).

    Raises `RecipeError` if the folder is not free, and `DataError` if the disk is too small or samples are lost.
    """
    with shared_folder(out) as folder:
        writer = _Writer(folder, out, "features" if names is None else "tokens", num_samples)
        for rows in gathered(make_loader, predict):
            if rows is not None:
                writer.add(rows)
        on_rank_zero(lambda: check_count(writer.what, writer.samples, num_samples))
        on_rank_zero(lambda: writer.finish(about, None if names is None else names()))
    return on_rank_zero(lambda: writer.samples)


def read_features(folder: Path) -> tuple[Features, dict[str, Any]]:
    """Read what `write_features` has written, sorted by uid, and its meta.json. Holds the features in memory once.

    Raises `DataError` for a folder of anything else, and for files that are damaged or missing.
    """
    meta = _read_meta(folder)
    for name, sha256 in meta["sha256"].items():
        with os_errors(f"{folder / name}: cannot be read"):
            found = file_digests(folder / name).sha256
        if found != sha256:
            raise DataError(f"{folder / name}: damaged: sha256 {found}; {META} says {sha256}")
    names = sorted(name for name in meta["sha256"] if name.startswith("features-"))
    with turned(f"{folder}: damaged", DataError, OSError, ValueError, OverflowError):
        labels, uids = (map_array(folder / f"{name}.npy") for name in ("labels", "uids"))
        parts = (map_array(folder / name) for name in names)
        features = np.concatenate([np.empty((0, meta["width"]), np.float32), *parts])
    shapes, types = {features.shape[:1], labels.shape, uids.shape}, [features.dtype, labels.dtype, uids.dtype]
    if shapes != {(meta["samples"],)} or types != [np.float32, np.int64, np.int64]:
        raise DataError(f"{folder}: {len(features):,} representations, {len(labels):,} labels and {len(uids):,} uids")
    order = uids.argsort()
    if (order != np.arange(len(order))).any():
        features = features[order]
    return Features(*map(torch.from_numpy, (features, labels[order], uids[order]))), meta


def _read_meta(folder: Path) -> dict[str, Any]:
    try:
        meta: dict[str, Any] = json.loads(read_bytes(folder / META))
    except OSError as error:
        raise DataError(
            f"{folder}: no representations there ({META}: {error.strerror}); `vitscale features` writes them"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{folder / META}: cannot be read: {error}") from None
    if isinstance(meta, dict) and "grid" in meta:
        raise DataError(f"{folder}: patch tokens, one map an image; expected features, without --tokens")
    needed = {"version": int, "samples": int, "width": int, "sha256": dict, "class_names": list, "policy": dict}
    if not isinstance(meta, dict) or not all(isinstance(meta.get(key), kind) for key, kind in needed.items()):
        raise DataError(f"{folder / META}: is not of `vitscale features`; expected {', '.join(needed)}")
    if missing := {"labels.npy", "uids.npy"} - meta["sha256"].keys():
        raise DataError(f"{folder / META}: lists no {' and no '.join(sorted(missing))}")
    if others := [name for name in meta["sha256"] if not re.fullmatch(r"(labels|uids|features-\d+)\.npy", name)]:
        raise DataError(f"{folder / META}: lists {others[0]!r}, which is no file of `vitscale features`")
    if meta["version"] != _VERSION:
        raise DataError(f"{folder / META}: version {meta['version']}; this version of vitscale reads {_VERSION}")
    return meta


class _Writer:
    """Appends rows to files as they come, each a .npy file whose header is written again at its end."""

    def __init__(self, folder: Path, out: Path, what: str, expected: int | None) -> None:
        self.what, self.samples = what, 0
        self._folder, self._out, self._expected = folder, out, expected  # folder: what is to be `out`
        # Not the batches' tensors: among them malloc finds no room for the next batch where it freed the last one.
        self._labels, self._uids = array("q"), array("q")
        self._files: list[str] = []
        self._shape: tuple[int, ...] = ()  # of one row
        self._most = _ROWS  # rows of one file
        self._rows = 0  # of the file that is open
        self._file: BinaryIO | None = None

    def add(self, rows: Rows) -> None:
        values = rows[0].contiguous().numpy()
        if not self._shape:
            self._shape = values.shape[1:]
            size = math.prod(self._shape) * values.itemsize
            self._most = _ROWS if self.what == "features" else max(1, _TOKEN_BYTES // size)
            needed, free = (self._expected or 0) * size, shutil.disk_usage(self._folder).free
            if needed > free > 0:
                raise DataError(f"{self._out}: {self.what} take {needed:,} bytes, and {free:,} are free")
        self._labels.extend(rows[1].tolist())
        self._uids.extend(rows[2].tolist())
        self.samples += len(values)
        while len(values):
            if self._file is None:
                self._files.append(f"{self.what}-{len(self._files):05d}.npy")
                self._file, self._rows = (self._folder / self._files[-1]).open("wb"), 0
                self._write_header()
            part = values[: self._most - self._rows]
            self._file.write(part.data)
            self._rows, values = self._rows + len(part), values[len(part) :]
            if self._rows == self._most:
                self._close()

    def finish(self, about: dict[str, Any], names: Mapping[int, str] | None) -> None:
        if self._file is not None:
            self._close()
        for name, values in (("labels.npy", self._labels), ("uids.npy", self._uids)):
            np.save(self._folder / name, np.asarray(values))
            self._files.append(name)
        if names:
            (self._folder / KEYS).write_text(json.dumps([names[uid] for uid in self._uids], indent=0) + "\n")
            self._files.append(KEYS)
        digests = {name: file_digests(self._folder / name).sha256 for name in self._files}
        content: dict[str, Any] = {"version": _VERSION, "samples": self.samples, "width": self._shape[-1]}
        content |= {"grid": self._shape[:-1]} if len(self._shape) > 1 else {}
        content |= {**about, "sha256": digests}
        (self._folder / META).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def _write_header(self) -> None:
        """The header has room for any number of rows, so that it keeps its length."""
        assert self._file is not None, "a file is open"
        described = {"descr": "<f4", "fortran_order": False, "shape": (self._rows, *self._shape)}
        np.lib.format.write_array_header_1_0(self._file, described)

    def _close(self) -> None:
        assert self._file is not None, "a file is open"
        with self._file:
            self._file.seek(0)
            self._write_header()
        self._file = None
