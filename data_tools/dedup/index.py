"""An index: everything by which images of test sets are recognised, in a folder.

    index.json        version, algorithm, test sets with their settings, size and digest of every file; written last
    images.parquet    one row a test image: key, digests, quality, size, and a small picture to look at
    hashes.npy        uint64 (4, H): the PDQ hashes of all variants of all images
    owners.npy        uint32 (H,): the row of each hash's image, ascending
    variants.npy      uint8 (H,): which variant it is, see `variants.variant_name`
    thumbnails.npy    uint8 (N, 64, 64): lumas
    embeddings.npy    float32 (N, D), of length 1; only with a user's model

Images of a test set follow one another, test sets stand in the order in which they were given, images in that of keys.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_tools.dedup.fingerprint import ALGORITHM
from data_tools.dedup.luma import Box
from data_tools.dedup.settings import Settings
from vitscale.errors import DataError
from vitscale.shards import file_digests

INDEX_NAME = "index.json"
IMAGES_NAME = "images.parquet"
EMBEDDINGS_NAME = "embeddings.npy"
ARRAYS = ("hashes", "owners", "variants", "thumbnails")
VERSION = 1

IMAGES = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("sha256", pa.binary(32), nullable=False),  # of the file
        pa.field("pixels", pa.uint64()),  # null: the image cannot be decoded, so only its bytes are known
        pa.field("quality", pa.uint8(), nullable=False),
        pa.field("height", pa.int32(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("trim", pa.list_(pa.int32(), 4)),  # top, left, height, width without borders; null: there are none
        pa.field("picture", pa.binary(), nullable=False),  # JPEG, small; empty if the image cannot be decoded
    ]
)


@dataclass(frozen=True)
class TestSet:
    """One test set of an index.

    Attributes:
        name: what reports call it.
        source: where it came from.
        preset: its kind, of which the settings are.
        level: how many variants of its images there are, 0 to 3.
        images, hashes: their number.
        unreadable: images that cannot be decoded.
        settings: what counts as a copy.
    """

    name: str
    source: str
    preset: str
    level: int
    images: int
    hashes: int
    unreadable: int
    settings: Settings

    __test__ = False  # for pytest, which takes the name for a test's


class Index:
    """An index, open. Its arrays are mapped, not read: a process touches what it needs."""

    def __init__(self, folder: str | Path) -> None:
        """Raises DataError: missing, damaged, of another version or made by another algorithm."""
        self.folder = Path(folder)
        described = _described(self.folder)
        self.sha256 = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
        self.embedding: dict[str, Any] | None = described["embedding"]
        self.test_sets = tuple(
            TestSet(**one | {"settings": Settings(**one["settings"])}) for one in described["test_sets"]
        )
        self._files: dict[str, dict[str, Any]] = described["files"]
        for name, file in self._files.items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != file["bytes"]:
                raise DataError(f"{path}: missing or cut: the index has {file['bytes']:,} bytes of it. Make it anew")
        self.hashes, self.owners, self.variants, self.thumbnails = (self._map(name) for name in ARRAYS)
        self.embeddings = self._map("embeddings") if self.embedding is not None else None
        try:
            table = pq.read_table(
                self.folder / IMAGES_NAME, columns=[name for name in IMAGES.names if name != "picture"]
            )
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self.folder / IMAGES_NAME}: damaged or not readable ({error})") from error
        self.images = table.combine_chunks()

    def verify(self) -> None:
        """Read everything. Raises DataError for the first file that is not what was written."""
        for name, file in self._files.items():
            if file_digests(self.folder / name).sha256 != file["sha256"]:
                raise DataError(f"{self.folder / name}: damaged: its sha256 is not the index's. Make the index anew")

    @cached_property
    def first_images(self) -> np.ndarray:
        """int64 (S + 1,): rows of images at which each test set begins, and the end of the last."""
        return np.cumsum([0, *(one.images for one in self.test_sets)])

    @cached_property
    def first_hashes(self) -> np.ndarray:
        """int64 (S + 1,): the same of the hashes."""
        return np.cumsum([0, *(one.hashes for one in self.test_sets)])

    def set_of(self, image: int) -> int:
        """Number of the test set that a row of images belongs to."""
        return int(np.searchsorted(self.first_images, image, side="right")) - 1

    @cached_property
    def keys(self) -> pa.StringArray:
        """What test images are called, by row."""
        return self.images["key"].combine_chunks()

    def size(self, image: int) -> tuple[int, int, Box | None]:
        """Height and width of a test image in pixels, and what of it is left without borders."""
        trim = self.images["trim"][image].as_py()
        return self.images["height"][image].as_py(), self.images["width"][image].as_py(), trim and Box(*trim)

    def pictures(self, images: Sequence[int]) -> list[bytes]:
        """The small JPEGs of test images, in this order. Reads a column of pictures, in pieces."""
        wanted = dict.fromkeys(images, b"")
        row = 0
        with pq.ParquetFile(self.folder / IMAGES_NAME) as file:
            for batch in file.iter_batches(columns=["picture"]):
                for image in wanted:
                    if row <= image < row + batch.num_rows:
                        wanted[image] = batch.column(0)[image - row].as_py()
                row += batch.num_rows
        return [wanted[image] for image in images]

    def _map(self, name: str) -> np.ndarray:
        path = self.folder / f"{name}.npy"
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path}: damaged or not readable ({error})") from error


def describe_index(
    folder: Path, test_sets: Iterable[TestSet], embedding: dict[str, Any] | None, names: Iterable[str]
) -> None:
    """Write `index.json` for files that lie in a folder. Raises OSError."""
    files = {name: file_digests(folder / name) for name in names}
    content = {
        "version": VERSION,
        "algorithm": ALGORITHM,
        "embedding": embedding,
        "test_sets": [asdict(one) for one in test_sets],
        "files": {name: {"bytes": digests.bytes, "sha256": digests.sha256} for name, digests in files.items()},
    }
    (folder / INDEX_NAME).write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def _described(folder: Path) -> dict[str, Any]:
    path = folder / INDEX_NAME
    try:
        described = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{folder}: no index there ({INDEX_NAME}); `vitscale dedup index` makes one") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: damaged or not readable ({error})") from error
    if not isinstance(described, dict) or described.get("version") != VERSION:
        found = described.get("version") if isinstance(described, dict) else None
        raise DataError(f"{path}: version {found!r}; this version of vitscale reads {VERSION}. Make the index anew")
    if described["algorithm"] != ALGORITHM:
        raise DataError(
            f"{path}: made by the algorithm {described['algorithm']}; this version of vitscale has {ALGORITHM}. "
            "Make the index anew"
        )
    return described
