"""`find` against copies that were planted, by other ways to the same samples, and what `apply` leaves of them."""

import csv
import json
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from commands import run as command
from datasets_on_disk import samples_of, uids
from dedup_data import make_photo
from messages import refusal
from pictures import encoded
from planted_copies import OWN, PLANTED, URL, stripped
from small_files import files_in, flip_images, upload, write_files
from stock_beton import write_stock

from data_tools.conversion import convert
from data_tools.dedup.finding import Removal, find
from data_tools.machine import Machine
from data_tools.request import Request
from data_tools.sources import SourceOptions
from data_tools.tasks import run_inline
from data_tools.views import write_subset
from vitscale.data.shards import Manifest
from vitscale.data.shards.verify import verify
from vitscale.ground.errors import DataError, RecipeError


def run(planted, dataset, out, runner=run_inline):
    return find(str(dataset), list(map(str, planted.indexes.values())), str(out), runner)


def rows_of(found, removed=True):
    return [row for row in pq.read_table(found / "dedup.parquet").to_pylist() if row["removed"] or not removed]


def copies(found):
    """Training image -> test set and test image."""
    return {row["train_key"]: (row["test_set"], row["test_key"]) for row in rows_of(found)}


def test_what_was_planted_is_found_and_nothing_else(finding, planted):
    found, result = finding
    assert (result.findings.images, result.findings.removed, result.made_anew) == (OWN + len(PLANTED), len(PLANTED), 0)
    rows = rows_of(found)
    assert sorted(row["train_key"] for row in rows) == sorted(PLANTED)
    for row in rows:
        test_set, test_key, tier = PLANTED[row["train_key"]]
        assert (row["test_set"], row["test_key"]) == (test_set, test_key)
        assert tier in (None, row["tier"])
        # Pixels are laid over each other where nothing else has decided; as three decimals they are read again.
        assert (row["correlation"] is None) == (row["variant"] is None) == (row["tier"] in ("bytes", "pixels"))
        assert row["correlation"] is None or row["correlation"] == round(row["correlation"], 3) > 0.9
        assert row["cosine"] is None
    uids = {row["train_uid"]: row["train_key"] for row in rows}
    for table in sorted(planted.dataset.glob("*.idx.parquet")):
        of_shard = pq.read_table(table, columns=["uid", "key"]).to_pylist()
        assert all(uids.get(row["uid"], row["key"]) == row["key"] for row in of_shard)
    assert [row["train_uid"] for row in rows] == sorted(uids)  # in order of shards


def test_contaminated_test_images_are_listed_once_the_nearest_first(found):
    with (found / "contaminated.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["test_set", "test_key", "train_key", "tier", "distance", "correlation"]
    expected = {(test_set, key) for test_set, key, _ in PLANTED.values()}
    assert len(rows) == len(expected) and {(row["test_set"], row["test_key"]) for row in rows} == expected
    assert [row["test_set"] for row in rows] == ["birds"] * 6 + ["fish"] * 4
    birds = [row["tier"] for row in rows[:6]]
    assert birds[:3] == ["bytes", "pixels", "hash"] and rows[0]["train_key"] == "a/same-bytes.jpg"
    distances = [int(row["distance"]) for row in rows[:6] if row["tier"] == "hash"]
    assert distances == sorted(distances)


def test_the_folder_says_what_it_is_of(found, planted):
    described = json.loads((found / "found.json").read_text())
    assert described["dataset"]["sha256"] == Manifest.load(planted.dataset).sha256
    assert [index["test_sets"] for index in described["indexes"]] == [["birds"], ["fish"]]
    assert described["removed"] == len(PLANTED)
    assert {"dedup.parquet", "contaminated.csv", "report.json"} <= set(described["files"])
    assert {path.name for path in found.iterdir()} == {"found.json", *described["files"]}
    assert [path.name for path in found.parent.iterdir()] == ["found"]


def test_tables_without_fingerprints_give_the_same(found, planted, tmp_path):
    """All that was stored passed through, so what is decoded now is what was then."""
    result = run(planted, stripped(planted, tmp_path / "v1"), tmp_path / "found")
    assert result.made_anew == len(Manifest.load(planted.dataset).shards)
    for name in ("dedup.parquet", "contaminated.csv"):
        assert (tmp_path / "found" / name).read_bytes() == (found / name).read_bytes(), name


def test_no_tables_at_all_give_the_same_uids(found, planted, tmp_path):
    shutil.copytree(planted.dataset, tmp_path / "bare", ignore=shutil.ignore_patterns("*.idx.parquet"))
    run(planted, tmp_path / "bare", tmp_path / "found")
    rows = rows_of(tmp_path / "found")
    assert [row["train_uid"] for row in rows] == [row["train_uid"] for row in rows_of(found)]
    assert all(row["train_key"] == f"uid-{row['train_uid']}" for row in rows)
    assert [row["tier"] for row in rows] == [row["tier"] for row in rows_of(found)]


def damaged(planted, out, wanted):
    """The dataset with a flipped bit in each image whose key is wanted; returns the number of these."""
    shutil.copytree(planted.dataset, out)
    count = 0
    for path in sorted(out.glob("*.beton")):
        keys = pq.read_table(path.with_suffix(".idx.parquet"))["key"].to_pylist()
        slots = [slot for slot, key in enumerate(keys) if wanted(key)]
        flip_images(path, *slots)
        count += len(slots)
    return count


def test_only_candidates_are_decoded(found, planted, tmp_path):
    near = {row["train_key"] for row in rows_of(found, removed=False)}
    ours = set(PLANTED) | near
    assert damaged(planted, tmp_path / "others", lambda key: key not in ours) > 10
    run(planted, tmp_path / "others", tmp_path / "found")
    assert copies(tmp_path / "found") == copies(found)
    damaged(planted, tmp_path / "candidate", lambda key: key == "a/quality.jpg")
    with pytest.raises(DataError, match=r"shard-0000\d\.beton: uid \d+"):
        run(planted, tmp_path / "candidate", tmp_path / "never")
    assert not [path for path in tmp_path.iterdir() if "never" in path.name]


def test_only_selected_samples_are_compared(found, planted, tmp_path):
    write_subset(str(planted.dataset), str(tmp_path / "subset"), 23)
    result = run(planted, tmp_path / "subset", tmp_path / "found")
    assert result.findings.images == 23
    expected = [row["train_uid"] for row in rows_of(found) if row["train_uid"] < 23]
    assert [row["train_uid"] for row in rows_of(tmp_path / "found")] == expected
    assert 0 < len(expected) < len(PLANTED)


def test_a_url_and_another_number_of_workers_give_equal_bytes(found, planted, tmp_path):
    run(planted, URL, tmp_path / "found", Machine().runner(URL))
    for path in found.iterdir():
        if path.name != "found.json":  # which says where the dataset is
            assert (tmp_path / "found" / path.name).read_bytes() == path.read_bytes(), path.name


def test_mistakes_are_said_and_leave_nothing(planted, tmp_path):
    fish, dataset = str(planted.indexes["fish"]), str(planted.dataset)
    write_files(tmp_path / "full", "mine.txt")
    for arguments, kind in (
        ((str(tmp_path / "no"), [fish], "out"), DataError),
        ((dataset, [str(tmp_path / "full")], "out"), DataError),
        ((dataset, [fish, fish], "out"), RecipeError),
        ((dataset, [fish], "full"), RecipeError),
        ((dataset, [fish], "full/mine.txt/out"), RecipeError),
    ):
        with refusal(kind, "dedup", f"find {arguments}", {tmp_path: "FOLDER", fish: "FISH", dataset: "DATASET"}):
            find(arguments[0], arguments[1], str(tmp_path / arguments[2]), run_inline)
    with pytest.raises(RecipeError, match="this machine's disk"):
        find(dataset, [fish], "s3://bucket/found", run_inline)
    assert Counter(path.name for path in tmp_path.rglob("*")) == Counter(["full", "mine.txt"])


def test_a_table_of_another_shard_is_damage(planted, tmp_path):
    shutil.copytree(planted.dataset, tmp_path / "ds")
    first, second, *_, last = sorted((tmp_path / "ds").glob("*.idx.parquet"))
    content = first.read_bytes()
    shutil.copyfile(second, first)
    with pytest.raises(DataError, match=first.name.partition(".")[0]):
        run(planted, tmp_path / "ds", tmp_path / "found")
    first.write_bytes(content)
    shutil.copyfile(first, last)
    with pytest.raises(DataError, match=last.name.partition(".")[0]):
        run(planted, tmp_path / "ds", tmp_path / "found")
    assert not (tmp_path / "found").exists()


def removal_of(planted, found, dataset=None):
    return Removal.of(str(dataset or planted.dataset), str(found))


def expected(planted):
    """What must be left, by what was planted."""
    left = {uid: sample for uid, sample in samples_of(planted.dataset).items() if sample.key not in PLANTED}
    assert len(left) == OWN
    return left


def test_a_view_is_what_is_left(found, planted, tmp_path):
    before = files_in(planted.dataset)
    view = removal_of(planted, found).write(str(tmp_path / "deep" / "view"))
    assert samples_of(tmp_path / "deep" / "view") == expected(planted)
    whole = Manifest.load(planted.dataset)
    assert (view.num_removed, view.class_names, view.shuffle_seed) == (len(PLANTED), whole.class_names, 3)
    indexes = [json.loads((planted.indexes[name] / "index.json").read_text()) for name in ("birds", "fish")]
    against = view.options.pop("dedup_against")
    assert [one["test_sets"] for one in against] == [[one["test_sets"][0]["name"]] for one in indexes]
    assert view.options == whole.options
    names = {path.name for path in (tmp_path / "deep" / "view").iterdir()}
    assert names - {"manifest.json", "dedup.parquet"} == {
        f"shard-{index:05d}.excluded.npy" for index, shard in enumerate(view.shards) if shard.select != "all"
    }
    assert not verify(view).damage
    assert files_in(planted.dataset) == before


def test_what_was_found_in_a_subset_leaves_the_subset(planted, tmp_path):
    """And a view of a view: the second comparison's index is another, and both are told."""
    write_subset(str(planted.dataset), str(tmp_path / "subset"), 30)
    dataset = tmp_path / "subset"
    left = samples_of(dataset)
    for step, name in enumerate(("fish", "birds")):
        find(str(dataset), [str(planted.indexes[name])], str(tmp_path / f"found-{name}"), run_inline)
        out = tmp_path / f"without-{name}"
        view = removal_of(planted, tmp_path / f"found-{name}", dataset).write(str(out))
        left = {uid: sample for uid, sample in left.items() if PLANTED.get(sample.key, ("",))[0] != name}
        assert samples_of(out) == left and not verify(view).damage
        assert len(view.options["dedup_against"]) == step + 1
        dataset = out
    assert view.num_removed == 30 - len(left) and set(left) == {uid for uid in expected(planted) if uid < 30}
    result = find(str(dataset), [str(planted.indexes["birds"])], str(tmp_path / "again"), run_inline)
    assert result.findings.removed == 0
    with (tmp_path / "again" / "contaminated.csv").open(newline="") as file:
        assert len(list(csv.reader(file))) == 1


def test_a_shard_of_which_nothing_is_left_disappears(found, planted, tmp_path):
    whole = samples_of(planted.dataset)
    uids = np.array([uid for uid in whole if 9 <= uid < 18 or uid in (0, 20)])
    removal = replace(removal_of(planted, found), uids=uids)
    written = removal.write(str(tmp_path / "view"))
    assert len(written.shards) == len(Manifest.load(planted.dataset).shards) - 1
    assert samples_of(tmp_path / "view") == {uid: sample for uid, sample in whole.items() if uid not in uids}
    assert not verify(written).damage


def test_at_a_url(found, planted):
    """The same dataset, by its bytes, so what was found on this machine holds there."""
    view = removal_of(planted, found, URL).write("memory://planted/view")
    assert not verify(view).damage and view.num_samples == OWN


def test_what_does_not_belong_to_the_dataset_is_refused(found, planted, tmp_path):
    write_subset(str(planted.dataset), str(tmp_path / "subset"), 20)
    with pytest.raises(RecipeError, match="vitscale dedup find"):
        removal_of(planted, found, tmp_path / "subset")
    with pytest.raises(DataError, match="vitscale dedup find"):
        removal_of(planted, tmp_path / "subset")
    for name, damage in (
        ("dedup.parquet", None),
        ("dedup.parquet", b"x"),
        ("found.json", b"{}"),
        ("found.json", b'{"version": 1'),
    ):
        broken = shutil.copytree(found, tmp_path / "broken")
        (broken / name).unlink() if damage is None else (broken / name).write_bytes(damage)
        with refusal(DataError, "dedup", f"{name} {damage!r}", {broken: "FOUND"}):
            removal_of(planted, broken)
        shutil.rmtree(broken)


def test_nothing_left_is_refused(planted, tmp_path):
    """A training set that is the test set itself."""
    url = f"memory://{tmp_path.name}/fish"
    convert(Request(str(planted.test_sets["fish"]), source=SourceOptions(unlabelled=True)), url)
    find(url, [str(planted.indexes["fish"])], str(tmp_path / "found"), run_inline)
    with pytest.raises(RecipeError, match=r"\b6 samples\b"):
        Removal.of(url, str(tmp_path / "found"))


def test_uids_that_the_shards_do_not_have(found, planted, tmp_path):
    removal = replace(removal_of(planted, found), uids=np.array([4, 10**6]))
    with pytest.raises(DataError, match=r"\b0 of\b.*\b1\b"):
        removal.write(str(tmp_path / "view"))
    assert not list((tmp_path / "view").iterdir())


@pytest.mark.parametrize("mode", ["raw", "jpg"])
def test_copies_are_found_and_taken_out(inline, tmp_path, mode):
    from ffcv.fields import IntField, RGBImageField

    photos = [np.asarray(make_photo(i, 140, 140)) for i in range(6)]
    fields = {"label": IntField(), "image": RGBImageField(write_mode=mode)}
    path = write_stock(tmp_path / "train.beton", fields, [(i % 2, photo) for i, photo in enumerate(photos)])
    command("shards", "adopt", path)
    pets = [make_photo(i, 140, 140) for i in (1, 4, 99)]
    write_files(tmp_path / "pets", *((f"{i}.png", encoded(photo, "PNG")) for i, photo in enumerate(pets)))
    command("dedup", "index", tmp_path / "pets", "--out", tmp_path / "index", "--workers", 1)
    bucket = f"memory://{tmp_path.name}"  # for this process, which then needs no workers
    upload(path, f"{bucket}/train.beton")
    upload(tmp_path / "train", f"{bucket}/train")
    command("dedup", "find", f"{bucket}/train", tmp_path / "index", "--out", tmp_path / "found")
    command("dedup", "apply", tmp_path / "train", tmp_path / "found", tmp_path / "far" / "view")
    view = Manifest.load(tmp_path / "far" / "view")
    assert (view.schema_version, view.num_samples, view.num_removed) == (2, 4, 2)
    assert not verify(view, decode=True).damage
    assert uids(view) == [0, 2, 3, 5]
