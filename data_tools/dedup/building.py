"""Test sets -> an index: every image is decoded once, in worker processes, and its variants are fingerprinted."""

import hashlib
import itertools
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_tools.dedup.embedding import MODEL_NAME, Embedder
from data_tools.dedup.fingerprint import lumas_of, pixels_digest
from data_tools.dedup.hamming import words
from data_tools.dedup.index import EMBEDDINGS_NAME, IMAGES, IMAGES_NAME, TestSet, describe_index
from data_tools.dedup.luma import SIDE, square_luma
from data_tools.dedup.pdq import pdq_hashes
from data_tools.dedup.pictures import small_picture
from data_tools.dedup.settings import PRESETS, SMALL_SIDE, Preset, Settings
from data_tools.dedup.variants import CROPS, DEFAULT_LEVEL, LEVELS, crops_of
from data_tools.engines.local import run_in_processes
from data_tools.engines.task import Progress, Task, Tick
from data_tools.images import Reject, store_image
from data_tools.sources import Source
from vitscale.durable import sync_folder
from vitscale.errors import DataError, RecipeError

_PIECE = 512  # images of a task
_PROBED = 64
_ARRAYS = {
    "hashes": (np.dtype(np.uint64), (4,)),
    "owners": (np.dtype(np.uint32), ()),
    "variants": (np.dtype(np.uint8), ()),
}


@dataclass(frozen=True)
class TestSource:
    """A test set to be indexed.

    Attributes:
        name: what reports will call it.
        src: what the person typed.
        source: that, opened.
        preset: what kind of pictures it has; None to go by their size.
        level: how many variants; None for the preset's usual one.
        settings: in place of the preset's.
    """

    name: str
    src: str
    source: Source
    preset: Preset | None = None
    level: int | None = None
    settings: Settings | None = None

    __test__ = False  # for pytest


@dataclass(frozen=True)
class EmbeddingModel:
    """A user's TorchScript file, and the side of the pictures that it takes, in pixels."""

    path: str
    side: int


@dataclass(frozen=True)
class _PieceTask:
    """Some images of a test set to fingerprint, or a whole part of a source that streams."""

    source: Source
    part: int
    items: tuple[tuple[str, bytes], ...] | None
    folder: Path
    number: int
    level: int | None
    min_quality: int
    model: EmbeddingModel | None

    @property
    def name(self) -> str:
        return f"images of {self.source.parts[self.part]}"

    def describe(self, position: int) -> str:
        """What people call the image at a position."""
        return repr(self.items[position][0]) if self.items else f"image {position:,} of {self.source.parts[self.part]}"

    def without(self, position: int, reason: str) -> None:
        """No image of a test set may be left out unnoticed."""
        return None

    def run(self, progress: Progress) -> tuple[int, int, int, int]:
        """Write the piece; returns its number, and how many images, hashes and unreadable images it has."""
        embedder = None if self.model is None else Embedder(self.model.path, self.model.side)
        columns: dict[str, list[Any]] = {name: [] for name in IMAGES.names}
        thumbnails, hashes, owners, variants, vectors = [], [], [], [], []
        unreadable = 0
        for row, (key, data) in enumerate(self._images()):
            image = _fingerprinted(data, self.level, self.min_quality)
            unreadable += image.rgb is None
            for name, value in (("key", key), ("sha256", hashlib.sha256(data).digest()), *image.columns.items()):
                columns[name].append(value)
            thumbnails.append(image.thumbnail)
            hashes.append(image.hashes)
            variants.append(image.variants)
            owners.append(np.full(len(image.variants), row, np.uint32))
            if embedder is not None:
                vectors.append(_vector(embedder, image.rgb))
            progress.advance()
        if not columns["key"]:
            return self.number, 0, 0, 0
        pq.write_table(pa.table(columns, IMAGES), _piece(self.folder, self.number, IMAGES_NAME))
        arrays = {
            "thumbnails": np.stack(thumbnails),
            "hashes": words(np.concatenate(hashes)),
            "owners": np.concatenate(owners),
            "variants": np.concatenate(variants),
        }
        if vectors:
            known = next((len(vector) for vector in vectors if vector is not None), 1)
            arrays["embeddings"] = np.stack([np.zeros(known, np.float32) if v is None else v for v in vectors])
        for name, array in arrays.items():
            np.save(_piece(self.folder, self.number, f"{name}.npy"), array)
        return self.number, len(thumbnails), len(arrays["owners"]), unreadable

    def _images(self) -> Iterator[tuple[str, bytes]]:
        if self.items is None:
            for item in self.source.items(self.part, Counter()):
                yield item.key, item.content
            return
        for key, content in self.items:
            try:
                yield key, self.source.read(self.part, content)
            except OSError as error:
                raise DataError(f"{self.name}: {key!r} cannot be read ({error.strerror or error})") from error


@dataclass(frozen=True)
class _Image:
    rgb: np.ndarray | None
    columns: dict[str, Any]
    thumbnail: np.ndarray
    hashes: np.ndarray
    variants: np.ndarray


def _fingerprinted(data: bytes, level: int | None, min_quality: int) -> _Image:
    """Everything that the index has of an image; `level` is None where hashes are not compared."""
    stored = store_image(data)
    none = np.empty((0, 32), np.uint8), np.empty(0, np.uint8)
    if isinstance(stored, Reject):
        nothing = {"pixels": None, "quality": 0, "height": 0, "width": 0, "trim": None, "picture": b""}
        return _Image(None, nothing, np.zeros((SIDE, SIDE), np.uint8), *none)
    rgb = stored.pixels
    luma, luma_trimmed, trim = lumas_of(rgb)
    quality = int(pdq_hashes(luma[None])[1][0])
    columns = {
        "pixels": pixels_digest(rgb),
        "quality": quality,
        "height": stored.height,
        "width": stored.width,
        "trim": None if trim is None else list(trim),
        "picture": small_picture(rgb),
    }
    if level is None:
        return _Image(rgb, columns, luma, *none)
    base, crops = crops_of(rgb, level)
    whole = (0, 0, *base.shape[:2])
    lumas = [(number, luma if tuple(box) == whole else square_luma(base, box)) for number, box in crops]
    if luma_trimmed is not None:
        lumas.append((len(CROPS), luma_trimmed))
    codes = np.array([2 * number + mirrored for number, _ in lumas for mirrored in (0, 1)], np.uint8)
    hashes, qualities = pdq_hashes(np.stack([view for _, one in lumas for view in (one, one[:, ::-1])]))
    enough = qualities >= min_quality
    return _Image(rgb, columns, luma, hashes[enough], codes[enough])


def _vector(embedder: Embedder, rgb: np.ndarray | None) -> np.ndarray | None:
    return None if rgb is None else embedder.vector(rgb)


def build_index(
    test_sources: Sequence[TestSource],
    out: str | Path,
    *,
    workers: int,
    model: EmbeddingModel | None = None,
    tick: Tick = lambda done, rejected: None,
    told: Callable[[TestSet], None] = lambda test_set: None,
) -> None:
    """Write an index of test sets to a new folder; complete or not at all.

    Args:
        test_sources: in order.
        out: a folder that does not exist, or is empty.
        workers: processes.
        model: to embed the images with as well.
        tick: told several times a second how many images of the test set are done.
        told: what became of each test set.

    Raises:
        RecipeError: an `out` that is taken; a model that cannot be loaded.
        DataError: a test set without images, or one that cannot be read; a disk that refuses.
        StorageError: a URL that does not answer.
    """
    target = Path(out).absolute()
    if model is not None:
        Embedder(model.path, model.side)  # before anything long starts
    try:
        if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
            raise RecipeError(f"--out {out}: already exists. Choose a new or empty folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
        aside.mkdir()
    except OSError as error:
        raise RecipeError(f"--out {out}: cannot be written ({error.strerror})") from error
    try:
        _build(test_sources, aside, workers, model, tick, told)
        os.sync()
        aside.replace(target)
        sync_folder(target.parent)
    except OSError as error:
        raise DataError(f"{error.filename or out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _build(
    test_sources: Sequence[TestSource],
    folder: Path,
    workers: int,
    model: EmbeddingModel | None,
    tick: Tick,
    told: Callable[[TestSet], None],
) -> None:
    pieces = folder / "pieces"
    pieces.mkdir()
    test_sets: list[TestSet] = []
    counts: list[tuple[int, int, int, int]] = []
    for test_source in test_sources:
        preset = test_source.preset or _preset_of(test_source.source)
        settings = test_source.settings or PRESETS[preset]
        level = test_source.level
        if level is None:
            level = len(LEVELS) - 1 if preset == "small" else DEFAULT_LEVEL
        tasks = _tasks(test_source.source, pieces, len(counts), level, settings, model)
        found = sorted(run_in_processes(tasks, workers, tick))
        images, hashes, unreadable = (sum(one[i] for one in found) for i in (1, 2, 3))
        if not images:
            raise DataError(f"TESTSET {test_source.src}: no images")
        test_set = TestSet(
            *(test_source.name, test_source.src, preset, level if settings.near else 0),
            *(images, hashes, unreadable, settings),
        )
        test_sets.append(test_set)
        counts += found
        told(test_set)
    _assemble(pieces, folder, counts)
    names = [IMAGES_NAME, *(f"{name}.npy" for name in (*_ARRAYS, "thumbnails"))]
    embedding = None
    if model is not None:
        shutil.copyfile(model.path, folder / MODEL_NAME)
        names += [MODEL_NAME, EMBEDDINGS_NAME]
        embedding = {"side": model.side}
    shutil.rmtree(pieces)
    describe_index(folder, test_sets, embedding, names)


def _tasks(
    source: Source, folder: Path, first: int, level: int, settings: Settings, model: EmbeddingModel | None
) -> Iterator[Task]:
    number = itertools.count(first)

    def task(part: int, items: tuple[tuple[str, bytes], ...] | None) -> _PieceTask:
        return _PieceTask(
            source,
            part,
            items,
            folder,
            next(number),
            level if settings.near else None,
            settings.min_quality,
            model,
        )

    for part in range(len(source.parts)):
        if source.streams:
            yield task(part, None)
            continue
        listed = ((item.key, item.content) for item in source.items(part, Counter()))
        while items := tuple(itertools.islice(listed, _PIECE)):
            yield task(part, items)


def _preset_of(source: Source) -> Preset:
    """By the size of the first images: small ones have no detail that could tell a copy from something alike."""
    sides = []
    for item in itertools.islice(_items(source), _PROBED):
        stored = store_image(item.content if source.streams else source.read(0, item.content))
        if not isinstance(stored, Reject):
            sides.append(min(stored.height, stored.width))
    return "small" if sides and np.median(sides) < SMALL_SIDE else "photo"


def _items(source: Source) -> Iterator[Any]:
    return source.items(0, Counter())


def _assemble(pieces: Path, folder: Path, counts: Iterable[tuple[int, int, int, int]]) -> None:
    """Pieces, in order, as one; a piece in memory at a time."""
    counts = [one for one in counts if one[1]]
    images, hashes = sum(one[1] for one in counts), sum(one[2] for one in counts)
    with pq.ParquetWriter(folder / IMAGES_NAME, IMAGES, compression="zstd") as writer:
        for number, *_ in counts:
            writer.write_table(pq.read_table(_piece(pieces, number, IMAGES_NAME), schema=IMAGES))
    for name in ("hashes", "owners", "variants", "thumbnails", "embeddings"):
        out: np.ndarray | None = None
        image = place = 0
        for number, of_piece, hashes_of_piece, _ in counts:
            path = _piece(pieces, number, f"{name}.npy")
            if not path.exists():
                continue
            array = np.load(path)
            if out is None:
                shape = {"hashes": (4, hashes), "owners": (hashes,), "variants": (hashes,)}.get(
                    name, (images, *array.shape[1:])
                )
                out = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", array.dtype, shape)
            if name == "hashes":
                out[:, place : place + hashes_of_piece] = array
            elif name in ("owners", "variants"):
                out[place : place + hashes_of_piece] = array + (image if name == "owners" else 0)
            else:
                out[image : image + of_piece] = array
            image, place = image + of_piece, place + hashes_of_piece


def _piece(folder: Path, number: int, name: str) -> Path:
    return folder / f"{number:06d}.{name}"
