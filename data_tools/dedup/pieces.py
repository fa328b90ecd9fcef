"""Pieces of an index: one process fingerprints some images of a test set, and the pieces are joined into an index."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_tools.dedup.embedding import Embedder, unit_vector, whitened, whitening_of
from data_tools.dedup.fingerprint import lumas_of, pixels_digest
from data_tools.dedup.hamming import words
from data_tools.dedup.index import IMAGES, IMAGES_NAME, Embedding, array_types
from data_tools.dedup.luma import SIDE, square_luma
from data_tools.dedup.pdq import HASH_BYTES, pdq_hashes
from data_tools.dedup.pictures import small_picture
from data_tools.dedup.variants import CROPS, crops_of
from data_tools.engines.task import Progress
from data_tools.sources import Source
from data_tools.sources.source import without_surrogates
from vitscale.data.shards.images import Reject, store_image
from vitscale.data.shards.provenance import write_tables
from vitscale.ground.errors import DataError


class Piece(NamedTuple):
    """The result of a task: its number, and how many images, hashes and unreadable images it has."""

    number: int
    images: int
    hashes: int
    unreadable: int


@dataclass(frozen=True)
class PieceTask:
    """Some images of a test set to fingerprint.

    Attributes:
        source, part: the source, and the number of the part that they come from.
        items: their keys and contents, as the source's `read` understands them; for a stream, the bytes.
        folder: where the piece goes.
        number: the piece's number; names its files.
        level: how many variants; None if hashes are not compared.
        min_quality: hashes of lower quality are left out.
        embedder: a model that also turns the images into vectors.
    """

    source: Source
    part: int
    items: tuple[tuple[str, bytes], ...]
    folder: Path
    number: int
    level: int | None
    min_quality: int
    embedder: Embedder | None

    @property
    def name(self) -> str:
        return f"images of {self.source.parts[self.part]}"

    def describe(self, position: int) -> str:
        """What messages call the image at a position."""
        return repr(self.items[position][0]) if position < len(self.items) else "the end"

    def without(self, position: int, reason: str) -> None:
        """None: no image of a test set may be left out unnoticed."""
        return None

    def run(self, progress: Progress) -> Piece:
        """Write the piece. Raises DataError: an image that cannot be read, a disk that refuses; the model's errors."""
        rows: list[dict[str, Any]] = []
        images: list[_Image] = []
        vectors = np.zeros((len(self.items), self.embedder.dimensions if self.embedder else 0), np.float32)
        for position, (key, content) in enumerate(self.items):
            data = read_bytes(self.source, self.part, key, content)
            image = _fingerprinted(data, self.level, self.min_quality)
            rows.append(
                {
                    "key": without_surrogates(key),
                    "sha256": hashlib.sha256(data).digest(),
                    **image.row,
                }
            )
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
        try:
            pq.write_table(pa.Table.from_pylist(rows, IMAGES), _table_path(self.folder, self.number))
            np.savez(_arrays_path(self.folder, self.number), **arrays)
        except OSError as error:
            raise DataError(f"{self.folder}: cannot be written ({error.strerror or error})") from error
        unreadable = sum(row["pixels"] is None for row in rows)
        return Piece(self.number, len(images), len(arrays["owners"]), unreadable)


def read_bytes(source: Source, part: int, key: str, content: bytes) -> bytes:
    """The bytes of an image file. Raises DataError or StorageError."""
    if source.streams:
        return content
    try:
        return source.read(part, content)
    except OSError as error:
        raise DataError(f"{source.parts[part]}: {key!r} cannot be read ({error.strerror or error})") from error


def join_pieces(pieces: Sequence[Piece], parts: Path, folder: Path, embedding: Embedding | None) -> None:
    """Write an index's files except `index.json`, with one piece in memory at a time. Raises OSError."""
    tables = (pq.read_table(_table_path(parts, piece.number), schema=IMAGES) for piece in pieces)
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


def _in_order(name: str, pieces: Sequence[Piece], parts: Path) -> Iterator[np.ndarray]:
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


def _array(name: str, piece: Piece, parts: Path) -> np.ndarray:
    with np.load(_arrays_path(parts, piece.number), allow_pickle=False) as arrays:
        return arrays[name]


def _table_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.parquet"


def _arrays_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.npz"


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
