"""Lists of ids: the images that a prepared task is trained and tuned on, pinned by the SHA-256 of their pixels.

    ids.json    {"version": 1, "task": ..., "source": ..., "slices": ..., "train800": [{"key", "label", "sha256"}], ...}

The order of TFDS depends on its version, other copies have orders of their own, and images may have been re-encoded.
The pixels stay the same: uint8 RGB, row by row, EXIF orientation applied, JPEGs decoded as libjpeg does with its
accurate integer transform, gray repeated three times.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from data_tools.vtab.source import PartSource
from vitscale.data.shards.images import Reject, store_image
from vitscale.data.shards.manifest import Sha256, Strict
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.files.durable import write_text
from vitscale.ground.wording import describe_mistake

IDS_NAME = "ids.json"


class PinnedImage(Strict):
    """One image: its key in the copy that it was taken from, its class number, the SHA-256 of its pixels."""

    key: str
    label: Annotated[int, Field(ge=0)]
    sha256: Sha256

    @property
    def content(self) -> tuple[str, int]:
        """Identifies the image in any copy; with the label, because dSprites has equal pictures with different ones."""
        return self.sha256, self.label


class Ids(Strict):
    """The images of a task's two small parts, and a description of their origin."""

    version: Literal[1] = 1
    task: str
    source: str
    slices: dict[str, str]
    train800: tuple[PinnedImage, ...]
    val200: tuple[PinnedImage, ...]

    @property
    def parts(self) -> dict[str, tuple[PinnedImage, ...]]:
        """The entries of each part, by its name."""
        return {"train800": self.train800, "val200": self.val200}

    @property
    def sha256(self) -> str:
        """Digest of pixels and labels of both parts: equal for equal images from any copy."""
        lines = [
            f"{name} {sha} {label}"
            for name, part in self.parts.items()
            for sha, label in sorted(contents(part).elements())
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def differences(self, other: "Ids") -> int:
        """How many images of this list are not in the same part of the other."""
        return sum((contents(part) - contents(other.parts[name])).total() for name, part in self.parts.items())

    def write(self, folder: Path) -> None:
        """Write IDS_NAME into a folder. Raises OSError."""
        write_text(folder / IDS_NAME, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Ids":
        """The list in a file. Raises RecipeError if it cannot be read, DataError if it is damaged."""
        try:
            ids = cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise RecipeError(f"{path}: cannot be read ({error.strerror or error})") from error
        except ValidationError as error:
            reason = describe_mistake(error.errors(include_url=False)[0])
            raise DataError(f"{path}: not a list of ids: {reason}") from error
        keys = Counter(entry.key for part in ids.parts.values() for entry in part)
        if repeated := [key for key, count in keys.items() if count > 1]:
            raise DataError(f"{path}: names {len(repeated)} images twice, such as {repeated[0]!r}")
        return ids


def entries_of(source: PartSource) -> Iterator[PinnedImage]:
    """The images of a part as entries, each decoded. Raises DataError for one that cannot be."""
    for part, name in enumerate(source.parts):
        for item in source.items(part, Counter()):
            try:
                digest = pixels_sha256(source.read(part, item.content))
            except (OSError, DataError) as error:
                raise DataError(f"{name}: {item.key!r}: {error}") from error
            yield PinnedImage(key=item.key, label=source.label_of(item), sha256=digest)


def pixels_sha256(image: bytes) -> str:
    """SHA-256 of an image file's pixels. Raises DataError if it cannot be decoded."""
    stored = store_image(image)
    if isinstance(stored, Reject):
        raise DataError(stored.reason)
    return hashlib.sha256(stored.pixels.tobytes()).hexdigest()


def contents(entries: Iterable[PinnedImage]) -> Counter[tuple[str, int]]:
    """How often each image, by `PinnedImage.content`, is among these."""
    return Counter(entry.content for entry in entries)
