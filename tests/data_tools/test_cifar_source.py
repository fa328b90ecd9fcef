import io
import pickle
from pathlib import Path

import numpy as np
import pytest
from datasets_on_disk import items_of
from messages import refusal
from PIL import Image
from small_files import pack, upload, write_files

from data_tools.sources.cifar import is_cifar, open_cifar
from data_tools.sources.source import Item, SourceOptions
from vitscale.ground.errors import DataError, RecipeError

COUNT = 7
NAMES = {
    "labels": [f"class {i}" for i in range(10)],
    "fine_labels": [f"fine {i}" for i in range(100)],
    "coarse_labels": [f"coarse {i}" for i in range(20)],
}
BATCHES = {10: [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"], 100: ["train", "test"]}
FIELDS = {10: ("labels",), 100: ("coarse_labels", "fine_labels")}


def make_batch(name: str, classes: int) -> dict:
    """Pixels (N, 3072) of red, green and blue planes, and labels, by the name of the batch."""
    rng = np.random.default_rng(list(name.encode()))
    batch = {"data": rng.integers(0, 256, (COUNT, 3072), np.uint8)}
    for field in FIELDS[classes]:
        batch[field] = rng.integers(0, len(NAMES[field]), COUNT).tolist()
    return batch


def write_binary(folder: Path, classes: int) -> Path:
    folder.mkdir(parents=True)
    for name in BATCHES[classes]:
        batch = make_batch(name, classes)
        labels = np.array([batch[field] for field in FIELDS[classes]], np.uint8).T
        (folder / f"{name}.bin").write_bytes(np.hstack([labels, batch["data"]]).tobytes())
    for field in FIELDS[classes]:
        name = "batches.meta.txt" if classes == 10 else f"{field.replace('labels', 'label_names')}.txt"
        (folder / name).write_text("\n".join(NAMES[field]) + "\n\n")
    return folder


def open_all(*files: Path | str, mixed_ok=True, **options):
    return open_cifar("SOURCE", [str(file) for file in files], SourceOptions(**options), mixed_ok)


def expected(classes: int, field: str, order: list[str] | None = None) -> list[tuple]:
    found = []
    for name in order or sorted(BATCHES[classes]):
        batch = make_batch(name, classes)
        for i in range(COUNT):
            found.append((f"{name}/{i:05d}", (NAMES[field][batch[field][i]],), batch["data"][i].reshape(3, 32, 32)))
    return found


def check(items: list[Item], wanted: list[tuple]) -> None:
    assert [(item.key, item.labels) for item in items] == [(key, labels) for key, labels, _ in wanted]
    for item, (_, _, planes) in zip(items, wanted, strict=True):
        with Image.open(io.BytesIO(item.content)) as image:
            assert (image.format, image.mode) == ("PPM", "RGB")
            np.testing.assert_array_equal(np.asarray(image), np.moveaxis(planes, 0, 2))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("classes", [10, 100])
def test_both_data_sets(tmp_path, classes, packed):
    folder = write_binary(tmp_path / "cifar", classes)
    files = [pack(folder, tmp_path / "cifar.tar.gz")] if packed else sorted(folder.iterdir())
    source = open_all(*files)
    assert source.streams
    field = FIELDS[classes][-1]
    assert source.class_names == tuple(NAMES[field])
    check(items_of(source), expected(classes, field))
    if classes == 100:
        source = open_all(*files, label_field="coarse_labels")
        assert source.class_names == tuple(NAMES["coarse_labels"])
        check(items_of(source), expected(100, "coarse_labels"))
    assert {item.labels for item in items_of(open_all(*files, unlabelled=True))} == {()}


def test_remote(tmp_path):
    folder = write_binary(tmp_path / "cifar", 10)
    source = open_all(f"{upload(folder, 'memory://cifar')}/test_batch.bin")
    assert source.parts == ("memory://cifar/test_batch.bin",)
    check(items_of(source), expected(10, "labels", ["test_batch"]))


def test_training_and_test_images_are_never_mixed_unasked(tmp_path):
    folder = write_binary(tmp_path / "cifar", 10)
    archive = pack(folder, tmp_path / "cifar.tar.gz")
    for files in (sorted(folder.iterdir()), [archive]):
        with pytest.raises(RecipeError, match=r"--split 'train=data_batch_\*/\*' --split"):
            open_all(*files, mixed_ok=False)
    assert len(open_all(*sorted(folder.glob("data_batch_*")), mixed_ok=False).parts) == 5


def test_which_names_are_cifar():
    assert is_cifar(["data_batch_1", "batches.meta", "readme.html"])
    assert is_cifar(["cifar-10-batches-bin/test_batch.bin"])
    assert is_cifar(["train", "test", "meta", "file.txt~"])
    assert is_cifar(["train.bin"])
    for names in ([], ["train"], ["train", "test"], ["train", "val", "meta"], ["meta"], ["data_batch_1.jpg"]):
        assert not is_cifar(names)


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["readme.html"], {}),
        (["data_batch_1.bin", "../hundred/train.bin"], {}),
        (["data_batch_1.bin"], {"label_field": "fine_labels"}),
        (["../hundred/train.bin"], {"label_field": "x"}),
        (["data_batch_1.bin"], {"image_field": "data"}),
        (["../python/test_batch"], {}),
    ],
)
def test_what_people_may_get_wrong(tmp_path, names, options):
    folder = write_binary(tmp_path / "ten", 10)
    write_binary(tmp_path / "hundred", 100)
    (folder / "readme.html").write_text("read me")
    write_files(tmp_path / "python", ("test_batch", b"cposix\nsystem\n(S'false'\ntR."))
    with refusal(RecipeError, "cifar", f"{names} {options}", {tmp_path: "FOLDER"}):
        open_cifar("SOURCE", [str(folder / name) for name in names], SourceOptions(**options))


@pytest.mark.parametrize("packed", [False, True])
def test_nothing_of_the_python_version_is_run(tmp_path, packed):
    trap = b"cposix\nmkdir\n(V%s\ntR." % bytes(tmp_path / "trap")
    names = ("batches.meta", "data_batch_1", "test_batch")
    folder = write_files(tmp_path / "cifar-10-batches-py", *((name, trap) for name in names))
    files = [pack(folder, tmp_path / "cifar.tar.gz")] if packed else sorted(folder.iterdir())
    with pytest.raises(RecipeError, match=r"cifar-10-binary\.tar\.gz"):
        open_all(*files)
    assert not (tmp_path / "trap").exists()
    pickle.loads(trap)
    assert (tmp_path / "trap").is_dir()


@pytest.mark.parametrize("content", [b"", bytes(3072), bytes(3073 * 2 + 1)])
def test_damaged_binary_versions(tmp_path, content):
    folder = write_binary(tmp_path / "cifar", 10)
    (folder / "test_batch.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"test_batch\.bin.*\b3,073\b"):
        items_of(open_all(folder / "test_batch.bin"))
    (folder / "batches.meta.txt").write_text("one name")
    with pytest.raises(DataError, match=r"batches\.meta\.txt.*\b10\b"):
        open_all(folder / "test_batch.bin")


def test_damaged_archives(tmp_path):
    archive = pack(write_binary(tmp_path / "cifar", 10), tmp_path / "cifar-10-binary.tar.gz")
    archive.write_bytes(archive.read_bytes()[:-5000])
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz"):
        open_all(archive)
