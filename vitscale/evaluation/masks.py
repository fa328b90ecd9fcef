"""Masks of classes, one PNG for each image of a dataset, as strangers make them.

Shape legend: H W height and width of a mask.
"""

import io
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Self

import numpy as np
from PIL import Image, UnidentifiedImageError

from vitscale.data.shards import Manifest
from vitscale.data.shards.images import MAX_PIXELS
from vitscale.data.shards.opening import open_shard
from vitscale.ground.errors import DataError, os_errors
from vitscale.ground.files.unpacked import most_pixels
from vitscale.ground.storage import regular

MOST_CLASSES = 1 << 10
_MOST_BYTES = 1 << 28
_GRAY, _PALETTE = 0, 3
_COLOURS = {2: "RGB", 4: "gray with alpha", 6: "RGB with alpha"}
_SCALED = {2: 85, 4: 17}  # bits -> what Pillow multiplies gray values by
_ASPECT = 0.02  # a mask's may differ by so much from its image's: both are whole pixels of something resized


@dataclass(frozen=True)
class Masks:
    """The masks of a dataset's images: uid -> (file, height and width of the image)."""

    files: dict[int, tuple[Path, int, int]]

    @classmethod
    def of(cls, folder: Path, manifest: Manifest) -> Self:
        """The masks of a dataset in a folder: `cat/1.png`, or `1.png` anywhere in it, for the image `cat/1.jpg`.

        Raises `DataError` for images without a mask, or with several, and for a dataset that does not know its
        images' names.
        """
        found = sorted(path for path in _files_in(folder) if path.suffix.lower() == ".png")
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder; expected one of masks, a PNG for each image")
        if not found:
            raise DataError(f"{folder}: no PNG in it; expected a mask for each image, called as the image is")
        whole = {path.relative_to(folder).with_suffix("").as_posix(): path for path in found}
        by_stem: dict[str, list[Path]] = {}
        for path in found:
            by_stem.setdefault(path.stem, []).append(path)
        files, missing, taken = {}, [], dict[Path, str]()
        for index in range(len(manifest.shards)):
            with open_shard(manifest, index) as shard:
                if shard.keys is None:
                    raise DataError(f"{shard.file.path}: no table of provenance, so its images have no names")
                for slot in shard.slots.tolist():
                    name = PurePosixPath(shard.keys[slot])
                    own = whole.get(str(name.parent / name.stem))
                    paths = by_stem.get(name.stem, []) if own is None else [own]
                    if len(paths) > 1:
                        raise DataError(f"{shard.keys[slot]}: two masks, {paths[0]} and {paths[1]}")
                    if not paths:
                        missing.append(shard.keys[slot])
                        continue
                    if (other := taken.setdefault(paths[0], shard.keys[slot])) != shard.keys[slot]:
                        raise DataError(f"{paths[0]}: the mask of two images, {other} and {shard.keys[slot]}")
                    size = int(shard.file.height[slot]), int(shard.file.width[slot])
                    files[int(shard.file.uid[slot])] = (paths[0], *size)
        if missing:
            raise DataError(
                f"{folder}: no mask for {len(missing):,} of the {manifest.num_samples:,} images of {manifest.where}, "
                f"the first {missing[0]}; expected {PurePosixPath(missing[0]).stem}.png"
            )
        return cls(files)

    def read(self, uid: int, rows: int, columns: int) -> np.ndarray:
        """The mask of an image, int64 (rows, columns): of each position the class at its centre.

        Raises `DataError` for what is no mask, and for one of another shape than its image.
        """
        path, height, width = self.files[uid]
        mask = read_mask(path)
        H, W = mask.shape
        if abs(H * width / (W * height) - 1) > _ASPECT and abs(H - height * W / width) > 1:
            raise DataError(
                f"{path}: {W} x {H} pixels, and its image has {width} x {height}; expected the same shape, at any scale"
            )
        centres = [((np.arange(count) + 0.5) * side / count).astype(int) for count, side in ((rows, H), (columns, W))]
        return mask[np.ix_(*centres)].astype(np.int64)


def _files_in(folder: Path) -> Iterator[Path]:
    """All files, also in linked folders; those of a folder with several names once."""
    seen = set[str]()
    for at, folders, names in os.walk(folder, followlinks=True):
        folders.sort()
        if (real := os.path.realpath(at)) in seen:
            folders.clear()
        else:
            seen.add(real)
            yield from (Path(at, name) for name in names)


def read_mask(path: Path) -> np.ndarray:
    """The class numbers in a PNG, (H, W): gray values of up to 16 bits, or numbers of a palette's colours.

    Raises `DataError` for colours, which number no classes, and for files that are damaged, large or no PNG.
    """
    with os_errors(f"{path}: cannot be read"), open(path, "rb", opener=regular) as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES or data[:8] != b"\x89PNG\r\n\x1a\n" or data[12:16] != b"IHDR" or len(data) < 33:
        raise DataError(f"{path}: is no PNG, or has more than {_MOST_BYTES:,} bytes")
    bits, kind = data[24], data[25]
    if kind not in (_GRAY, _PALETTE):
        raise DataError(
            f"{path}: {_COLOURS.get(kind, 'unknown')} pixels; expected numbers of classes: gray, or a palette"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about bombs, which are limited here
            with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
                width, height = image.size
                if width * height > (most := min(MAX_PIXELS, most_pixels(len(data)))):
                    raise DataError(f"{path}: {width} x {height} pixels; at most {most:,} are accepted")
                if getattr(image, "is_animated", False):
                    raise DataError(f"{path}: is animated; expected one picture")
                image.verify()  # the checksums of pixels, which decoding does not compare
            with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
                mask = np.asarray(image)
    except (DataError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise DataError(f"{path}: cannot be decoded: Pillow finds no picture in it") from None
    except Exception as error:  # Pillow raises almost anything on damaged files
        raise DataError(f"{path}: cannot be decoded: {type(error).__name__}: {error}") from None
    if mask.ndim != 2:  # by a second header
        raise DataError(f"{path}: damaged: its headers contradict each other")
    return mask // _SCALED[bits] if kind == _GRAY and bits in _SCALED else mask
