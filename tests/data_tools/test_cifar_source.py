import io
import os
import pickle
import struct
import tarfile
from collections import Counter
from pathlib import Path

import fsspec
import numpy as np
import pytest
from messages import refusal
from PIL import Image

from data_tools.sources.cifar import is_cifar, open_cifar
from data_tools.sources.restricted_pickle import load_pickle
from data_tools.sources.source import Item, SourceOptions
from vitscale.errors import DataError, RecipeError

COUNT = 7
NAMES = {
    "labels": [f"class {i}" for i in range(10)],
    "fine_labels": [f"fine {i}" for i in range(100)],
    "coarse_labels": [f"coarse {i}" for i in range(20)],
}
BATCHES = {10: [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"], 100: ["train", "test"]}
FIELDS = {10: ("labels",), 100: ("coarse_labels", "fine_labels")}


def make_batch(name: str, classes: int) -> dict:
    """Pixels (N, 3072) of red, green and blue planes, labels and names, by the name of the batch."""
    rng = np.random.default_rng(list(name.encode()))
    batch = {"data": rng.integers(0, 256, (COUNT, 3072), np.uint8)}
    for field in FIELDS[classes]:
        batch[field] = rng.integers(0, len(NAMES[field]), COUNT).tolist()
    batch["filenames"] = [f"{name}_s_{i:06d}.png" for i in range(COUNT)]
    return batch


# ------------------------------------------------------- pickles as Python 2 wrote them: opcodes of the protocol's text


def python2_pickle(value) -> bytes:
    """Protocol 2, with `str` (bytes) for texts and numpy's names of that time."""
    return b"\x80\x02" + _python2(value) + b"."


def _python2(value) -> bytes:
    match value:
        case dict():
            return b"}(" + b"".join(_python2(key) + _python2(item) for key, item in value.items()) + b"u"
        case list():
            return b"](" + b"".join(map(_python2, value)) + b"e"
        case int():
            return b"J" + struct.pack("<i", value)
        case str():
            return b"T" + struct.pack("<i", len(value)) + value.encode()
    assert value.dtype == np.uint8
    dtype = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"(" + b"".join(map(_python2, value.shape)) + b"t"
    data = b"T" + struct.pack("<i", value.nbytes) + value.tobytes()
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    return empty + b"(K\x01" + shape + dtype + b"\x89" + data + b"tb"


def test_these_pickles_are_what_python_reads():
    batch = make_batch("x", 10)
    loaded = pickle.loads(python2_pickle(batch), encoding="bytes")
    np.testing.assert_array_equal(loaded[b"data"], batch["data"])
    assert loaded[b"labels"] == batch["labels"]


# --------------------------------------------------------------------------------------------------------- the versions


def write_python(folder: Path, classes: int, dump=python2_pickle) -> Path:
    folder.mkdir(parents=True)
    for name in BATCHES[classes]:
        (folder / name).write_bytes(dump(make_batch(name, classes)))
    meta = {field.replace("labels", "label_names"): NAMES[field] for field in FIELDS[classes]}
    (folder / ("batches.meta" if classes == 10 else "meta")).write_bytes(dump(meta))
    (folder / ("readme.html" if classes == 10 else "file.txt~")).write_text("read me")
    return folder


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


def pack(folder: Path, path: Path) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, folder.name)
    return path


def open_all(*files: Path | str, label=None, mixed_ok=True):
    source = open_cifar("SOURCE", [str(file) for file in files], SourceOptions(label_field=label), mixed_ok)
    return pickle.loads(pickle.dumps(source))  # as it travels to a worker


def listed(source) -> list[Item]:
    return [item for part in range(len(source.parts)) for item in source.items(part, Counter())]


def expected(classes: int, field: str, with_names: bool, order: list[str] | None = None) -> list[tuple]:
    found = []
    for name in order or sorted(BATCHES[classes]):
        batch = make_batch(name, classes)
        for i in range(COUNT):
            key = f"{name}/{i:05d}" + (f"/{batch['filenames'][i]}" if with_names else "")
            found.append((key, (NAMES[field][batch[field][i]],), batch["data"][i].reshape(3, 32, 32)))
    return found


def check(items: list[Item], wanted: list[tuple]) -> None:
    assert [(item.key, item.labels) for item in items] == [(key, labels) for key, labels, _ in wanted]
    for item, (_, _, planes) in zip(items, wanted, strict=True):
        with Image.open(io.BytesIO(item.content)) as image:
            assert (image.format, image.mode) == ("PPM", "RGB")
            np.testing.assert_array_equal(np.asarray(image), np.moveaxis(planes, 0, 2))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("write", [write_python, write_binary])
@pytest.mark.parametrize("classes", [10, 100])
def test_all_versions(tmp_path, write, classes, packed):
    folder = write(tmp_path / "cifar", classes)
    files = [pack(folder, tmp_path / "cifar.tar.gz")] if packed else sorted(folder.iterdir())
    source = open_all(*files)
    assert source.streams
    field = FIELDS[classes][-1]
    assert source.class_names == tuple(NAMES[field])
    check(listed(source), expected(classes, field, write is write_python))
    if classes == 100:
        source = open_all(*files, label="coarse_labels")
        assert source.class_names == tuple(NAMES["coarse_labels"])
        check(listed(source), expected(100, "coarse_labels", write is write_python))
    assert {item.labels for item in listed(open_all(*files, label="none"))} == {()}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_every_protocol(tmp_path, protocol):
    folder = write_python(tmp_path / "cifar", 10, lambda value: pickle.dumps(value, protocol))
    check(listed(open_all(folder / "test_batch")), expected(10, "labels", True, ["test_batch"]))


def test_remote(tmp_path):
    folder = write_binary(tmp_path / "cifar", 10)
    for path in folder.iterdir():
        with fsspec.open(f"memory://cifar/{path.name}", "wb") as file:
            file.write(path.read_bytes())
    source = open_all("memory://cifar/test_batch.bin")
    assert source.parts == ("memory://cifar/test_batch.bin",)
    check(listed(source), expected(10, "labels", False, ["test_batch"]))


def test_training_and_test_images_are_never_mixed_unasked(tmp_path):
    folder = write_python(tmp_path / "cifar", 10)
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
        (["data_batch_1", "../hundred/train"], {}),
        (["data_batch_1", "../binary/data_batch_1.bin"], {}),
        (["data_batch_1"], {"label_field": "fine_labels"}),
        (["../hundred/train"], {"label_field": "x"}),
        (["data_batch_1"], {"image_field": "data"}),
    ],
)
def test_what_people_may_get_wrong(tmp_path, names, options):
    folder = write_python(tmp_path / "ten", 10)
    write_python(tmp_path / "hundred", 100)
    write_binary(tmp_path / "binary", 10)
    with refusal(RecipeError, "cifar", f"{names} {options}", {tmp_path: "FOLDER"}):
        open_cifar("SOURCE", [str(folder / name) for name in names], SourceOptions(**options))


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_that_would_run_something(tmp_path, protocol):
    trap = tmp_path / "trap"
    for name, value in (("batches.meta", Evil(trap)), ("test_batch", make_batch("x", 10) | {"more": [Evil(trap)]})):
        folder = write_python(tmp_path / name, 10)
        (folder / name).write_bytes(pickle.dumps(value, protocol))
        with pytest.raises(DataError, match=rf"{name}.*\b(posix|nt)\.mkdir\b"):
            listed(open_all(folder / "test_batch"))
    assert not trap.exists()


@pytest.mark.parametrize(
    "text",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cnumpy\nndarray\n(I1000000000000\ntR.",
        b"c_codecs\nencode\n(Vx\nVrot13\ntR.",
        b"cnumpy\ndtype\n(S'O'\ntR.",
        b"cnumpy\ndtype.type\n.",
        b"(dS'a'\ncnumpy.core.multiarray\n_reconstruct\n(tRs.",
        b"\x80\x02",
        b"",
        b"no pickle",
    ],
)
def test_pickles_that_are_refused(text):
    with pytest.raises(DataError, match="here: "):
        load_pickle(text, "here")


def test_arrays_as_numpy_pickles_them():
    rng = np.random.default_rng(0)
    for array in (rng.integers(0, 9, (3, 4)), rng.random((2, 3), np.float32).T, np.arange(4, dtype=">i2")):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            loaded = load_pickle(pickle.dumps({"a": array}, protocol), "here")
            np.testing.assert_array_equal(loaded.get("a", loaded.get(b"a")), array)


def damaged_batch(**changes):
    batch = make_batch("test_batch", 10) | changes
    return python2_pickle({key: value for key, value in batch.items() if value is not None})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("test_batch", lambda: damaged_batch(data=None), "test_batch: not a batch of CIFAR: expected `data`"),
        ("test_batch", lambda: damaged_batch(data=np.zeros((7, 9), np.uint8)), "expected `data`"),
        ("test_batch", lambda: damaged_batch(labels=None), "expected `labels`, a list of 7 numbers"),
        ("test_batch", lambda: damaged_batch(labels=[0] * 6), "expected `labels`, a list of 7 numbers"),
        ("test_batch", lambda: damaged_batch(labels=["x"] * 7), "expected `labels`, a list of 7 numbers"),
        ("test_batch", lambda: damaged_batch(labels=[0] * 6 + [10]), "image 6 has the label 10; there are 10 classes"),
        ("test_batch", lambda: damaged_batch(filenames=["x"]), "expected `filenames`, a list of 7 names"),
        ("test_batch", lambda: python2_pickle([1]), "expected a dict, found list"),
        ("test_batch", lambda: damaged_batch()[:-1000], "test_batch: not a pickle"),
        ("batches.meta", lambda: python2_pickle({"x": 1}), "batches.meta: expected the names of 10 classes"),
        ("batches.meta", lambda: python2_pickle({"label_names": ["a"] * 10}), "expected the names of 10 classes"),
        ("batches.meta", None, "batches.meta: cannot be read"),
    ],
)
def test_damaged_python_versions(tmp_path, name, content, message):
    folder = write_python(tmp_path / "cifar", 10)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content())
    with pytest.raises(DataError, match=message):
        listed(open_all(folder / "test_batch"))


@pytest.mark.parametrize("content", [b"", bytes(3072), bytes(3073 * 2 + 1)])
def test_damaged_binary_versions(tmp_path, content):
    folder = write_binary(tmp_path / "cifar", 10)
    (folder / "test_batch.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"test_batch\.bin.*\b3,073\b"):
        listed(open_all(folder / "test_batch.bin"))
    (folder / "batches.meta.txt").write_text("one name")
    with pytest.raises(DataError, match=r"batches\.meta\.txt.*\b10\b"):
        open_all(folder / "test_batch.bin")


def test_damaged_archives(tmp_path):
    archive = pack(write_binary(tmp_path / "cifar", 10), tmp_path / "cifar-10-binary.tar.gz")
    archive.write_bytes(archive.read_bytes()[:-5000])
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz"):
        open_all(archive)
