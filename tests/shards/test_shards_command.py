"""`vitscale shards` as a person runs it: what it prints, what it writes, and how it ends."""

import csv
import json

import numpy as np
import pytest
from messages import refusal
from PIL import Image, ImageChops
from processes import run_python
from shards_command import run
from small_files import files_in, flip_images, upload, write_files
from stored_dataset import Photo, write_dataset
from typer.testing import CliRunner

from data_tools.views import write_subset
from vitscale.cli.convert import app as convert_app
from vitscale.data.shards import Manifest, ShardFile
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.ground.errors import DataError, RecipeError

PHOTOS = [Photo(f"{('cat', 'dog')[i % 2]}/{i:02d}.png", (i % 2,), seed=i) for i in range(12)]


def as_json(*arguments):
    code, text = run(*arguments, "--json")
    return code, json.loads(text)


def test_help_is_there_without_the_libraries():
    code = (
        "import sys; from vitscale.cli.main import app; app(['shards', '--help'], standalone_mode=False); "
        "assert not {'pyarrow', 'PIL', 'torch'} & sys.modules.keys()"
    )
    printed = run_python(code)
    for command in ("info", "verify", "head", "export", "adopt"):
        assert f"  {command} " in printed


def test_info(tmp_path):
    manifest = write_dataset(tmp_path / "ds", PHOTOS, 5, ("cat", "dog", "owl"))
    view = write_subset(str(tmp_path / "ds"), str(tmp_path / "view"), 11)
    code, text = run("info", tmp_path / "view", "--classes")
    assert code == 0 and manifest.sha256 not in text and view.sha256 in text
    size = sum(path.stat().st_size for path in (tmp_path / "ds").glob("*.beton"))
    code, facts = as_json("info", tmp_path / "view", "--classes")
    assert code == 0
    assert facts["class_counts"] == {"cat": 6, "dog": 5, "owl": 0} and facts["unlabelled"] == 0
    assert (facts["samples"], facts["stored_samples"], facts["selecting_shards"], facts["shards"]) == (11, 12, 1, 3)
    assert (facts["bytes"], facts["mean_bytes_per_sample"]) == (size, round(size / 12))
    assert facts["mean_image_bytes"] == round(sum(len(photo.jpeg) for photo in PHOTOS[:11]) / 11)
    assert facts["largest_shard"]["bytes"] >= facts["smallest_shard"]["bytes"]
    for number in ("11", "12", "3, of 1 only a part"):
        assert f" {number}\n" in text


def test_info_counts_several_labels(tmp_path):
    write_dataset(tmp_path / "ds", [Photo("a", (1, 0)), Photo("b", (1,), seed=1), Photo("c", (), seed=2)], 3)
    _, facts = as_json("info", tmp_path / "ds", "--classes")
    assert (facts["class_counts"], facts["unlabelled"]) == ({"cat": 1, "dog": 2}, 1)


def test_verify(tmp_path):
    manifest = write_dataset(tmp_path / "ds", PHOTOS, 5)
    code, text = run("verify", tmp_path / "ds", "--workers", 2, "--decode")
    assert code == 0 and "whole: 3 shards, 12 samples, all decoded" in text
    flip_images(manifest.shard_path(1), 0)
    (tmp_path / "ds" / "shard-00002.beton").unlink()
    code, text = run("verify", tmp_path / "ds")
    assert code == 3 and "DAMAGED" in text and "dog/05.png" in text
    code, verdict = as_json("verify", tmp_path / "ds")
    assert code == 3 and verdict["ok"] is False
    assert [one["uid"] for one in verdict["damage"]] == [None, 5, None]


def test_what_is_no_dataset(tmp_path):
    for command in (["info"], ["verify"], ["head"], ["export", tmp_path / "out"]):
        with pytest.raises(DataError, match=str(tmp_path / "absent")):
            run(command[0], tmp_path / "absent", *command[1:])
    for split in ("train", "test"):
        write_dataset(tmp_path / "ds" / split, [Photo("x")], 1)
    with pytest.raises(DataError, match="test, train"):
        run("info", tmp_path / "ds")


def test_head_draws_every_sample_whole(tmp_path):
    names = ["cat", "a class name far too long for the room that is under a picture", "日本", "[red]x[/red]"]
    shapes = [(300, 20), (20, 300), (64, 64), (5, 700), (900, 1000)]
    photos = [Photo(f"k/{i}\x1b[31m.png", (i % 4,), i, *shapes[i % 5]) for i in range(11)]
    write_dataset(tmp_path / "ds", photos, 4, names)
    code, text = run("head", tmp_path / "ds", "-n", 9, "--out", tmp_path / "sheet.png")
    assert code == 0 and "first 9 of 11" in text and "[red]x[/red]" in text and "\x1b" not in text
    sheet = Image.open(tmp_path / "sheet.png").convert("RGB")
    step_x, step_y = (sheet.width - 12) // 3, (sheet.height - 12) // 3
    for i, photo in enumerate(photos[:9]):
        x, y = i % 3 * step_x, i // 3 * step_y
        # White gaps between the tiles: nothing reaches into a neighbour's room.
        assert np.asarray(sheet.crop((x, y, x + 8, y + step_y))).min() == 255
        assert np.asarray(sheet.crop((x, y, x + step_x, y + 8))).min() == 255
        tile = sheet.crop((x + 12, y + 12, x + 12 + 160, y + 12 + 160))
        difference = ImageChops.difference(tile, Image.new("RGB", tile.size, "#ececec"))
        box = difference.point(lambda v: 255 * (v > 40)).getbbox()
        width, height = (160 * side / max(photo.width, photo.height) for side in (photo.width, photo.height))
        assert abs(box[2] - box[0] - width) < 8 and abs(box[3] - box[1] - height) < 8
        # Two lines of text.
        below = np.asarray(sheet.crop((x + 12, y + 172, x + 172, y + 172 + 36)).convert("L")) < 200
        rows = np.flatnonzero(below.any(axis=1))
        assert rows.min() > 0 and rows.max() < 35 and below[:18].any() and below[18:].any()


def test_head_without_a_sheet_and_with_a_wrong_one(tmp_path):
    write_generated_dataset(tmp_path / "ds", [3, 3])
    code, text = run("head", tmp_path / "ds")
    assert code == 0 and "first 6 of 6" in text
    with pytest.raises(RecipeError, match=r"\.png"):
        run("head", tmp_path / "ds", "--out", tmp_path / "ds" / "shard-00000.beton")
    with pytest.raises(RecipeError, match=r"sheet\.png"):
        run("head", tmp_path / "ds", "--out", tmp_path / "absent" / "sheet.png")


def test_export(tmp_path):
    write_dataset(tmp_path / "ds", PHOTOS, 5, ("cat", "dog", "owl"))
    write_subset(str(tmp_path / "ds"), str(tmp_path / "view"), 11)
    (tmp_path / "out").mkdir()
    code, text = run("export", tmp_path / "view", tmp_path / "out")
    assert code == 0 and "11 images" in text
    expected = {photo.key.replace(".png", ".jpg"): photo.jpeg for photo in PHOTOS[:11]}
    rows = "".join(f"{key},{key.split('/')[0]}\n" for key in expected)
    beside = {"classes.txt": b"cat\ndog\nowl\n", "labels.csv": f"path,label\n{rows}".encode()}
    assert files_in(tmp_path / "out") == expected | beside
    assert (tmp_path / "out" / "owl").is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ds", "out", "view"]


def test_converting_an_export_gives_the_same_samples(tmp_path):
    photos = [Photo(f"{('cat', 'dog', 'owl')[i % 3]}/{i // 9}/{i:02d}.jpg", (i % 3,), seed=i) for i in range(11)]
    photos += [Photo("both.jpg", (2, 0), seed=50), Photo("unlabelled/none.jpg", (), seed=51)]
    write_dataset(tmp_path / "a", photos, 5, ("owl", "never", "cat", "dog"))
    exported, again = tmp_path / "exported", tmp_path / "b"
    run("export", tmp_path / "a", exported)
    arguments = [exported / "labels.csv", again, "--classes", exported / "classes.txt", "--workers", 1]
    result = CliRunner().invoke(convert_app, [str(argument) for argument in [*arguments, "--allow-unlabelled"]])
    assert result.exit_code == 0, result.output
    assert Manifest.load(again).class_names == ("owl", "never", "cat", "dog")
    labels_of, first = {}, Manifest.load(tmp_path / "a")
    with ShardFile(Manifest.load(again).shard_path(0)) as shard:
        stored = {shard.read(slot): shard.labels(slot).tolist() for slot in range(len(shard))}
    for index in range(len(first.shards)):
        with ShardFile(first.shard_path(index)) as shard:
            labels_of |= {shard.read(slot): shard.labels(slot).tolist() for slot in range(len(shard))}
    assert stored == labels_of == {photo.jpeg: list(photo.labels) for photo in photos}
    # Once more: keys are the exported paths now, and stay.
    run("export", again, tmp_path / "again")
    assert files_in(tmp_path / "again").keys() == files_in(exported).keys()


def test_hostile_names_stay_inside_and_apart(tmp_path):
    names = ["..", "a/b", "a_b", "", ".hidden", "classes.txt", "x|y", "-1", " ", "w" * 300, "line\nbreak", "unlabelled"]
    keys = [
        *("../../etc/passwd", "/absolute.png", "a/b/../../../c.png", "same.png", "same.jpg", "same.JPEG"),
        *("same/below.png", "same.jpg/below.png", "", "...", "k" * 300 + ".png", "/".join(["deep" * 20] * 40)),
        *("nul\0.png", ".hidden.png", "photo.v2", "__MACOSX/x.jpg", "-1/\u2028.jpg"),
    ]
    photos = [Photo(key, (1,), seed=i) for i, key in enumerate(keys)]
    photos += [Photo(f"{i}.jpg", (i,), seed=50 + i) for i in range(len(names))]
    photos += [Photo("none.jpg", (), seed=80), Photo("both.jpg", (2, 6), seed=81)]
    write_dataset(tmp_path / "ds", photos, 50, names)
    assert run("export", tmp_path / "ds", tmp_path / "out")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ds", "out"]
    files = files_in(tmp_path / "out")
    folders = files.pop("classes.txt").decode().splitlines()
    assert len(set(folders)) == len(names) and "w" * 200 in folders[9]
    assert folders[:9] == ["class-0", "a_b-1", "a_b", "class-3", "_.hidden", "class-5", "x_y", "class-7", "class-8"]
    assert folders[10:] == ["line_break", "unlabelled"]
    rows = list(csv.DictReader(files.pop("labels.csv").decode().splitlines()))
    assert len(rows) == len(photos) == len(files)
    for row, photo in zip(rows, photos, strict=True):
        assert files[row["path"]] == photo.jpeg
        expected = [folders[label] for label in photo.labels]
        assert row["label"] == "|".join(expected)
        parts = row["path"].split("/")
        assert parts[0] == (expected[0] if expected else "unlabelled-1")
        assert row["path"].endswith(".jpg") and not any(part.startswith(".") or part == "" for part in parts)
    assert [row["path"] for row in rows[3:8]] == [
        "a_b-1/same.jpg",
        "a_b-1/same-4.jpg",
        "a_b-1/same-5.jpg",
        "a_b-1/same/below.jpg",
        "a_b-1/below-7.jpg",
    ]


def test_export_never_half(tmp_path):
    manifest = write_dataset(tmp_path / "ds", PHOTOS, 5)
    flip_images(manifest.shard_path(2), 1)
    with pytest.raises(DataError, match=r"uid 11 \(dog/11\.png\)"):
        run("export", tmp_path / "ds", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["ds"]
    write_files(tmp_path, "full/x")
    for out in ("full", "full/x"):
        with refusal(RecipeError, "shards", f"export to {out}", {tmp_path: "FOLDER"}):
            run("export", tmp_path / "ds", tmp_path / out)
    with refusal(RecipeError, "shards", "export to a URL"):
        run("export", tmp_path / "ds", "memory://out")


def test_datasets_at_a_url(tmp_path):
    write_dataset(tmp_path / "ds", PHOTOS, 5)
    url = upload(tmp_path / "ds", "memory://shards-command/ds")
    assert as_json("info", url, "--classes")[1]["class_counts"] == {"cat": 6, "dog": 6}
    assert "cat/00.png" in run("head", url, "-n", 1)[1]
    run("export", url, tmp_path / "out")
    assert len(files_in(tmp_path / "out")) == 14


def test_export_without_tables_names_by_uid(tmp_path):
    manifest = write_generated_dataset(tmp_path / "ds", [4, 3])
    run("export", tmp_path / "ds", tmp_path / "out")
    files = files_in(tmp_path / "out")
    with ShardFile(manifest.shard_path(1)) as shard:
        name = manifest.class_names[int(shard.label[2])]
        assert files[f"{name}/000000006.jpg"] == shard.read(2)
    assert len(files) == 9
