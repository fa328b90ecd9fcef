"""A conversion that goes on later, while the source, the output or the request is no longer what it was."""

import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from datasets_on_disk import contents
from messages import refusal
from pictures import encoded, make_picture
from small_files import pack, write_files, write_tar
from test_cifar_source import COUNT, write_binary

from data_tools import shard_task
from data_tools.conversion import convert, merge
from data_tools.machine import Machine, TaskRange
from data_tools.request import Request, parse_splits
from vitscale.data.shards import Manifest
from vitscale.ground.errors import DataError, RecipeError

pytestmark = pytest.mark.usefixtures("here")

ONE = Machine(workers=1)
FIRST_HALF = Machine(workers=1, tasks=TaskRange(0, 2))


def make_images(root: Path, *names: str) -> Path:
    return write_files(root, *((name, encoded(make_picture(i, 20 + i, 20))) for i, name in enumerate(names)))


def make_tar(path: Path, names: list[str], mode: str = "w") -> Path:
    bmps = ((name, encoded(make_picture(i, 20, 20), "BMP")) for i, name in enumerate(names))  # all of one size
    return write_tar(path, *bmps, mode=mode)


NAMES = [f"c{i % 2}/{i:02d}.bmp" for i in range(16)]


def test_folders_that_were_swapped(tmp_path):
    root = make_images(tmp_path / "images", *(name.replace("bmp", "jpg") for name in NAMES))
    request = Request(str(root), shard_samples=4)
    convert(request, tmp_path / "out", FIRST_HALF)
    (root / "c0").rename(tmp_path / "c")
    for name in (path.name for path in (root / "c1").iterdir()):
        (root / "c1" / name).rename(root / "c1" / f"{int(name[:2]) - 1:02d}.jpg")
    (root / "c1").rename(root / "c0")
    with pytest.raises(DataError, match=r"images/c0/\d\d\.jpg"):
        convert(request, tmp_path / "out", Machine(workers=1, max_reject_rate=1.0))


def test_a_folder_that_was_mended_is_listed_anew(tmp_path):
    request = Request(str(make_images(tmp_path / "images", "cat/1.jpg", "2.jpg")))
    with pytest.raises(DataError, match="--unlabelled"):
        convert(request, tmp_path / "out", ONE)
    (tmp_path / "images" / "2.jpg").rename(tmp_path / "images" / "cat" / "2.jpg")
    assert convert(request, tmp_path / "out", ONE).manifests[""].num_samples == 2


def replace_a_tar(root: Path) -> None:
    make_tar(root / "m-1.tar", NAMES[::-1])
    os.utime(root / "m-1.tar", (1, 1))


def write_list(root: Path, classes: int = 2) -> None:
    make_images(root, *(f"{i}.jpg" for i in range(8)))
    (root / "list.csv").write_text("path,label\n" + "".join(f"{i}.jpg,c{i % classes}\n" for i in range(8)))


def of_another_version(root: Path) -> None:
    state = root / "out" / ".vitscale-convert" / "conversion.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"version": 99}))


@pytest.mark.parametrize(
    ("src", "change", "named"),
    [
        ("m-*.tar", replace_a_tar, r"m-1\.tar"),
        ("m-*.tar", lambda root: make_tar(root / "m-0.tar", [f"c3/{i}.bmp" for i in range(4)]), r"m-0\.tar"),
        ("list.csv", lambda root: write_list(root, 3), r"list\.csv"),
        ("m-*.tar", of_another_version, "/out"),
    ],
)
def test_what_has_changed_since_the_first_half(tmp_path, src, change, named):
    make_tar(tmp_path / "m-1.tar", NAMES)
    write_list(tmp_path)
    request = Request(str(tmp_path / src), shard_samples=2)
    convert(request, tmp_path / "out", FIRST_HALF)
    change(tmp_path)
    with pytest.raises(RecipeError, match=named):
        convert(request, tmp_path / "out", ONE)


def test_a_plan_of_another_request_is_not_taken_for_this_one(tmp_path):
    """Whatever lies in the work folder: here of a conversion whose output was removed."""
    work = tmp_path / "work"
    make_tar(tmp_path / "a.tar", NAMES[:8])
    request = Request(str(tmp_path / "a.tar"), shard_samples=4)
    convert(request, tmp_path / "out", Machine(workers=1, tasks=TaskRange(0, 2), work=work))
    for path in sorted((tmp_path / "out").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    make_tar(tmp_path / "a.tar", NAMES)
    outcome = convert(request, tmp_path / "out", Machine(workers=1, work=work))
    assert outcome.totals.samples == 16


def test_parts_that_are_listed_stay_listed(tmp_path):
    """Of three archives that must be streamed one is damaged; the others are not read again."""
    for i in range(3):
        make_tar(tmp_path / f"{i}.tar.gz", [name.replace("c", f"c{i}") for name in NAMES], "w:gz")
    whole = (tmp_path / "2.tar.gz").read_bytes()
    (tmp_path / "2.tar.gz").write_bytes(whole[:1000])
    request = Request(str(tmp_path / "*.tar.gz"), shard_samples=16)
    with pytest.raises(DataError, match=r"2\.tar\.gz"):
        convert(request, tmp_path / "out", ONE)
    listing = tmp_path / "out" / ".vitscale-convert" / "listing"
    before = {path.name: path.stat().st_mtime_ns for path in listing.glob("part-0000[01].bin")}
    assert len(before) == 2
    (tmp_path / "2.tar.gz").write_bytes(whole)
    outcome = convert(request, tmp_path / "out", Machine(workers=1, tasks=TaskRange(0, 2)))
    after = {path.name: path.stat().st_mtime_ns for path in listing.glob("part-0000[01].bin")}
    assert after == before and outcome.totals.samples == 16


def test_a_finished_data_set_is_never_written_into(tmp_path):
    root = make_images(tmp_path / "images", *(name.replace("bmp", "jpg") for name in NAMES))
    splits = parse_splits(["val=4", "train=rest"])
    convert(Request(str(root), splits=splits), tmp_path / "out", ONE)
    convert(Request(str(root)), tmp_path / "plain", ONE)
    before = contents(tmp_path / "out"), contents(tmp_path / "plain")
    for request, out in (
        (Request(str(root), splits=parse_splits(["val=4", "test=4", "train=rest"])), "out"),
        (Request(str(root)), "out"),
        (Request(str(root), splits=splits), "plain"),
        (Request(str(tmp_path / "other images")), "plain"),
    ):
        with pytest.raises(RecipeError, match=str(tmp_path / out)):
            convert(request, tmp_path / out, ONE)
    assert before == (contents(tmp_path / "out"), contents(tmp_path / "plain"))
    (tmp_path / "plain" / "manifest.json").unlink()
    with pytest.raises(RecipeError, match=str(tmp_path / "plain")):
        convert(Request(str(root), shard_samples=3), tmp_path / "plain", ONE)


def test_a_finished_data_set_is_known_again_unless_it_lost_a_shard(tmp_path):
    root = make_images(tmp_path / "images", *(name.replace("bmp", "jpg") for name in NAMES))
    request = Request(str(root), shard_samples=4)
    for i in range(2):
        convert(request, tmp_path / "out", Machine(workers=1, tasks=TaskRange(i, 2)))
    assert merge(tmp_path / "out", 0.01).manifests[""].num_samples == 16
    with (tmp_path / "out" / "convert.log.jsonl").open("a") as file:
        file.write('{"time": "2020-01-')  # as a kill cuts it
    assert merge(tmp_path / "out", 0.01).was_complete and convert(request, tmp_path / "out", ONE).was_complete
    (tmp_path / "out" / "shard-00002.beton").unlink()
    for again in (lambda: convert(request, tmp_path / "out", ONE), lambda: merge(tmp_path / "out", 0.01)):
        with pytest.raises(DataError, match=r"\b1 of .*shard-00002\.beton"):
            again()


def test_pipes_and_devices_in_a_list(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_task, "_PAUSE", 0.0)  # before the second try
    make_images(tmp_path, *(f"{i}.jpg" for i in range(8)))
    os.mkfifo(tmp_path / "pipe.jpg")
    rows = [f"{i}.jpg,a" for i in range(8)] + ["pipe.jpg,a", "/dev/zero,a", "nowhere.jpg,a"]
    (tmp_path / "list.csv").write_text("path,label\n" + "\n".join(rows))
    convert(Request(str(tmp_path / "list.csv")), tmp_path / "out", Machine(workers=1, max_reject_rate=0.5))
    rejects = {row["key"]: row["reason"] for row in pq.read_table(tmp_path / "out" / "rejects.parquet").to_pylist()}
    missing, other = (f"cannot be read: {why}" for why in ("No such file or directory", "is not a regular file"))
    assert rejects == {"pipe.jpg": other, "dev/zero": other, "nowhere.jpg": missing}


def test_machines_that_plan_by_themselves_must_see_the_same_source(tmp_path):
    make_tar(tmp_path / "a.tar", NAMES)
    request = Request(str(tmp_path / "a.tar"), shard_samples=4)
    convert(request, tmp_path / "out", Machine(workers=1, tasks=TaskRange(0, 2), work=tmp_path / "one"))
    pack(make_images(tmp_path / "other", *NAMES), tmp_path / "a.tar")
    with refusal(RecipeError, "convert", "machines with other sources", {tmp_path: "FOLDER"}):
        convert(request, tmp_path / "out", Machine(workers=1, tasks=TaskRange(1, 2), work=tmp_path / "two"))


def test_cifar_as_people_hold_it(tmp_path):
    """The archive of the binary version, both splits at once."""
    pack(write_binary(tmp_path / "cifar", 10), tmp_path / "cifar-10-binary.tar.gz")
    splits = parse_splits(["test=test_batch*", "train=rest"])
    convert(Request(str(tmp_path / "cifar-10-binary.tar.gz"), splits=splits), tmp_path / "out", ONE)
    train, test = (Manifest.load(tmp_path / "out" / name) for name in ("train", "test"))
    assert (train.num_samples, test.num_samples, train.class_names[1]) == (5 * COUNT, COUNT, "class 1")
