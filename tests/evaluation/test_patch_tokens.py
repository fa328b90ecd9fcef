"""`vitscale features --tokens`: the patches' tokens of whole datasets, written as they come."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from commands import command, on_processes
from models.test_feature_maps import SWIN
from models.weights.exported import described, valued, write
from toy_split import Batch

import vitscale as vs
from vitscale.evaluation import features
from vitscale.evaluation.features import write_features
from vitscale.ground.errors import DataError
from vitscale.models import Model, Outputs
from vitscale.models.vit import ViT

SAMPLES = 37


def written(folder: Path) -> tuple[np.ndarray, dict]:
    tokens = [np.load(path) for path in sorted(folder.glob("tokens-*.npy"))]
    return np.concatenate(tokens), json.loads((folder / "meta.json").read_text())


@pytest.fixture(scope="module")
def swin(tmp_path_factory) -> Path:
    description = described(SWIN)
    return write(valued(description), description, "safetensors", tmp_path_factory.mktemp("swin"))


@pytest.mark.parametrize("family", ["vit", "swin"])
def test_they_are_the_normed_maps_of_the_model(family, home, swin, tmp_path, monkeypatch):
    monkeypatch.setattr(features, "_TOKEN_BYTES", 10 * 8 * 8 * 48 * 4)
    source = home / "run" if family == "vit" else swin
    done = command("features", source, home / "data/test", "--out", tmp_path / "out", "--tokens")
    assert done.returncode == 0, done.stderr
    tokens, meta = written(tmp_path / "out")
    side, width = (8, 48) if family == "vit" else (2, 256)
    assert tokens.shape == (SAMPLES, side, side, width) and tokens.dtype == np.float32
    assert (meta["samples"], meta["grid"], meta["width"]) == (SAMPLES, [side, side], width)
    assert len(list((tmp_path / "out").glob("tokens-*.npy"))) == (4 if family == "vit" else 2)
    model, uids = vs.load(source), np.load(tmp_path / "out/uids.npy").tolist()
    seen = {each.uid: model.preprocess(each.image) for each in vs.Dataset(home / "data/test")}
    with torch.no_grad():
        pixels = torch.stack([seen[uid] for uid in uids]).permute(0, 2, 3, 1)
        maps = model.backbone.norm(model.backbone.feature_maps(pixels)[-1].permute(0, 2, 3, 1))
    np.testing.assert_allclose(tokens, maps.numpy(), rtol=1e-3, atol=1e-3)


def test_names_of_the_images_are_beside_them(home, tmp_path):
    from PIL import Image

    (tmp_path / "photos/cat").mkdir(parents=True)
    for number in range(5):
        Image.new("RGB", (40, 50), (number * 50, 9, 9)).save(tmp_path / f"photos/cat/no {number}\u2028.png")
    data = vs.convert(tmp_path / "photos", tmp_path / "data", workers=1)
    command("features", home / "run", tmp_path / "data", "--out", tmp_path / "out", "--tokens")
    names, uids = json.loads((tmp_path / "out/keys.json").read_text()), np.load(tmp_path / "out/uids.npy")
    assert dict(zip(uids.tolist(), names, strict=True)) == {each.uid: each.key for each in data}
    assert "\u2028" not in (tmp_path / "out/keys.json").read_text()


def test_two_processes_write_the_same(home, tmp_path):
    arguments = ["features", home / "run", "test", "--tokens", "--set", "evaluation.batch=5", "--out"]
    command(*arguments, tmp_path / "one")
    on_processes(2, [*arguments, tmp_path / "two"])
    (one, about), (two, other) = written(tmp_path / "one"), written(tmp_path / "two")
    np.testing.assert_allclose(one, two, atol=1e-5)
    assert {**about, "sha256": 0} == {**other, "sha256": 0}


def test_features_are_not_tokens(home, tmp_path, monkeypatch):
    command("features", home / "run", "test", "--out", tmp_path / "out", "--tokens")
    done = command("fewshot", "--train", tmp_path / "out", "--test", tmp_path / "out")
    assert done.returncode == 3 and "--tokens" in done.message
    monkeypatch.setattr(ViT, "anatomy", Model.anatomy)  # a model that says nothing of its patches
    done = command("features", home / "run", "test", "--out", tmp_path / "none", "--tokens")
    assert done.returncode == 2 and not (tmp_path / "none").exists()


def batch(first: int) -> Batch:
    """Eight images of a dataset, which their uids tell apart."""
    uids = torch.arange(first, first + 8)
    images = uids[:, None, None, None].to(torch.uint8).expand(-1, 2, 2, 3)
    return Batch(0, 0, images, torch.zeros(8, dtype=torch.int64), uids, torch.ones(8, dtype=torch.bool))


def predict(images: torch.Tensor) -> Outputs:
    maps = images[:, :1, :1, :1].float().expand(-1, 16, 16, 96).contiguous()
    return Outputs(maps, maps, None)


def test_ten_thousand_images_take_the_memory_of_a_batch(tmp_path):
    seen = []

    def batches():
        for first in range(0, 10_000, 8):
            seen.append(psutil.Process().memory_info().rss)
            yield batch(first)

    count = write_features(batches, predict, tmp_path / "out", {}, 10_000, names=dict)
    assert count == 10_000 and max(seen) - seen[10] < 30 << 20
    tokens = np.load(tmp_path / "out/tokens-00000.npy", mmap_mode="r")
    assert tokens.shape == (10_000, 16, 16, 96) and tokens[9_999, 3, 3, 3] == 9_999 % 256


def test_nothing_is_there_after_a_kill_and_the_next_call_writes_all(tmp_path):
    script = (
        "import os, signal, sys\nsys.path[:0] = sys.argv[2:]\nfrom evaluation import test_patch_tokens as it\n"
        "def batches():\n"
        "    for first in range(0, 800, 8):\n"
        "        if first == 400: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        yield it.batch(first)\n"
        "it.write_features(batches, it.predict, it.Path(sys.argv[1]), {}, 800, names=dict)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "out"), *sys.path], check=False)
    assert done.returncode == -9 and not (tmp_path / "out").exists()
    write_features(lambda: map(batch, range(0, 800, 8)), predict, tmp_path / "out", {}, 800, names=dict)
    assert len(written(tmp_path / "out")[0]) == 800


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(tmp_path):
    expected = 10**12
    with pytest.raises(DataError, match=r"98,304,000,000,000,000 bytes"):
        write_features(lambda: map(batch, range(0, 8, 8)), predict, tmp_path / "out", {}, expected, names=dict)
    assert not (tmp_path / "out").exists()
