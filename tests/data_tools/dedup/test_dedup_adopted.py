"""De-duplication of an adopted file of FFCV's own writer: raw pixels and JPEGs, no table of provenance."""

import fsspec
import numpy as np
import pytest
from dedup_data import build_here
from pictures import make_picture
from PIL import Image
from stock_beton import write_stock
from typer.testing import CliRunner

from vitscale.cli.main import app
from vitscale.data.shards import Manifest
from vitscale.data.shards.opening import open_shard
from vitscale.data.shards.verify import verify

URL = "memory://dedup-adopted"  # for this process, which then needs no workers


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("mode", ["raw", "jpg"])
def test_copies_are_found_and_taken_out(tmp_path, monkeypatch, mode):
    from ffcv.fields import IntField, RGBImageField

    rng = np.random.default_rng(0)
    coarse = [Image.fromarray(rng.integers(0, 256, (12, 12, 3), np.uint8)) for _ in range(6)]
    photos = [np.asarray(image.resize((140, 140), Image.Resampling.BICUBIC)) for image in coarse]
    fields = {"label": IntField(), "image": RGBImageField(write_mode=mode)}
    path = write_stock(tmp_path / "train.beton", fields, [(i % 2, photo) for i, photo in enumerate(photos)])
    run("shards", "adopt", path)
    (tmp_path / "pets").mkdir()
    for i in (1, 4):
        Image.fromarray(photos[i]).save(tmp_path / "pets" / f"{i}.png")
    Image.fromarray(np.asarray(make_picture(99, 140, 140))).save(tmp_path / "pets" / "other.png")
    build_here(monkeypatch)
    run("dedup", "index", tmp_path / "pets", "--out", tmp_path / "index", "--workers", 1)
    memory = fsspec.filesystem("memory")
    memory.put(str(path), "/dedup-adopted/train.beton")
    memory.put(str(tmp_path / "train"), "/dedup-adopted/train", recursive=True)
    try:
        run("dedup", "find", f"{URL}/train", tmp_path / "index", "--out", tmp_path / "found")
    finally:
        memory.rm("/dedup-adopted", recursive=True)

    run("dedup", "apply", tmp_path / "train", tmp_path / "found", tmp_path / "far" / "view")
    view = Manifest.load(tmp_path / "far" / "view")
    assert (view.schema_version, view.num_samples, view.num_removed) == (2, 4, 2)
    assert not verify(view, decode=True).damage
    with open_shard(view, 0) as shard:
        assert shard.slots.tolist() == [0, 2, 3, 5]
