import errno
import gzip
import lzma
import os
import shutil
import struct
import subprocess
import tarfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
from datasets_on_disk import items_of
from small_files import tar_bytes, upload, write_files, write_tar

from data_tools.sources.source import LONG, Item, SourceOptions
from data_tools.sources.tar import is_tar, open_tars
from vitscale.ground.errors import DataError, RecipeError

MODES = {"tar": "w", "tar.gz": "w:gz", "tgz": "w:gz", "tar.xz": "w:xz", "txz": "w:xz", "tar.bz2": "w:bz2"}

NAMES = [f"c{i % 2}/{i}.jpg" for i in range(50)]


def listed(*paths: Path | str, ignored: Counter | None = None, **options: str) -> list[Item]:
    return items_of(open_tars("SRC", [str(path) for path in paths], SourceOptions(**options)), ignored)


@pytest.mark.parametrize("kind", MODES)
def test_every_compression_gives_the_same(tmp_path, kind):
    path = write_tar(
        tmp_path / f"images.{kind}", "train/cat/b.jpg", "train/dog/x/a.PNG", "c" * 150 + "/é.jpg", mode=MODES[kind]
    )
    with tarfile.open(path) as peer:
        expected = [(name, None, os.fsencode(name)) for name in peer.getnames()]
    assert is_tar(str(path)) and listed(path) == expected
    assert open_tars("SRC", [str(path)], SourceOptions()).streams == (kind != "tar")
    assert listed(upload(path, f"memory://bucket/images.{kind}")) == expected
    with pytest.raises(DataError, match=r"absent\.tar"):
        listed("memory://bucket/absent.tar")


@pytest.mark.parametrize("style", ["gnu", "pax", "ustar", "v7"])
def test_archives_of_gnu_tar(tmp_path, style):
    tar = shutil.which("tar")
    if tar is None:
        pytest.skip("no tar command")
    # v7 has room for 100 characters
    names = ["cat/1.jpg", f"dog/{'d' * 40}/{'e' * 40 if style == 'v7' else 'e' * 90}.jpg"]
    folder, path = write_files(tmp_path / "in", *((name, name.encode() * 100) for name in names)), tmp_path / "a.tar"
    subprocess.run([tar, f"--format={style}", "-cf", path, "-C", folder, "."], check=True)
    assert sorted(listed(path)) == [(name, None, name.encode() * 100) for name in names]


def test_plain_and_compressed_parts(tmp_path):
    first = write_tar(tmp_path / "a.tar", "cat/1.jpg", ("cat/2.jpg", tarfile.SYMTYPE, "1.jpg"))
    second = write_tar(tmp_path / "b.tar.gz", "dog/2.jpg", mode="w:gz")
    found = {key: content for key, _, content in listed(first, second)}
    assert found == {"cat/1.jpg": b"cat/1.jpg", "cat/2.jpg": b"cat/1.jpg", "dog/2.jpg": b"dog/2.jpg"}


def test_hostile_paths_are_only_keys(tmp_path):
    path = write_tar(
        tmp_path / "evil.tar", "/etc/cat/1.jpg", "../../etc/dog/2.jpg", "./etc//cat/../cat/3.jpg", "x/" * 3000
    )
    ignored = Counter()
    keys = [key for key, _, _ in listed(path, ignored=ignored)]
    assert keys == ["etc/cat/1.jpg", "etc/dog/2.jpg", "etc/cat/cat/3.jpg"] and ignored == {LONG: 1}
    assert [path.name for path in tmp_path.iterdir()] == ["evil.tar"]


def test_links_and_repeated_names(tmp_path):
    path = write_tar(
        tmp_path / "a.tar",
        "cat/1.jpg",
        ("dog/hard.jpg", tarfile.LNKTYPE, "cat/1.jpg"),
        ("dog/soft.jpg", tarfile.SYMTYPE, "../cat/1.jpg"),
        ("dog/out.jpg", tarfile.SYMTYPE, "/etc/passwd"),
        "./cat/1.jpg",
        ("dog/later.jpg", tarfile.SYMTYPE, "hard.jpg"),
        ("dog/latest.jpg", tarfile.LNKTYPE, "cat/1.jpg"),
        ("dog/pipe.jpg", tarfile.FIFOTYPE, ""),
        "dog/b.tar",
    )
    ignored: Counter[str] = Counter()
    assert listed(path, ignored=ignored) == [
        ("cat/1.jpg", None, b"cat/1.jpg"),
        ("dog/hard.jpg", None, b"cat/1.jpg"),
        ("dog/soft.jpg", None, b"cat/1.jpg"),
        ("cat/1.jpg", None, b"./cat/1.jpg"),
        ("dog/later.jpg", None, b"cat/1.jpg"),
        ("dog/latest.jpg", None, b"./cat/1.jpg"),
    ]
    assert ignored == {"neither file nor folder": 2, "archive inside of the archive": 1}


def test_links_in_a_stream_are_refused(tmp_path):
    links = (("dog/hard.jpg", tarfile.LNKTYPE, "cat/1.jpg"), ("notes", tarfile.SYMTYPE, "cat/1.jpg"))
    path = write_tar(tmp_path / "a.tar.gz", "cat/1.jpg", *links, mode="w:gz")
    with pytest.raises(DataError, match=r"'dog/hard\.jpg'.*'cat/1\.jpg'.*--hard-dereference"):
        listed(path)
    ignored: Counter[str] = Counter()
    assert len(listed(write_tar(path, "cat/1.jpg", links[1], mode="w:gz"), ignored=ignored)) == 1
    assert ignored == {"neither file nor folder": 1}


def test_links_within_the_tar_of_a_class(tmp_path):
    link = ("2.jpg", tarfile.LNKTYPE, "1.jpg")
    inner = write_tar(tmp_path / "b.tar", ("1.jpg", b"image"), link)
    path = write_tar(tmp_path / "a.tar", ("a.tar", tar_bytes("1.jpg")), ("b.tar", inner.read_bytes()))
    assert listed(path)[1:] == [("b/1.jpg", ("b",), b"image"), ("b/2.jpg", ("b",), b"image")]


@pytest.mark.parametrize("kind", ["tar", "tar.gz"])
@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda tar: tar[: 10 * 1024], ""),  # exactly between two files
        (lambda tar: tar[: 10 * 1024 + 100], ""),
        (lambda tar: tar[: 20 * 1024 + 20] + b"?" + tar[20 * 1024 + 21 :], ".*20,480"),
        (lambda tar: tar + tar, ""),
    ],
)
def test_nothing_of_a_tar_is_lost_silently(tmp_path, damage, named, kind):
    tar = damage(tar_bytes(*NAMES))
    (tmp_path / f"images.{kind}").write_bytes(tar if kind == "tar" else gzip.compress(tar))
    with pytest.raises(DataError, match=rf"images\.{kind}{named}"):
        listed(tmp_path / f"images.{kind}")


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "tar.xz", "tar.bz2"])
def test_truncation_at_every_place_and_what_is_no_archive(tmp_path, kind):
    path = write_tar(tmp_path / f"a.{kind}", "cat/1.jpg", ("dog/2.jpg", os.urandom(700)), "dog/3.jpg", mode=MODES[kind])
    whole = path.read_bytes()
    # A tar is whole with the first block of its end mark.
    needed = 5 * 512 + 1024 + 512 if kind == "tar" else len(whole)
    for damaged in (b"this is no archive" * 100, *(whole[:size] for size in range(0, needed, 37))):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=path.name):
            listed(path)


def test_damage_at_every_place_of_a_header(tmp_path):
    """Every flipped bit of a header is told, or makes no difference (the padding of its checksum)."""
    path = tmp_path / "a.tar"
    whole = tar_bytes("cat/1.jpg", "dog/2.jpg", "dog/3.jpg")
    path.write_bytes(whole)
    expected = listed(path)
    undone = 0
    for place in range(1024, 1536):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            assert listed(path) == expected
            undone += 1
        except DataError:
            pass
    assert undone <= 2


def header(name: str, kind: bytes = b"0", size: int = 0) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        (b"0", -1),
        *((kind, size) for kind in (b"0", b"L", b"x", b"S", b"g") for size in (-512, -2048, 1 << 40, 1 << 70)),
    ],
)
def test_hostile_sizes(tmp_path, kind, size):
    """Sizes in base 256, also negative ones, neither hang nor fill the memory."""
    content = tar_bytes("cat/1.jpg")[:1024] + header("cat/2.jpg", kind, size) + tar_bytes("cat/3.jpg")
    assert content[1024 + 124] in b"\x80\xff"
    for suffix in ("tar", "tar.xz"):
        path = tmp_path / f"a.{suffix}"
        path.write_bytes(content if suffix == "tar" else lzma.compress(content))
        with pytest.raises(DataError, match=path.name):
            listed(path)


def test_endless_sparse_map(tmp_path):
    """A map of holes that promises more than there is; tarfile would read on for ever."""
    record = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n"
    pax = header("p", b"x", len(record)) + record.ljust(512, b"\0")
    (tmp_path / "a.tar").write_bytes(pax + header("cat/1.jpg", size=512) + b"9" * 512)
    with pytest.raises(DataError, match=r"a\.tar"):
        listed(tmp_path / "a.tar")


@pytest.mark.parametrize("count", [1000, 1001])
def test_global_records_are_few(tmp_path, count):
    records = {f"x{number}": "" for number in range(count)}
    with tarfile.open(tmp_path / "a.tar", "w", pax_headers=records) as archive:
        archive.addfile(tarfile.TarInfo("cat/1.jpg"))
    with pytest.raises(DataError) if count > 1000 else nullcontext():
        assert len(listed(tmp_path / "a.tar")) == 1


def test_a_header_of_digits_takes_no_quadratic_time(tmp_path):
    """CVE-2024-6232, which older versions of Python have."""
    with tarfile.open(tmp_path / "a.tar", "w", pax_headers={"comment": "1" * 5_000_000}) as archive:
        archive.addfile(tarfile.TarInfo("cat/1.jpg"))
    with pytest.raises(DataError):
        listed(tmp_path / "a.tar")


def test_headers_within_headers(tmp_path):
    long = header("l", b"L", 10) + b"x".ljust(512, b"\0")
    (tmp_path / "a.tar").write_bytes(long * 5000)
    with pytest.raises(DataError, match=r"a\.tar"):
        listed(tmp_path / "a.tar")


def test_an_archive_that_became_shorter(tmp_path):
    path = write_tar(tmp_path / "a.tar", "cat/1.jpg")
    source = open_tars("SRC", [str(path)], SourceOptions())
    (item,) = source.items(0, Counter())
    assert struct.unpack("<QQ", item.content) == (512, 9)
    path.write_bytes(path.read_bytes()[:515])
    with pytest.raises(OSError, match=r"shorter.*a\.tar") as caught:
        source.read(0, item.content)
    assert caught.value.errno == errno.EIO


def inner_tars(prefix: str = "") -> tuple[tuple[str, bytes], ...]:
    return (
        (f"{prefix}n01440764.tar", tar_bytes("n01440764_10026.JPEG", "sub/n01440764_2.JPEG", "notes.txt")),
        (f"{prefix}n01443537.tar", tar_bytes("n01443537_1.JPEG")),
    )


@pytest.mark.parametrize("kind", ["tar", "tar.gz"])
@pytest.mark.parametrize("prefix", ["", "./", "winter21_whole/"])
def test_tars_of_classes(tmp_path, kind, prefix):
    members = ((f"{prefix}._n01440764.tar", b"mac"), (f"{prefix}README", b""), *inner_tars(prefix))
    path = write_tar(tmp_path / f"ILSVRC2012_img_train.{kind}", *members, mode=MODES[kind])
    ignored: Counter[str] = Counter()
    assert listed(path, ignored=ignored) == [
        ("n01440764/n01440764_10026.JPEG", ("n01440764",), b"n01440764_10026.JPEG"),
        ("n01440764/sub/n01440764_2.JPEG", ("n01440764",), b"sub/n01440764_2.JPEG"),
        ("n01443537/n01443537_1.JPEG", ("n01443537",), b"n01443537_1.JPEG"),
    ]
    assert ignored == {"hidden": 1, "no image suffix": 2}


@pytest.mark.parametrize("kind", ["tar", "tar.gz"])
@pytest.mark.parametrize(
    "damage",
    [lambda tar: tar[:512], lambda tar: tar[:1024], lambda tar: tar[:700], lambda tar: tar + tar, lambda tar: b""],
)
def test_damage_within_a_tar_of_a_class(tmp_path, damage, kind):
    """Also where the tar that follows would go on as if nothing were missing."""
    (first, _), second = inner_tars()
    members = ((first, damage(tar_bytes("n01440764_10026.JPEG"))), second)
    path = write_tar(tmp_path / f"train.{kind}", *members, mode=MODES[kind])
    with pytest.raises(DataError, match=r"n01440764\.tar"):
        listed(path)


def test_tars_of_classes_that_are_not_understood(tmp_path):
    path = write_tar(tmp_path / "a.tar", *inner_tars(), ("n3.tar.gz", b""))
    with pytest.raises(DataError, match=r"'n3\.tar\.gz'"):
        listed(path)
    path = write_tar(tmp_path / "b.tar", *inner_tars(), "x/1.jpg")
    with pytest.raises(DataError, match=r"'x/1\.jpg'"):
        listed(path)
    for options, message in (({"labels": "x.txt"}, "--labels"), ({"label_field": "x"}, "--label-field x")):
        with pytest.raises(RecipeError, match=message):
            listed(write_tar(tmp_path / "c.tar", *inner_tars()), **options)


def test_a_tar_for_every_class(tmp_path):
    """As they lie in a folder, once the outer tar has been unpacked."""
    paths = [write_files(tmp_path, file) / file[0] for file in inner_tars()]
    assert listed(*paths) == listed(write_tar(tmp_path / "all.tar", *inner_tars()))
    with pytest.raises(RecipeError, match="--label-field x"):
        listed(*paths, label_field="x")
