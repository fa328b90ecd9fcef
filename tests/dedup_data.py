"""Test sets for tests of de-duplication: pictures that nobody could take for one another, and indexes of them."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_tools.dedup import building
from data_tools.dedup.building import TestSource, build_index
from data_tools.dedup.index import FingerprintIndex
from data_tools.dedup.queries import Candidate
from data_tools.dedup.settings import Preset
from data_tools.sources import SourceOptions, open_source
from data_tools.tasks import run_inline
from vitscale.data.shards.images import StoredImage, store_image

NAMES = [f"{i:02d}.png" for i in range(11)]


def make_photo(seed: int, height: int = 200, width: int = 260) -> Image.Image:
    """A picture with structure at many scales, some edges and full contrast; another one for every seed."""
    rng = np.random.default_rng(seed)
    layers = np.zeros((height, width, 3))
    for cells, weight in ((4, 1.0), (9, 0.8), (20, 0.5), (48, 0.3)):
        noise = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), np.uint8))
        layers += weight * (np.asarray(noise.resize((width, height), Image.Resampling.BICUBIC), np.float64) - 128)
    y, x = np.mgrid[0:height, 0:width]
    for _ in range(6):  # discs with a sharp edge
        row, column = rng.uniform(0, height), rng.uniform(0, width)
        radius = rng.uniform(0.08, 0.25) * min(height, width)
        layers[(y - row) ** 2 + (x - column) ** 2 < radius**2] += rng.uniform(-110, 110, 3)
    return Image.fromarray(np.clip(128 + layers, 0, 255).astype(np.uint8))


def unevenly_lit(photo: Image.Image) -> Image.Image:
    """A copy with light and shade of its own: the hash stays near, but the pictures correlate by less than 0.92."""
    light = Image.fromarray(np.random.default_rng(0).integers(0, 256, (12, 10), np.uint8))
    pixels = np.asarray(light.resize(photo.size, Image.Resampling.BICUBIC), np.float64)[..., None] - 128
    return Image.fromarray(np.clip(np.asarray(photo) + pixels / 2, 0, 255).astype(np.uint8))


def write_photos(folder: Path, names: Iterable[str], seed: int = 0, size: tuple[int, int] = (200, 260)) -> list[Path]:
    """Files of these names in a folder, JPEG or what their suffix says, of height and width `size`.

    The picture of a name is `make_photo(seed + i)` of its position i.
    """
    paths = []
    for i, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        make_photo(seed + i, *size).save(path, **({"quality": 95} if path.suffix == ".jpg" else {}))
        paths.append(path)
    return paths


def source_of(
    src: Path | str, name: str = "photos", preset: Preset | None = None, level: int | None = None
) -> TestSource:
    """A test set of what lies at a path, as the command line would open it."""
    return TestSource(name, str(src), open_source(str(src), None, SourceOptions(unlabelled=True)), preset, level)


def index_of(out: Path, sources: Sequence[TestSource]) -> FingerprintIndex:
    """An index of test sets, built in this process, written to `out` and opened."""
    with pytest.MonkeyPatch.context() as patch:
        build_here(patch)
        build_index(sources, out, workers=1)
    return FingerprintIndex(out)


def candidate(content: bytes, uid: int = 0, key: str = "") -> Candidate:
    """An image file as a conversion compares it."""
    stored = store_image(content)
    assert isinstance(stored, StoredImage), stored
    return Candidate.of(stored, content, uid, key)


def build_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have indexes built in this process, by the engine for `memory://`: another one takes seconds to start."""
    monkeypatch.setattr(building, "run_in_processes", lambda tasks, workers, tick: run_inline(tasks, tick))
