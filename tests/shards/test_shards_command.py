"""`vitscale shards` as a person runs it: what it prints, what it writes, and how it ends."""

import csv
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import fsspec
import numpy as np
import pytest
from messages import refusal
from PIL import Image, ImageChops
from stored_dataset import Photo, write_dataset
from typer.testing import CliRunner

from data_tools.convert import app as convert_app
from vitscale.cli.main import app
from vitscale.data.shards import Manifest, SelectFirst, ShardFile
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.ground.errors import DataError, RecipeError

PHOTOS = [Photo(f"{('cat', 'dog')[i % 2]}/{i:02d}.png", (i % 2,), seed=i) for i in range(12)]


def shards(*arguments):
    """Exit code and what was printed; errors for people are raised."""
    result = CliRunner().invoke(app, ["shards", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def as_json(*arguments):
    code, text = shards(*arguments, "--json")
    return code, json.loads(text)


def first_of(manifest, out, count, shard=-1):
    """The same dataset, but with the first `count` samples of one shard."""
    out.mkdir()
    entries = [e.model_copy(update={"path": f"../{manifest.directory.name}/{e.path}"}) for e in manifest.shards]
    entries[shard] = entries[shard].model_copy(update={"select": SelectFirst(first=count)})
    samples = sum(entry.num_selected for entry in entries)
    return manifest.model_copy(update={"shards": tuple(entries), "num_samples": samples}).save(out)


def test_help_is_there_without_the_libraries():
    code = (
        "import sys; from vitscale.cli.main import app; app(['shards', '--help'], standalone_mode=False); "
        "assert not {'numpy', 'pyarrow', 'PIL', 'torch', 'numba'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for command in ("info", "verify", "head", "diff", "export", "adopt"):
        assert f"  {command} " in done.stdout


# ------------------------------------------------------------------------------------------------------ info and verify


def test_info(tmp_path):
    manifest = write_dataset(tmp_path / "ds", PHOTOS, 5, ("cat", "dog", "owl"))
    view = first_of(manifest, tmp_path / "view", 1)
    code, text = shards("info", tmp_path / "view", "--classes")
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
    code, text = shards("verify", tmp_path / "ds", "--workers", 2, "--decode")
    assert code == 0 and "whole: 3 shards, 12 samples, all decoded" in text
    with ShardFile(manifest.shard_path(1)) as shard, manifest.shard_path(1).open("r+b") as file:
        file.seek(int(shard.offset[0]))
        file.write(b"x")
    (tmp_path / "ds" / "shard-00002.beton").unlink()
    code, text = shards("verify", tmp_path / "ds")
    assert code == 3 and "DAMAGED" in text and "dog/05.png" in text
    code, verdict = as_json("verify", tmp_path / "ds")
    assert code == 3 and verdict["ok"] is False
    assert [one["uid"] for one in verdict["damage"]] == [None, 5, None]


def test_what_is_no_dataset(tmp_path):
    for command in (["info"], ["verify"], ["head"], ["diff", tmp_path], ["export", tmp_path / "out"]):
        with pytest.raises(DataError, match=str(tmp_path / "absent")):
            shards(command[0], tmp_path / "absent", *command[1:])
    for split in ("train", "test"):
        write_dataset(tmp_path / "ds" / split, [Photo("x")], 1)
    with pytest.raises(DataError, match="test, train"):
        shards("info", tmp_path / "ds")


# ----------------------------------------------------------------------------------------------------------------- head


def test_head_draws_every_sample_whole(tmp_path):
    names = ["cat", "a class name far too long for the room that is under a picture", "日本", "[red]x[/red]"]
    shapes = [(300, 20), (20, 300), (64, 64), (5, 700), (900, 1000)]
    photos = [Photo(f"k/{i}\x1b[31m.png", (i % 4,), i, *shapes[i % 5]) for i in range(11)]
    write_dataset(tmp_path / "ds", photos, 4, names)
    code, text = shards("head", tmp_path / "ds", "-n", 9, "--out", tmp_path / "sheet.png")
    assert code == 0 and "first 9 of 11" in text and "[red]x[/red]" in text and "\x1b" not in text
    sheet = Image.open(tmp_path / "sheet.png").convert("RGB")
    step_x, step_y = (sheet.width - 12) // 3, (sheet.height - 12) // 3
    for i, photo in enumerate(photos[:9]):
        x, y = i % 3 * step_x, i // 3 * step_y
        # White gaps between the tiles: nothing reaches into a neighbour's room.
        assert np.asarray(sheet.crop((x, y, x + 8, y + step_y))).min() == 255
        assert np.asarray(sheet.crop((x, y, x + step_x, y + 8))).min() == 255
        tile = sheet.crop((x + 12, y + 12, x + 12 + 160, y + 12 + 160))
        box = (
            ImageChops.difference(tile, Image.new("RGB", tile.size, "#ececec"))
            .point(lambda v: 255 * (v > 40))
            .getbbox()
        )
        width, height = (
            160 * photo.width / max(photo.width, photo.height),
            160 * photo.height / max(photo.width, photo.height),
        )
        assert abs(box[2] - box[0] - width) < 8 and abs(box[3] - box[1] - height) < 8
        # Two lines of text.
        below = np.asarray(sheet.crop((x + 12, y + 172, x + 172, y + 172 + 36)).convert("L")) < 200
        rows = np.flatnonzero(below.any(axis=1))
        assert rows.min() > 0 and rows.max() < 35 and below[:18].any() and below[18:].any()


def test_head_without_a_sheet_and_with_a_wrong_one(tmp_path):
    write_generated_dataset(tmp_path / "ds", [3, 3])
    code, text = shards("head", tmp_path / "ds")
    assert code == 0 and "first 6 of 6" in text
    with pytest.raises(RecipeError, match=r"\.png"):
        shards("head", tmp_path / "ds", "--out", tmp_path / "ds" / "shard-00000.beton")
    with pytest.raises(RecipeError, match=r"sheet\.png"):
        shards("head", tmp_path / "ds", "--out", tmp_path / "absent" / "sheet.png")


# ----------------------------------------------------------------------------------------------------------------- diff


def test_equal_datasets(tmp_path):
    write_dataset(tmp_path / "a", PHOTOS, 5)
    write_dataset(tmp_path / "b", PHOTOS, 5)
    code, text = shards("diff", tmp_path / "a", tmp_path / "b" / "manifest.json")
    assert code == 0 and "equal: 3 shards" in text
    # The same images cut otherwise: only the option differs.
    write_dataset(tmp_path / "c", PHOTOS, 7)
    code, found = as_json("diff", tmp_path / "a", tmp_path / "c")
    assert code == 1 and found["counts"] == {} and found["facts"] == {"options.shard_samples": [5, 7]}


def test_what_differs(tmp_path):
    write_dataset(tmp_path / "a", PHOTOS, 12, options={"quality": 95})
    changed = list(PHOTOS)
    changed[1] = replace(PHOTOS[1], seed=77)  # another picture under the same key
    changed[2] = replace(PHOTOS[2], quality=50, source=PHOTOS[2].jpeg)  # the same source, transcoded
    changed[3] = replace(PHOTOS[3], labels=(0,))
    changed[4] = replace(PHOTOS[4], key="cat/new.png")
    changed.append(Photo("dog/added.png", (1,), seed=50))
    write_dataset(tmp_path / "b", changed, 12, options={"quality": 90, "more": 1}, seed=3)
    code, found = as_json("diff", tmp_path / "a", tmp_path / "b")
    assert code == 1 and found["equal"] is False
    assert found["facts"] == {
        "num_samples": [12, 13],
        "shuffle_seed": [0, 3],
        "options.quality": [95, 90],
        "options.more": [None, 1],
    }
    examples = {what: [example[0] for example in of] for what, of in found["examples"].items()}
    assert examples == {
        "only in A": ["cat/04.png"],
        "only in B": ["cat/new.png", "dog/added.png"],
        "another source image": ["dog/01.png"],
        "same source image, stored differently": ["cat/02.png"],
        "other labels": ["dog/03.png"],
    }
    assert found["counts"] == {what: len(keys) for what, keys in examples.items()}
    assert found["examples"]["other labels"] == [["dog/03.png", '["dog"]', '["cat"]']]
    assert sha256(PHOTOS[1].jpeg).hexdigest().upper() in found["examples"]["another source image"][0]
    code, text = shards("diff", tmp_path / "a", tmp_path / "b")
    assert code == 1 and "only in B: 2 samples" in text and "options.quality: 95 -> 90" in text


def test_the_same_images_under_other_names(tmp_path):
    """By content; of images that are there several times, each has its counterpart."""
    photos = [*PHOTOS, replace(PHOTOS[0], key="cat/again.png"), replace(PHOTOS[0], key="cat/more.png")]
    renamed = [replace(photo, key=f"mnt/{index:02d}.jpg") for index, photo in enumerate(photos)]
    write_dataset(tmp_path / "a", photos, 7)
    write_dataset(tmp_path / "b", renamed[::-1], 7)
    code, text = shards("diff", tmp_path / "a", tmp_path / "b")
    assert code == 1 and "--by content" in text
    assert shards("diff", "--by", "content", tmp_path / "a", tmp_path / "b")[0] == 0
    renamed[3] = replace(renamed[3], labels=(0,))
    write_dataset(tmp_path / "c", renamed[-2::-1], 7)
    code, found = as_json("diff", "--by", "content", tmp_path / "a", tmp_path / "c")
    assert code == 1 and found["counts"] == {"only in A": 1, "other labels": 1}
    assert found["examples"]["other labels"] == [["dog/03.png", '["dog"]', '["cat"]']]


def test_labels_are_compared_by_name(tmp_path):
    write_dataset(tmp_path / "a", PHOTOS, 5, ("cat", "dog"))
    swapped = [replace(photo, labels=(2 - photo.labels[0],)) for photo in PHOTOS]
    write_dataset(tmp_path / "b", swapped, 5, ("owl", "dog", "cat"))
    code, found = as_json("diff", tmp_path / "a", tmp_path / "b")
    assert code == 1 and found["counts"] == {}
    assert found["classes_added"] == ["owl"] and found["classes_removed"] == [] and found["classes_reordered"]
    # The same shards under other names: every label is another.
    (tmp_path / "c").mkdir()
    write_dataset(tmp_path / "c", PHOTOS, 5, ("dog", "cat"))
    _, found = as_json("diff", tmp_path / "a", tmp_path / "c")
    assert found["counts"] == {"other labels": 12} and len(found["examples"]["other labels"]) == 10


def test_only_selected_samples_are_compared(tmp_path):
    manifest = write_dataset(tmp_path / "a", PHOTOS, 5)
    first_of(manifest, tmp_path / "b", 2, shard=1)
    code, found = as_json("diff", tmp_path / "a", tmp_path / "b")
    assert code == 1 and found["counts"] == {"only in A": 3} and found["equal_shards"] == 2


def test_a_shard_of_other_bytes_under_the_same_list_of_samples_is_told(tmp_path):
    manifest = write_dataset(tmp_path / "a", PHOTOS, 5)
    shutil.copytree(tmp_path / "a", tmp_path / "forged")
    file, path = tmp_path / "forged" / "manifest.json", tmp_path / "forged" / manifest.shards[1].path
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    digest = sha256(path.read_bytes()).hexdigest()
    content = json.loads(file.read_text().replace(manifest.shards[1].sha256, digest))
    del content["checksum"]
    file.write_text(json.dumps(content))
    code, found = as_json("diff", tmp_path / "a", tmp_path / "forged")
    assert code == 0 and found["equal_shards"] == 2 and found["unequal_shards"] == [1, 1]
    assert "sha256" in shards("diff", tmp_path / "a", tmp_path / "forged")[1]
    assert "sha256" not in shards("diff", tmp_path / "a", tmp_path / "a")[1]


def test_diff_needs_tables_of_what_differs_only(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_generated_dataset(tmp_path / name, [4], seed=seed)
    assert shards("diff", tmp_path / "a", tmp_path / "b")[0] == 0
    with pytest.raises(DataError, match=r"shard-00000\.idx\.parquet"):
        shards("diff", tmp_path / "a", tmp_path / "c")
    write_dataset(tmp_path / "d", [Photo("x"), Photo("x", seed=1)], 2)
    with pytest.raises(DataError, match=str(tmp_path / "d")):
        shards("diff", tmp_path / "d", tmp_path / "a")


# --------------------------------------------------------------------------------------------------------------- export


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_export(tmp_path):
    manifest = write_dataset(tmp_path / "ds", PHOTOS, 5, ("cat", "dog", "owl"))
    first_of(manifest, tmp_path / "view", 1)
    (tmp_path / "out").mkdir()
    code, text = shards("export", tmp_path / "view", tmp_path / "out")
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
    shards("export", tmp_path / "a", exported)
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
    shards("export", again, tmp_path / "again")
    assert files_in(tmp_path / "again").keys() == files_in(exported).keys()


def test_hostile_names_stay_inside_and_apart(tmp_path):
    names = ["..", "a/b", "a_b", "", ".hidden", "classes.txt", "x|y", "-1", " ", "w" * 300, "line\nbreak", "unlabelled"]
    keys = [
        "../../etc/passwd",
        "/absolute.png",
        "a/b/../../../c.png",
        "same.png",
        "same.jpg",
        "same.JPEG",
        "same/below.png",
        "same.jpg/below.png",
        "",
        "...",
        "k" * 300 + ".png",
        "/".join(["deep" * 20] * 40),
        "nul\0.png",
        ".hidden.png",
        "photo.v2",
        "__MACOSX/x.jpg",
        "-1/\u2028.jpg",
    ]
    photos = [Photo(key, (1,), seed=i) for i, key in enumerate(keys)]
    photos += [Photo(f"{i}.jpg", (i,), seed=50 + i) for i in range(len(names))]
    photos += [Photo("none.jpg", (), seed=80), Photo("both.jpg", (2, 6), seed=81)]
    write_dataset(tmp_path / "ds", photos, 50, names)
    assert shards("export", tmp_path / "ds", tmp_path / "out")[0] == 0
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


def test_export_without_tables_names_by_uid(tmp_path):
    manifest = write_generated_dataset(tmp_path / "ds", [4, 3])
    shards("export", tmp_path / "ds", tmp_path / "out")
    files = files_in(tmp_path / "out")
    with ShardFile(manifest.shard_path(1)) as shard:
        name = manifest.class_names[int(shard.label[2])]
        assert files[f"{name}/000000006.jpg"] == shard.read(2)
    assert len(files) == 9


def test_export_never_half(tmp_path):
    manifest = write_dataset(tmp_path / "ds", PHOTOS, 5)
    with ShardFile(manifest.shard_path(2)) as shard:
        position = int(shard.offset[1])
    with manifest.shard_path(2).open("r+b") as file:
        file.seek(position + 3)
        file.write(b"x")
    with pytest.raises(DataError, match=r"uid 11 \(dog/11\.png\)"):
        shards("export", tmp_path / "ds", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["ds"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    for out in ("full", "full/x"):
        with refusal(RecipeError, "shards", f"export to {out}", {tmp_path: "FOLDER"}):
            shards("export", tmp_path / "ds", tmp_path / out)
    with refusal(RecipeError, "shards", "export to a URL"):
        shards("export", tmp_path / "ds", "memory://out")


def test_datasets_at_a_url(tmp_path):
    write_dataset(tmp_path / "ds", PHOTOS, 5)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "ds"), "/shards-command/ds", recursive=True)
    try:
        url = "memory://shards-command/ds"
        assert as_json("info", url, "--classes")[1]["class_counts"] == {"cat": 6, "dog": 6}
        assert "cat/00.png" in shards("head", url, "-n", 1)[1]
        assert shards("diff", url, tmp_path / "ds")[0] == 0
        shards("export", url, tmp_path / "out")
        assert len(files_in(tmp_path / "out")) == 14
        assert Manifest.load(url).num_samples == 12
    finally:
        memory.rm("/shards-command", recursive=True)
