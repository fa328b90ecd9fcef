"""Builds an index of test sets: each image is decoded once, in worker processes, and its variants are fingerprinted."""

import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_tools.dedup.embedding import Embedder
from data_tools.dedup.index import Embedding, TestSet, describe_index
from data_tools.dedup.pieces import Piece, PieceTask, join_pieces, read_bytes
from data_tools.dedup.settings import PRESETS, SMALL_SIDE, Preset, Settings
from data_tools.dedup.variants import DEFAULT_LEVEL, LEVELS
from data_tools.engines.local import run_in_processes
from data_tools.engines.task import Task, Tick
from data_tools.sources import Source
from data_tools.sources.source import without_surrogates
from vitscale.data.shards.images import Reject, store_image
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.files.durable import new_folder
from vitscale.ground.safe_text import without_secrets
from vitscale.ground.wording import counted

# Images per task, and the bytes that they may have in a stream: a waiting task is held in memory.
_PIECE = 256
_PIECE_BYTES = 32 << 20
_PROBED = 64


@dataclass(frozen=True)
class TestSource:
    """A test set to be indexed.

    Attributes:
        name: its name in reports.
        src: the source as typed.
        source: that source, opened.
        preset: the kind of pictures; None to choose by their size.
        level: how many variants, 0 to 3; None for the preset's default.
        settings: settings that replace the preset's.

    Raises RecipeError for a level that does not exist.
    """

    name: str
    src: str
    source: Source
    preset: Preset | None = None
    level: int | None = None
    settings: Settings | None = None

    __test__ = False  # for pytest

    def __post_init__(self) -> None:
        if self.level is not None and not 0 <= self.level < len(LEVELS):
            raise RecipeError(f"TESTSET {self.src}: level {self.level}; expected 0 to {len(LEVELS) - 1}")


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
        _build(test_sources, folder, workers, embedder, tick, told)


def _build(
    test_sources: Sequence[TestSource],
    folder: Path,
    workers: int,
    embedder: Embedder | None,
    tick: Tick,
    told: Callable[[TestSet], None],
) -> None:
    parts = folder / "pieces"
    parts.mkdir()
    test_sets: list[TestSet] = []
    pieces: list[Piece] = []
    for one in test_sources:
        preset = one.preset or _preset_of(one.source)
        settings = one.settings or PRESETS[preset]
        level = one.level
        if level is None:
            level = len(LEVELS) - 1 if preset == "small" else DEFAULT_LEVEL
        ignored: Counter[str] = Counter()
        tasks: Iterator[Task] = (
            PieceTask(
                source=one.source,
                part=part,
                items=items,
                folder=parts,
                number=number,
                level=level if settings.near else None,
                min_quality=settings.min_quality,
                embedder=embedder,
            )
            for number, (part, items) in enumerate(_pieces(one.source, ignored), len(pieces))
        )
        found = sorted(run_in_processes(tasks, workers, tick))
        if not found:
            why = ", ".join(f"{counted(count, 'file')}: {reason}" for reason, count in sorted(ignored.items()))
            raise DataError(f"TESTSET {one.src}: no images" + (f" ({why})" if why else ""))
        test_set = TestSet(
            name=without_surrogates(one.name),  # an index's JSON is UTF-8
            source=without_surrogates(without_secrets(one.src)),
            preset=preset,
            level=level if settings.near else 0,
            images=sum(piece.images for piece in found),
            hashes=sum(piece.hashes for piece in found),
            unreadable=sum(piece.unreadable for piece in found),
            settings=settings,
        )
        test_sets.append(test_set)
        pieces += found
        told(test_set)
    embedding = None
    if embedder is not None:
        embedding = Embedding(title=embedder.title, sha256=embedder.sha256, dimensions=embedder.dimensions)
    join_pieces(pieces, parts, folder, embedding)
    shutil.rmtree(parts)
    describe_index(folder, test_sets, embedding)


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
        stored = store_image(read_bytes(source, part, item.key, item.content))
        if not isinstance(stored, Reject):
            sides.append(min(stored.height, stored.width))
    return "small" if sides and np.median(sides) < SMALL_SIDE else "photo"
