"""`vitscale shards adopt`: files of FFCV's own writer as datasets, compared with what was written and stock FFCV."""

import gc
import hashlib
import io
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import Counter

import fsspec
import google_crc32c
import numpy as np
import pytest
import xxhash
from pictures import make_picture
from PIL import Image
from stock_beton import write_stock
from typer.testing import CliRunner

from data_tools.sources.dataset import open_dataset
from data_tools.sources.source import SourceOptions
from data_tools.subset import write_subset
from vitscale.cli.main import app
from vitscale.errors import DataError, RecipeError
from vitscale.images import decode
from vitscale.shards import Manifest, StoredSample, write_shard
from vitscale.shards.adopt import adopt
from vitscale.shards.generated import write_generated_dataset
from vitscale.shards.opening import open_shard, open_shard_file
from vitscale.shards.verify import verify

HEADER_BYTES, FIELD_BYTES = 24, 1041


def pixels_of(seed, height, width):
    return np.asarray(make_picture(seed, height, width))


def run(*arguments):
    """Exit code and what was printed; errors for people are raised."""
    result = CliRunner().invoke(app, ["shards", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


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
        "weight": FloatField(),
        "notes": JSONField(),
        "a_long_name_of_it": RGBImageField(write_mode="proportion"),  # FFCV cuts it
        "blob": BytesField(),
        "uid": IntField(),
        "vector": NDArrayField(np.dtype("f4"), (2, 3)),
        "label": IntField(),
    }
    return write_stock(tmp_path_factory.mktemp("mixed") / "train.beton", fields, rows, workers=2)


@pytest.fixture(scope="module")
def small_original(tmp_path_factory):
    """9 samples of several sizes: raw, JPEG, raw, ..."""
    from ffcv.fields import IntField, RGBImageField

    rows = [(pixels_of(i, 20 + i, 30 + (i % 2) * 120), i % 4) for i in range(9)]
    # "smart" keeps as raw pixels what is below the threshold.
    fields = {"picture": RGBImageField(write_mode="smart", smart_threshold=5_000), "class": IntField()}
    return write_stock(tmp_path_factory.mktemp("small") / "val.beton", fields, rows)


@pytest.fixture
def small(small_original, tmp_path):
    return shutil.copy(small_original, tmp_path / "val.beton")


# -------------------------------------------------------------------------------------------------------- what is there


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
    rows = np.frombuffer(content, "V24", 9, first_row(content))
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
    assert (entry["path"], entry["bytes"], entry["samples"], entry["first_uid"]) == (
        "../../val.beton", len(content), 9, 0,
    )  # fmt: skip
    assert entry["sha256"] == hashlib.sha256(content).hexdigest()
    assert entry["xxh3_128"] == xxhash.xxh3_128_hexdigest(content)
    checksums = (out / "val.crc.npy").read_bytes()
    assert entry["adopted"] == {
        "image_field": "picture",
        "label_field": "class",
        "checksums": {"path": "val.crc.npy", "sha256": hashlib.sha256(checksums).hexdigest()},
    }
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
    data["shards"][0]["adopted"] = {
        "image_field": "image", "label_field": None, "checksums": {"path": "x.npy", "sha256": "0" * 64},
    }  # fmt: skip
    manifest.path.write_text(json.dumps(data))
    with pytest.raises(DataError, match="adopted shards in a manifest of version 1"):
        Manifest.load(tmp_path / "ds")


# ---------------------------------------------------------------------------------------------------------- the command


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
    for arguments, words in (
        ([two], r"which field has the images\?; there are a \(integer\), left \(image\).*--image-field NAME"),
        ([two, "--image-field", "left"], r"which field has the labels\?.*--label-field none for images without"),
        ([two, "--image-field", "b"], "b is a field of kind integer"),
        ([two, "--image-field", "middle"], "no field 'middle'"),
        ([only_float], "no field of kind integer; there are image"),
        ([only_float, "--label-field", "age"], "age is a field of kind float"),
        ([no_image], "no field of kind image; there are label"),
    ):
        with pytest.raises(RecipeError, match=words):
            run("adopt", *arguments)
    assert run("adopt", two, "--image-field", "right", "--label-field", "b")[0] == 0
    with open_shard(Manifest.load(tmp_path / "two"), 0) as shard:
        assert (shard.file.label.tolist(), len(shard.image(1))) == ([0, 0], 192)
    assert run("adopt", only_float, "--label-field", "none")[0] == 0


def test_mistakes(small, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    (tmp_path / "three.txt").write_text("a\nb\nc\n")
    write_shard(tmp_path / "ours.beton", [StoredSample(b"x", 1, 1, 0, 0)])
    (tmp_path / "photo.beton").write_bytes(b"\x89PNG" * 100)
    for arguments, kind, words in (
        ([small, tmp_path / "full"], RecipeError, "already exists"),
        ([small, "s3://bucket/x"], RecipeError, "expected a folder"),
        (["s3://bucket/x.beton", tmp_path / "out"], RecipeError, "expected a path"),
        ([tmp_path, tmp_path / "out"], RecipeError, "is not a file"),
        ([tmp_path / "absent.beton"], DataError, "cannot be opened"),
        ([tmp_path / "photo.beton"], DataError, "is this a .beton file"),
        ([tmp_path / "ours.beton"], RecipeError, "a shard that vitscale wrote"),
        ([small, "--classes", tmp_path / "three.txt"], RecipeError, r"has label 3, counted from 0; --classes names 3"),
        ([small, "--classes", tmp_path / "absent.txt"], RecipeError, "--classes .*absent.txt"),
    ):
        with pytest.raises(kind, match=words):
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
    program = "import sys; from vitscale.cli.main import main; sys.argv[0] = 'vitscale'; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "shards", "adopt", str(small)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while process.poll() is None and len(list(tmp_path.iterdir())) == 1:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted: nothing was written" in errors and "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["val.beton"]


# --------------------------------------------------------------------------------------------------------------- damage


def first_row(content):
    return HEADER_BYTES + 2 * FIELD_BYTES


def table_of(content):
    return struct.unpack_from("<Q", content, 16)[0]


def patch(where, kind, value):
    def apply(content):
        struct.pack_into(kind, content, where if isinstance(where, int) else where(content), value)

    return apply


def first_jpeg(content):
    """Position of the second sample's image, which is a JPEG."""
    return struct.unpack_from("<Q", content, first_row(content) + 24 + 5)[0]


def last_piece(content):
    return len(content) - 24


# A sample has 24 bytes: mode u1, width u2, height u2, position u8 of the picture, and from 16 on the class i8.
DAMAGES = {
    "crashed writer": (patch(16, "<Q", 0), "did not finish"),
    "other version": (patch(0, "<H", 3), "format version 3"),
    "page size": (patch(4, "<I", 1 << 20), "page size"),
    "no samples": (patch(8, "<Q", 0), "no samples"),
    "more samples": (patch(8, "<Q", 10), "at least 10 times 24 bytes"),
    "absurd samples": (patch(8, "<Q", 1 << 60), "samples and an allocation table"),
    "no fields": (patch(2, "<H", 0), "no field of kind image"),
    "more fields than bytes": (patch(2, "<H", 60_000), "a field table of"),
    "custom field": (patch(HEADER_BYTES, "<B", 255), "'picture' is of a type that is not FFCV's own"),
    "unknown field": (patch(HEADER_BYTES, "<B", 7), "'picture' is of a type that is not FFCV's own"),
    "two fields of one name": (patch(HEADER_BYTES + FIELD_BYTES + 1, "16s", b"picture"), "fields of one name"),
    "table beyond the end": (patch(16, "<Q", 1 << 50), "allocation table at byte"),
    "table elsewhere": (lambda content: patch(16, "<Q", table_of(content) - 1)(content), "an allocation table of"),
    "image mode": (patch(first_row, "<B", 2), "neither a JPEG nor raw"),
    "raw as a JPEG": (patch(first_row, "<B", 0), r"no JPEG of the height and width that the file states: sample 0,"),
    "a JPEG as raw": (lambda content: patch(first_row(content) + 24, "<B", 1)(content), "raw pixels that are not"),
    "no width": (lambda content: patch(first_row(content) + 1, "<H", 0)(content), "without height or width"),
    "raw of another width": (lambda content: patch(first_row(content) + 1, "<H", 31)(content), "raw pixels that are"),
    "a JPEG of another width": (
        lambda content: patch(first_row(content) + 24 + 1, "<H", 40)(content),
        "the image of 1 of 9 samples is no JPEG of the height and width that the file states: sample 1, counted",
    ),
    "image outside": (lambda content: patch(first_row(content) + 5, "<Q", 1 << 60)(content), "nothing was allocated"),
    "image of another": (
        lambda content: patch(first_row(content) + 5, "<Q", first_jpeg(content))(content),
        "nothing was allocated for",
    ),
    "label": (
        lambda content: patch(first_row(content) + 16, "<q", -2)(content),
        "sample 0 has -2 in the field 'class'",
    ),
    "piece outside": (lambda content: patch(last_piece(content) + 8, "<Q", 1 << 63)(content), "outside the pages"),
    "piece without end": (lambda content: patch(last_piece(content) + 16, "<Q", 1 << 63)(content), "outside the pages"),
    "piece too long": (lambda content: patch(table_of(content) + 16, "<Q", 50_000)(content), "overlapping pieces"),
    "piece too short": (lambda content: patch(table_of(content) + 16, "<Q", 17)(content), "raw pixels that are not"),
    "truncated header": (lambda content: content.__delitem__(slice(10, None)), "header of 24 bytes"),
    "truncated fields": (lambda content: content.__delitem__(slice(100, None)), "field table"),
    "truncated pages": (lambda content: content.__delitem__(slice((2 << 20) + 100, None)), "inside the file"),
    "truncated table": (lambda content: content.__delitem__(slice(len(content) - 24, None)), "allocation table of"),
    "empty": (lambda content: content.clear(), "0 bytes"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_nothing_written(small, tmp_path, damage):
    apply, message = DAMAGES[damage]
    content = bytearray(small.read_bytes())
    apply(content)
    small.write_bytes(content)
    with pytest.raises((DataError, RecipeError), match=message) as raised:
        adopt(str(small), str(tmp_path / "out"))
    assert str(small) in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["val.beton"]


def test_what_only_decoding_shows(small, tmp_path):
    content = bytearray(small.read_bytes())
    end = content.index(b"\xff\xd9", first_jpeg(content))
    content[end - 400 : end] = bytes(400)  # the rest of the picture
    small.write_bytes(content)
    adopt(str(small), str(tmp_path / "unseen"))
    with pytest.raises(DataError, match="the image of 1 of 9 samples does not decode cleanly: sample 1, counted"):
        adopt(str(small), str(tmp_path / "out"), decode=True)


def test_a_file_that_changes_meanwhile(small, tmp_path):
    def write_on(_):
        with small.open("ab") as file:
            file.write(bytes(24))

    with pytest.raises(DataError, match="has changed while it was read"):
        adopt(str(small), str(tmp_path / "out"), progress=write_on)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def adopted(small, tmp_path):
    return adopt(str(small), str(tmp_path / "ds"), class_names=["cat", "dog", "owl", "yak"]).manifest


def test_damage_after_adoption_is_found(small, adopted, tmp_path):
    code, text = run("verify", tmp_path / "ds", "--decode")
    assert code == 0 and "whole: 1 shard, 9 samples, all decoded" in text
    whole = small.read_bytes()
    for position, uids in ((first_jpeg(whole) + 30, [1]), (len(whole) - 24 * 9 - 1, []), (first_row(whole) + 16, [])):
        content = bytearray(whole)
        content[position] ^= 1
        small.write_bytes(content)
        damage = verify(adopted).damage
        assert damage and [one.uid for one in damage if one.uid is not None] == uids
    with small.open("r+b") as file:
        file.truncate(len(whole) - 24)
    with pytest.raises(DataError, match=r"val\.beton.*bytes; expected"):
        open_shard_file(adopted, 0, small)
    small.unlink()
    assert [one.what for one in verify(adopted).damage] == ["missing"]


def test_another_file_in_its_place(small, adopted):
    from ffcv.fields import IntField, RGBImageField

    rows = [(pixels_of(i, 30, 30), 0) for i in range(8)]
    fields = {"picture": RGBImageField(write_mode="raw"), "class": IntField()}
    write_stock(small, fields, rows)
    entry = adopted.shards[0].model_copy(update={"bytes": small.stat().st_size})
    with pytest.raises(DataError, match="8 samples; expected 9, as many as there are checksums"):
        open_shard_file(adopted.model_copy(update={"shards": (entry,)}), 0, small)


def test_damaged_checksums(small, adopted, tmp_path):
    checksums = tmp_path / "ds" / "val.crc.npy"
    with checksums.open("r+b") as file:
        file.seek(130)
        file.write(b"x")
    with pytest.raises(DataError, match=r"val\.crc\.npy: damaged: sha256"):
        open_shard_file(adopted, 0, small)
    assert any("val.crc.npy: damaged" in one.what for one in verify(adopted).damage)
    checksums.unlink()
    with pytest.raises(DataError, match=r"val\.crc\.npy: the checksums of \.\./val\.beton cannot be read"):
        open_shard_file(adopted, 0, small)
    np.save(checksums, np.zeros(8, np.uint32))
    data = json.loads(adopted.path.read_text())
    data["shards"][0]["adopted"]["checksums"]["sha256"] = hashlib.sha256(checksums.read_bytes()).hexdigest()
    adopted.path.write_text(json.dumps(data))
    with pytest.raises(DataError, match=r"val\.crc\.npy: expected 9 uint32 checksums"):
        open_shard_file(Manifest.load(tmp_path / "ds"), 0, small)


# ------------------------------------------------------------------------------------------------- what else reads them


def test_info_and_head(adopted, tmp_path):
    code, text = run("info", tmp_path / "ds", "--classes", "--json")
    facts = json.loads(text)
    assert code == 0 and facts["schema_version"] == 2 and facts["fields"] == ["picture", "class"]
    assert facts["class_counts"] == {"cat": 3, "dog": 2, "owl": 2, "yak": 2} and facts["unlabelled"] == 0
    code, text = run("head", tmp_path / "ds", "-n", 4, "--out", tmp_path / "sheet.png")
    assert code == 0 and "first 4 of 9" in text and "yak" in text
    sheet = np.asarray(Image.open(tmp_path / "sheet.png").convert("RGB"), int)
    for i in range(4):  # a raw one, a JPEG, ...: each tile has the mean colour of its picture
        picture = pixels_of(i, 20 + i, 30 + (i % 2) * 120)
        height, width = (round(160 * side / max(picture.shape)) for side in picture.shape[:2])
        y, x = 12 + i // 2 * 208 + (160 - height) // 2, 12 + i % 2 * 172 + (160 - width) // 2
        assert np.abs(sheet[y : y + height, x : x + width].mean((0, 1)) - picture.mean((0, 1))).max() < 4


def test_export(small, adopted, tmp_path):
    code, text = run("export", tmp_path / "ds", tmp_path / "files")
    assert code == 0 and "9 images, 4 classes" in text
    content = small.read_bytes()
    for i in range(9):
        path = tmp_path / "files" / ("cat", "dog", "owl", "yak")[i % 4] / f"{i:09d}{'.jpg' if i % 2 else '.png'}"
        if i % 2:
            assert path.read_bytes() in content
            assert Image.open(path).size == (150, 20 + i)
        else:
            assert np.array_equal(np.asarray(Image.open(path)), pixels_of(i, 20 + i, 30))


def test_diff(small, adopted, tmp_path):
    adopt(str(small), str(tmp_path / "again"), class_names=adopted.class_names)
    assert run("diff", tmp_path / "ds", tmp_path / "again")[0] == 0
    adopt(str(small), str(tmp_path / "unlabelled"), label_field="none", class_names=adopted.class_names)
    code, text = run("diff", tmp_path / "ds", tmp_path / "unlabelled")
    assert code == 1 and "options.adopted" in text
    write_generated_dataset(tmp_path / "ours", [4])
    with pytest.raises(DataError, match=r"val\.beton: differs, but is an adopted file, whose samples have no keys"):
        run("diff", tmp_path / "ds", tmp_path / "ours")


def test_views_find_file_and_checksums(adopted, tmp_path):
    write_subset(str(tmp_path / "ds"), str(tmp_path / "a" / "b"), 5)
    view = write_subset(str(tmp_path / "a" / "b"), str(tmp_path / "c"), 4)
    assert (view.schema_version, view.num_samples) == (2, 4)
    assert view.shards[0].path == "../val.beton"
    assert view.shards[0].adopted.checksums.path == "../ds/val.crc.npy"
    assert not verify(view, decode=True).damage
    with open_shard(view, 0) as shard:
        assert shard.slots.tolist() == [0, 1, 2, 3] and len(shard.image(3)) == shard.file.size[3]


def test_at_a_url(small, adopted, tmp_path):
    memory = fsspec.filesystem("memory")
    memory.put(str(small), "/adopted/val.beton")
    memory.put(str(tmp_path / "ds"), "/adopted/ds", recursive=True)
    try:
        assert run("verify", "memory://adopted/ds")[0] == 0
        assert run("diff", "memory://adopted/ds", tmp_path / "ds")[0] == 0
    finally:
        memory.rm("/adopted", recursive=True)


@pytest.mark.parametrize("is_remote", [False, True])
def test_as_the_source_of_a_conversion(small, adopted, tmp_path, is_remote):
    memory = fsspec.filesystem("memory")
    memory.put(str(small), "/adopted/val.beton")
    memory.put(str(tmp_path / "ds"), "/adopted/ds", recursive=True)
    try:
        where = "memory://adopted/ds" if is_remote else str(tmp_path / "ds")
        source = open_dataset("SRC", [where], SourceOptions())
        items = list(source.items(0, Counter()))
        assert [item.labels for item in items] == [(("cat", "dog", "owl", "yak")[i % 4],) for i in range(9)]
        for i, item in enumerate(items):
            image = Image.open(io.BytesIO(source.read(0, item.content)))
            assert image.format == ("JPEG" if i % 2 else "PNG") and image.size == (30 + i % 2 * 120, 20 + i)
            if not i % 2:
                assert np.array_equal(np.asarray(image), pixels_of(i, 20 + i, 30))
    finally:
        memory.rm("/adopted", recursive=True)
