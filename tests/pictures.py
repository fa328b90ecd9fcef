"""Pictures: made ones, and real photos in folders of their classes."""

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image


def make_picture(seed: int, height: int, width: int) -> Image.Image:
    """An RGB picture with smooth structure that differs by seed."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def unpack_photos(archive: Path, folder: Path, of_each: int) -> None:
    """The first photos of each class in a tar of `CLASS/NAME.jpg`, as `folder`/CLASS/0.jpg and so on."""
    taken: dict[str, int] = {}
    with tarfile.open(archive) as content:
        for member in filter(tarfile.TarInfo.isfile, content):
            label = Path(member.name).parent.name
            number = taken.setdefault(label, 0)
            if number < of_each:
                (folder / label).mkdir(parents=True, exist_ok=True)
                (folder / label / f"{number}.jpg").write_bytes(content.extractfile(member).read())  # type: ignore[union-attr]
            taken[label] += 1


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    """The bytes of an image file."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()
