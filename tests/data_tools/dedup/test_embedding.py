"""The fifth tier, with a model that is a few lines: what it decides, and that an index belongs to one model."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from dedup_data import build_here, candidate, make_photo, source_of, unevenly_lit, write_photos
from PIL import Image

from data_tools.dedup import building
from data_tools.dedup.against import name_indexes, open_matcher
from data_tools.dedup.building import build_index
from data_tools.dedup.embedding import cosine, unit_vector
from data_tools.dedup.index import Index
from data_tools.dedup.matching import Matcher
from vitscale.errors import DataError, RecipeError


@dataclass(frozen=True)
class Pooled:
    """Means of 4 x 4 parts of a picture less its mean colour: (48,)."""

    title: str = "pooled pixels"
    sha256: str = "5" * 64
    dimensions: int = 48

    def __call__(self, rgb: np.ndarray) -> np.ndarray:
        parts = np.asarray(Image.fromarray(rgb).resize((4, 4), Image.Resampling.BOX), np.float32)
        return (parts - parts.mean((0, 1))).flatten()


@dataclass(frozen=True)
class Constant(Pooled):
    """The same number everywhere: every picture is like every other, unlike any, or nonsense."""

    value: float = 1.0

    def __call__(self, rgb: np.ndarray) -> np.ndarray:
        return np.full(self.dimensions, self.value, np.float32)


def cosine_of(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    build_here(monkeypatch)


def index_with(embedder: Pooled | None, photos: Path, out: Path) -> Index:
    build_index([source_of(photos, preset="photo", level=0)], out, workers=1, embedder=embedder)
    return Index(out)


def test_vectors_of_an_index_and_cosines_with_them(inline, tmp_path):
    paths = write_photos(tmp_path / "photos", ["a.png", "b.png", "c.png"])
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"no")
    model = Pooled()
    index = index_with(model, tmp_path / "photos", tmp_path / "index")
    index.verify()
    assert index.embedding.model_dump() == {"title": model.title, "sha256": model.sha256, "dimensions": 48}
    assert index.embeddings.shape == (4, 48) and index.embeddings.dtype == np.float32
    query, rows = make_photo(1).rotate(2), {key: row for row, key in enumerate(index.keys.to_pylist())}
    vector = unit_vector(model, np.asarray(query))
    for path in paths:
        expected = cosine_of(model(np.asarray(query)), model(np.asarray(Image.open(path))))
        assert cosine(vector, index.embeddings[rows[path.name]]) == pytest.approx(expected, abs=0.001)
    assert cosine(vector, index.embeddings[rows["broken.jpg"]]) == 0


def test_unreadable_images_of_a_whole_piece_fit_in(inline, monkeypatch, tmp_path):
    monkeypatch.setattr(building, "_PIECE", 1)
    write_photos(tmp_path / "photos", ["a.jpg", "b.jpg"])
    for name in ("c.jpg", "d.jpg"):
        (tmp_path / "photos" / name).write_bytes(b"no")
    index = index_with(Pooled(), tmp_path / "photos", tmp_path / "index")
    is_readable = index.images["pixels"].is_valid().to_numpy()
    np.testing.assert_allclose(np.linalg.norm(index.embeddings, axis=1), is_readable, atol=1e-5)


def test_a_picture_of_which_the_model_sees_nothing_is_like_none():
    vector = unit_vector(Constant(value=0.0), np.asarray(make_photo(0)))
    assert np.array_equal(vector, np.zeros(48)) and cosine(vector, np.ones(48, np.float32)) == 0


def test_a_model_of_no_numbers_is_refused(inline, tmp_path):
    write_photos(tmp_path / "photos", ["a.jpg"])
    for value in (np.nan, np.inf):
        with pytest.raises(DataError, match="pooled pixels"):
            index_with(Constant(value=value), tmp_path / "photos", tmp_path / "index")
        assert not (tmp_path / "index").exists()


@pytest.fixture
def shaded(inline, tmp_path) -> tuple[Path, Path]:
    """A test set, and a copy of one of its photos that correlates too little."""
    write_photos(tmp_path / "photos", ["a.png", "b.png"])
    unevenly_lit(make_photo(0)).save(tmp_path / "query.png")
    return tmp_path / "photos", tmp_path / "query.png"


def test_the_model_decides_what_the_correlation_does_not(shaded, tmp_path):
    photos, query = shaded[0], candidate(shaded[1].read_bytes())
    of = {name: index_with(model, photos, tmp_path / name) for name, model in (("none", None), ("pooled", Pooled()))}
    (((alone,),),) = (Matcher([of["none"]]).match([query]),)
    assert (alone.tier, alone.removed, alone.cosine) == ("correlation", False, None)
    assert alone.distance <= 80 and alone.correlation < 0.92
    (((judged,),),) = (Matcher([of["pooled"]], embedder=Pooled()).match([query]),)
    assert (judged.tier, judged.key, judged.removed) == ("embedding", "a.png", True)
    assert judged.cosine >= 0.75 and judged.correlation == alone.correlation
    strict = {"photos": replace(of["pooled"].test_sets[0].settings, cosine=1.0)}
    (((kept,),),) = (Matcher([of["pooled"]], strict, Pooled()).match([query]),)
    assert (kept.tier, kept.removed, kept.cosine) == ("embedding", False, judged.cosine)


def test_an_index_belongs_to_one_model(shaded, tmp_path):
    made, without = tmp_path / "made", tmp_path / "without"
    index_with(Pooled(), shaded[0], made)
    build_index([source_of(shaded[0], "others", preset="photo", level=0)], without, workers=1)
    (named, other) = name_indexes([str(made), str(without)], embedder=Pooled())
    assert (named.embedder, other.embedder) == (Pooled(), None)
    assert "embedder" not in named.to_json() and Pooled().title not in named.title
    open_matcher.cache_clear()
    with pytest.raises(RecipeError, match="pooled pixels: give it"):
        name_indexes([str(made)])
    with pytest.raises(RecipeError, match="6666666666666666"):
        name_indexes([str(made)], embedder=Pooled(sha256="6" * 64))
    with pytest.raises(RecipeError, match="--embedding"):
        name_indexes([str(without)], embedder=Pooled())
