"""Builds an index of test sets: each image is decoded once, in worker processes, and its variants are fingerprinted.

A process fingerprints some images of a test set, a piece, and the pieces are joined into an index.
"""

import hashlib
import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_tools.dedup.embedding import Embedder, unit_vector, whitened, whitening_of
from data_tools.dedup.fingerprint import HASH_BYTES, SIDE, lumas_of, pdq_hashes, pixels_digest, square_luma
from data_tools.dedup.index import IMAGES, IMAGES_NAME, Embedding, TestSet, array_types, describe_index
from data_tools.dedup.matching import words
from data_tools.dedup.queries import small_picture
from data_tools.dedup.settings import PRESETS, SMALL_SIDE, Preset, Settings
from data_tools.dedup.variants import CROPS, DEFAULT_LEVEL, LEVELS, crops_of
from data_tools.sources import Source
from data_tools.sources.source import without_surrogates
from data_tools.tasks import Progress, Task, Tick
from data_tools.worker_processes import run_in_processes
from vitscale.data.shards.images import Reject, store_image
from vitscale.data.shards.provenance import write_tables
from vitscale.ground.errors import DataError, RecipeError, os_errors
from vitscale.ground.files.durable import new_folder
from vitscale.ground.safe_text import without_secrets
from vitscale.ground.wording import counted

# Images per task, and the bytes that they may have in a stream: a waiting task is held in memory.
_PIECE = 256
_PIECE_BYTES = 32 << 20
_PROBED = 64


@dataclass(frozen=True)
class TestSource:
    """A test set to be indexed. Raises RecipeError for a level that does not exist."""

    name: str  # in reports
    src: str  # the source as typed
    source: Source  # that source, opened
    preset: Preset | None = None  # the kind of pictures; None to choose by their size
    level: int | None = None  # how many variants, 0 to 3; None for the preset's default
    settings: Settings | None = None  # settings that replace the preset's

    __test__ = False  # for pytest

    def __post_init__(self) -> None:
        if self.level is not None and not 0 <= self.level < len(LEVELS):
            raise RecipeError(f"TESTSET {self.src}: level {self.level}; expected 0 to {len(LEVELS) - 1}")


class TaskCounts(NamedTuple):
    """The result of a task: its number, and how many images, hashes and unreadable images it has."""

    number: int
    images: int
    hashes: int
    unreadable: int


def build_index(
    test_sources: Sequence[TestSource],
    out: str | Path,
    *,
    workers: int,
    embedder: Embedder | None = None,
    tick: Tick = lambda done, rejected: None,
    told: Callable[[TestSet], None] = lambda test_set: None,
) -> None:
    """Write an index of test sets to a new folder; either complete or not at all.

    Equal test sets, listed in the same order, give equal bytes, however many workers there are.

    Args:
        test_sources: the test sets, in order.
        out: a folder that does not exist, or is empty.
        workers: number of processes.
        embedder: a model that also turns the images into vectors.
        tick: called several times a second with the test set's images done, and how many of these are unreadable.
        told: called with each test set when it is done.

    Raises:
        RecipeError: an `out` that is not empty, or not a path on this machine; two test sets with the same name.
        DataError: a test set without images, or one that cannot be read; a disk that refuses; a model that has changed,
            or whose output is not finite.
        StorageError: a URL that does not answer.
    """
    names = Counter(one.name for one in test_sources)
    if twice := sorted(name for name, count in names.items() if count > 1):
        raise RecipeError(f"two test sets are called {twice[0]!r}: give them different names")
    with new_folder(out, "--out") as folder:
        parts = folder / "pieces"
        parts.mkdir()
        test_sets: list[TestSet] = []
        pieces: list[TaskCounts] = []
        for one in test_sources:
            test_set, found = _fingerprint_all(one, parts, len(pieces), workers, embedder, tick)
            test_sets.append(test_set)
            pieces += found
            told(test_set)
        embedding = None
        if embedder is not None:
            embedding = Embedding(title=embedder.title, sha256=embedder.sha256, dimensions=embedder.dimensions)
        _join(pieces, parts, folder, embedding)
        shutil.rmtree(parts)
        describe_index(folder, test_sets, embedding)


def _fingerprint_all(
    one: TestSource, parts: Path, first: int, workers: int, embedder: Embedder | None, tick: Tick
) -> tuple[TestSet, list[TaskCounts]]:
    """Write the pieces of a test set, numbered from `first`, to the folder `parts`."""
    preset = one.preset or _preset_of(one.source)
    settings, level = one.settings or PRESETS[preset], one.level
    if level is None:
        level = len(LEVELS) - 1 if preset == "small" else DEFAULT_LEVEL
    ignored: Counter[str] = Counter()
    hashed = level if settings.near else None
    tasks: Iterator[Task] = (
        PieceTask(one.source, part, items, parts, number, hashed, settings.min_quality, embedder)
        for number, (part, items) in enumerate(_pieces(one.source, ignored), first)
    )
    found = sorted(run_in_processes(tasks, workers, tick))
    if not found:
        why = ", ".join(f"{counted(count, 'file')}: {reason}" for reason, count in sorted(ignored.items()))
        raise DataError(f"TESTSET {one.src}: no images" + (f" ({why})" if why else ""))
    test_set = TestSet(
        name=without_surrogates(one.name),  # an index's JSON is UTF-8
        source=without_surrogates(without_secrets(one.src)),
        preset=preset,
        level=hashed or 0,
        images=sum(piece.images for piece in found),
        hashes=sum(piece.hashes for piece in found),
        unreadable=sum(piece.unreadable for piece in found),
        settings=settings,
    )
    return test_set, found


def _pieces(source: Source, ignored: Counter[str]) -> Iterator[tuple[int, tuple[tuple[str, bytes], ...]]]:
    """Parts and items of tasks, each from one part. What a source streams is read here, as workers become free."""
    for part in range(len(source.parts)):
        items: list[tuple[str, bytes]] = []
        size = 0
        for item in source.items(part, ignored):
            items.append((item.key, item.content))
            size += len(item.content)
            if len(items) == _PIECE or size >= _PIECE_BYTES:
                yield part, tuple(items)
                items, size = [], 0
        if items:
            yield part, tuple(items)


def _preset_of(source: Source) -> Preset:
    """The preset, by the size of the first images: small ones lack the detail that tells copies from look-alikes."""
    sides = []
    listed = ((part, item) for part in range(len(source.parts)) for item in source.items(part, Counter()))
    for part, item in itertools.islice(listed, _PROBED):
        stored = store_image(_read(source, part, item.key, item.content))
        if not isinstance(stored, Reject):
            sides.append(min(stored.height, stored.width))
    return "small" if sides and np.median(sides) < SMALL_SIDE else "photo"


@dataclass(frozen=True)
class PieceTask(Task):
    """Some images of a test set, of one part of its source, to fingerprint."""

    source: Source
    part: int
    items: tuple[tuple[str, bytes], ...]  # keys and contents, as the source's `read` understands them
    folder: Path  # where the piece goes
    number: int  # the piece's number; names its files
    level: int | None  # how many variants; None if hashes are not compared
    min_quality: int  # hashes of lower quality are left out
    embedder: Embedder | None  # a model that also turns the images into vectors

    @property
    def name(self) -> str:
        return f"images of {self.source.parts[self.part]}"

    def describe(self, position: int) -> str:
        return repr(self.items[position][0]) if position < len(self.items) else "the end"

    def run(self, progress: Progress) -> TaskCounts:
        """Write the piece. Raises DataError: an image that cannot be read, a disk that refuses; the model's errors."""
        rows: list[dict[str, Any]] = []
        images: list[_Image] = []
        vectors = np.zeros((len(self.items), self.embedder.dimensions if self.embedder else 0), np.float32)
        for position, (key, content) in enumerate(self.items):
            data = _read(self.source, self.part, key, content)
            image = _fingerprinted(data, self.level, self.min_quality)
            rows.append({"key": without_surrogates(key), "sha256": hashlib.sha256(data).digest(), **image.row})
            if self.embedder is not None and image.rgb is not None:
                vectors[position] = unit_vector(self.embedder, image.rgb)
            images.append(replace(image, rgb=None))
            progress.advance(rejected=image.rgb is None)
        arrays: dict[str, Any] = {
            "hashes": words(np.concatenate([image.hashes for image in images])),
            "owners": np.repeat(np.arange(len(images), dtype=np.uint32), [len(image.hashes) for image in images]),
            "variants": np.concatenate([image.variants for image in images]),
            "thumbnails": np.stack([image.thumbnail for image in images]),
            "embeddings": vectors,
        }
        stem = self.folder / f"{self.number:06d}"
        with os_errors(f"{self.folder}: cannot be written"):
            pq.write_table(pa.Table.from_pylist(rows, IMAGES), stem.with_suffix(".parquet"))
            np.savez(stem.with_suffix(".npz"), **arrays)
        unreadable = sum(row["pixels"] is None for row in rows)
        return TaskCounts(self.number, len(images), len(arrays["owners"]), unreadable)


def _read(source: Source, part: int, key: str, content: bytes) -> bytes:
    """The bytes of an image file. Raises DataError or StorageError."""
    if source.streams:
        return content
    with os_errors(f"{source.parts[part]}: {key!r} cannot be read"):
        return source.read(part, content)


def _join(pieces: Sequence[TaskCounts], parts: Path, folder: Path, embedding: Embedding | None) -> None:
    """Write an index's files except `index.json`, with one piece in memory at a time. Raises OSError."""
    tables = (pq.read_table(parts / f"{piece.number:06d}.parquet", schema=IMAGES) for piece in pieces)
    write_tables(folder / IMAGES_NAME, tables, IMAGES)
    images, hashes = sum(piece.images for piece in pieces), sum(piece.hashes for piece in pieces)
    whitening = np.empty(0)
    if embedding is not None:
        whitening = whitening_of((_array("embeddings", one, parts) for one in pieces), embedding.dimensions)
    for name, (dtype, shape) in array_types(images, hashes, embedding).items():
        # Not through a memory map: a full disk would kill the process.
        with (folder / f"{name}.npy").open("wb") as file:
            header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for array in [whitening] if name == "whitening" else _in_order(name, pieces, parts):
                file.write((whitened(array, whitening) if name == "embeddings" else array).tobytes())


def _in_order(name: str, pieces: Sequence[TaskCounts], parts: Path) -> Iterator[np.ndarray]:
    """An array of the index, in the order of its file."""
    if name == "hashes":
        for word in range(4):
            for piece in pieces:
                yield _array(name, piece, parts)[word]
        return
    first = 0
    for piece in pieces:
        array = _array(name, piece, parts)
        yield array + np.uint32(first) if name == "owners" else array
        first += piece.images


def _array(name: str, piece: TaskCounts, parts: Path) -> np.ndarray:
    with np.load(parts / f"{piece.number:06d}.npz", allow_pickle=False) as arrays:
        return arrays[name]


@dataclass(frozen=True)
class _Image:
    """One image: its pixels, None if it cannot be decoded; most of its row; its thumbnail and hashes."""

    rgb: np.ndarray | None
    row: dict[str, Any]
    thumbnail: np.ndarray
    hashes: np.ndarray
    variants: np.ndarray


def _fingerprinted(data: bytes, level: int | None, min_quality: int) -> _Image:
    """Everything that the index stores about an image; `level` is None if hashes are not compared."""
    stored = store_image(data)
    hashes, variants = np.empty((0, HASH_BYTES), np.uint8), np.empty(0, np.uint8)
    if isinstance(stored, Reject):
        nothing = {"pixels": None, "quality": 0, "height": 0, "width": 0, "trim": None, "picture": b""}
        return _Image(None, nothing, np.zeros((SIDE, SIDE), np.uint8), hashes, variants)
    rgb = stored.pixels
    luma, luma_trimmed, trim = lumas_of(rgb)
    if level is None:
        quality = pdq_hashes(luma[None])[1][0]
    else:
        base, crops = crops_of(rgb, level)
        # The first of them is the whole picture.
        lumas = [(number, luma if number == 0 else square_luma(base, box)) for number, box in crops]
        if luma_trimmed is not None:
            lumas.append((len(CROPS), luma_trimmed))
        codes = np.array([2 * number + mirrored for number, _ in lumas for mirrored in (0, 1)], np.uint8)
        hashes, qualities = pdq_hashes(np.stack([view for _, one in lumas for view in (one, one[:, ::-1])]))
        quality, enough = qualities[0], qualities >= min_quality
        hashes, variants = hashes[enough], codes[enough]
    row: dict[str, Any] = {
        "pixels": pixels_digest(rgb),
        "quality": int(quality),
        "height": stored.height,
        "width": stored.width,
        "trim": None if trim is None else list(trim),
        "picture": small_picture(rgb),
    }
    return _Image(rgb, row, luma, hashes, variants)
