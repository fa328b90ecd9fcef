"""An index: a folder with everything needed to recognise the images of test sets.

    index.json        version, algorithm, test sets with their settings, size and digest of every file; written last
    images.parquet    one row a test image: key, digests, quality, size, and a small picture to look at
    hashes.npy        uint64 (4, H): the PDQ hashes of all variants of all images
    owners.npy        uint32 (H,): the row of each hash's image, ascending
    variants.npy      uint8 (H,): which variant it is, see `variants.variant_name`
    thumbnails.npy    uint8 (N, 64, 64): lumas
    embeddings.npy    float32 (N, D), whitened, of length 1; only with a user's model, which is not in the folder
    whitening.npy     float32 (D + 1, D): the whitening that was applied, see `embedding.whitening_of`; likewise

Images of a test set are contiguous. Test sets are in the order in which they were given, images in the order in which
their source lists them.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, ValidationError, model_validator

from data_tools.dedup.fingerprint import ALGORITHM, SIDE, Box
from data_tools.dedup.settings import Preset, Settings
from data_tools.dedup.variants import LEVELS
from vitscale.data.shards.manifest import Sha256, Strict
from vitscale.data.shards.provenance import read_table
from vitscale.ground.errors import DataError, RecipeError, os_errors
from vitscale.ground.files.arrays import map_array
from vitscale.ground.files.digests import file_digests
from vitscale.ground.files.unpacked import CHECKS, read_batches
from vitscale.ground.storage import read_bytes
from vitscale.ground.wording import describe_mistake

INDEX_NAME = "index.json"
IMAGES_NAME = "images.parquet"
VERSION = 1
_GROUP_ROWS = 1 << 17

_Count = Annotated[int, Field(ge=0)]
IMAGES = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("sha256", pa.binary(32), nullable=False),  # of the file
        pa.field("pixels", pa.uint64()),  # null: the image cannot be decoded, so only its bytes are known
        pa.field("quality", pa.uint8(), nullable=False),
        pa.field("height", pa.int32(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        # top, left, height, width within the borders; null: no borders
        pa.field("trim", pa.list_(pa.field("element", pa.int32()), 4)),
        pa.field("picture", pa.binary(), nullable=False),  # JPEG, small; empty if the image cannot be decoded
    ]
)


@dataclass(frozen=True)
class TestSet:
    """One test set of an index."""

    name: str  # in reports
    source: str  # where it came from
    preset: Preset  # its kind of pictures, whose settings it has by default
    level: Annotated[int, Field(ge=0, lt=len(LEVELS))]  # of variants of its images
    images: Annotated[int, Field(ge=1)]
    hashes: _Count
    unreadable: _Count  # images that cannot be decoded
    settings: Settings  # what counts as a copy

    __test__ = False  # for pytest, which takes the class for a test because of its name


class Embedding(Strict):
    """An index's record of a user's model: what messages call it, its digest, and the length D of its vectors."""

    title: str
    sha256: Sha256
    dimensions: Annotated[int, Field(ge=1)]


class _ArrayFile(Strict):
    bytes: _Count
    sha256: Sha256


class _Content(Strict):
    """`index.json`."""

    version: Literal[1]
    algorithm: str
    embedding: Embedding | None
    test_sets: Annotated[tuple[TestSet, ...], Field(min_length=1)]
    files: dict[str, _ArrayFile]

    @model_validator(mode="after")
    def _consistent(self) -> "_Content":
        names = [one.name for one in self.test_sets]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two test sets have one name: {', '.join(twice)}")
        expected = file_names(self.embedding)
        if sorted(self.files) != sorted(expected):
            raise ValueError(f"files {', '.join(self.files)}; expected {', '.join(expected)}")
        return self


class FingerprintIndex:
    """An open index. Its arrays are memory-mapped: a process reads only what it needs."""

    def __init__(self, folder: str | Path) -> None:
        """Raises DataError: missing, damaged, of another version or made by another algorithm."""
        self.folder = Path(folder)
        content = _read_content(self.folder)
        # Includes the digests of all files: the index's identity.
        self.sha256 = hashlib.sha256(json.dumps(content.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()
        self.test_sets, self.embedding, self._files = content.test_sets, content.embedding, content.files
        for name, file in self._files.items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != file.bytes:
                raise DataError(f"{path}: missing or cut: the index has {file.bytes:,} bytes of it. Make it again")
        count = int(self.first_images[-1])
        columns = [name for name in IMAGES.names if name != "picture"]
        # Of schema IMAGES, without the pictures.
        self.images = read_table(self.folder / IMAGES_NAME, IMAGES, columns).combine_chunks()
        if len(self.images) != count:
            raise DataError(f"{self.folder / IMAGES_NAME}: {len(self.images):,} images; {INDEX_NAME} says {count:,}")
        arrays = array_types(count, int(self.first_hashes[-1]), self.embedding)
        mapped = {name: self._map(name, *kind) for name, kind in arrays.items()}
        # The files with these names; the last two are None without a model.
        self.hashes, self.owners, self.variants = mapped["hashes"], mapped["owners"], mapped["variants"]
        self.thumbnails, self.embeddings = mapped["thumbnails"], mapped.get("embeddings")
        self.whitening = mapped.get("whitening")
        self._check_owners()

    def verify(self) -> None:
        """Read everything. Raises DataError for the first file that differs from what was written."""
        for name, file in self._files.items():
            path = self.folder / name
            with os_errors(f"{path}: cannot be read"):
                digests = file_digests(path)
            if digests.sha256 != file.sha256:
                raise DataError(f"{path}: damaged: its sha256 is not the index's. Make the index again")

    @cached_property
    def first_images(self) -> np.ndarray:
        """int64 (S + 1,): the first image row of each test set, and the end of the last."""
        return np.cumsum([0, *(one.images for one in self.test_sets)])

    @cached_property
    def first_hashes(self) -> np.ndarray:
        """int64 (S + 1,): the same for hashes."""
        return np.cumsum([0, *(one.hashes for one in self.test_sets)])

    def set_of(self, image: int) -> int:
        """The number of the test set that an image row belongs to."""
        return int(np.searchsorted(self.first_images, image, side="right")) - 1

    @cached_property
    def keys(self) -> pa.StringArray:
        """Keys of the test images, by row."""
        return self.images["key"].combine_chunks()

    def size(self, image: int) -> tuple[int, int, Box | None]:
        """Height and width of a test image in pixels, and the part within its borders."""
        trim = self.images["trim"][image].as_py()
        return self.images["height"][image].as_py(), self.images["width"][image].as_py(), trim and Box(*trim)

    def pictures(self, images: Sequence[int]) -> list[bytes]:
        """The small JPEGs of test images, in this order. Raises DataError for damage."""
        path = self.folder / IMAGES_NAME
        found: dict[int, bytes] = {}
        try:
            with path.open("rb") as raw, pq.ParquetFile(raw, **CHECKS) as file:
                ends = np.cumsum([file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)])
                loaded = -1
                for image in sorted(set(images)):
                    group = int(np.searchsorted(ends, image, side="right"))
                    if group != loaded:
                        batches = read_batches(raw, file, str(path), _GROUP_ROWS, ["picture"], [group])
                        table, loaded = pa.Table.from_batches(batches), group
                    found[image] = table["picture"][image - int(ends[group]) + len(table)].as_py()
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: damaged or not readable ({error})") from error
        return [found[image] for image in images]

    def _map(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        path = self.folder / f"{name}.npy"
        try:
            array = map_array(path)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: damaged or not readable ({error})") from error
        if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
            raise DataError(f"{path}: {array.dtype} {array.shape}; expected {dtype} {shape}. Make the index again")
        return array

    def _check_owners(self) -> None:
        """Check that each test set's hashes belong to its own images: at both ends, since they ascend."""
        for number, one in enumerate(self.test_sets):
            if not one.hashes:
                continue
            first, end = self.first_hashes[number : number + 2]
            least, beyond = self.first_images[number : number + 2]
            if self.owners[first] < least or self.owners[end - 1] >= beyond:
                path = self.folder / "owners.npy"
                raise DataError(f"{path}: has hashes of {one.name} that are of no image of it. Make the index again")


def array_types(
    images: int, hashes: int, embedding: Embedding | None
) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """Type and shape of each array of an index with this many images and hashes, by file name without suffix."""
    types: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
        "hashes": (np.dtype(np.uint64), (4, hashes)),
        "owners": (np.dtype(np.uint32), (hashes,)),
        "variants": (np.dtype(np.uint8), (hashes,)),
        "thumbnails": (np.dtype(np.uint8), (images, SIDE, SIDE)),
    }
    if embedding is not None:
        types["embeddings"] = np.dtype(np.float32), (images, embedding.dimensions)
        types["whitening"] = np.dtype(np.float32), (embedding.dimensions + 1, embedding.dimensions)
    return types


def file_names(embedding: Embedding | None) -> list[str]:
    """The files of an index besides `index.json`."""
    return [IMAGES_NAME, *[f"{name}.npy" for name in array_types(0, 0, embedding)]]


def describe_index(folder: Path, test_sets: Iterable[TestSet], embedding: Embedding | None) -> None:
    """Write `index.json` for the files in a folder. Raises OSError."""
    files = {name: file_digests(folder / name) for name in file_names(embedding)}
    content = {
        "version": VERSION,
        "algorithm": ALGORITHM,
        "embedding": embedding and embedding.model_dump(),
        "test_sets": [asdict(one) for one in test_sets],
        "files": {name: {"bytes": digests.bytes, "sha256": digests.sha256} for name, digests in files.items()},
    }
    (folder / INDEX_NAME).write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def _read_content(folder: Path) -> _Content:
    path = folder / INDEX_NAME
    try:
        text = read_bytes(path)
        described = json.loads(text)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"{folder}: no index there ({INDEX_NAME}); `vitscale dedup index` makes one") from error
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: damaged or not readable ({error})") from error
    if not isinstance(described, dict) or described.get("version") != VERSION:
        found = described.get("version") if isinstance(described, dict) else None
        raise DataError(f"{path}: version {found!r}; this version of vitscale reads {VERSION}. Make the index again")
    if described.get("algorithm") != ALGORITHM:
        raise DataError(
            f"{path}: made by the algorithm {described.get('algorithm')}; this version of vitscale has {ALGORITHM}. "
            "Make the index again"
        )
    try:
        return _Content.model_validate_json(text)
    except ValidationError as error:
        reason = describe_mistake(error.errors(include_url=False)[0])
    except RecipeError as error:  # of settings
        reason = str(error)
    raise DataError(f"{path}: not a valid index: {reason}")
