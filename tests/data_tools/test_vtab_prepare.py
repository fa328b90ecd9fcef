"""VTAB-1k the whole way on made-up copies of all 19 tasks: which images, labels and pixels, and what is missing."""

import hashlib
import io
import json
import os
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import command
from datasets_on_disk import samples_of
from messages import refusal
from pictures import encoded
from PIL import Image
from rich.console import Console
from small_files import write_tar
from test_tfrecord import encode, masked, write
from vtab_copies import IMAGES, expected_label, make_folders, make_tars, make_tfds, picture

from data_tools.machine import Machine
from data_tools.sources.source import SourceOptions
from data_tools.sources.tfrecord import LabelRule, open_tfrecords
from data_tools.vtab.copies import find_copy
from data_tools.vtab.prepare import DATASETS, Ids, Prepared, prepare
from data_tools.vtab.source import open_copy, with_full_contrast
from data_tools.vtab.tasks import (
    CLEVR_METRES,
    KITTI_METRES,
    ORIGINS,
    Slice,
    Takes,
    clevr_distance,
    dsprites_location,
    dsprites_orientation,
    kitti_distance,
    stated,
)
from vitscale.data.shards import Manifest
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.vtab import TASKS

pytestmark = pytest.mark.usefixtures("here")

TAKES = Takes(8, 2)
# (split, first image) of the validation images, and (split, first image) of the test part, of 40 images in TFDS.
PUBLISHED = dict.fromkeys(TASKS, (("validation", 0), ("test", 0))) | {
    **dict.fromkeys(("caltech101", "cifar100", "svhn"), (("train", 36), ("test", 0))),
    **dict.fromkeys(("eurosat", "resisc45"), (("train", 24), ("train", 32))),
    **dict.fromkeys(("clevr_count", "clevr_dist"), (("train", 36), ("validation", 0))),
    **dict.fromkeys(("dspr_loc", "dspr_ori"), (("train", 32), ("train", 36))),
    **dict.fromkeys(("snorb_azim", "snorb_elev"), (("test", 0), ("test", 20))),
    "pets": (("train", 32), ("test", 0)),
}


def run_prepare(task: str, folder: Path, out: Path, pinned: Ids | None = None, takes: Takes = TAKES) -> Prepared:
    return prepare(task, [folder], out, Machine(1), Console(quiet=True), pinned, takes)


def shown(task: str, split: str, number: int) -> np.ndarray:
    """The pixels of a made picture, by Pillow alone."""
    binary, gray = task.startswith("dspr"), task.startswith("snorb")
    with Image.open(io.BytesIO(picture(split, number, gray=gray, binary=binary))) as image:
        return np.asarray(image.convert("RGB")) * (255 if binary else 1)


def shown_sha256(task: str, split: str, number: int) -> str:
    return hashlib.sha256(shown(task, split, number).tobytes()).hexdigest()


def expected(task: str, split: str, numbers: range) -> list[tuple[str, int]]:
    return sorted((shown_sha256(task, split, number), expected_label(task, number)) for number in numbers)


def contents(entries) -> list[tuple[str, int]]:
    return sorted((entry.sha256, entry.label) for entry in entries)


@pytest.mark.parametrize("task", TASKS)
def test_every_task_from_records_of_tfds(tmp_path, task):
    make_tfds(tmp_path / "tfds", task)
    prepared = run_prepare(task, tmp_path / "tfds", tmp_path / "out")
    (val_split, val_first), (test_split, test_first) = PUBLISHED[task]
    place = tmp_path / "out" / task
    ids = Ids.read(place / "ids.json")
    assert contents(ids.train800) == expected(task, "train", range(8))
    assert contents(ids.val200) == expected(task, val_split, range(val_first, val_first + 2))

    held = {name: list(samples_of(place / name).values()) for name in DATASETS}
    assert {name: len(found) for name, found in held.items()} == prepared.counts
    assert prepared.counts == {"train800val200": 10, "train800": 8, "val200": 2, "test": IMAGES - test_first}
    keys = {name: {sample.key for sample in found} for name, found in held.items()}
    assert keys["train800"] | keys["val200"] == keys["train800val200"]
    assert not keys["train800"] & keys["val200"] and not keys["train800val200"] & keys["test"]
    assert prepared.doubt is None

    manifests = [Manifest.load(place / name) for name in DATASETS]
    assert len({manifest.class_names for manifest in manifests}) == 1
    assert len(manifests[0].class_names) == TASKS[task].num_classes
    whole, *views = [
        {(place / n / s.path).resolve() for s in m.shards} for n, m in zip(DATASETS[:3], manifests, strict=False)
    ]
    assert all(view <= whole for view in views)  # no copies

    by_key = {entry.key: entry.sha256 for entry in (*ids.train800, *ids.val200)}
    tested = set()
    for key, labels, stored in held["train800val200"] + held["test"]:
        split, file, number = key.split("/")[:3]
        row = int(number) + (IMAGES // 3 if "00001-of" in file else 0)
        if key in by_key:
            assert by_key[key] == shown_sha256(task, split, row)
        else:
            tested.add((split, row))
        assert labels == [expected_label(task, row)]
        # A JPEG of quality 100 loses next to nothing.
        assert np.abs(shown(task, split, row).astype(int) - np.asarray(Image.open(io.BytesIO(stored)))).max() <= 8
    assert tested == {(test_split, row) for row in range(test_first, IMAGES)}


def test_class_names_come_from_tfds_or_from_the_rule(tmp_path):
    for task, second in (("pets", "pets 1"), ("dmlab", "1"), ("kitti_dist", "to 20 m")):
        make_tfds(tmp_path, task)
        assert open_copy(find_copy(task, [tmp_path]).copy).class_names[1] == second


@pytest.mark.parametrize("task", ["eurosat", "clevr_dist"])
def test_folders_of_classes(tmp_path, task):
    make_folders(tmp_path, task, train=IMAGES, val=IMAGES, test=IMAGES)
    prepared = run_prepare(task, tmp_path, tmp_path / "out")
    ids = Ids.read(tmp_path / "out" / task / "ids.json")
    in_order = sorted(range(IMAGES), key=lambda number: (expected_label(task, number), number))
    assert sorted(entry.label for entry in ids.train800) == sorted(expected_label(task, n) for n in in_order[:8])
    assert contents(ids.val200) == sorted(
        (shown_sha256(task, "val", number), expected_label(task, number)) for number in in_order[:2]
    )
    assert prepared.counts["test"] == IMAGES and prepared.doubt is not None


@pytest.mark.parametrize("task", ["svhn", "clevr_count", "snorb_elev"])
def test_tars_of_clip_benchmark(tmp_path, task):
    """They have no images for validation: the next training images stand in."""
    make_tars(tmp_path, task, ("train", "test"))
    prepared = run_prepare(task, tmp_path, tmp_path / "out")
    ids = Ids.read(tmp_path / "out" / task / "ids.json")
    numbers = {part: sorted(int(entry.key[-11:-4]) for entry in entries) for part, entries in ids.parts.items()}
    assert numbers == {"train800": list(range(8)), "val200": [8, 9]}
    assert [entry.label for entry in ids.val200] == [expected_label(task, 8), expected_label(task, 9)]
    assert prepared.counts["test"] == IMAGES and prepared.doubt is not None


@pytest.fixture
def pinned(tmp_path) -> Ids:
    make_tfds(tmp_path / "one", "pets")
    run_prepare("pets", tmp_path / "one", tmp_path / "first")
    return Ids.read(tmp_path / "first" / "pets" / "ids.json")


def test_a_list_of_ids_takes_the_same_images_from_another_copy(tmp_path, pinned):
    """By key where the copy has them; by pixels and label where it has another order and other keys."""
    again = run_prepare("pets", tmp_path / "one", tmp_path / "second", pinned)
    assert Ids.read(tmp_path / "second" / "pets" / "ids.json").parts == pinned.parts and again.doubt is None

    make_folders(tmp_path / "two", "pets", train=IMAGES, test=IMAGES)
    other = run_prepare("pets", tmp_path / "two", tmp_path / "third", pinned)
    ids = Ids.read(tmp_path / "third" / "pets" / "ids.json")
    assert ids.sha256 == pinned.sha256 and ids.differences(pinned) == 0 and other.doubt is None
    assert {entry.key for entry in ids.train800}.isdisjoint(entry.key for entry in pinned.train800)

    # The same keys over other images, as another version of TFDS may have them: pixels decide.
    key = "train/oxford_iiit_pet-train.tfrecord-00001-of-00002/000000005"
    moved = pinned.train800[0].model_copy(update={"key": key})
    moved = pinned.model_copy(update={"train800": (moved, *pinned.train800[1:])})
    run_prepare("pets", tmp_path / "one", tmp_path / "fourth", moved)
    assert Ids.read(tmp_path / "fourth" / "pets" / "ids.json").sha256 == pinned.sha256


def test_a_list_of_ids_is_verified(tmp_path, pinned):
    for changed in ({"sha256": "0" * 64}, {"key": "train/x", "sha256": "0" * 64}):
        first, *others = pinned.train800
        other = pinned.model_copy(update={"train800": (first.model_copy(update=changed), *others)})
        with pytest.raises(DataError, match=r"\b1 of\b"):
            run_prepare("pets", tmp_path / "one", tmp_path / "second", other)
    assert not (tmp_path / "second" / "pets" / "train800val200").exists()
    with pytest.raises(RecipeError, match=str(tmp_path / "first")):  # prepared before, not with this list
        run_prepare("pets", tmp_path / "one", tmp_path / "first", other)


def test_a_damaged_list_of_ids(tmp_path, pinned):
    path = tmp_path / "first" / "pets" / "ids.json"
    content = json.loads(path.read_text())
    for damaged in ("{", '{"version": 2}', "\xff", json.dumps(content | {"val200": content["train800"][:2]})):
        path.write_text(damaged, "latin-1")
        with pytest.raises(DataError, match=r"ids\.json"):
            Ids.read(path)
    os.truncate(path, 1 << 40)
    os.mkfifo(tmp_path / "pipe")
    for endless in (path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(RecipeError):
            Ids.read(endless)


def test_pictures_of_strangers(tmp_path, monkeypatch):
    """What Pillow would give to Ghostscript, or unpack without end, is left to the conversion, which refuses it."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/called\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    drawing = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\n(hello) print\n"
    text = b"zTXtwords\0\0" + zlib.compress(bytes(80_000_000))
    plain = encoded(Image.new("L", (8, 8), 1), "PNG")
    bomb = plain[:33] + struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text)) + plain[33:]
    for image in (drawing, bomb, plain[:40], b""):
        assert with_full_contrast(image) == image
    assert not (tmp_path / "called").exists()
    assert np.asarray(Image.open(io.BytesIO(with_full_contrast(plain)))).min() == 255


def test_records_of_a_length_that_cannot_be(tmp_path):
    folder = make_tfds(tmp_path, "dtd")
    file = sorted(folder.glob("*test*"))[0]
    length = struct.pack("<Q", (1 << 63) - 1)
    file.write_bytes(file.read_bytes() + length + masked(length))
    with pytest.raises(DataError, match=file.name):
        open_copy(find_copy("dtd", [tmp_path]).copy)


def test_repeating_goes_on(tmp_path):
    make_tfds(tmp_path, "camelyon")
    run_prepare("camelyon", tmp_path, tmp_path / "out")
    place = tmp_path / "out" / "camelyon"
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and "log" not in path.name}
    for name in ("val200", "test"):
        (place / name / "manifest.json").unlink()
    (place / "test" / "shard-00000.beton").unlink()
    (place / "test" / "shard-00000.idx.parquet").unlink()
    (place / "test" / "convert.log.jsonl").unlink()
    run_prepare("camelyon", tmp_path, tmp_path / "out")
    assert {path: path.read_bytes() for path in before} == before
    assert run_prepare("camelyon", tmp_path / "nowhere", tmp_path / "out").search is None  # needs the copy no more


def test_another_copy_does_not_go_on(tmp_path):
    make_tfds(tmp_path / "one", "camelyon")
    make_folders(tmp_path / "two", "camelyon", train=IMAGES, test=IMAGES)
    run_prepare("camelyon", tmp_path / "one", tmp_path / "out")
    (tmp_path / "out" / "camelyon" / "test" / "manifest.json").unlink()
    with refusal(RecipeError, "sources", "VTAB copy of another kind", {tmp_path: "FOLDER"}):
        run_prepare("camelyon", tmp_path / "two", tmp_path / "out")


@pytest.mark.parametrize(
    ("task", "images", "takes"),
    [
        ("pets", 7, Takes(8, 2)),
        ("pets", 9, Takes(8, 2)),  # training and validation images would overlap
        ("snorb_azim", 12, Takes(8, 7)),
        ("eurosat", 12, Takes(8, 2)),
    ],
)
def test_too_few_images(tmp_path, task, images, takes):
    make_tfds(tmp_path, task, images)
    with refusal(DataError, "sources", f"{images} images of {task}", {tmp_path: "FOLDER"}):
        run_prepare(task, tmp_path, tmp_path / "out", takes=takes)


def test_labels_and_classes_that_a_task_does_not_have(tmp_path):
    folder = make_tfds(tmp_path / "tfds", "pets")
    (folder / "label.labels.txt").write_text("cat\ndog\n")
    with pytest.raises(DataError, match=r"\b37\b"):
        run_prepare("pets", tmp_path / "tfds", tmp_path / "out")
    make_folders(tmp_path / "folders", "svhn", train=9, test=9)
    with pytest.raises(DataError, match=r"\b10\b"):
        run_prepare("svhn", tmp_path / "folders", tmp_path / "out")
    tars = make_tars(tmp_path / "tars", "svhn", ("train", "test"))
    (tars / "classnames.txt").unlink()
    tars.rename(tars.with_name(f"wds_vtab-{ORIGINS['camelyon'].tars}"))
    with pytest.raises(DataError, match="label 2"):
        run_prepare("camelyon", tmp_path / "tars", tmp_path / "out")
    for path in (tars.parent / f"wds_vtab-{ORIGINS['camelyon'].tars}").glob("*/*.tar"):
        write_tar(path, "0.png", ("0.cls", b"1" * 5000))
    with pytest.raises(DataError):
        run_prepare("camelyon", tmp_path / "tars", tmp_path / "out")


def test_versions_of_tfds(tmp_path):
    make_tfds(tmp_path, "kitti_dist", version="3.3.0")
    copy = find_copy("kitti_dist", [tmp_path]).copy
    assert copy.version == "3.3.0" and "3.1.0" in copy.doubt
    make_tfds(tmp_path, "kitti_dist", version="3.1.0")
    copy = find_copy("kitti_dist", [tmp_path]).copy
    assert copy.version == "3.1.0" and copy.doubt is None


def test_a_copy_with_files_missing_is_none(tmp_path):
    folder = make_tfds(tmp_path, "pets")
    (folder / "oxford_iiit_pet-test.tfrecord-00001-of-00002").unlink()
    search = find_copy("pets", [tmp_path])
    assert search.copy is None and "1 of 2 files of the split test" in search.problems[0]
    assert tmp_path / "oxford_iiit_pet" in search.looked


def test_slices_round_down_to_an_image():
    assert Slice("train", 90).rows(3059, 200) == range(2753, 2953)
    assert Slice("train", 90).rows(73257, 200) == range(65931, 66131)
    assert Slice("train", 80).rows(3680, 200) == range(2944, 3144)
    assert Slice("train", 80, 90).rows(737280, 200) == range(589824, 590024)
    assert Slice("train", 60, 80).rows(27000, 200) == range(16200, 16400)
    assert Slice("test", 50).rows(24300) == range(12150, 24300)


def test_the_command_takes_what_there_is_and_says_what_is_missing(tmp_path):
    make_tfds(tmp_path / "tfds", "camelyon", images={"train": 800, "validation": 200, "test": 4})
    out = tmp_path / "out"
    code, printed = command("vtab", "prepare", tmp_path / "tfds", "--out", out).answer
    assert code == 0, printed
    assert [Manifest.load(out / "camelyon" / name).num_samples for name in DATASETS] == [1000, 800, 200, 4]
    assert "missing: caltech101" in printed and str(tmp_path / "tfds" / "kitti") in printed
    assert ORIGINS["resisc45"].get in printed
    camelyon = "--task", "camelyon"
    for folder, arguments, code in (
        ("tfds", ("--out", out, *camelyon), 0),
        ("tfds", ("--out", out, *camelyon, "--task", "dtd"), 3),
        ("tfds", ("--out", out, "--task", "mnist"), 2),
        ("no", ("--out", out), 2),
        ("tfds", ("--out", tmp_path / "b", "--ids", out, *camelyon), 0),
    ):
        assert command("vtab", "prepare", tmp_path / folder, *arguments).returncode == code
    both = [Ids.read(folder / "camelyon" / "ids.json") for folder in (out, tmp_path / "b")]
    assert both[0].parts == both[1].parts


def test_a_task_that_fails_does_not_stop_the_others(tmp_path):
    make_tfds(tmp_path / "tfds", "camelyon", images=20)
    make_folders(tmp_path / "tfds", "svhn", train=1000, test=20)
    done = command("vtab", "prepare", tmp_path / "tfds", "--out", tmp_path / "out")
    assert done.returncode == 3 and (tmp_path / "out" / "svhn" / "test" / "manifest.json").is_file()
    assert "failed: camelyon" in done.stdout


@pytest.mark.parametrize(
    ("distances", "types", "label"),
    [
        *(([8.0, 30.0], [0, 0], 0), ([8.01, 30.0], [1, 0], 1), ([20.0], [2], 1), ([20.5], [2], 2)),
        ([3.0, 25.0], [3, 0], 2),  # a pedestrian is nearer than the car
        *(([3.0, 4.0], [3, 5], 3), ([], [], 3), ([-1.5], [0], 0)),
    ],
)
def test_kitti_looks_at_cars_vans_and_trucks(distances, types, label):
    locations = np.array([[-7.0, 1.5, distance] for distance in distances], np.float32).reshape(-1)
    assert kitti_distance(np.array(types, np.int64), locations) == label


def test_distances_as_the_original_computes_them():
    """There: the last i for which thresholds[i] - distance < 0, in fp32."""
    rng = np.random.default_rng(0)
    for value in np.concatenate([rng.uniform(0.1, 30, 500), CLEVR_METRES[1:], KITTI_METRES[1:]]).astype(np.float32):
        for thresholds, mine in (
            (CLEVR_METRES, lambda d: clevr_distance(np.array([1, 2, d + 3, 300, 2, d, 5, 6, d + 1], np.float32))),
            (KITTI_METRES, lambda d: kitti_distance(np.array([0]), np.array([0, 0, d], np.float32))),
        ):
            assert mine(value) == np.where(np.array(thresholds, np.float32) - value < 0)[0].max()


def test_bins_of_dsprites():
    assert [dsprites_location(np.array([label])) for label in range(32)] == [label // 2 for label in range(32)]
    bins = [dsprites_orientation(np.array([label])) for label in range(40)]
    assert bins[:10] == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3] and bins[-1] == 15
    assert np.bincount(bins).tolist() == [3, 2] * 8


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        *((dsprites_location, [[32]]), (dsprites_orientation, [[40]]), (dsprites_location, [[-1]])),
        *((clevr_distance, [[]]), (clevr_distance, [[0.0, 0.0, 0.0]]), (clevr_distance, [[0.0, 0.0, float("nan")]])),
        *((kitti_distance, [[0], [1.0, 1.0, -100.0]]), (stated, [[1, 2]]), (stated, [[]])),
    ],
)
def test_what_has_no_class(rule, values):
    with pytest.raises(ValueError):
        rule(*map(np.array, values))


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        (LabelRule(("label_x",), stated), "record 0 .*label_x"),
        (LabelRule(("type", "location"), kitti_distance), "record 1 "),  # of two types and one location
        (LabelRule(("location",), clevr_distance), "record 2 "),  # of none
    ],
)
def test_records_of_which_no_label_follows(tmp_path, rule, named):
    scenes = ([0, 3], [1.0, 2.0, 9.5, 0.0, 0.0, 1.0]), ([0, 1], [1.0, 2.0, 3.0]), ([], [])
    records = [encode(image=["x"], type=types, location=xyz) for types, xyz in scenes]
    source = open_tfrecords("source", [write(tmp_path / "train-0", *records)], SourceOptions(unlabelled=True))
    with pytest.raises(DataError, match=named):
        list(replace(source, rule=rule).items(0, {}))
