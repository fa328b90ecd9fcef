import io
import os
import pickle
import tarfile
from pathlib import Path

import pytest

from data_tools.sources import check_source, list_images, open_source
from vitscale.errors import DataError, RecipeError


def make_folder(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(name))
    return root


def make_tar(path: Path, *names: str | tuple[str, bytes, str], mode: str = "w") -> Path:
    """A tar of files that contain their own name, and of links (name, type, target)."""
    with tarfile.open(path, mode) as archive:
        for name in names:
            if isinstance(name, tuple):
                info = tarfile.TarInfo(name[0])
                info.type, info.linkname = name[1], name[2]
                archive.addfile(info)
            else:
                info = tarfile.TarInfo(name)
                info.size = len(name.encode("utf-8", "surrogateescape"))
                archive.addfile(info, io.BytesIO(name.encode("utf-8", "surrogateescape")))
    return path


def listed(path: Path, work: Path, classes=None):
    source = open_source(path, work)
    listing = list_images(source, classes)
    copy = pickle.loads(pickle.dumps(source))  # as it travels to a worker
    return {entry.key: (entry.class_name, copy.read(entry.location)) for entry in listing.entries}, listing


MODES = {"tar": "w", "tar.gz": "w:gz", "tgz": "w:gz", "tar.xz": "w:xz", "tar.bz2": "w:bz2"}


@pytest.mark.parametrize("kind", ["folder", *MODES])
def test_equal_images_give_equal_listings(tmp_path, kind):
    names = ("train/v2/cat/b.jpg", "train/v2/dog/x/a.PNG")
    if kind == "folder":
        path = make_folder(tmp_path / "images", *names)
    else:
        path = make_tar(tmp_path / f"images.{kind}", *names, mode=MODES[kind])
    found, listing = listed(path, tmp_path)
    assert found == {"cat/b.jpg": ("cat", names[0].encode()), "dog/x/a.PNG": ("dog", names[1].encode())}
    assert not listing.ignored


def test_hostile_paths_are_only_keys(tmp_path):
    names = ("/etc/cat/1.jpg", "../../etc/dog/2.jpg", "./etc//cat/../cat/3.jpg")
    found, _ = listed(make_tar(tmp_path / "evil.tar", *names), tmp_path)
    assert sorted(found) == ["cat/1.jpg", "cat/cat/3.jpg", "dog/2.jpg"]
    assert [path.name for path in tmp_path.iterdir()] == ["evil.tar"]


def test_what_is_no_image_is_counted(tmp_path):
    names = ["a/1.jpg", "b/2.webp", "a/notes.txt", "README", ".git/x.jpg", "a/._1.jpg", "__MACOSX/a/1.jpg"]
    _, from_folder = listed(make_folder(tmp_path / "images", *names), tmp_path)
    _, from_tar = listed(make_tar(tmp_path / "images.tar", *names), tmp_path)
    assert from_folder.ignored == from_tar.ignored == {"hidden": 3, "no image suffix": 2}
    assert [entry.key for entry in from_folder.entries] == ["a/1.jpg", "b/2.webp"]


def test_odd_files_of_a_folder(tmp_path):
    root = make_folder(tmp_path / "images", "cat/1.jpg", "dog/2.jpg")
    os.mkfifo(root / "cat" / "pipe.jpg")  # opening it would wait for ever
    (root / "cat" / "broken.jpg").symlink_to("nowhere.jpg")
    (root / "cat" / "circle").symlink_to(root)
    (root / "dog" / "linked.jpg").symlink_to(root / "cat" / "1.jpg")
    source = open_source(root, tmp_path)
    listing = list_images(source)
    assert [entry.key for entry in listing.entries] == ["cat/1.jpg", "cat/broken.jpg", "dog/2.jpg", "dog/linked.jpg"]
    assert listing.ignored == {"neither file nor folder": 1}
    with pytest.raises(OSError, match="No such file"):
        source.read(listing.entries[1].location)


def test_links_and_repeated_names_of_a_tar(tmp_path):
    path = make_tar(
        tmp_path / "a.tar",
        "cat/1.jpg",
        ("dog/hard.jpg", tarfile.LNKTYPE, "cat/1.jpg"),
        ("dog/soft.jpg", tarfile.SYMTYPE, "../cat/1.jpg"),
        ("dog/out.jpg", tarfile.SYMTYPE, "/etc/passwd"),
        "./cat/1.jpg",
    )
    found, listing = listed(path, tmp_path)
    assert {key: content for key, (_, content) in found.items()} == {
        "cat/1.jpg": b"./cat/1.jpg",
        "dog/hard.jpg": b"cat/1.jpg",
        "dog/soft.jpg": b"cat/1.jpg",
    }
    assert listing.ignored == {"neither file nor folder": 1, "replaced later in the archive": 1}


def test_names_that_are_no_utf8(tmp_path):
    root = make_folder(tmp_path / "images", "dog/1.jpg")
    make_folder(root, os.fsdecode(b"caf\xe9/placeholder.txt"))
    (root / os.fsdecode(b"caf\xe9/\xff.jpg")).write_bytes(b"x")
    path = make_tar(tmp_path / "a.tar", "dog/1.jpg", os.fsdecode(b"caf\xe9/\xff.jpg"))
    for source in (root, path):
        found, _ = listed(source, tmp_path)
        assert sorted(found) == ["caf\\xe9/\\xff.jpg", "dog/1.jpg"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), r"no images in the source \(found: nothing\)"),
        (("a/x.txt", "b/.y.jpg"), "found: 1 hidden, 1 no image suffix"),
        (("1.jpg", "2.jpg", "cat/3.jpg"), r"2 of 3 images lie outside of class folders: '1\.jpg', '2\.jpg'"),
        (("train/1.jpg", "train/cat/3.jpg"), r"1 of 2 images lie beside the folders in 'train'"),
    ],
)
def test_sources_without_classes(tmp_path, names, message):
    (tmp_path / "images").mkdir()
    with pytest.raises(DataError, match=message):
        listed(make_folder(tmp_path / "images", *names), tmp_path)


def test_known_classes(tmp_path):
    root = make_folder(tmp_path / "images", "cat/1.jpg", "cat/sub/2.jpg")
    found, _ = listed(root, tmp_path, ["dog", "cat"])
    assert sorted(found) == ["cat/1.jpg", "cat/sub/2.jpg"]
    with pytest.raises(DataError, match=r"1 of 2 classes of the source are not in --classes: 'cow'"):
        listed(make_folder(root, "cow/1.jpg"), tmp_path, ["dog", "cat"])


NAMES = [f"c{i % 2}/{i}.jpg" for i in range(50)]


@pytest.mark.parametrize("kind", MODES)
def test_damaged_archives(tmp_path, kind):
    path = make_tar(tmp_path / f"images.{kind}", *NAMES, mode=MODES[kind])
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"this is no archive at all" * 100, b""):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=path.name):
            listed(path, tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tar: tar[: 10 * 1024], "truncated: no end-of-archive mark"),  # exactly between two files
        (lambda tar: tar[: 10 * 1024 + 100], "truncated"),
        (lambda tar: tar[: 20 * 1024 + 20] + b"?" + tar[20 * 1024 + 21 :], "a damaged header at byte 20,480"),
        (lambda tar: tar + tar, "data after the end of the archive"),
    ],
)
def test_nothing_of_a_tar_is_lost_silently(tmp_path, damage, message):
    path = make_tar(tmp_path / "images.tar", *NAMES)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        listed(path, tmp_path)


def test_unknown_kinds(tmp_path):
    (tmp_path / "images.zip").write_bytes(b"PK")
    with pytest.raises(RecipeError, match=r"none of \.tar"):
        check_source(tmp_path / "images.zip")
    with pytest.raises(RecipeError, match="no such file"):
        check_source(tmp_path / "absent")
