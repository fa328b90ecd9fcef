"""`vitscale shards adopt`: files of FFCV's own writer as datasets, compared with what was written and stock FFCV."""

import gc
import hashlib
import json
import os
import signal
import struct
import time

import google_crc32c
import numpy as np
import pytest
from adopted_files import FIRST_ROW, pixels_of, table_of
from messages import refusal
from processes import start_python
from shards_command import run
from small_files import edit_manifest, entry_of, write_files
from stock_beton import write_stock

from vitscale.data.shards import Manifest, StoredSample, write_shard
from vitscale.data.shards.adopt import adopt
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.data.shards.opening import open_shard, open_shard_file
from vitscale.data.shards.verify import verify
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.images import decode


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """60 images of one size, some JPEGs and some raw, among fields of all types; several pages by two processes."""
    from ffcv.fields import BytesField, FloatField, IntField, JSONField, NDArrayField, RGBImageField

    rows = [
        (
            i / 7,
            {"name": "x" * i},
            pixels_of(i, 240, 300),
            np.full(i % 3, i, np.uint8),  # of every third sample nothing
            1000 - i,
            np.full((2, 3), i, np.float32),
            i % 5 - 1,
        )
        for i in range(60)
    ]
    fields = {
        **{"weight": FloatField(), "notes": JSONField()},
        "a_long_name_of_it": RGBImageField(write_mode="proportion"),  # FFCV cuts it
        **{"blob": BytesField(), "uid": IntField(), "vector": NDArrayField(np.dtype("f4"), (2, 3))},
        "label": IntField(),
    }
    return write_stock(tmp_path_factory.mktemp("mixed") / "train.beton", fields, rows, workers=2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # numba's, when FFCV's are collected
def test_samples_are_those_of_the_stock_loader(mixed, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_THREADING_LAYER", "omp")
    from ffcv.loader import Loader, OrderOption
    from ffcv.reader import Reader

    before = mixed.read_bytes(), mixed.stat().st_mtime_ns
    adoption = adopt(str(mixed), str(tmp_path / "out"))
    assert (mixed.read_bytes(), mixed.stat().st_mtime_ns) == before
    assert [path.name for path in mixed.parent.iterdir()] == ["train.beton"]
    assert (adoption.image_field, adoption.label_field) == ("a_long_name_of_i", "label")
    assert adoption.unused_fields == ("weight", "notes", "blob", "uid", "vector")

    reader, image = Reader(str(mixed)), adoption.image_field
    pipelines = {name: None for name in reader.field_names if name not in (image, "label", "uid")}
    loader = Loader(
        str(mixed), batch_size=20, num_workers=1, order=OrderOption.SEQUENTIAL, pipelines=pipelines, os_cache=True
    )
    seen = 0
    with open_shard(adoption.manifest, 0) as shard:
        file = shard.file
        assert file.samples == 60 and file.fields == tuple(reader.field_names) and file.labels(0) is None
        assert file.raw.tolist() == [mode == 1 for mode in reader.metadata["f2"]["mode"]]
        assert 0 < file.raw.sum() < 60 and adoption.raw == file.raw.sum()
        assert len({position >> 21 for position in file.offset.tolist()}) > 1
        for pictures, uids, labels in loader:
            for picture, uid, label in zip(pictures.numpy(), uids.numpy(), labels.numpy(), strict=True):
                assert (file.label[seen], file.uid[seen]) == (label.item(), seen) and uid.item() == 1000 - seen
                stored = shard.image(seen)
                if file.raw[seen]:
                    ours = np.frombuffer(stored, np.uint8).reshape(240, 300, 3)
                else:
                    status, ours = decode(stored, 240, 300)
                    assert status == 0 and stored.endswith(b"\xff\xd9")
                assert np.array_equal(ours, picture)
                assert file.crc[seen] == google_crc32c.value(stored)
                seen += 1
    assert seen == 60
    del loader, reader, pictures
    gc.collect()


def test_pixels_and_sizes_are_those_that_were_written(tmp_path):
    """Raw images of many sizes; one is larger than what is read at once, and so is its page."""
    from ffcv.fields import IntField, RGBImageField

    pictures = [pixels_of(i, 1 + 7 * i, 90 - 8 * i) for i in range(10)]
    pictures.insert(4, pixels_of(50, 1700, 1800))
    rows = [(i - 1, picture) for i, picture in enumerate(pictures)]
    path = write_stock(
        tmp_path / "raw.beton", {"y": IntField(), "x": RGBImageField(write_mode="raw")}, rows, page_size=16 << 20
    )
    manifest = adopt(str(path), str(tmp_path / "out")).manifest
    assert manifest.class_names == tuple(map(str, range(10))) and manifest.fields == ("y", "x")
    with open_shard(manifest, 0) as shard:
        assert shard.file.raw.all() and shard.file.label.tolist() == [row[0] for row in rows]
        for slot, picture in enumerate(pictures):
            assert (shard.file.height[slot], shard.file.width[slot]) == picture.shape[:2]
            assert shard.image(slot) == picture.tobytes()
            assert shard.labels(slot) == ([] if slot == 0 else [slot - 1])
    assert not verify(manifest, decode=True).damage


def test_samples_and_pieces_may_lie_in_any_order(small, tmp_path):
    """As several processes leave them, here for certain: the last sample first, and the table shuffled."""
    before = adopt(str(small), str(tmp_path / "before")).manifest
    with open_shard(before, 0) as shard:
        expected = [(shard.image(slot), shard.labels(slot)) for slot in range(9)]
    content = bytearray(small.read_bytes())
    rows = np.frombuffer(content, "V24", 9, FIRST_ROW)
    rows[:] = rows[::-1].copy()
    table = np.frombuffer(content, "<u8", offset=table_of(content)).reshape(9, 3)
    table[:, 0] = 8 - table[:, 0]
    table[:] = np.random.default_rng(0).permutation(table)
    small.write_bytes(content)
    after = adopt(str(small), str(tmp_path / "after")).manifest
    assert not verify(after, decode=True).damage
    with open_shard(after, 0) as shard:
        assert [(shard.image(slot), shard.labels(slot)) for slot in range(9)] == expected[::-1]
        assert np.all(np.diff(shard.file.offset) < 0)


def test_the_manifest(small, tmp_path):
    out = tmp_path / "some" / "where"
    manifest = adopt(str(small), str(out), class_names=["a", "b", "c", "d", "e"]).manifest
    content = small.read_bytes()
    data = json.loads((out / "manifest.json").read_text())
    (entry,) = data["shards"]
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "val.crc.npy"]
    assert data["schema_version"] == 2 and data["options"] == {
        "adopted": {"image_field": "picture", "label_field": "class"}
    }
    checksums = {"path": "val.crc.npy", "sha256": hashlib.sha256((out / "val.crc.npy").read_bytes()).hexdigest()}
    adopted = {"image_field": "picture", "label_field": "class", "checksums": checksums}
    expected = {"path": "../../val.beton", "samples": 9, "first_uid": 0, "adopted": adopted}
    digests = {name: getattr(entry_of(content), name) for name in ("bytes", "sha256", "xxh3_128")}
    assert entry == entry | expected | digests
    crc = np.load(out / "val.crc.npy")
    assert crc.dtype == np.uint32 and crc.shape == (9,)
    assert manifest.class_names == ("a", "b", "c", "d", "e")
    again = adopt(str(small), str(tmp_path / "some" / "more"), class_names=["a", "b", "c", "d", "e"]).manifest
    assert again.sha256 == manifest.sha256


def test_manifests_of_our_own_shards_stay_as_they_were(tmp_path):
    manifest = write_generated_dataset(tmp_path / "ds", [3, 2])
    data = json.loads(manifest.path.read_text())
    assert data["schema_version"] == 1 and "adopted" not in data["shards"][0]
    with open_shard_file(manifest, 0, manifest.shard_path(0)) as shard:
        assert shard.raw.dtype == bool and not shard.raw.any() and not shard.has_several_labels
    checksums = {"path": "x.npy", "sha256": "0" * 64}
    adopted = {"image_field": "image", "label_field": None, "checksums": checksums}
    edit_manifest(tmp_path / "ds", lambda data: data["shards"][0].update(adopted=adopted))
    with pytest.raises(DataError, match="version 1"):
        Manifest.load(tmp_path / "ds")


def test_the_command(small, tmp_path, monkeypatch):
    code, text = run("adopt", small)
    assert code == 0 and "4 JPEGs and 5 raw images" in text and "4 classes" in text
    assert "images from 'picture', labels from 'class'" in text and "not used" not in text and "--classes" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["val", "val.beton"]
    assert Manifest.load(tmp_path / "val").shards[0].path == "../val.beton"
    (tmp_path / "names.txt").write_text("cat\ndog\nowl\nyak\n")
    monkeypatch.chdir(tmp_path)
    code, text = run("adopt", "val.beton", "named", "--classes", "names.txt", "--decode")
    assert code == 0 and "--classes" not in text
    assert Manifest.load("named").class_names == ("cat", "dog", "owl", "yak")
    code, text = run("adopt", "val.beton", "unlabelled", "--label-field", "none")
    assert code == 0 and "no labels; not used: 'class'" in text
    with open_shard(Manifest.load("unlabelled"), 0) as shard:
        assert shard.file.label.tolist() == [-1] * 9 and shard.labels(3) == []
    assert Manifest.load("unlabelled").class_names == ()


def test_fields_must_be_clear(tmp_path):
    from ffcv.fields import FloatField, IntField, RGBImageField

    def with_fields(name, fields):
        values = {RGBImageField: pixels_of(1, 8, 8), IntField: 0, FloatField: 0.5}
        return write_stock(tmp_path / name, fields, [tuple(values[type(field)] for field in fields.values())] * 2)

    two = with_fields(
        "two.beton", {"a": IntField(), "left": RGBImageField(), "b": IntField(), "right": RGBImageField()}
    )
    only_float = with_fields("float.beton", {"image": RGBImageField(), "age": FloatField()})
    no_image = with_fields("none.beton", {"label": IntField()})
    for arguments in (
        *([two], [two, "--image-field", "left"], [two, "--image-field", "b"], [two, "--image-field", "middle"]),
        *([only_float], [only_float, "--label-field", "age"], [no_image]),
    ):
        with refusal(RecipeError, "adopt", " ".join(map(str, arguments)), {tmp_path: "FOLDER"}):
            run("adopt", *arguments)
    assert run("adopt", two, "--image-field", "right", "--label-field", "b")[0] == 0
    with open_shard(Manifest.load(tmp_path / "two"), 0) as shard:
        assert (shard.file.label.tolist(), len(shard.image(1))) == ([0, 0], 192)
    assert run("adopt", only_float, "--label-field", "none")[0] == 0


def test_mistakes(small, tmp_path):
    write_files(tmp_path, "full/x", ("three.txt", b"a\nb\nc\n"), ("photo.beton", b"\x89PNG" * 100))
    write_shard(tmp_path / "ours.beton", [StoredSample(b"x", 1, 1, 0, 0)])
    for arguments, kind in (
        ([small, tmp_path / "full"], RecipeError),
        ([small, "s3://bucket/x"], RecipeError),
        (["s3://bucket/x.beton", tmp_path / "out"], RecipeError),
        ([tmp_path, tmp_path / "out"], RecipeError),
        ([tmp_path / "absent.beton"], DataError),
        ([tmp_path / "photo.beton"], DataError),
        ([tmp_path / "ours.beton"], RecipeError),
        ([small, "--classes", tmp_path / "three.txt"], RecipeError),
        ([small, "--classes", tmp_path / "absent.txt"], RecipeError),
    ):
        with refusal(kind, "adopt", " ".join(map(str, arguments)), {small: "FILE", tmp_path: "FOLDER"}):
            run("adopt", *arguments)
    names = ["full", "ours.beton", "photo.beton", "three.txt", "val.beton"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_ctrl_c_leaves_nothing(small, tmp_path):
    """Pressed while a file is read whose pages end in gigabytes of nothing."""
    content = bytearray(small.read_bytes())
    (table,) = struct.unpack_from("<Q", content, 16)
    far = 16 << 30
    struct.pack_into("<Q", content, 16, far)
    with small.open("wb") as file:
        file.write(content[:table])
        file.seek(far)
        file.write(content[table:])
    program = "import sys; from vitscale.cli.entry import vitscale; sys.argv[0] = 'vitscale'; vitscale()"
    process = start_python(program, "shards", "adopt", small, start_new_session=True)
    while process.poll() is None and len(list(tmp_path.iterdir())) == 1:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted: nothing was written" in errors and "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["val.beton"]
