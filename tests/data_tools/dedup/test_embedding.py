"""The fifth tier, with a model that is a few lines: what it decides, and that an index belongs to one model."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from dedup_data import candidate, make_photo, source_of, unevenly_lit, write_photos
from pictures import encoded
from PIL import Image, ImageOps
from sklearn.covariance import ShrunkCovariance

from data_tools.dedup import building
from data_tools.dedup.against import name_indexes, open_matcher
from data_tools.dedup.building import build_index
from data_tools.dedup.embedding import cosine, unit_vector, whitened, whitening_of
from data_tools.dedup.index import FingerprintIndex
from data_tools.dedup.matching import Matcher
from vitscale.ground.errors import DataError, RecipeError


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


def index_with(embedder: Pooled | None, photos: Path, out: Path) -> FingerprintIndex:
    build_index([source_of(photos, preset="photo", level=0)], out, workers=1, embedder=embedder)
    return FingerprintIndex(out)


def test_vectors_of_an_index(inline, tmp_path):
    """Cosines are those by the inverse of scikit-learn's covariance, shrunk by as much as D in N + D."""
    paths = write_photos(tmp_path / "photos", [f"{i:02d}.png" for i in range(40)], size=(64, 80))
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"no")
    model = Pooled()
    index = index_with(model, tmp_path / "photos", tmp_path / "index")
    index.verify()
    assert index.embedding.model_dump() == {"title": model.title, "sha256": model.sha256, "dimensions": 48}
    assert index.embeddings.shape == (41, 48) and index.whitening.shape == (49, 48)
    raw = np.stack([unit_vector(model, np.asarray(Image.open(path))) for path in paths]).astype(np.float64)
    covariance = ShrunkCovariance(shrinkage=48 / (40 + 48)).fit(raw).covariance_
    centred = raw - raw.mean(0)
    products = centred @ np.linalg.inv(covariance) @ centred.T
    lengths = np.sqrt(np.diag(products))
    rows = [index.keys.to_pylist().index(path.name) for path in paths]
    found = index.embeddings[rows] @ index.embeddings[rows].T
    np.testing.assert_allclose(found, products / np.outer(lengths, lengths), atol=1e-4)
    assert not index.embeddings[index.keys.to_pylist().index("broken.jpg")].any()
    np.testing.assert_allclose(whitened(raw.astype(np.float32), index.whitening), index.embeddings[rows], atol=1e-5)


@pytest.mark.parametrize("vectors", [np.zeros((0, 3)), np.ones((1, 3)), np.ones((5, 3))])
def test_vectors_that_do_not_differ_stay_as_they_are(vectors):
    whitening = whitening_of([vectors.astype(np.float32)], 3)
    np.testing.assert_array_equal(whitening, np.concatenate([np.zeros((1, 3)), np.eye(3)]))


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


SHADED = unevenly_lit(make_photo(0))  # correlates too little with what it is a copy of


@pytest.fixture
def two_photos(inline, tmp_path) -> Path:
    write_photos(tmp_path / "photos", ["a.png", "b.png"])
    return tmp_path / "photos"


def with_settings(index: FingerprintIndex, **values: float) -> FingerprintIndex:
    index.test_sets = tuple(replace(one, settings=replace(one.settings, **values)) for one in index.test_sets)
    return index


def test_the_model_decides_what_the_correlation_does_not(two_photos, tmp_path):
    query, models = candidate(encoded(SHADED, "PNG")), {"none": None, "pooled": Pooled()}
    of = {name: index_with(model, two_photos, tmp_path / name) for name, model in models.items()}
    (((alone,),),) = (Matcher([of["none"]]).match([query]),)
    assert (alone.tier, alone.removed, alone.cosine) == ("correlation", False, None)
    assert alone.distance <= 80 and alone.correlation < 0.92
    (((judged,),),) = (Matcher([of["pooled"]], embedder=Pooled()).match([query]),)
    assert (judged.tier, judged.key, judged.removed) == ("embedding", "a.png", True)
    assert judged.cosine >= 0.85 and judged.correlation == alone.correlation
    (((kept,),),) = (Matcher([with_settings(of["pooled"], cosine=1.0)], Pooled()).match([query]),)
    assert (kept.tier, kept.removed, kept.cosine) == ("embedding", False, judged.cosine)


def test_a_mirrored_copy_is_compared_as_the_test_image_lies(two_photos, tmp_path):
    matcher = Matcher([index_with(Pooled(), two_photos, tmp_path / "index")], embedder=Pooled())
    queries = [candidate(encoded(picture, "PNG")) for picture in (SHADED, ImageOps.mirror(SHADED))]
    ((plain,), (other,)) = matcher.match(queries)
    assert (other.tier, other.removed) == ("embedding", True) and other.variant % 2 == 1
    assert other.cosine == pytest.approx(plain.cosine, abs=0.01)


def test_a_model_judges_pairs_that_are_too_far_for_the_correlation(two_photos, tmp_path):
    """Of a preset for small pictures with fewer candidates: without the model nothing is told of such a pair."""
    index = with_settings(index_with(Pooled(), two_photos, tmp_path / "index"), candidates=35)
    query = candidate(encoded(SHADED, "PNG"))
    (((found,),),) = (Matcher([index], Pooled()).match([query]),)
    assert (found.tier, found.removed) == ("embedding", True) and 35 < found.distance <= 80
    assert Matcher([index]).match([query]) == [[]]


def test_an_index_belongs_to_one_model(two_photos, tmp_path):
    made, without = tmp_path / "made", tmp_path / "without"
    index_with(Pooled(), two_photos, made)
    build_index([source_of(two_photos, "others", preset="photo", level=0)], without, workers=1)
    (named, other) = name_indexes([str(made), str(without)], embedder=Pooled())
    assert (named.embedder, other.embedder) == (Pooled(), None)
    assert "embedder" not in named.to_json() and Pooled().title not in named.title
    open_matcher.cache_clear()
    with pytest.raises(RecipeError, match="pooled pixels"):
        name_indexes([str(made)])
    with pytest.raises(RecipeError, match="6666666666666666"):
        name_indexes([str(made)], embedder=Pooled(sha256="6" * 64))
    with pytest.raises(RecipeError, match="--embedding"):
        name_indexes([str(without)], embedder=Pooled())
