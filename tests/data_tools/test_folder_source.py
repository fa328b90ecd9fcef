import os
import pickle
from collections import Counter
from pathlib import Path

import pytest
from small_files import write_files

from data_tools.sources import SourceOptions, open_source
from vitscale.ground.errors import DataError


def listed(root: Path, options: SourceOptions | None = None):
    source = open_source(str(root), "folder", options or SourceOptions())
    ignored: Counter[str] = Counter()
    items = sorted(source.items(0, ignored))
    return pickle.loads(pickle.dumps(source)), items, +ignored  # as it travels to a worker


def test_files_and_what_is_ignored(tmp_path):
    names = ("a/1.jpg", "b/2.webp", "a/notes.txt", "README", ".git/x.jpg", "a/._1.jpg", "__MACOSX/a/1.jpg")
    source, items, ignored = listed(write_files(tmp_path, *names))
    assert [(item.key, item.labels) for item in items] == [("a/1.jpg", None), ("b/2.webp", None)]
    assert [source.read(0, item.content) for item in items] == [b"a/1.jpg", b"b/2.webp"]
    assert ignored == {"hidden": 3, "no image suffix": 2}


def test_odd_files(tmp_path):
    root = write_files(tmp_path, "cat/1.jpg", "dog/2.jpg")
    os.mkfifo(root / "cat" / "pipe.jpg")  # opening it would wait for ever
    (root / "cat" / "broken.jpg").symlink_to("nowhere.jpg")
    (root / "cat" / "circle").symlink_to(root)
    (root / "cat" / "self.jpg").symlink_to("self.jpg")
    (root / "dog" / "linked.jpg").symlink_to(root / "cat" / "1.jpg")
    (root / "fox").symlink_to(root / "dog")  # one folder by two names is no circle
    source, items, ignored = listed(root)
    keys = ["cat/1.jpg", "cat/broken.jpg", "dog/2.jpg", "dog/linked.jpg", "fox/2.jpg", "fox/linked.jpg"]
    assert [item.key for item in items] == keys
    assert ignored == {"neither file nor folder": 2, "link to a folder above": 1}
    with pytest.raises(OSError, match="No such file"):
        source.read(0, items[1].content)


def test_names_that_are_no_utf8(tmp_path):
    name = b"caf\xe9/\xff.jpg"
    source, items, _ = listed(write_files(tmp_path, os.fsdecode(name)))
    assert [item.key for item in items] == ["caf\\xe9/\\xff.jpg"]
    assert source.read(0, items[0].content) == name


def test_a_folder_that_vanishes(tmp_path):
    source, _, _ = listed(write_files(tmp_path / "images", "a/1.jpg"))
    (tmp_path / "images").rename(tmp_path / "away")
    with pytest.raises(DataError, match=r"images"):
        list(source.items(0, Counter()))


def test_labels_from_a_list(tmp_path):
    root = write_files(tmp_path / "images", "x/1.jpg", "2.jpg")
    (tmp_path / "labels.csv").write_text("x/1.jpg,cat\n2.jpg,dog\n")
    _, items, _ = listed(root, SourceOptions(labels=str(tmp_path / "labels.csv")))
    assert [(item.key, item.labels) for item in items] == [("2.jpg", ("dog",)), ("x/1.jpg", ("cat",))]
