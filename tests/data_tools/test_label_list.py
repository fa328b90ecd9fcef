import gzip
import io
from pathlib import Path

import numpy as np
import pytest
from messages import refusal
from small_files import upload, write_tar

from data_tools.sources.label_list import labelled, read_label_list
from data_tools.sources.source import Item
from vitscale.ground.errors import DataError, RecipeError

# The first images of ILSVRC2012's validation set, as ImageNet publishes them: their synsets, and the same as
# ILSVRC2012_IDs in the development kit.
SYNSETS = ("n01751748", "n09193705", "n02105855", "n04263257", "n03125729")
IDS = (490, 361, 171, 822, 297)


def val(number: int) -> str:
    return f"ILSVRC2012_val_{number:08d}.JPEG"


def written(path: Path, text: str | bytes) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def test_one_label_a_line(tmp_path):
    path = written(tmp_path / "imagenet_2012_validation_synset_labels.txt", "\n".join(SYNSETS) + "\n\n")
    labels = read_label_list(path)
    assert [labels.labels_of(f"some/folder/{val(i)}") for i in range(1, 6)] == [(name,) for name in SYNSETS]
    assert labels.labels_of(f"some/folder/{val(1)}") == (SYNSETS[0],)  # again
    for name in (val(6), val(0), "cat.jpg", "other/1.jpg"):
        with refusal(DataError, "label-list", name, {path: "LABELS"}):
            labels.labels_of(name)


def test_lines_of_names_and_numbers(tmp_path):
    path = written(tmp_path / "labels.txt", "\ufefftench, Tinca tinca\r\n0\r\n-1\r\na|7\r\n")
    labels = read_label_list(path)
    found = [labels.labels_of(f"{i}.png") for i in (1, 2, 3, 4)]
    assert found == [("tench, Tinca tinca",), ("0",), (), ("a", "7")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "cat/1.jpg,cat\ndog/2.jpg,golden retriever\n3.jpg,-1\n4.jpg,x|5\n"),
        ("a.csv", "path,label\ncat/1.jpg,cat\ndog/2.jpg,golden retriever\n3.jpg,-1\n4.jpg,x|5\n"),
        ("a.csv", '"Label","Path",n\n"cat","./cat/1.jpg",1\ngolden retriever,/dog/2.jpg,\n\n-1,3.jpg,\nx|5,4.jpg,\n'),
        ("a.tsv", "cat/1.jpg\tcat\ndog/2.jpg\tgolden retriever\n3.jpg\t-1\n4.jpg\tx|5\n"),
        ("a.txt", "cat/1.jpg cat\ndog/2.jpg golden retriever\n3.jpg -1\n4.jpg x|5\n"),
        ("a.txt", "cat/1.jpg\tcat\r\ndog/2.jpg\tgolden retriever\r\n3.jpg\t-1\r\n4.jpg\tx|5\r\n"),
        ("a.csv", "1,cat\n2,golden retriever\n3,-1\n4,x|5\n"),
    ],
)
def test_tables(tmp_path, name, text):
    labels = read_label_list(written(tmp_path / name, text))
    found = [labels.labels_of(f"train/{path}.jpg") for path in ("cat/1", "dog/2", "3", "4")]
    assert found == [("cat",), ("golden retriever",), (), ("x", "5")]
    assert labels.labels_of("train/5.jpg") is None
    assert labels.labels_of("train/" * 500_000 + "5.jpg") is None  # quadratic time would be hours


def test_the_validation_labels_of_kaggle(tmp_path):
    """LOC_val_solution.csv: class and box of every object."""
    rows = [f"ILSVRC2012_val_{i:08d},{name} 111 108 441 193 {name} 1 2 3 4 " for i, name in enumerate(SYNSETS, 1)]
    path = written(tmp_path / "LOC_val_solution.csv", "\n".join(["ImageId,PredictionString", *reversed(rows)]) + "\n")
    labels = read_label_list(path)
    assert [labels.labels_of(f"CLS-LOC/val/{val(i)}") for i in range(1, 6)] == [(name,) for name in SYNSETS]


def devkit(path: Path, ids: tuple[int, ...] = IDS, meta: bytes | None = None) -> str:
    """A development kit with 5 of the 1,860 synsets, in the layout of the one that ImageNet publishes."""
    scipy_io = pytest.importorskip("scipy.io", reason="needs SciPy, which writes .mat files")
    fields = [("ILSVRC2012_ID", object), ("WNID", object), ("words", object), ("num_children", object)]
    synsets = np.zeros((5, 1), fields)
    for row, (number, synset) in enumerate(zip(IDS, SYNSETS, strict=True)):
        synsets[row, 0] = (float(number), synset, f"words of {synset}", 0.0)
    out = io.BytesIO()
    scipy_io.savemat(out, {"synsets": synsets})
    folder = "ILSVRC2012_devkit_t12"
    text = "".join(f"{number}\n" for number in ids).encode()
    write_tar(
        path,
        (f"{folder}/readme.txt", b""),
        (f"{folder}/data/meta.mat", out.getvalue() if meta is None else meta),
        (f"{folder}/data/ILSVRC2012_validation_ground_truth.txt", text),
        mode="w:gz",
    )
    return str(path)


def test_the_development_kit(tmp_path):
    labels = read_label_list(devkit(tmp_path / "ILSVRC2012_devkit_t12.tar.gz"))
    assert [labels.labels_of(val(i)) for i in range(1, 6)] == [(name,) for name in SYNSETS]
    assert labels.labels_of("n01440764_1.JPEG") is None


def test_development_kits_that_are_none(tmp_path):
    path = tmp_path / "ILSVRC2012_devkit_t12.tar.gz"
    with pytest.raises(DataError, match=r"'1000'.*ILSVRC2012_ID"):
        read_label_list(devkit(path, (490, 1000)))
    with pytest.raises(DataError, match=r"data/meta\.mat"):
        read_label_list(devkit(path, meta=b"MATLAB 5.0 MAT-file" * 20))
    with pytest.raises(DataError, match=r"ILSVRC2012_devkit_t12\.tar\.gz.*data/meta\.mat"):
        read_label_list(str(write_tar(path, "a.jpg", mode="w:gz")))
    path.write_bytes(gzip.compress(b"x"))
    with pytest.raises(DataError, match=path.name):
        read_label_list(str(path))


def test_numbers_of_the_development_kit_alone_are_refused(tmp_path):
    """Their order is not that of the sorted synsets, which is everybody's."""
    path = written(tmp_path / "ILSVRC2012_validation_ground_truth.txt", "".join(f"{i}\n" for i in IDS))
    with pytest.raises(DataError, match=r"ILSVRC2012_ID.*ILSVRC2012_devkit_t12"):
        read_label_list(path).labels_of(val(1))
    assert read_label_list(path).labels_of("other_1.jpg") == ("490",)
    long = written(tmp_path / "long.txt", "4" * 5000)
    assert read_label_list(long).labels_of(val(1)) == ("4" * 5000,)
    counted_from_0 = written(tmp_path / "sorted.txt", "65\n970\n0\n")
    assert read_label_list(counted_from_0).labels_of(val(1)) == ("65",)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("a.txt", ""), ("a.csv", "path,label\n"), ("a.txt", "a\n\nb\n"), ("a.txt", "-2\n")),
        ("a.txt", "x" * (1 << 20)),
        *(("a.txt", b"\x89PNG\xff"), ("a.csv", "1.jpg,\n"), ("a.csv", "1.jpg,a|\n"), ("a.csv", "1.jpg\n")),
        *(("a.csv", "label\ncat\n"), ("a.csv", "a.jpg,cat,1\n"), ("a.csv", "path,label,x\n1.jpg,cat,1\n2.jpg,dog\n")),
        *(("a.csv", "1.jpg,a\n2.jpg,a\n./1.jpg,b\n"), ("a.csv", '"' + "x" * 200_000)),
    ],
)
def test_lists_that_are_not_understood(tmp_path, name, text):
    path = written(tmp_path / name, text)
    with refusal(DataError, "label-list", f"{name} {text[:60]!r}", {tmp_path: "FOLDER"}):
        read_label_list(path)


def test_lists_that_are_not_there(tmp_path):
    with pytest.raises(RecipeError, match=r"absent\.csv"):
        read_label_list(str(tmp_path / "absent.csv"))
    path = Path(written(tmp_path / "a.csv", "1.jpg,cat\n"))
    assert read_label_list(upload(path, "memory://labels/a.csv")).labels_of("x/1.jpg") == ("cat",)


def test_images_without_an_entry_are_counted(tmp_path):
    labels = written(tmp_path / "a.csv", "1.jpg,cat\n")
    items = [Item(f"x/{i}.jpg", None, b"") for i in range(1, 9)]
    found = labelled(items, labels, "images.tar")
    assert next(found) == Item("x/1.jpg", ("cat",), b"")
    message = r"does not name 7 images of images\.tar: 'x/2\.jpg', 'x/3\.jpg', .*'x/6\.jpg' \.\.\."
    with pytest.raises(DataError, match=message):
        list(found)


def test_a_name_that_fits_two_images_is_refused(tmp_path):
    labels = written(tmp_path / "a.csv", "1.jpg,cat\n")
    items = [Item("a/1.jpg", None, b""), Item("a/1.jpg", None, b""), Item("b/1.jpg", None, b"")]
    with pytest.raises(DataError, match=r"'b/1\.jpg'"):
        list(labelled(items, labels, "images.tar"))
