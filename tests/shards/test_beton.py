import gc
import io
import struct

import google_crc32c
import numpy as np
import pytest
from adopted_files import FIELD_BYTES, HEADER_BYTES, OF_THE_FORMAT, patch, table_of
from messages import refusal
from pictures import encoded, make_picture
from PIL import Image
from small_files import flip

from vitscale.data.shards import ShardFile, StoredSample, write_shard
from vitscale.data.shards.beton import DEFAULT_PAGE_BYTES, expected_bytes
from vitscale.ground.errors import DataError
from vitscale.ground.files.digests import file_digests
from vitscale.ground.images import decode

ROW_BYTES = 40


def samples_of(photos, labels=False):
    for i, photo in enumerate(photos):
        with Image.open(io.BytesIO(photo)) as image:
            width, height = image.size
        many = np.array([i % 3, 7, 9][: 1 + i % 3], np.int32) if labels else None
        yield StoredSample(photo, height, width, i % 3, 1000 + 2 * i, many)


@pytest.fixture
def shard(tmp_path, photos):
    write_shard(tmp_path / "s.beton", samples_of(photos))
    return tmp_path / "s.beton"


def test_what_is_written_is_read(tmp_path, photos):
    stats = write_shard(tmp_path / "s.beton", samples_of(photos))
    with ShardFile(tmp_path / "s.beton", expected_bytes=stats.bytes) as shard:
        assert shard.samples == len(shard) == stats.samples == len(photos)
        assert shard.fields == ("image", "label", "uid", "crc")
        for slot, sample in enumerate(samples_of(photos)):
            assert shard.read(slot) == sample.image
            assert (shard.height[slot], shard.width[slot]) == (sample.height, sample.width)
            assert (shard.label[slot], shard.uid[slot]) == (sample.label, sample.uid)
            assert shard.crc[slot] == google_crc32c.value(sample.image) == stats.crc[slot]
            assert shard.labels(slot) is None
        assert [a.dtype for a in (shard.height, shard.offset, shard.size, shard.label, shard.uid, shard.crc)] == [
            "i4", "i8", "i8", "i8", "i8", "u4",
        ]  # fmt: skip
    assert shard.fd == -1
    assert [path.name for path in tmp_path.iterdir()] == ["s.beton"]


# numba complains when FFCV's compiled pipelines are collected; the test collects them itself, to hear it here.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("labels", [False, True])
def test_stock_ffcv_reads_it(tmp_path, labels, monkeypatch):
    """By its own Loader: once a small shard, whose first images share a page with the metadata, once one of more than
    64 MiB."""
    monkeypatch.setenv("NUMBA_THREADING_LAYER", "omp")
    from ffcv.loader import Loader, OrderOption

    # Two samples of 5 MB (padding behind the end of a JPEG is allowed) do not fit one page.
    count, padded = (16, range(1, 15)) if labels else (8, (2, 5))
    pictures = [encoded(make_picture(i, 24, 32).convert("L" if i in (1, 5) else "RGB")) for i in range(count)]
    stored = [photo + bytes(5_000_000) if i in padded else photo for i, photo in enumerate(pictures)]
    samples = [
        StoredSample(photo, 24, 32, i % 3, 10 * i, np.array([i % 3, i], np.int32) if labels else None)
        for i, photo in enumerate(stored)
    ]
    stats = write_shard(tmp_path / "s.beton", samples)
    with ShardFile(tmp_path / "s.beton") as shard:
        assert shard.offset[0] // stats.page_bytes == labels
    seen = 0
    path = str(tmp_path / "s.beton")
    # Its two ways of reading, one with each set of fields.
    loader = Loader(path, batch_size=4, num_workers=1, os_cache=labels, order=OrderOption.SEQUENTIAL)
    for batch in loader:
        for image, label, uid, crc, *more in zip(*(part.numpy() for part in batch), strict=True):
            sample = samples[seen]
            assert np.array_equal(image, decode(sample.image, 24, 32)[1])
            assert (label, uid, crc) == (sample.label, sample.uid, google_crc32c.value(sample.image))
            assert not labels or more[0].tobytes() == sample.labels.tobytes()
            seen += 1
    assert seen == len(samples)
    del loader, batch
    gc.collect()


def test_bytes_do_not_depend_on_capacity(tmp_path, photos):
    digests = set()
    for capacity in (1, 8192, 1_000_000):  # the last needs five pages of metadata, and then moves every image
        write_shard(tmp_path / "s.beton", samples_of(photos), capacity)
        digests.add(file_digests(tmp_path / "s.beton"))
    assert len(digests) == 1


def test_a_small_shard_is_hardly_larger_than_its_images(tmp_path, photos):
    for samples in (list(samples_of(photos[:1])), list(samples_of(photos)), list(samples_of(photos, labels=True))):
        stats = write_shard(tmp_path / "s.beton", samples)
        assert stats.bytes == (tmp_path / "s.beton").stat().st_size
        assert samples[0].labels is not None or zero_between(tmp_path / "s.beton")
        assert stats.image_bytes < stats.bytes < stats.image_bytes + 8192 + 150 * len(samples)
        # A handful fit into one page, so the forecast has nothing to guess.
        if samples[0].labels is None:
            assert abs(expected_bytes(len(samples), stats.image_bytes / len(samples)) - stats.bytes) <= 16


def zero_between(path):
    """What is no sample is zero: moving leaves no remains."""
    with ShardFile(path) as shard:
        ends = [HEADER_BYTES + 4 * FIELD_BYTES + ROW_BYTES * shard.samples, *(shard.offset + shard.size).tolist()]
        content = path.read_bytes()
        table = struct.unpack_from("<Q", content, 16)[0]
        gaps = [content[a:b] for a, b in zip(ends, [*shard.offset.tolist(), table], strict=True)]
        return not any(map(any, gaps))


def test_a_large_shard_begins_with_a_page(tmp_path, photos):
    """As those of older versions do, whatever was expected."""
    samples = [StoredSample(photos[0] + bytes(1_000_000), 40, 64, 0, uid) for uid in range(70)]
    digests = set()
    for capacity in (70, 300_000):  # the latter needs two pages of metadata
        stats = write_shard(tmp_path / "s.beton", samples, capacity)
        digests.add(file_digests(tmp_path / "s.beton"))
    assert len(digests) == 1
    with ShardFile(tmp_path / "s.beton") as shard:
        assert shard.offset[0] == DEFAULT_PAGE_BYTES
    assert abs(expected_bytes(70, stats.image_bytes / 70) / stats.bytes - 1) < 0.02


@pytest.mark.parametrize("others", [0, 60])
def test_a_large_sample_enlarges_the_pages(tmp_path, photos, others):
    """Then a small shard's images move towards the front, the first of a large one to the back."""
    samples = list(samples_of(photos))
    large = photos[3] + bytes(DEFAULT_PAGE_BYTES)
    samples.insert(4, StoredSample(large, 49, 61, 0, 1))
    samples += [StoredSample(photos[0] + bytes([1]) * 1_000_000, 40, 64, 0, uid) for uid in range(others)]
    stats = write_shard(tmp_path / "s.beton", samples)
    assert stats.page_bytes == 2 * DEFAULT_PAGE_BYTES
    with ShardFile(tmp_path / "s.beton") as shard:
        assert [shard.read(slot) for slot in range(shard.samples)] == [sample.image for sample in samples]
        first, last = shard.offset // stats.page_bytes, (shard.offset + shard.size - 1) // stats.page_bytes
        assert np.array_equal(first, last)
        assert first[0] == bool(others)
    assert zero_between(tmp_path / "s.beton")


def test_refusals_leave_nothing_behind(tmp_path, photos):
    def broken():
        yield from samples_of(photos[:3])
        raise OSError("the source vanished")

    for samples, error in (
        (broken(), OSError),
        ([], DataError),
        ([StoredSample(b"", 1, 1, 0, 0)], ValueError),
        ([StoredSample(b"x", 0, 1, 0, 0)], ValueError),
        ([StoredSample(b"x", 1, 65536, 0, 0)], ValueError),
        ([StoredSample(b"x", 1, 1, 0, 0, np.array([1], np.int32))], ValueError),
        ([StoredSample(b"x", 1, 1, 0, 0), StoredSample(b"x", 1, 1, 0, 1, np.array([0], np.int32))], ValueError),
    ):
        with pytest.raises(error):
            write_shard(tmp_path / "s.beton", samples)
        assert list(tmp_path.iterdir()) == []


FIRST_ROW = HEADER_BYTES + 4 * FIELD_BYTES
DAMAGES = {
    **OF_THE_FORMAT,
    "field count": patch(2, "<H", 9),
    "field type": patch(HEADER_BYTES, "<B", 3),
    "field name": patch(HEADER_BYTES + 1, "<B", 0x58),
    "page size": patch(4, "<I", 12345678),
    "more samples": patch(8, "<Q", 21),
    "table elsewhere": patch(16, "<Q", FIRST_ROW + 2000),
    "image mode": patch(FIRST_ROW, "<B", 1),
    "no width": patch(FIRST_ROW + 1, "<H", 0),
    "image position": patch(FIRST_ROW + 5, "<Q", 17),
    "label": patch(FIRST_ROW + 16, "<q", -2),
    "uid": patch(FIRST_ROW + 24, "<q", -1),
    "crc": patch(FIRST_ROW + 32, "<q", 1 << 33),
    "truncated images": lambda content: content.__delitem__(slice(FIRST_ROW + 2000, None)),
    "appended": lambda content: content.extend(bytes(24)),
    "another file": lambda content: content.__setitem__(slice(0, 4), b"\x89PNG"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(shard, damage):
    content = bytearray(shard.read_bytes())
    DAMAGES[damage](content)
    shard.write_bytes(content)
    with refusal(DataError, "beton", damage, {shard: "SHARD"}):
        ShardFile(shard)


def test_any_flip_in_the_allocation_table_is_found(shard):
    content = shard.read_bytes()
    rng = np.random.default_rng(0)
    for position in rng.integers(table_of(content), len(content), 50).tolist():
        flip(shard, position, bit := int(rng.integers(8)))
        with pytest.raises(DataError):
            ShardFile(shard)
        flip(shard, position, bit)


def test_size_missing_file_and_truncation_after_opening(shard):
    size = shard.stat().st_size
    with pytest.raises(DataError, match=f"{size + 1:,}"):
        ShardFile(shard, expected_bytes=size + 1)
    with pytest.raises(DataError, match=r"absent\.beton"):
        ShardFile(shard.with_name("absent.beton"))
    with ShardFile(shard, expected_bytes=size) as opened:
        with shard.open("r+b") as file:
            file.truncate(opened.offset[3])
        with pytest.raises(DataError, match=shard.name):
            opened.read(3)
