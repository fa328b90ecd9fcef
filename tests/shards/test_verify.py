import random
import shutil

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_files import edit_manifest, excluding, flip, flip_images, upload
from stored_dataset import Photo, write_dataset, write_one_shard

from vitscale.data.shards import Manifest, ShardFile, StoredSample
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.data.shards.provenance import (
    FINGERPRINT_COLUMNS,
    REJECTS,
    provenance_path,
    read_provenance,
    write_provenance,
    write_tables,
)
from vitscale.data.shards.verify import Damage, verify
from vitscale.ground.errors import DataError

PHOTOS = [Photo(f"cat/{i:02d}.jpg", (i % 2,), seed=i, height=20 + i) for i in range(10)]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Two shards of five samples and one of two, with one label a sample."""
    folder = tmp_path_factory.mktemp("verify") / "train"
    write_dataset(folder, [*PHOTOS, Photo("dog/a.jpg", (1,), seed=90), Photo("dog/b.jpg", (), seed=91)], 5)
    return folder


@pytest.fixture
def dataset(original, tmp_path):
    return shutil.copytree(original, tmp_path / "train")


def found(dataset, **options):
    return verify(Manifest.load(dataset), **options)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_whole_dataset(original, workers):
    told = []
    verdict = found(original, workers=workers, decode=True, progress=told.append)
    assert (verdict.damage, verdict.notes) == ([], [])
    assert (verdict.shards, verdict.samples) == (3, 12)
    assert verdict.bytes == sum(path.stat().st_size for path in original.glob("*.beton"))
    assert told == [1, 2, 3]


def test_every_flipped_bit_is_found_and_located(original, dataset):
    rng = random.Random(5)
    name = "shard-00001.beton"
    size = (dataset / name).stat().st_size
    with ShardFile(dataset / name) as shard:
        samples, spans = shard.samples, list(zip(shard.offset.tolist(), shard.size.tolist(), strict=True))
    fields_end = 24 + 4 * 1041
    metadata_end = fields_end + samples * 40
    images = [start + rng.randrange(length) for start, length in spans]
    images += [spans[0][0], spans[-1][0] + spans[-1][1] - 1]  # first and last byte
    elsewhere = [*range(0, 24, 3), 24, 30, 41, 1040, fields_end - 1]  # header, field table
    elsewhere += [rng.randrange(fields_end, metadata_end) for _ in range(12)]  # metadata
    elsewhere += [metadata_end, rng.randrange(metadata_end, spans[0][0]), spans[0][0] - 1]  # padding
    elsewhere += [size - 24 * samples - 1, *(size - 1 - rng.randrange(24 * samples) for _ in range(8))]  # allocations
    for position in [*images, *elsewhere]:
        bit = rng.randrange(8)
        flip(dataset / name, position, bit)
        damage = found(dataset).damage
        assert damage and {one.path for one in damage} <= {name, "shard-00001.idx.parquet"}, position
        assert any("sha256 and xxh3_128 not as the manifest says" in one.what for one in damage)
        if position in images:
            slot = next(slot for slot, (start, length) in enumerate(spans) if start <= position < start + length)
            expected = Damage(name, "the image's bytes do not have their checksum", 5 + slot, PHOTOS[5 + slot].key)
            assert [one for one in damage if one.uid is not None] == [expected]
        else:
            # The checksum of an image may itself be what is damaged; everything else is no image's damage.
            assert any("outside of the images" in one.what for one in damage) or len(damage) > 1
        flip(dataset / name, position, bit)
    assert not found(dataset).damage


def test_damage_does_not_hide_other_damage(dataset):
    (dataset / "shard-00000.beton").unlink()
    with (dataset / "shard-00001.beton").open("r+b") as file:
        file.truncate(9 << 20 >> 1)
    flip_images(dataset / "shard-00002.beton", 0, 1)
    verdict = found(dataset)
    told = [(one.path[:11], one.what) for one in verdict.damage]
    assert {path for path, _ in told} == {"shard-00000", "shard-00001", "shard-00002"}
    assert [what for path, what in told if path == "shard-00000"] == ["missing"]
    assert any("the manifest says" in what for path, what in told if path == "shard-00001")
    assert {(one.uid, one.key) for one in verdict.damage} == {(None, None), (10, "dog/a.jpg"), (11, "dog/b.jpg")}


def test_many_damaged_samples_are_counted_not_listed(tmp_path):
    write_generated_dataset(tmp_path / "ds", [60])
    flip_images(tmp_path / "ds" / "shard-00000.beton", *range(60))
    damage = found(tmp_path / "ds").damage
    assert [one.uid for one in damage if one.uid is not None] == list(range(20))
    assert any(one.what.startswith("40 more samples: ") for one in damage)


def test_tables_of_provenance_are_compared(dataset):
    manifest = Manifest.load(dataset)
    path = provenance_path(manifest.shard_path(0))
    rows = read_provenance(path).to_pylist()
    for name, value in (("uid", 99), ("crc32c", 7), ("size", 1), ("labels", [0, 1]), ("height", 3), ("width", 3)):
        changed = [row | ({name: value} if i == 2 else {}) for i, row in enumerate(rows)]
        write_provenance(path, pa.Table.from_pylist(changed, read_provenance(path).schema), "none")
        what = "labels differ" if name == "labels" else f"{name} differs"
        assert found(dataset).damage == [
            Damage("shard-00000.beton", f"{what} from the table of provenance", 2, "cat/02.jpg")
        ]
    write_provenance(path, pa.Table.from_pylist(rows[:-1], read_provenance(path).schema), "none")
    assert [one.what for one in found(dataset).damage] == ["4 rows; the shard has 5 samples"]
    digests = pq.read_metadata(path).row_group(0).column(read_provenance(path).column_names.index("sha256"))
    flip(path, digests.data_page_offset + digests.total_compressed_size - 5)
    (one,) = found(dataset).damage
    assert one.path == "shard-00000.idx.parquet" and "damaged" in one.what
    path.unlink()
    assert found(dataset).damage == [Damage("shard-00000.idx.parquet", "missing; other shards have theirs")]


def test_tables_of_version_1_are_compared_too(dataset):
    for i in range(3):
        path = provenance_path(dataset / f"shard-{i:05d}.beton")
        pq.write_table(pq.read_table(path).drop_columns(list(FINGERPRINT_COLUMNS)), path)
    assert not found(dataset, decode=True).damage
    path = provenance_path(dataset / "shard-00002.beton")
    rows = pq.read_table(path)
    sizes = pa.array([1, rows["size"][1].as_py()])
    pq.write_table(rows.set_column(rows.column_names.index("size"), rows.schema.field("size"), sizes), path)
    what = "size differs from the table of provenance"
    assert found(dataset).damage == [Damage("shard-00002.beton", what, 10, "dog/a.jpg")]


def test_a_dataset_without_tables_is_whole(tmp_path):
    write_generated_dataset(tmp_path / "ds", [6, 3])
    verdict = found(tmp_path / "ds")
    assert not verdict.damage and "keys are not known" in verdict.notes[0]


def test_shards_that_nobody_lists_are_mentioned(dataset):
    shutil.copy(dataset / "shard-00000.beton", dataset / "shard-00007.beton")
    verdict = found(dataset)
    assert not verdict.damage
    assert verdict.notes == ["in the folder, but not in the manifest: shard-00007.beton"]


def test_uids_are_unique_over_the_dataset(dataset):
    shutil.copy(dataset / "shard-00000.beton", dataset / "again.beton")
    shutil.copy(dataset / "shard-00000.idx.parquet", dataset / "again.idx.parquet")

    def list_again(data):
        data["shards"].append(data["shards"][0] | {"path": "again.beton"})
        data["num_samples"] += 5

    edit_manifest(dataset, list_again)
    assert found(dataset).damage == [Damage("again.beton", "begins with uid 0, but an earlier shard goes up to uid 11")]


def test_uids_ascend_and_labels_are_known(tmp_path):
    uids_and_labels = ((3, 0), (3, 2), (9, 1))
    write_one_shard(tmp_path, [StoredSample(Photo("").jpeg, 24, 32, label, uid) for uid, label in uids_and_labels])
    assert {(one.what, one.uid) for one in found(tmp_path).damage} == {
        ("begins with uid 3; the manifest says 0", None),
        ("uids do not ascend", None),
        ("a label beyond the manifest's 2 classes", 3),
    }


def test_several_labels_are_checked(tmp_path):
    write_dataset(tmp_path / "ds", [Photo("a", (0, 1)), Photo("b", (1,), seed=1), Photo("c", (), seed=2)], 3)
    assert not found(tmp_path / "ds").damage
    path = tmp_path / "ds" / "shard-00000.beton"
    with ShardFile(path) as shard:
        behind_image = int(shard.offset[0] + shard.size[0])
    for position, what in ((0, "its labels contradict each other"), (4, "labels differ from the table of provenance")):
        flip(path, behind_image + position)
        damage = found(tmp_path / "ds").damage
        assert Damage("shard-00000.beton", what, 0, "a") in damage
        assert any("outside of the images" in one.what for one in damage)
        flip(path, behind_image + position)


def test_decode_finds_what_was_damaged_before_it_was_stored(tmp_path):
    jpeg = Photo("", height=64, width=64).jpeg
    write_one_shard(tmp_path, [StoredSample(jpeg[: len(jpeg) // 2], 64, 64, 0, 0)])
    assert not found(tmp_path).damage
    assert found(tmp_path, decode=True).damage == [
        Damage("shard-00000.beton", "the image does not decode cleanly", 0, None)
    ]


def test_files_beside_the_manifest_are_read(dataset):
    def select(data):
        data["shards"][1]["select"] = excluding(dataset, "out.npy", [1, 2]).model_dump()
        data["num_samples"] -= 2

    edit_manifest(dataset, select)
    rows = pa.table({"key": ["x.jpg"], "reason": ["empty"]}, REJECTS)
    write_tables(dataset / "rejects.parquet", [rows], REJECTS)
    assert [one.what for one in found(dataset).damage] == ["1 image; the manifest says that 0 were rejected"]
    edit_manifest(dataset, lambda data: data.update(num_rejected=1))
    assert not found(dataset).damage
    flip(dataset / "out.npy", 130)
    flip(dataset / "rejects.parquet", 20)
    paths = [one.path for one in found(dataset).damage]
    assert paths == ["shard-00001.beton", "rejects.parquet"]


def test_at_a_url(dataset):
    url = upload(dataset, f"memory://{dataset.parent.name}/train")
    verdict = found(url)
    assert (verdict.damage, verdict.samples) == ([], 12)
    flip_images(dataset / "shard-00002.beton", 0)
    upload(dataset / "shard-00002.beton", f"{url}/shard-00002.beton")
    fsspec.filesystem("memory").rm_file(f"{url}/shard-00000.beton")
    verdict = found(f"{url}/manifest.json")
    assert ("dog/a.jpg", 10) in {(one.key, one.uid) for one in verdict.damage}
    assert any(one.path == "shard-00000.beton" and one.what.endswith("missing") for one in verdict.damage)
    with pytest.raises(DataError, match="memory://verify/absent"):
        found("memory://verify/absent")
