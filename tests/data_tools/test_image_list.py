import csv
import gzip
import json
import os
import pickle
import tracemalloc
from collections import Counter

import pytest
from messages import refusal
from small_files import upload, write_files

from data_tools.sources.image_list import open_image_list
from data_tools.sources.source import Item, SourceOptions
from vitscale.ground.errors import DataError, RecipeError


def listed(*files, image=None, label=None, **others) -> list[Item]:
    options = SourceOptions(image_field=image, label_field=label, **others)
    source = pickle.loads(pickle.dumps(open_image_list("source", list(map(str, files)), options)))  # as it travels
    assert not source.streams
    return [item for part in range(len(files)) for item in source.items(part, Counter())]


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
        ("x.ndjson", '\ufeff{"url": "a/1.jpg", "cls": ["cat"]}\r\n{"url": "a/2.jpg", "cls": ["cat", "dog", "cat"]}\r'),
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


def test_labels_that_are_none(tmp_path):
    rows = ["", "-1", "0", "07"]
    path = write(tmp_path / "x.csv", "path,label\n" + "".join(f"{i}.jpg,{row}\n" for i, row in enumerate(rows)))
    assert [item.labels for item in listed(path)] == [(), (), ("0",), ("07",)]
    values = [None, -1, 0, 12, "", [], [3, -1], [1, "x"]]
    lines = [json.dumps({"path": "1.jpg", "label": value}) for value in values]
    path = write(tmp_path / "x.jsonl", "\n".join(lines))
    assert [item.labels for item in listed(path)] == [(), (), ("0",), ("12",), (), (), ("3",), ("1", "x")]


def test_fields_that_people_name(tmp_path):
    path = write(tmp_path / "x.csv", "id,shot,species,path\n7,1.jpg,cat,thumb.jpg\n")
    assert listed(path, image="shot", label="species") == [("1.jpg", ("cat",), b"1.jpg")]
    assert listed(path, unlabelled=True) == [("thumb.jpg", (), b"thumb.jpg")]
    path = write(tmp_path / "y.csv", "1.jpg\n2.jpg\n")
    assert [item.labels for item in listed(path, unlabelled=True)] == [(), ()]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("x.csv", "id,label\n1,cat\n"), ("x.csv", "path,url,label\n1,2,cat\n"), ("x.csv", "path,id\n1,cat\n")),
        *(("x.csv", "path,label,target\n1,cat,2\n"), ("x.csv", "path;label\n1.jpg;cat\n")),
        *(("x.csv", "a/1.jpg,cat,3\n"), ("x.csv", "a/1.jpg\n"), ("x.csv", "path,label,label\n")),
        *(("x.jsonl", '{"id": 1, "label": 2}'), ("x.json", "{}")),
    ],
)
def test_lists_that_cannot_be_told(tmp_path, name, text):
    with refusal(RecipeError, "image-list", f"{name} {text!r}", {tmp_path: "FOLDER"}):
        listed(write(tmp_path / name, text))


HEAD = b"path,label\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.csv", b""),
        ("x.csv", HEAD + b"1.jpg,cat\n2.jpg\n"),
        ("x.csv", HEAD + b"1,2.jpg,cat\n"),
        ("x.csv", HEAD + b"1.jpg,cat\n,cat\n"),
        ("x.csv", HEAD + b"../,cat\n"),
        ("x.csv", HEAD + b"1.jpg,cat\n\n2.jpg,caf\xe9\n"),
        ("x.csv", "path,label\n1.jpg,cat\n".encode("utf-16")),
        ("x.csv", HEAD + b'"1.jpg,cat\n2.jpg,dog\n'),
        ("x.csv", HEAD + b'"' + b"1.jpg,cat\n" * 100_000),
        ("x.csv", HEAD + bytes(9_000_000)),
        ("x.jsonl", b""),
        ("x.jsonl", b'{"path": "1.jpg", "label": 1}\n{"path": '),
        ("x.jsonl", b'{"path": "1.jpg", "label": 1}\n\n\xff'),
        ("x.jsonl", b'{"path": "1.jpg", "label": 1}\n[1]'),
        ("x.jsonl", b'{"path": "1.jpg", "label": 1}\n{"label": 1}'),
        ("x.jsonl", b'{"path": "1.jpg", "label": 1}\n{"path": "2.jpg"}'),
        ("x.jsonl", b'{"path": "1.jpg", "label": [[1]]}'),
        ("x.jsonl", b'{"path": "1.jpg", "label": -2}'),
        ("x.jsonl", b'{"path": "\\ud800.jpg", "label": 1}'),
        ("x.jsonl", b'{"path": "1.jpg", "label": "\\udc00"}'),
        ("x.jsonl", b"[" * 100_000),
        ("x.jsonl", b'{"path": 1' + b"0" * 5000 + b"}"),
    ],
)
def test_damage_is_told_with_its_line(tmp_path, name, text):
    with refusal(DataError, "image-list", f"{name} {text[:60]!r}", {tmp_path: "FOLDER"}):
        listed(write(tmp_path / name, text))


def test_a_list_that_is_missing_or_cut(tmp_path):
    with pytest.raises(DataError, match=r"absent\.csv"):
        listed(tmp_path / "absent.csv")
    cut = gzip.compress(HEAD + os.urandom(1000).hex().encode())[:-50]
    with pytest.raises(DataError, match=r"cut\.csv"):
        listed(write(tmp_path / "cut.csv", cut))


@pytest.mark.parametrize(
    ("path", "key"),
    [
        *(("a/1.jpg", "a/1.jpg"), ("./a//b/../1.jpg", "a/1.jpg"), ("../a/1.jpg", "a/1.jpg")),
        *(("/data/a/1.jpg", "data/a/1.jpg"), ("s3://bucket/a/1.jpg", "bucket/a/1.jpg")),
        *(("https://host/i?id=5", "host/i?id=5"), (".hidden/1.jpg", ".hidden/1.jpg"), ("a/...jpg", "a/...jpg")),
    ],
)
def test_keys(tmp_path, path, key):
    assert listed(write(tmp_path / "x.csv", f"path,label\n{path},cat\n")) == [(key, ("cat",), path.encode())]


def test_keys_below_the_list_are_relative_to_it(tmp_path):
    """However the list names them: a dataset does not depend on where its folder is mounted."""
    inside, beside = tmp_path / "a" / "cat" / "1.jpg", tmp_path / "ab" / "2.jpg"
    rows = f"path,label\n{inside},cat\n{beside},cat\n../ab/3.jpg,cat\n"
    items = listed(write_files(tmp_path / "a", ("x.csv", rows.encode())) / "x.csv")
    assert [item.key for item in items] == ["cat/1.jpg", str(beside).lstrip("/"), "ab/3.jpg"]
    assert items[0].content == str(inside).encode()


def test_relative_paths_start_at_the_list(tmp_path, monkeypatch):
    folder = tmp_path / "lists"
    write_files(tmp_path, ("1.jpg", b"one"), ("2.jpg", b"two"))
    paths = ["../1.jpg", str(tmp_path / "1.jpg"), "memory://images/2.jpg", "absent.jpg", "memory://images/absent.jpg"]
    near, far = (
        "path,label\n" + "".join(f"{path},cat\n" for path in each) for each in (paths, ["../2.jpg", *paths[2:]])
    )
    write_files(folder, ("x.csv", near.encode()), ("far.csv", far.encode()))
    upload(tmp_path / "2.jpg", "memory://images/2.jpg")
    upload(folder / "far.csv", "memory://images/lists/x.csv")
    monkeypatch.chdir(folder)
    for where, expected in (
        (str(folder / "x.csv"), [b"one", b"one", b"two"]),
        ("x.csv", [b"one", b"one", b"two"]),
        ("memory://images/lists/x.csv", [b"two", b"two"]),
    ):
        source = open_image_list("source", [where], SourceOptions())
        contents = [item.content for item in source.items(0, Counter())]
        assert [source.read(0, content) for content in contents[:-2]] == expected
        for content in [*contents[-2:], b"a\0b.jpg"]:
            with pytest.raises(OSError):
                source.read(0, content)


@pytest.mark.parametrize("path", ["{}", "file://{}", "LOCAL://{}", "sftp://localhost{}", "../../1.jpg::file://{}.zip"])
@pytest.mark.parametrize("line", ["{},0", '{{"path": "{}", "label": 0}}'])
def test_a_list_at_a_url_reads_nothing_of_this_machine(tmp_path, path, line):
    row = line.format(path.format(tmp_path / "1.jpg"))
    file = write(tmp_path / ("x.jsonl" if row.startswith("{") else "x.csv"), f"{line.format('a/1.jpg')}\n{row}\n")
    assert len(listed(file)) == len(listed(file.as_uri())) == 2
    with pytest.raises(DataError, match=r"memory:.*line 2\b.*1\.jpg"):
        listed(upload(file, f"memory://strangers/{file.name}"))


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
