import shutil
from collections import Counter

import pytest
from datasets_on_disk import items_of
from small_files import edit_manifest, excluding, flip, upload
from stored_dataset import Photo, write_dataset

from data_tools.sources.dataset import open_dataset
from data_tools.sources.source import SourceOptions
from vitscale.data.shards import MANIFEST_NAME, SelectFirst
from vitscale.ground.errors import DataError, RecipeError

PHOTOS = [Photo(f"k/{i}.jpg", labels=(i % 2,), seed=i) for i in range(7)]


def opened(*files):
    return open_dataset("SOURCE", [str(file) for file in files], SourceOptions())


def listed(source) -> dict:
    return {item.key: (item.labels, item.content) for item in items_of(source)}


def expected(photos, names=("cat", "dog")) -> dict:
    return {photo.key: (tuple(names[label] for label in photo.labels), photo.jpeg) for photo in photos}


@pytest.mark.parametrize("where", ["folder", "manifest", "remote", "remote manifest"])
def test_samples_come_back_as_they_were(tmp_path, where):
    write_dataset(tmp_path, PHOTOS, 3)
    root = upload(tmp_path, f"memory://{tmp_path.name}") if "remote" in where else str(tmp_path)
    source = opened(f"{root}/{MANIFEST_NAME}" if "manifest" in where else root)
    assert source.streams == ("remote" in where)
    assert source.parts == tuple(f"{root}/shard-0000{i}.beton" for i in range(3))
    assert source.class_names == ("cat", "dog")
    assert listed(source) == expected(PHOTOS)


def test_several_labels_and_none(tmp_path):
    photos = [Photo("a", (1, 0)), Photo("b", ()), Photo("c", (0,))]
    write_dataset(tmp_path / "several", photos, 8)
    assert listed(opened(tmp_path / "several")) == expected(photos)
    write_dataset(tmp_path / "none", [Photo("a", ())], 8, class_names=())
    source = opened(tmp_path / "none")
    assert source.class_names is None
    assert listed(source) == expected([Photo("a", ())])


@pytest.mark.parametrize("is_remote", [False, True])
def test_only_selected_samples(tmp_path, is_remote):
    manifest = write_dataset(tmp_path, PHOTOS, 4)
    first = manifest.shards[0].model_copy(update={"select": excluding(tmp_path, "out.npy", [0, 2])})
    second = manifest.shards[1].model_copy(update={"select": SelectFirst(first=1)})
    manifest.model_copy(update={"shards": (first, second), "num_samples": 3}).save(tmp_path)
    root = upload(tmp_path, f"memory://{tmp_path.name}") if is_remote else tmp_path
    assert listed(opened(root)) == expected([PHOTOS[1], PHOTOS[3], PHOTOS[4]])


@pytest.mark.parametrize("is_remote", [False, True])
def test_without_tables_of_provenance(tmp_path, is_remote):
    write_dataset(tmp_path, PHOTOS, 4)
    for path in tmp_path.glob("*.idx.parquet"):
        path.unlink()
    root = upload(tmp_path, f"memory://{tmp_path.name}") if is_remote else tmp_path
    assert list(listed(opened(root))) == [f"uid-{uid}" for uid in range(7)]


def test_damaged_samples(tmp_path):
    write_dataset(tmp_path, PHOTOS, 7)
    shard = tmp_path / "shard-00000.beton"
    flip(shard, shard.read_bytes().index(PHOTOS[2].jpeg) + 100)
    source = opened(tmp_path)
    items = list(source.items(0, Counter()))
    assert source.read(0, items[1].content) == PHOTOS[1].jpeg
    with pytest.raises(OSError, match=r"shard-00000\.beton"):
        source.read(0, items[2].content)
    remote = opened(upload(tmp_path, f"memory://{tmp_path.name}"))
    with pytest.raises(DataError, match=r"memory://.*shard-00000\.beton.*sha256"):
        list(remote.items(0, Counter()))


def test_what_cannot_be_read(tmp_path):
    data = tmp_path / "data"
    write_dataset(data, PHOTOS, 4, class_names=("cat", "dog"))
    with pytest.raises(DataError, match=str(tmp_path)):
        opened(tmp_path)
    with pytest.raises(RecipeError, match="2 datasets"):
        opened(data, data)
    with pytest.raises(RecipeError, match="--label-field x"):
        open_dataset("SOURCE", [str(data)], SourceOptions(label_field="x"))
    source = opened(data)
    edit_manifest(data, lambda content: content.update(class_names=["cat"]))
    with pytest.raises(DataError, match=str(data)):
        listed(source)
    with pytest.raises(DataError, match=r"shard-00000\.beton.*'k/1\.jpg'.*\b1\b"):
        listed(opened(data))
    shutil.copy(data / "shard-00000.beton", data / "shard-00001.beton")
    with pytest.raises(DataError, match=r"shard-00001\.beton"):
        list(opened(data).items(1, Counter()))
    (data / "shard-00001.beton").unlink()
    with pytest.raises(DataError, match=r"shard-00001\.beton"):
        list(opened(data).items(1, Counter()))
