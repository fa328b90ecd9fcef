import csv
import gzip
import json
import os
import pickle
import tracemalloc
from collections import Counter

import fsspec
import pytest

from data_tools.sources.image_list import open_image_list
from data_tools.sources.source import Item, SourceOptions
from vitscale.errors import DataError, RecipeError


def listed(*files, image=None, label=None) -> list[Item]:
    options = SourceOptions(image_field=image, label_field=label)
    source = open_image_list("source", [str(file) for file in files], options)
    assert not source.streams
    copy = pickle.loads(pickle.dumps(source))  # as it travels to a worker
    return [item for part in range(len(files)) for item in copy.items(part, Counter())]


def write(path, text: str | bytes):
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


TWO = [Item("a/1.jpg", ("cat",), b"a/1.jpg"), Item("a/2.jpg", ("cat", "dog"), b"a/2.jpg")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.csv", "path,label\na/1.jpg,cat\na/2.jpg,cat|dog\n"),
        ("x.csv", "a/1.jpg,cat\na/2.jpg,cat|dog"),
        ("x.csv", "\ufeffLABEL, File_Name\r\n\r\ncat,a/1.jpg\r\n cat | dog |cat,a/2.jpg\r\n\r\n"),
        ("x.csv", 'n,url,class\n"1\n1",a/1.jpg,cat\n2,"a/2.jpg","cat|dog"\n'),
        ("x.tsv", "image\ttarget\na/1.jpg\tcat\na/2.jpg\tcat|dog\n"),
        ("x.TSV", "a/1.jpg\tcat\na/2.jpg\tcat|dog\n"),
        ("x.jsonl", '{"file_name": "a/1.jpg", "label": "cat"}\n\n{"label": ["cat", "dog"], "file_name": "a/2.jpg"}'),
        (
            "x.ndjson",
            '\ufeff{"path": "a/1.jpg", "cls": ["cat"]}\r\n{"path": "a/2.jpg", "cls": ["cat", "dog", "cat"]}\r\n',
        ),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_every_spelling_of_a_list(tmp_path, name, text, packed):
    content = text.encode()
    path = write(tmp_path / (f"{name}.gz" if packed else name), gzip.compress(content) if packed else content)
    assert listed(path) == TWO


def test_a_list_as_csv_writes_it(tmp_path):
    rows = [("a/1.jpg", 'a "big" cat'), ("b, c/2.jpg", "dog, black"), ("é/\n3.jpg", "")]
    with (tmp_path / "x.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "class"), *rows])
    expected = [(path, (label,) if label else (), path.encode()) for path, label in rows]
    assert listed(tmp_path / "x.csv") == expected


def test_a_real_list(data_root):
    path = data_root / "grocery" / "train.csv"
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [(item.key, item.labels) for item in listed(path)] == [(row["path"], (row["class"],)) for row in rows]
    assert listed(path, label="class_id")[0].labels == (rows[0]["class_id"],)


def test_labels_that_are_none(tmp_path):
    rows = ["", "-1", "0", "07"]
    path = write(tmp_path / "x.csv", "path,label\n" + "".join(f"{i}.jpg,{row}\n" for i, row in enumerate(rows)))
    assert [item.labels for item in listed(path)] == [(), (), ("0",), ("07",)]
    values = [None, -1, 0, 12, "", [], [3, -1], [1, "x"]]
    path = write(
        tmp_path / "x.jsonl", "".join(json.dumps({"path": "1.jpg", "label": value}) + "\n" for value in values)
    )
    assert [item.labels for item in listed(path)] == [(), (), ("0",), ("12",), (), (), ("3",), ("1", "x")]


def test_fields_that_people_name(tmp_path):
    path = write(tmp_path / "x.csv", "id,shot,species,path\n7,1.jpg,cat,thumb.jpg\n")
    assert listed(path, image="shot", label="species") == [("1.jpg", ("cat",), b"1.jpg")]
    assert listed(path, label="none") == [("thumb.jpg", (), b"thumb.jpg")]
    path = write(tmp_path / "y.csv", "1.jpg\n2.jpg\n")
    assert [item.labels for item in listed(path, label="none")] == [(), ()]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.csv", "id,label\n1,cat\n", "no column that is known to hold images; there are id, label.*--image-field"),
        ("x.csv", "path,url,label\n1,2,cat\n", "images may be in any of the columns path, url.*--image-field"),
        ("x.csv", "path,id\n1,cat\n", "no column that is known to hold labels; there are path, id.*--label-field"),
        ("x.csv", "path,label,target\n1,cat,2\n", "labels may be in any of the columns label, target.*--label-field"),
        ("x.csv", "path;label\n1.jpg;cat\n", "there are path;label"),
        ("x.csv", "a/1.jpg,cat,3\n", "3 columns and no header"),
        ("x.csv", "a/1.jpg\n", "1 column and no header"),
        ("x.csv", "path,label,label\n", "a column twice"),
        ("x.jsonl", '{"id": 1, "label": 2}', "no column that is known to hold images; there are id, label"),
        ("x.json", "{}", "not a list of images; those end in .csv, .tsv, .jsonl, .ndjson"),
    ],
)
def test_lists_that_cannot_be_told(tmp_path, name, text, message):
    with pytest.raises(RecipeError, match=f"{name}: .*{message}"):
        listed(write(tmp_path / name, text))


HEAD = b"path,label\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.csv", b"", "an empty list"),
        ("x.csv", HEAD + b"1.jpg,cat\n2.jpg\n", "line 3: 1 column; expected 2"),
        ("x.csv", HEAD + b"1,2.jpg,cat\n", "line 2: 3 columns; expected 2 .* needs quotes"),
        ("x.csv", HEAD + b"1.jpg,cat\n,cat\n", "line 3: no path of an image"),
        ("x.csv", HEAD + b"../,cat\n", "line 2: no path of an image"),
        ("x.csv", HEAD + b"1.jpg,cat\n\n2.jpg,caf\xe9\n", "line 4: not UTF-8"),
        ("x.csv", "path,label\n1.jpg,cat\n".encode("utf-16"), "line 1: not UTF-8"),
        ("x.csv", HEAD + b'"1.jpg,cat\n2.jpg,dog\n', "line 3: not valid CSV"),
        ("x.csv", HEAD + b'"' + b"1.jpg,cat\n" * 100_000, "not valid CSV"),
        ("x.csv", HEAD + bytes(9_000_000), "not valid CSV"),
        ("x.jsonl", b"", "an empty list"),
        ("x.jsonl", b'{"path": "1.jpg", "label": 1}\n{"path": ', "line 2: not valid JSON"),
        ("x.jsonl", b'{"path": "1.jpg", "label": 1}\n\n\xff', "line 3: not UTF-8"),
        ("x.jsonl", b'{"path": "1.jpg", "label": 1}\n[1]', "line 2: expected a JSON object, found list"),
        ("x.jsonl", b'{"path": "1.jpg", "label": 1}\n{"label": 1}', "line 2: no path of an image in 'path'"),
        ("x.jsonl", b'{"path": "1.jpg", "label": 1}\n{"path": "2.jpg"}', "line 2: no 'label'; write null"),
        ("x.jsonl", b'{"path": "1.jpg", "label": 1.5}', "line 1: label 1.5; expected text"),
        ("x.jsonl", b'{"path": "1.jpg", "label": true}', "line 1: label True; expected text"),
        ("x.jsonl", b'{"path": "1.jpg", "label": [[1]]}', "line 1: label .*; expected text"),
        ("x.jsonl", b'{"path": "1.jpg", "label": -2}', "line 1: label -2"),
        ("x.jsonl", b'{"path": "\\ud800.jpg", "label": 1}', "line 1: half a character"),
        ("x.jsonl", b'{"path": "1.jpg", "label": "\\udc00"}', "line 1: half a character"),
        ("x.jsonl", b"[" * 100_000, "line 1: not valid JSON"),
        ("x.jsonl", b'{"path": 1' + b"0" * 5000 + b"}", "line 1: not valid JSON"),
        ("x.csv", gzip.compress(HEAD + os.urandom(1000).hex().encode())[:-50], "truncated or damaged gzip data"),
    ],
)
def test_damage_is_told_with_its_line(tmp_path, name, text, message):
    with pytest.raises(DataError, match=rf"{name}(, |: ).*{message}" if "line" in message else message):
        listed(write(tmp_path / name, text))


def test_a_list_that_is_missing(tmp_path):
    with pytest.raises(DataError, match=r"absent\.csv"):
        listed(tmp_path / "absent.csv")


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("a/1.jpg", "a/1.jpg"),
        ("./a//b/../1.jpg", "a/1.jpg"),
        ("../a/1.jpg", "a/1.jpg"),
        ("/data/a/1.jpg", "data/a/1.jpg"),
        ("s3://bucket/a/1.jpg", "bucket/a/1.jpg"),
        ("https://host/i?id=5", "host/i?id=5"),
        (".hidden/1.jpg", ".hidden/1.jpg"),
        ("a/...jpg", "a/...jpg"),
    ],
)
def test_keys(tmp_path, path, key):
    assert listed(write(tmp_path / "x.csv", f"path,label\n{path},cat\n")) == [(key, ("cat",), path.encode())]


def test_keys_below_the_list_are_relative_to_it(tmp_path):
    """However the list names them: a dataset does not depend on where its folder is mounted."""
    (tmp_path / "a").mkdir()
    inside, beside = tmp_path / "a" / "cat" / "1.jpg", tmp_path / "ab" / "2.jpg"
    path = write(tmp_path / "a" / "x.csv", f"path,label\n{inside},cat\n{beside},cat\n../ab/3.jpg,cat\n")
    assert [item.key for item in listed(path)] == ["cat/1.jpg", str(beside).lstrip("/"), "ab/3.jpg"]
    assert next(iter(listed(path))).content == str(inside).encode()


def test_relative_paths_start_at_the_list(tmp_path, monkeypatch):
    folder = tmp_path / "lists"
    folder.mkdir()
    write(tmp_path / "1.jpg", b"one")
    paths = ["../1.jpg", str(tmp_path / "1.jpg"), "memory://images/2.jpg", "absent.jpg", "memory://images/absent.jpg"]
    with fsspec.open("memory://images/2.jpg", "wb") as file:
        file.write(b"two")
    content = "path,label\n" + "".join(f"{path},cat\n" for path in paths)
    write(folder / "x.csv", content)
    with fsspec.open("memory://images/lists/x.csv", "wb") as file:
        file.write(content.replace("../1.jpg", "../2.jpg").encode())
    monkeypatch.chdir(folder)
    for where, expected in (
        (str(folder / "x.csv"), [b"one", b"one", b"two"]),
        ("x.csv", [b"one", b"one", b"two"]),
        ("memory://images/lists/x.csv", [b"two", b"one", b"two"]),
    ):
        source = open_image_list("source", [where], SourceOptions())
        contents = [item.content for item in source.items(0, Counter())]
        assert [source.read(0, content) for content in contents[:3]] == expected
        for content in [*contents[3:], b"a\0b.jpg"]:
            with pytest.raises(OSError):
                source.read(0, content)


def test_memory_does_not_grow_with_the_list(tmp_path):
    rows = 100_000
    with (tmp_path / "x.csv").open("w") as file:
        file.write("path,label\n")
        file.writelines(f"a/folder/{i}.jpg,class {i % 100}\n" for i in range(rows))
    source = open_image_list("source", [str(tmp_path / "x.csv")], SourceOptions())
    tracemalloc.start()
    count = sum(1 for _ in source.items(0, Counter()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == rows
    assert peak < 4 << 20  # the keys alone would be more
