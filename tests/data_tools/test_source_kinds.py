import os
import pickle
from collections import Counter
from pathlib import Path

import pytest
from messages import refusal
from small_files import tar_bytes, upload, write_files, write_tar

from data_tools.sources import SourceOptions, open_source
from data_tools.sources.folder import FolderSource
from data_tools.sources.image_list import ImageListSource
from data_tools.sources.tar import NestedTarSource, TarSource
from vitscale.ground.errors import DataError, RecipeError

NONE = SourceOptions()


def touch(root: Path, *names: str) -> Path:
    return write_files(root, *((name, b"") for name in names))


def test_kinds_are_told_by_what_is_there(tmp_path):
    assert isinstance(open_source(str(touch(tmp_path / "a", "cat/1.jpg")), None, NONE), FolderSource)
    assert isinstance(open_source(str(touch(tmp_path / "b", "1.jpg", "labels.csv")), None, NONE), FolderSource)
    tars = touch(tmp_path / "c", "readme.txt")
    write_tar(tars / "1.tar", "cat/1.jpg"), write_tar(tars / "0.tar", "dog/2.jpg")
    source = open_source(str(tars), None, NONE)
    assert isinstance(source, TarSource) and [Path(part).name for part in source.parts] == ["0.tar", "1.tar"]
    (tmp_path / "list.csv").write_text("path,label\na.jpg,cat\n")
    assert isinstance(open_source(str(tmp_path / "list.csv"), None, NONE), ImageListSource)
    whole = write_tar(tmp_path / "whole.tar", ("n01440764.tar", tar_bytes("n01440764_1.JPEG")))
    assert isinstance(open_source(str(whole), None, NONE), NestedTarSource)


def test_patterns(tmp_path):
    for number in range(3):
        write_tar(tmp_path / f"train-{number:03d}.tar", f"cat/{number}.jpg")
    write_tar(tmp_path / "extra-000.tar", "cat/9.jpg")
    for pattern, expected in (
        ("train-*.tar", ["train-000.tar", "train-001.tar", "train-002.tar"]),
        ("train-{001..002}.tar", ["train-001.tar", "train-002.tar"]),
        ("*a*-{000..000}.tar", ["extra-000.tar", "train-000.tar"]),
    ):
        source = open_source(str(tmp_path / pattern), None, NONE)
        assert [Path(part).name for part in source.parts] == expected
    odd = write_tar(tmp_path / "odd[1].tar", "cat/1.jpg")
    assert open_source(str(odd), None, NONE).parts == (str(odd),)


NOT_UNDERSTOOD = [
    *("absent", "absent-*.tar", "train-{003..001}.tar", "train-{001..009}.tar", "images.zip", "mixed", "beside"),
    *("splits", "records", "hub/*/0000.parquet", "tars/*", "pipe.tar"),
]


@pytest.mark.parametrize("src", NOT_UNDERSTOOD)
def test_what_is_not_understood(tmp_path, src):
    touch(tmp_path, "images.zip", "train-001.tar")
    touch(tmp_path / "mixed", "a.tar", "b.parquet")
    touch(tmp_path / "beside", "a.tar", "cat/1.jpg")
    touch(tmp_path / "records", "train-00000-of-00001", "validation-00000-of-00001")
    touch(tmp_path / "hub", "test/0000.parquet", "train/0000.parquet")
    touch(tmp_path / "tars", "imagenet-train-0.tar", "imagenet-val-0.tar")
    os.mkfifo(tmp_path / "pipe.tar")
    touch(tmp_path / "splits", "train-00000-of-00001.parquet", "validation-00000-of-00001.parquet")
    with refusal(RecipeError, "sources", src, {tmp_path: "FOLDER"}):
        open_source(str(tmp_path / src), None, NONE)


def test_a_wrong_guess_tells_what_was_seen(tmp_path):
    touch(tmp_path / "images", "cat/1.jpg")
    with pytest.raises(RecipeError, match=r"\bcat\b"):
        open_source(str(tmp_path / "images"), "tar", NONE)
    with pytest.raises(RecipeError, match=r"images/cat/1\.jpg: .*\.tar\.gz"):
        open_source(str(tmp_path / "images" / "cat" / "1.jpg"), "tar", NONE)
    (tmp_path / "text.tar").write_text("a text, no archive")
    with pytest.raises(DataError, match=r"text\.tar"):
        open_source(str(tmp_path / "text.tar"), None, NONE)
    with pytest.raises(RecipeError, match=r"\blist\b"):
        (tmp_path / "list.csv").write_text("path,label\na.jpg,cat\n")
        open_source(str(tmp_path / "list.csv"), None, SourceOptions(labels="x.csv"))


def listed(root: Path, kind: str = "folder", options: SourceOptions = NONE):
    source = open_source(str(root), kind, options)
    ignored: Counter[str] = Counter()
    items = sorted(source.items(0, ignored))
    return pickle.loads(pickle.dumps(source)), items, +ignored  # as it travels to a worker


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_files_and_what_is_ignored(tmp_path, kind):
    images = ("a/1.jpg", "b/2.webp", os.fsdecode(b"caf\xe9/\xff.jpg"))
    others = ("a/notes.txt", "README", ".git/x.jpg", "a/._1.jpg", "__MACOSX/a/1.jpg")
    place = (write_files if kind == "folder" else write_tar)(tmp_path / "images.tar", *images, *others)
    source, items, ignored = listed(place, kind)
    keys = ["a/1.jpg", "b/2.webp", "caf\\xe9/\\xff.jpg"]
    assert [(item.key, item.labels) for item in items] == [(key, None) for key in keys]
    assert [source.read(0, item.content) for item in items] == [os.fsencode(name) for name in images]
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


def test_a_folder_that_vanishes(tmp_path):
    source, _, _ = listed(write_files(tmp_path / "images", "a/1.jpg"))
    (tmp_path / "images").rename(tmp_path / "away")
    with pytest.raises(DataError, match=r"images"):
        list(source.items(0, Counter()))


def test_labels_from_a_list(tmp_path):
    root = write_files(tmp_path / "images", "x/1.jpg", "2.jpg")
    (tmp_path / "labels.csv").write_text("x/1.jpg,cat\n2.jpg,dog\n")
    _, items, _ = listed(root, options=SourceOptions(labels=str(tmp_path / "labels.csv")))
    assert [(item.key, item.labels) for item in items] == [("2.jpg", ("dog",)), ("x/1.jpg", ("cat",))]


def test_folders_of_a_server_that_lead_into_each_other(tmp_path):
    """Links of a web server may go on for ever."""
    (tmp_path / "x.jpg").touch()
    for depth in (50, 150):
        upload(tmp_path / "x.jpg", f"memory://deep-{depth}" + "/a" * depth + "/x.jpg")
    assert len(list(open_source("memory://deep-50", "folder", NONE).items(0, Counter()))) == 1
    with pytest.raises(DataError):
        list(open_source("memory://deep-150", "folder", NONE).items(0, Counter()))
