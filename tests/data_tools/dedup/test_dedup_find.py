"""`find` against copies that were planted, and against itself by other ways to the same samples."""

import csv
import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from messages import refusal
from planted_copies import OWN, PLANTED, URL

from data_tools.dedup.finding import find
from data_tools.machine import Machine
from data_tools.tasks import run_inline
from data_tools.views import write_subset
from vitscale.data.shards import Manifest, ShardFile
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
    assert [row["test_set"] for row in rows] == ["birds"] * 6 + ["fish"] * 2
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


# ------------------------------------------------------------------------------------------------- tables and no tables


def stripped(planted, out):
    """The dataset as version 1 of the tables had it."""
    shutil.copytree(planted.dataset, out)
    for path in out.glob("*.idx.parquet"):
        table = pq.read_table(path).drop_columns(["pixels", "pdq", "pdq_quality", "pdq_trimmed"])
        pq.write_table(table.replace_schema_metadata(None), path, compression="zstd")
    return out


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
    """The dataset with one flipped byte in each image whose key is wanted; returns the number of these."""
    shutil.copytree(planted.dataset, out)
    count = 0
    for path in sorted(out.glob("*.beton")):
        keys = pq.read_table(path.with_suffix(".idx.parquet"))["key"].to_pylist()
        content = bytearray(path.read_bytes())
        with ShardFile(path) as shard:
            for slot, key in enumerate(keys):
                if wanted(key):
                    content[int(shard.offset[slot] + shard.size[slot] // 2)] ^= 0xFF
                    count += 1
        path.write_bytes(content)
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


# ------------------------------------------------------------------------------------------------- settings and subsets


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


# ------------------------------------------------------------------------------------------------------------- mistakes


def test_mistakes_are_said_and_leave_nothing(planted, tmp_path):
    fish, dataset = str(planted.indexes["fish"]), str(planted.dataset)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
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
    with pytest.raises(DataError, match=r"\b9 rows\b"):
        run(planted, tmp_path / "ds", tmp_path / "found")
    assert not (tmp_path / "found").exists()


def test_a_damaged_index_is_found_before_anything_long(planted, tmp_path):
    folder = tmp_path / "index"
    shutil.copytree(planted.indexes["birds"], folder)
    content = bytearray((folder / "hashes.npy").read_bytes())
    content[-1] ^= 1
    Path(folder / "hashes.npy").write_bytes(content)
    with pytest.raises(DataError, match=r"hashes\.npy"):
        find(str(planted.dataset), [str(folder)], str(tmp_path / "found"), run_inline)
    assert os.listdir(tmp_path) == ["index"]  # noqa: PTH208
