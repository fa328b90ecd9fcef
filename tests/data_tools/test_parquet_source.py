import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets_on_disk import items_of
from small_files import upload

from data_tools.sources.parquet import open_parquet
from data_tools.sources.source import Item, SourceOptions
from vitscale.ground.errors import DataError, RecipeError

IMAGES = [b"first", b"second", b"third", b"fourth"]
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def embedded(images=IMAGES, paths=None) -> pa.Array:
    paths = paths or [f"folder/{i}.png" for i in range(len(images))]
    return pa.array([{"bytes": data, "path": path} for data, path in zip(images, paths, strict=True)], STRUCT)


def class_label(*names: str) -> dict:
    return {"_type": "ClassLabel", "names": list(names)}


def write(path, columns: dict, features: dict | None = None, **options) -> str:
    table = pa.table(columns)
    if features is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, **options)
    return str(path)


def listed(*files: str, image=None, label=None, **others) -> list[Item]:
    return items_of(open_parquet("source", files, SourceOptions(image_field=image, label_field=label, **others)))


def test_as_datasets_writes_it(tmp_path, photos, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=["zebra", "cat"])
    tags = datasets.Sequence(datasets.ClassLabel(names=["small", "big", "far"]))
    features = datasets.Features({"image": datasets.Image(), "label": label, "tags": tags})
    (tmp_path / "0.jpg").write_bytes(photos[0])
    images = [str(tmp_path / "0.jpg"), {"bytes": photos[1], "path": None}]
    rows = {"image": images, "label": [1, 0], "tags": [[2, 0], []]}
    written = datasets.Dataset.from_dict(rows, features=features)
    file = tmp_path / "train-00000-of-00001.parquet"
    written.with_format("arrow").map(datasets.table.embed_table_storage, batched=True).to_parquet(file)
    single = open_parquet("source", [str(file)], SourceOptions(label_field="label"))
    assert single.class_names == ("zebra", "cat")
    name = "train-00000-of-00001"
    assert list(single.items(0, Counter())) == [
        (f"{name}/000000000/0.jpg", ("cat",), photos[0]),
        (f"{name}/000000001", ("zebra",), photos[1]),
    ]
    assert [item.labels for item in listed(str(file), label="tags")] == [("far", "small"), ()]
    with pytest.raises(RecipeError, match=r"label, tags.*--label-field"):
        listed(str(file))


def test_class_labels_and_row_groups(tmp_path):
    features = {"image": {"_type": "Image"}, "y": class_label("a", "b")}
    columns = {"text": list("wxyz"), "image": embedded(), "y": pa.array([1, 0, None, -1], pa.int64())}
    file = write(tmp_path / "x.parquet", columns, features, row_group_size=3)
    labels = ("b",), ("a",), (), ()
    expected = [(f"x/{i:09d}/{i}.png", *of_image) for i, of_image in enumerate(zip(labels, IMAGES, strict=True))]
    assert listed(file) == listed(upload(tmp_path / "x.parquet", "memory://bucket/data/x.parquet")) == expected
    assert [item.labels for item in listed(file, unlabelled=True)] == [()] * 4
    assert [item.labels for item in listed(file, label="text")] == [(letter,) for letter in "wxyz"]


@pytest.mark.parametrize(
    "tags",
    [
        {"_type": "Sequence", "feature": class_label("a", "b", "c"), "length": -1},
        {"_type": "List", "feature": class_label("a", "b", "c")},
        [class_label("a", "b", "c")],
    ],
)
def test_every_spelling_of_several_labels(tmp_path, tags):
    columns = {"image": embedded(), "tags": [[2, 0, 2], [], None, [-1, 1]]}
    file = write(tmp_path / "x.parquet", columns, {"image": {"_type": "Image"}, "tags": tags})
    assert [item.labels for item in listed(file)] == [("c", "a"), (), (), ("b",)]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (pa.array([3, 10, -1, None], pa.int32()), [("3",), ("10",), (), ()]),
        (pa.array(["cat", "a|b", "", None]), [("cat",), ("a|b",), (), ()]),
        (pa.array(["cat", "dog", "cat", None]).dictionary_encode(), [("cat",), ("dog",), ("cat",), ()]),
        (pa.array([["x", "y"], [], None, ["x"]], pa.large_list(pa.string())), [("x", "y"), (), (), ("x",)]),
    ],
)
def test_plain_columns(tmp_path, labels, expected):
    file = write(tmp_path / "x.parquet", {"jpg": pa.array(IMAGES, pa.large_binary()), "cls": labels, "n": range(4)})
    items = listed(file)
    assert [item.labels for item in items] == expected
    assert [item.content for item in items] == IMAGES
    assert items[0].key == "x/000000000"


def test_numbers_and_names_of_the_same_classes(tmp_path):
    columns = {"image": IMAGES, "class_id": [0, 1, 0, 1], "class": list("abab")}
    assert [item.labels for item in listed(write(tmp_path / "x.parquet", columns))] == [("a",), ("b",)] * 2


@pytest.mark.parametrize(
    ("columns", "image", "label", "message"),
    [
        ({"a": IMAGES, "b": IMAGES, "label": range(4)}, None, None, "columns a, b"),
        ({"a": range(4), "label": range(4)}, None, None, "images.*a, label"),
        ({"a": range(4), "label": range(4)}, "a", None, "'a'.*int64"),
        ({"image": IMAGES, "label": range(4)}, "img", None, "'img'.*image, label"),
        ({"image": IMAGES, "label": range(4)}, None, "y", "'y'.*image, label"),
        ({"image": IMAGES, "label": range(4)}, None, "image", "image"),
        ({"image": IMAGES, "x": range(4)}, None, None, "labels.*image, x.*--unlabelled"),
        ({"image": IMAGES, "label": [0.5] * 4}, None, None, "'label'.*double"),
    ],
)
def test_columns_that_cannot_be_told(tmp_path, columns, image, label, message):
    with pytest.raises(RecipeError, match=message):
        listed(write(tmp_path / "x.parquet", columns), image=image, label=label)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": embedded([b"a", None]), "label": [0, 1]}, r"row 1\b.*'folder/1\.png'"),
        ({"image": embedded([b"a", b"b"], ["x", "y"]).take(pa.array([0, None])), "label": [0, 1]}, r"row 1\b"),
        ({"image": pa.array([b"a", None]), "label": [0, 1]}, r"row 1\b"),
        ({"image": embedded([b"a", b"b"]), "label": [0, 2]}, r"row 1\b.*label 2\b.*\b2 classes"),
        ({"image": embedded([b"a", b"b"]), "label": [0, -2]}, r"row 1\b.*label -2"),
    ],
)
def test_rows_that_are_no_sample(tmp_path, columns, message):
    with pytest.raises(DataError, match=message):
        listed(write(tmp_path / "x.parquet", columns, {"label": class_label("a", "b")}))


def test_files_have_to_agree(tmp_path):
    features = {"image": {"_type": "Image"}, "label": class_label("a", "b", "c", "d")}
    columns = {"image": embedded(), "label": range(4)}
    first = write(tmp_path / "1.parquet", columns, features)
    other = write(tmp_path / "2.parquet", columns, features | {"label": class_label("a", "x", "c", "d")})
    renamed = write(tmp_path / "3.parquet", {"image": embedded(), "target": range(4)})
    with pytest.raises(DataError, match=r"2\.parquet.*'x'.*'b'"):
        listed(first, other)
    with pytest.raises(DataError, match=r"3\.parquet.*'image'.*'target'.*1\.parquet"):
        listed(first, renamed)
    assert len(listed(first, write(tmp_path / "4.parquet", columns, features))) == 8


def test_files_of_the_same_name(tmp_path):
    files = []
    for folder in ("train", "test"):
        (tmp_path / folder).mkdir()
        files.append(write(tmp_path / folder / "0.parquet", {"image": IMAGES, "label": range(4)}))
    assert [item.key for item in listed(*files)][::4] == ["train/0/000000000", "test/0/000000000"]
    with pytest.raises(RecipeError, match="train/0"):
        listed(files[0], files[0])


def test_damage(tmp_path):
    path = tmp_path / "x.parquet"
    images = [np.random.default_rng(i).bytes(3000) for i in range(100)]
    write(path, {"image": images, "label": range(100)}, compression="zstd", write_page_checksum=True)
    content = path.read_bytes()
    middle = len(content) // 4
    for damaged in (
        b"",
        b"no parquet at all",
        content[: len(content) // 2],
        content[:middle] + bytes(50) + content[middle + 50 :],
        content[:-30] + bytes(30),
        content[:-1000] + b"\xff" * 990 + content[-10:],
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"x\.parquet"):
            listed(str(path))
    path.write_bytes(content)
    footer = pq.read_metadata(path)
    footer.append_row_groups(footer)  # of the same pages
    footer.write_metadata_file(tmp_path / "footer")
    path.write_bytes(content + (tmp_path / "footer").read_bytes())
    with pytest.raises(DataError):
        listed(str(path))
    with pytest.raises(DataError, match=r"absent\.parquet"):
        listed(str(tmp_path / "absent.parquet"))
    with pytest.raises(DataError, match="Hugging Face"):
        listed(write(path, {"image": IMAGES, "label": range(4)}, {"label": {"_type": "ClassLabel", "names": 7}}))
