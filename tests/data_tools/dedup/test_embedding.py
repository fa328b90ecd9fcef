import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dedup_data import build_here, make_photo, source_of, write_photos
from PIL import Image
from torch import nn

from data_tools.dedup import building
from data_tools.dedup.building import EmbeddingModel, build_index
from data_tools.dedup.embedding import MODEL_NAME, Embedder
from data_tools.dedup.index import Index
from vitscale.errors import DataError, RecipeError

SIDE = 32


class Pooled(nn.Module):
    """Means of 4 x 4 parts: (1, 48)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.adaptive_avg_pool2d(x, 4).flatten(1)


class Zeros(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, 5)


class NoNumbers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full((1, 5), float("nan"))


class Map(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


class Fixed(nn.Module):
    """Takes 16 x 16 pixels only."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 16 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1))


def saved(module: nn.Module, folder: Path) -> Path:
    path = folder / f"{type(module).__name__}.pt"
    torch.jit.script(module).save(str(path))
    return path


def pooled(image: Image.Image) -> np.ndarray:
    """What `Pooled` gives for a picture normalised as ImageNet's are, by torch alone."""
    pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))
    values = torch.from_numpy(pixels.copy()).double().permute(2, 0, 1) / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    values = (values - mean[:, None, None]) / std[:, None, None]
    return values.reshape(3, 4, SIDE // 4, 4, SIDE // 4).mean((2, 4)).flatten().numpy()


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.fixture(autouse=True)
def one_thread_only_here():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    build_here(monkeypatch)


def test_vectors_are_what_torch_computes(tmp_path):
    embedder = Embedder(saved(Pooled(), tmp_path), SIDE)
    assert embedder.dimensions() == 48
    for seed in range(3):
        photo = make_photo(seed)
        vector = embedder.vector(np.asarray(photo))
        assert vector.dtype == np.float32 and vector.shape == (48,)
        expected = pooled(photo)
        np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), atol=1e-5)


def test_cosines_with_the_images_of_an_index(inline, tmp_path):
    paths = write_photos(tmp_path / "photos", ["a.png", "b.png", "c.png"])
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"no")
    model = saved(Pooled(), tmp_path)
    build_index(
        [source_of(tmp_path / "photos", level=0)], tmp_path / "index", workers=1, model=EmbeddingModel(str(model), SIDE)
    )
    model.unlink()  # the index has its own
    index = Index(tmp_path / "index")
    index.verify()
    assert (index.embedding.side, index.embedding.dimensions) == (SIDE, 48) and index.embeddings.shape == (4, 48)
    embedder, query = Embedder(index.folder / MODEL_NAME, SIDE, index.embeddings), make_photo(1).rotate(2)
    rows = {key: row for row, key in enumerate(index.keys.to_pylist())}
    for path in paths:
        expected = cosine(pooled(query), pooled(Image.open(path)))
        assert embedder.cosine(np.asarray(query), rows[path.name]) == pytest.approx(expected, abs=0.002)
    assert embedder.cosine(np.asarray(query), rows["broken.jpg"]) == 0


def test_unreadable_images_of_a_whole_piece_fit_in(inline, monkeypatch, tmp_path):
    monkeypatch.setattr(building, "_PIECE", 1)
    write_photos(tmp_path / "photos", ["a.jpg", "b.jpg"])
    for name in ("c.jpg", "d.jpg"):
        (tmp_path / "photos" / name).write_bytes(b"no")
    model = EmbeddingModel(str(saved(Pooled(), tmp_path)), SIDE)
    build_index([source_of(tmp_path / "photos", level=0)], tmp_path / "index", workers=1, model=model)
    index = Index(tmp_path / "index")
    is_readable = index.images["pixels"].is_valid().to_numpy()
    np.testing.assert_allclose(np.linalg.norm(index.embeddings, axis=1), is_readable, atol=1e-5)


def test_a_picture_of_which_the_model_sees_nothing_is_like_none(tmp_path):
    embedder = Embedder(saved(Zeros(), tmp_path), SIDE, np.ones((1, 5), np.float32))
    assert embedder.cosine(np.asarray(make_photo(0)), 0) == 0


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Fixed(), r"does not take float32 \(1, 3, 32, 32\)"),
        (Map(), r"gives shape \(1, 3, 32, 32\) for one picture; expected a tensor of shape \(1, D\)"),
        (Pair(), "gives tuple for one picture"),
        (NoNumbers(), "gives a vector of length nan"),
    ],
)
def test_models_of_other_shapes_are_refused_at_once(tmp_path, module, message):
    write_photos(tmp_path / "photos", ["a.jpg"])
    model = EmbeddingModel(str(saved(module, tmp_path)), SIDE)
    with pytest.raises(DataError, match=f"{type(module).__name__}.pt: {message}"):
        build_index([source_of(tmp_path / "photos")], tmp_path / "index", workers=1, model=model)
    assert not (tmp_path / "index").exists()


def test_files_that_are_no_model_are_refused(tmp_path):
    files = {name: tmp_path / name for name in ("missing.pt", "empty.pt", "text.pt", "weights.pt", "pickle.pt")}
    files["empty.pt"].write_bytes(b"")
    files["text.pt"].write_text("a model, some day")
    torch.save({"weight": torch.zeros(3)}, files["weights.pt"])
    files["pickle.pt"].write_bytes(pickle.dumps(Path))
    for path in (*files.values(), tmp_path):
        with pytest.raises(RecipeError, match="not a TorchScript model"):
            Embedder(path, SIDE)


def test_a_side_that_no_model_has():
    with pytest.raises(RecipeError, match="0 pixels a side; expected 1 to 4,096"):
        EmbeddingModel("model.pt", 0)
    with pytest.raises(RecipeError, match="4097 pixels"):
        replace(EmbeddingModel("model.pt", 4096), side=4097)
