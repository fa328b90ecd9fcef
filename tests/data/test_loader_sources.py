"""Shards from elsewhere: at a URL, behind the cache; or of FFCV's own writer."""

import asyncio
import fcntl
import os
import threading
from pathlib import Path
from typing import ClassVar

import fsspec
import numpy as np
import pytest
import torch
from damage import flip_byte
from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from loaders import loader_of, loader_threads, read
from picture_shards import write_pictures
from pictures import make_picture
from processes import wait_until
from small_files import flip, flip_images
from stock_beton import write_stock
from views import area_mean, whole_picture

from vitscale.data.augmentation import TrainTransform
from vitscale.data.order import EvalOrder, TrainOrder
from vitscale.data.shards import Manifest
from vitscale.data.shards.adopt import adopt
from vitscale.data.shards.opening import open_shard
from vitscale.ground.errors import DataError, StorageError

SHARDS = [20, 13, 20, 7, 20, 20]


class FarAway(AsyncFileSystem):
    """Files of this machine, which take their time to come."""

    protocol = "faraway"
    cachable = False
    seconds = 0.0  # a call
    fetched: ClassVar[list[str]] = []

    async def _info(self, path, **kwargs):
        return {"name": path, "size": Path(path).stat().st_size, "type": "file"}

    async def _cat_file(self, path, start=None, end=None, **kwargs):
        if path.endswith(".beton"):
            self.fetched.append(Path(path).name)
            await asyncio.sleep(FarAway.seconds)  # which ends early where nobody waits for it any more
        return Path(path).read_bytes()[start:end]


@pytest.fixture
def remote(manifest, monkeypatch):
    fsspec.register_implementation("faraway", FarAway, clobber=True)
    monkeypatch.setattr(FarAway, "seconds", 0.0)
    monkeypatch.setattr(FarAway, "fetched", [])
    return Manifest.load(f"faraway://{manifest.directory}")


def seen(*arguments, stop=12, **options):
    return [(batch.position, batch.uids.tolist(), batch.digest) for batch in read(*arguments, stop=stop, **options)]


@pytest.fixture(scope="module")
def expected(manifest, tmp_path_factory):
    return seen(manifest, cache=tmp_path_factory.mktemp("cache"))


def test_a_dataset_at_a_url(remote, tmp_path, expected):
    """The same batches; each shard comes once, also for the next loader."""
    for _ in range(2):
        assert seen(remote, cache=tmp_path) == expected
    assert set(FarAway.fetched) == {f"shard-{index:05d}.beton" for index in range(6)}
    pieces = sum(-(-entry.bytes // (8 << 20)) for entry in remote.shards)
    assert len(FarAway.fetched) == pieces


def test_shards_come_ahead(remote, tmp_path):
    with loader_of(remote, EvalOrder(SHARDS, 4), cache=tmp_path, prefetch=1) as loader:
        next(loader)
        assert wait_until(lambda: len(list((tmp_path / "shards").glob("*.beton"))) == 6)


@pytest.mark.parametrize("order", [TrainOrder, EvalOrder])
def test_a_cache_of_three_shards_for_twenty(tmp_path, order, monkeypatch):
    """What neither this window nor the next one needs makes room, and comes again when it is needed again."""
    monkeypatch.setattr("vitscale.data.order.WINDOW_SAMPLES", 12)
    fsspec.register_implementation("faraway", FarAway, clobber=True)
    written = write_pictures(tmp_path / "data", [6] * 20)
    order = EvalOrder([6] * 20, 6) if order is EvalOrder else TrainOrder([6] * 20, 6, 0)
    steps = 20 if isinstance(order, EvalOrder) else 26  # into the second epoch
    expected = seen(written, order, stop=steps)
    limit = 3 * max(entry.bytes for entry in written.shards)
    far = Manifest.load(f"faraway://{written.directory}")
    found, files = [], []
    with loader_of(far, order, stop=steps, cache=tmp_path / "cache", cache_bytes=limit, prefetch=1) as loader:
        for batch in loader:
            found.append((batch.position, batch.uids.tolist(), batch.digest))
            files.append(len(list((tmp_path / "cache" / "shards").glob("*.beton*"))))
    assert found == expected and len(found) == steps
    # Two shards a window; of the window before, batches that wait for the consumer.
    assert 3 <= max(files) <= 3 + 3 * 2


def test_nothing_stays_in_use(remote, tmp_path):
    with loader_of(remote, cache=tmp_path) as loader:
        next(loader)
    shards = list((tmp_path / "shards").glob("*.beton"))
    assert shards
    for path in shards:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.slow
def test_a_slow_transfer_is_no_stall(remote, tmp_path, monkeypatch):
    monkeypatch.setattr(FarAway, "seconds", 3.0)  # longer than a read may take
    with loader_of(remote, cache=tmp_path, stop=1, stall_s=2.0) as loader:
        assert next(loader).position == 0


class Silent(AbstractFileSystem):
    """Does not answer, and its library waits for ever; until the test has seen it."""

    protocol = "silent"
    cachable = False
    gate = threading.Event()

    def info(self, path, **kwargs):
        return {"name": path, "size": Path(path).stat().st_size, "type": "file"}

    def cat_file(self, path, start=None, end=None, **kwargs):
        if path.endswith(".beton"):
            self.gate.wait(60)
        return Path(path).read_bytes()[start:end]


def test_a_transfer_that_stands_still_is_a_stall(manifest, tmp_path, monkeypatch):
    monkeypatch.setattr("vitscale.data.loader._CLOSE_SECONDS", 0.2)
    fsspec.register_implementation("silent", Silent, clobber=True)
    silent = Manifest.load(f"silent://{manifest.directory}")
    try:
        with (
            loader_of(silent, cache=tmp_path, stall_s=0.3) as loader,
            pytest.raises(StorageError, match=r"silent://.*/shard-0000\d\.beton.* \d+ s"),
        ):
            next(loader)
    finally:
        Silent.gate.set()
    assert wait_until(lambda: not loader_threads())


def test_a_transfer_ends_when_the_loader_does(remote, tmp_path, monkeypatch):
    monkeypatch.setattr("vitscale.data.loader._CLOSE_SECONDS", 200.0)
    monkeypatch.setattr(FarAway, "seconds", 3600.0)
    loader = loader_of(remote, cache=tmp_path)
    assert wait_until(lambda: FarAway.fetched)
    loader.close()
    assert not loader_threads()
    assert not list((tmp_path / "shards").glob("*.part"))


def test_another_shard_at_the_url(tmp_path, monkeypatch):
    """Or none: nothing comes under the name of what the manifest lists, whatever the policy."""
    monkeypatch.setattr("vitscale.ground.files.fetching.PAUSES", (0.0, 0.0))
    fsspec.register_implementation("faraway", FarAway, clobber=True)
    damaged = write_pictures(tmp_path / "data", SHARDS)
    flip_byte(damaged, 1, [3])
    manifest = Manifest.load(f"faraway://{damaged.directory}")
    for is_there in (True, False):
        if not is_there:
            damaged.shard_path(1).unlink()
        for policy in ("error", "substitute", "mask"):
            with pytest.raises(DataError, match=rf"faraway://{damaged.shard_path(1)}"):
                seen(manifest, cache=tmp_path / "cache", bad_samples=policy)


def test_a_cache_whose_file_is_damaged_later(remote, tmp_path):
    """What each image's own checksum is for."""
    seen(remote, cache=tmp_path)
    for path in (tmp_path / "shards").glob("*.beton"):
        times = path.stat()
        flip_images(path, 0)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a disk does it; else it is fetched again
    with pytest.raises(DataError, match=r"\.beton: slot \d+, uid \d+: "):
        seen(remote, cache=tmp_path)


@pytest.fixture(scope="module")
def adopted(tmp_path_factory):
    """30 images of several sizes, gray values among them, some stored as raw pixels."""
    from ffcv.fields import IntField, RGBImageField

    folder = tmp_path_factory.mktemp("adopted")
    rows = [(np.asarray(make_picture(i, 20 + 3 * i, 30 + (i % 3) * 40)), i % 4) for i in range(30)]
    fields = {"image": RGBImageField(write_mode="smart", smart_threshold=15_000), "label": IntField()}
    adoption = adopt(str(write_stock(folder / "train.beton", fields, rows)), str(folder / "out"))
    assert 0 < adoption.raw < 30
    return adoption.manifest, [pixels for pixels, _ in rows]


def test_an_adopted_file(adopted):
    """Raw pixels are those that were given to the writer; JPEGs are decoded as ever."""
    manifest, given = adopted
    transform = TrainTransform((0.3, 1.0), (0.5, 2.0), 0.5)
    with open_shard(manifest, 0) as shard:
        pixels = [
            given[slot] if shard.file.raw[slot] else whole_picture(shard.image(slot), *given[slot].shape[:2])
            for slot in range(30)
        ]
    batches = read(manifest, batch=10, side=12, transform=transform, stop=6)
    assert len(batches) == 6
    for batch in batches:
        keys, uids = batch.keys.numpy().view(np.uint64), batch.uids.tolist()
        sides = np.array([given[uid].shape[:2] for uid in uids])
        boxes, flips = transform.boxes(keys, sides[:, 0], sides[:, 1]), transform.flips(keys)
        assert torch.equal(batch.labels, batch.uids % 4)
        for image, uid, (top, left, h, w), is_flipped in zip(batch.images.numpy(), uids, boxes, flips, strict=True):
            expected = area_mean(pixels[uid][top : top + h, left : left + w], 12)
            assert np.abs(image - (expected[:, ::-1] if is_flipped else expected)).max() <= 0.501


def test_damage_in_an_adopted_file(adopted, tmp_path):
    """Of raw pixels any byte could be: only the checksum tells."""
    manifest, _ = adopted
    with open_shard(manifest, 0) as shard:
        slots = [int(np.argmax(shard.file.raw)), int(np.argmin(shard.file.raw))]
        offsets = {slot: int(shard.file.offset[slot] + shard.file.size[slot] // 2) for slot in slots}
    for slot, offset in offsets.items():
        flip(manifest.shard_path(0), offset)
        for verify, named in ((True, "xxh3_128"), (False, f"slot {slot}, uid {slot}: .*checksum")):
            with pytest.raises(DataError, match=named):
                read(manifest, EvalOrder([30], 10), verify_shards=verify, cache=tmp_path)
        flip(manifest.shard_path(0), offset)
