"""A training set with copies of test images in it, and who copied what: made once for all tests that ask for it."""

import shutil
from pathlib import Path
from typing import NamedTuple

import fsspec
import pyarrow.parquet as pq
from dedup_data import index_of, make_photo, source_of
from pictures import encoded
from PIL import Image, ImageOps
from small_files import write_files

from data_tools.conversion import convert
from data_tools.request import Request

OWN = 34  # training images that are nobody's copies
SHARD_SAMPLES = 9
URL = "memory://planted/train"  # where the dataset also is, for this process

# Training image -> the test image that it is a copy of, and the tier that must say so; None where several may.
PLANTED = {
    "a/same-bytes.jpg": ("birds", "0.jpg", "bytes"),
    "b/same-bytes-too.jpg": ("birds", "0.jpg", "bytes"),
    "a/same-pixels.jpg": ("birds", "1.jpg", "pixels"),
    "a/quality.jpg": ("birds", "2.jpg", "hash"),
    "b/smaller.jpg": ("birds", "3.jpg", "hash"),
    "b/mirrored.jpg": ("birds", "4.jpg", "hash"),
    "b/cropped.jpg": ("birds", "5.jpg", None),
    "a/other-set.jpg": ("fish", "0.jpg", "bytes"),
    "a/other-set-mirrored.jpg": ("fish", "1.jpg", "hash"),
    "b/border.jpg": ("fish", "2.jpg", "hash"),
    "a/corner.jpg": ("fish", "3.jpg", None),
}


class Planted(NamedTuple):
    """Folders: the test sets and their indexes by name, the training images, and these as a dataset."""

    images: Path
    dataset: Path
    test_sets: dict[str, Path]
    indexes: dict[str, Path]


def jpeg(picture: Image.Image, quality: int = 92, **options: object) -> bytes:
    return encoded(picture, quality=quality, **options)


def photo(seed: int, height: int = 150, width: int = 200) -> Image.Image:
    return make_photo(1000 + seed, height, width)


def stripped(planted: Planted, out: Path) -> Path:
    """The dataset as version 1 of the tables of provenance had it, without fingerprints."""
    shutil.copytree(planted.dataset, out)
    for path in out.glob("*.idx.parquet"):
        table = pq.read_table(path).drop_columns(["pixels", "pdq", "pdq_quality", "pdq_trimmed"])
        pq.write_table(table.replace_schema_metadata(None), path, compression="zstd")
    return out


def plant(root: Path) -> Planted:
    birds, fish = [photo(i) for i in range(10)], [photo(100 + i) for i in range(6)]
    test_sets = {
        "birds": write_files(root / "birds", *((f"{i}.jpg", jpeg(picture)) for i, picture in enumerate(birds))),
        "fish": write_files(root / "fish", *((f"{i}.jpg", jpeg(picture)) for i, picture in enumerate(fish))),
    }
    images = {f"{'ab'[i % 2]}/own-{i:02d}.jpg": jpeg(photo(500 + i, 120 + 2 * i, 180)) for i in range(OWN)}
    images |= {
        "a/same-bytes.jpg": jpeg(birds[0]),
        "b/same-bytes-too.jpg": jpeg(birds[0]),
        "a/same-pixels.jpg": jpeg(birds[1], comment=b"taken from somewhere"),
        "a/quality.jpg": jpeg(birds[2], 40),
        "b/smaller.jpg": jpeg(birds[3].resize((100, 75), Image.Resampling.LANCZOS)),
        "b/mirrored.jpg": jpeg(birds[4].transpose(Image.Transpose.FLIP_LEFT_RIGHT), 80),
        "b/cropped.jpg": jpeg(birds[5].crop((20, 15, 180, 135))),
        "a/other-set.jpg": jpeg(fish[0]),
        "a/other-set-mirrored.jpg": jpeg(fish[1].transpose(Image.Transpose.FLIP_LEFT_RIGHT)),
        "b/border.jpg": jpeg(ImageOps.expand(fish[2], 12, "white")),
        "a/corner.jpg": jpeg(fish[3].crop((0, 0, 194, 146))),
    }
    write_files(root / "images", *images.items())
    # To memory first: that needs no worker process, which would take seconds to start.
    convert(Request(str(root / "images"), shard_samples=SHARD_SAMPLES, shuffle_seed=3), URL)
    dataset = root / "train"
    fsspec.filesystem("memory").get(f"{URL}/", f"{dataset}/", recursive=True)
    indexes = {
        name: index_of(root / f"{name}-index", [source_of(folder, name)]).folder for name, folder in test_sets.items()
    }
    return Planted(root / "images", dataset, test_sets, indexes)
