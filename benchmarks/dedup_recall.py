"""Which copies of test images are found: recall by kind of edit and level, and pairs taken for copies that are none.

    python benchmarks/dedup_recall.py [--data FOLDER] [--photos N] [--levels 0 1 2 3]

FOLDER holds the grocery and clothing photos; VITSCALE_TEST_DATA names it, too. N photos of each are a test set of
photos; their edited versions are looked for in it. Then all clothing photos, some of them edited, are looked for in
all grocery photos: not one is there.
"""

import io
import os
import tarfile
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from photo_edits import edits
from photos import parsed, photos_parser
from PIL import Image

from data_tools.dedup.building import TestSource, build_index
from data_tools.dedup.index import FingerprintIndex
from data_tools.dedup.matches import Match
from data_tools.dedup.matching import Matcher
from data_tools.dedup.queries import Candidate
from data_tools.dedup.variants import LEVELS
from data_tools.sources.folder import FolderSource
from vitscale.data.shards.images import StoredImage, store_image

BATCH = 64
CROSSED = (
    "JPEG quality 50",
    "squeezed to 224 x 224",
    "mirrored, centre 90 %",
    "white border of 5 %",
    "random crop of 80 %",
)


@dataclass(frozen=True)
class Photo:
    """A photo: its key in the index and its file."""

    key: str
    content: bytes

    @property
    def image(self) -> Image.Image:
        return Image.open(io.BytesIO(self.content)).convert("RGB")


@cache
def photos(data: Path, collection: str, part: str = "train") -> tuple[Photo, ...]:
    """All photos of a part of a collection, in the archive's order."""
    found: list[Photo] = []
    with tarfile.open(data / collection / f"{part}.tar") as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name.endswith(".jpg") else None
            if file is not None:
                found.append(Photo(f"{collection}/{len(found):04d}.jpg", file.read()))
    return tuple(found)


def spread(photos: tuple[Photo, ...], count: int) -> list[Photo]:
    """So many of them, evenly."""
    return [photos[i] for i in np.linspace(0, len(photos) - 1, count).astype(int)]


def index_of(photos: list[Photo], level: int, folder: Path, workers: int) -> FingerprintIndex:
    """A test set of these photos."""
    files = folder / f"photos-{level}"
    for photo in photos:
        path = files / photo.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo.content)
    out = folder / f"index-{level}"
    build_index([TestSource("photos", str(files), FolderSource((str(files),)), "photo", level)], out, workers=workers)
    return FingerprintIndex(out)


def seen(content: bytes) -> Candidate:
    """A file as a conversion sees it."""
    stored = store_image(content)
    assert isinstance(stored, StoredImage), stored
    return Candidate.of(stored, content)


def recall(photos: list[Photo], indexes: list[FingerprintIndex]) -> dict[str, list[float]]:
    """Share of the photos that are found in each index, by kind of edit."""
    matchers = [Matcher([index]) for index in indexes]
    found = {}
    for number, (name, edit) in enumerate(edits().items()):
        random = np.random.default_rng(number)
        edited = [seen(edit(photo.image, random)) for photo in photos]
        found[name] = [
            float(
                np.mean(
                    [
                        any(match.removed and match.key == photo.key for match in matches)
                        for photo, matches in zip(photos, matcher.match(edited), strict=True)
                    ]
                )
            )
            for matcher in matchers
        ]
    return found


def strangers(photos: list[Photo], index: FingerprintIndex, names: tuple[str, ...]) -> tuple[int, int, list[Match]]:
    """Photos that are not in the index, as they are and edited: pairs of images, pairs of hashes, and false matches."""
    matcher = Matcher([index])
    made = edits()
    false: list[Match] = []
    for name in ("", *names):
        random = np.random.default_rng(len(name))
        for start in range(0, len(photos), BATCH):
            some = photos[start : start + BATCH]
            files = [made[name](photo.image, random) if name else photo.content for photo in some]
            for matches in matcher.match([seen(content) for content in files]):
                false += [match for match in matches if match.removed]
    asked = matcher.findings.images
    return asked * index.images.num_rows, asked * index.hashes.shape[1], false


def main() -> None:
    """Print the tables."""
    parser = photos_parser(__doc__)
    parser.add_argument("--photos", type=int, default=150)
    parser.add_argument("--levels", type=int, nargs="+", default=range(len(LEVELS)))
    options = parsed(parser)
    workers = len(os.sched_getaffinity(0))
    some = [photo for name in ("grocery", "clothing") for photo in spread(photos(options.data, name), options.photos)]
    with tempfile.TemporaryDirectory() as folder:
        indexes = [index_of(some, level, Path(folder) / "recall", workers) for level in options.levels]
        title = f"found of {len(some)} photos, %"
        print(title.ljust(44) + "".join(f"{2 * LEVELS[level]:8d}" for level in options.levels))
        for name, found in recall(some, indexes).items():
            print(name.ljust(44) + "".join(f"{100 * share:8.1f}" for share in found))
        grocery = [photo for part in ("train", "test_dev") for photo in photos(options.data, "grocery", part)]
        clothing = [photo for part in ("train", "validation") for photo in photos(options.data, "clothing", part)]
        grocery = [Photo(f"{number:05d}.jpg", photo.content) for number, photo in enumerate(grocery)]
        for level in options.levels:
            index = index_of(grocery, level, Path(folder) / "strangers", workers)
            images, hashes, false = strangers(clothing, index, CROSSED)
            print(f"{2 * LEVELS[level]} variants: {len(false)} false pairs of {images:.2e} images, {hashes:.2e} hashes")


if __name__ == "__main__":
    main()
