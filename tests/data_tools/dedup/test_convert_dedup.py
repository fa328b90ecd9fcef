"""Copies of test images are left out of what is converted, whoever converts it and however often it is killed."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import fsspec
import pyarrow.parquet as pq
import pytest
from commands import command
from datasets_on_disk import contents, run_here
from dedup_data import index_of, source_of, write_photos
from messages import assert_messages
from planted_copies import OWN, PLANTED, photo, stripped
from small_files import flip, write_files

from data_tools.conversion import convert
from data_tools.dedup.against import name_indexes
from data_tools.machine import Machine, TaskRange
from data_tools.request import Request, parse_splits
from vitscale.data.shards import Manifest
from vitscale.data.shards.verify import verify
from vitscale.ground.errors import DataError, RecipeError

SHARDS = ("--shard-samples", 8)
ALL = OWN + len(PLANTED)
LISTED = f"{len(PLANTED)} (listed in dedup.parquet)"


@pytest.fixture(scope="module")
def index(planted, tmp_path_factory) -> Path:
    sources = [source_of(folder, name) for name, folder in planted.test_sets.items()]
    return index_of(tmp_path_factory.mktemp("both") / "index", sources).folder


@pytest.fixture(scope="module")
def pictures(planted) -> Path:
    return planted.images


@pytest.fixture(scope="module")
def unrelated(tmp_path_factory) -> Path:
    """An index of which there are no copies."""
    root = tmp_path_factory.mktemp("unrelated")
    write_photos(root / "others", ["x.jpg"], seed=5000)
    index_of(root / "index", [source_of(root / "others", preset="photo", level=2)])
    return root / "index"


def request_for(src: Path, *indexes: Path, **options) -> Request:
    return Request(str(src), shard_samples=8, dedup=name_indexes([str(path) for path in indexes]), **options)


@pytest.fixture(scope="module")
def in_peace(pictures, index, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("peace") / "out"
    convert(request_for(pictures, index), out, Machine(workers=2))
    return out


def converted(request: Request, folder: Path) -> Path:
    """A data set converted to a URL and brought here, in this process alone: that is faster."""
    url = f"memory://{folder.parent.name}/{folder.name}"
    convert(request, url)
    fsspec.filesystem("memory").get(url, str(folder), recursive=True)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def decisions(dataset: Path) -> list[dict]:
    return pq.read_table(dataset / "dedup.parquet").to_pylist()


def rows_of(dataset: Path) -> list[dict]:
    return [row for path in sorted(dataset.glob("*.idx.parquet")) for row in pq.read_table(path).to_pylist()]


def test_exactly_the_copies_are_left_out(pictures, index, in_peace):
    removed = [row for row in decisions(in_peace) if row["removed"]]
    found = {row["train_key"]: (row["test_set"], row["test_key"], row["tier"]) for row in removed}
    assert found == {key: (*of, tier or found[key][2]) for key, (*of, tier) in PLANTED.items()}
    stored = rows_of(in_peace)
    names = {str(path.relative_to(pictures)) for path in pictures.rglob("*.*")}
    assert {row["key"] for row in stored} == names - PLANTED.keys()
    # Numbers in the shuffled order stay what they are, with gaps.
    assert sorted([row["uid"] for row in stored] + [row["train_uid"] for row in removed]) == list(range(ALL))
    manifest = Manifest.load(in_peace)
    assert (manifest.num_samples, manifest.num_removed, manifest.num_rejected) == (OWN, len(PLANTED), 0)
    (named,) = name_indexes([str(index)])
    assert manifest.options["dedup_against"] == [{"test_sets": ["birds", "fish"], "sha256": named.sha256}]
    verdict = verify(manifest, decode=True)
    assert (verdict.damage, verdict.notes) == ([], [])
    assert sorted(path.name for path in (in_peace / "dedup").iterdir()) != []
    assert str(index) not in json.dumps(json.loads((in_peace / "manifest.json").read_text()))


def test_the_command_tells_what_was_left_out(here, pictures, index, in_peace, tmp_path):
    arguments = (pictures, tmp_path / "out", *SHARDS, "--dedup-against", index)
    done = run_here(*arguments)
    assert (done.exit_code, done.stderr) == (0, "")
    assert LISTED in done.stdout and "birds" in done.stdout and "fish" in done.stdout
    assert contents(tmp_path / "out") == contents(in_peace)
    again = run_here(*arguments)
    assert again.exit_code == 0 and "already complete" in again.stdout
    without = run_here(pictures, tmp_path / "out", *SHARDS)
    assert without.exit_code == 2
    assert_messages("convert", {"complete dataset": without.stderr.rstrip()}, {tmp_path / "out": "OUT"})
    assert command("shards", "verify", tmp_path / "out").returncode == 0


def test_what_is_kept_is_stored_as_without_the_option(pictures, in_peace, unrelated, tmp_path):
    without = converted(Request(str(pictures), shard_samples=8), tmp_path / "without")
    names = {path.name for path in without.iterdir()}
    assert names.isdisjoint({"dedup.parquet", "dedup"})
    manifest = Manifest.load(without)
    assert manifest.num_removed == 0 and "dedup_against" not in manifest.options
    before = {row["key"]: row for row in rows_of(without)}
    assert [before[row["key"]] for row in rows_of(in_peace)] == rows_of(in_peace)
    # Against a test set of which there are no copies, all of it is the same.
    clean = converted(request_for(pictures, unrelated), tmp_path / "clean")
    shards = [name for name in names if name.startswith("shard-")]
    assert len(shards) == 2 * -(-ALL // 8)
    for name in shards:
        assert (clean / name).read_bytes() == (without / name).read_bytes()
    assert not decisions(clean) and Manifest.load(clean).num_removed == 0
    assert (clean / "dedup").is_dir()


def test_task_ranges_and_a_merge_that_needs_the_index(here, pictures, index, in_peace, tmp_path):
    out, place = tmp_path / "out", tmp_path / "index"
    shutil.copytree(index, place)
    for i, where in enumerate((index, place)):  # the same index, which was moved: the merge looks where it was last
        done = run_here(pictures, out, *SHARDS, "--dedup-against", where, "--task-range", f"{i}/2")
        assert done.exit_code == 0, done.stderr
    place.rename(tmp_path / "elsewhere")
    gone = run_here("--merge", out)
    assert gone.exit_code == 3 and f"{place}:" in gone.stderr and "--dedup-against" in gone.stderr
    assert not (out / "manifest.json").exists()
    other = run_here("--merge", out, "--dedup-against", index)
    assert other.exit_code == 2 and "--dedup-against" in other.stderr
    (tmp_path / "elsewhere").rename(place)
    merged = run_here("--merge", out)
    assert merged.exit_code == 0 and LISTED in merged.stdout, merged.stderr
    assert contents(out) == contents(in_peace)


def test_another_index_on_a_half_done_output(pictures, index, unrelated, tmp_path):
    url, here = f"memory://{tmp_path.name}/out", tmp_path / "index"
    shutil.copytree(index, here)
    asked = request_for(pictures, here)
    convert(asked, url, Machine(tasks=TaskRange(0, 2)))
    shutil.rmtree(here)
    shutil.copytree(unrelated, here)
    with pytest.raises(RecipeError, match=r"dedup_against: .*birds, fish"):
        convert(request_for(pictures, here), url)
    with pytest.raises(RecipeError, match=r"dedup_against: "):
        convert(Request(str(pictures), shard_samples=8), url)
    with pytest.raises(DataError, match=r"\bindex\b"):
        convert(asked, url)  # as a worker sees it that starts late


def test_indexes_that_cannot_be_used(pictures, index, tmp_path):
    damaged = shutil.copytree(index, tmp_path / "damaged")
    flip(damaged / "hashes.npy", (damaged / "hashes.npy").stat().st_size - 5)
    for indexes, kind, message in (
        ([damaged], DataError, r"hashes\.npy: damaged"),
        ([index, index], RecipeError, "birds"),
        (["s3://bucket/index"], RecipeError, "--dedup-against s3://bucket/index: an index is read"),
    ):
        with pytest.raises(kind, match=message):
            request_for(pictures, *indexes)
    done = run_here(pictures, tmp_path / "out", "--dedup-against", damaged)
    assert done.exit_code == 3 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_splits_have_their_own(pictures, index, tmp_path):
    request = request_for(pictures, index, splits=parse_splits(["val=10", "train=rest"]))
    converted(request, tmp_path / "out")
    found = {}
    for split in ("val", "train"):
        manifest, rows = Manifest.load(tmp_path / "out" / split), decisions(tmp_path / "out" / split)
        removed = {row["train_key"] for row in rows if row["removed"]}
        assert manifest.num_removed == len(removed)
        assert not verify(manifest).damage
        assert (tmp_path / "out" / split / "dedup").is_dir()
        found[split] = (manifest.num_samples + manifest.num_removed, removed)
    assert [count for count, _ in found.values()] == [10, ALL - 10]
    assert found["val"][1] | found["train"][1] == PLANTED.keys()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["convert.log.jsonl", "train", "val"]


def test_shards_of_which_nothing_is_left(pictures, index, tmp_path):
    names = ("own-00.jpg", "own-02.jpg", "same-bytes.jpg", "own-04.jpg", "quality.jpg")
    write_files(tmp_path / "images" / "a", *((name, (pictures / "a" / name).read_bytes()) for name in names))
    out = converted(replace(request_for(tmp_path / "images", index), shard_samples=1), tmp_path / "out")
    manifest = Manifest.load(out)
    assert [shard.samples for shard in manifest.shards] == [1] * 3 and manifest.num_removed == 2
    assert len(list((tmp_path / "out").glob("shard-*.beton"))) == 3
    verdict = verify(manifest)
    assert (verdict.damage, verdict.notes) == ([], [])


def test_a_source_that_is_the_test_set(planted, index, tmp_path):
    tests = planted.test_sets["fish"]
    shutil.copytree(tests, tmp_path / "images" / "x")
    write_files(tmp_path / "images" / "x", ("broken.jpg", b"no image"))
    request, url = request_for(tmp_path / "images", index), f"memory://{tmp_path.name}"
    with pytest.raises(DataError, match=r"\b6\b.*\b1\b"):
        convert(request, f"{url}/out", Machine(max_reject_rate=0.5))
    assert not fsspec.filesystem("memory").exists(f"{url}/out/manifest.json")
    with pytest.raises(DataError, match=r"\b1 of 7\b.*14\.29%"):  # of all, not of those left
        convert(request, f"{url}/few", Machine(max_reject_rate=0.14))


def test_a_dry_run_counts_them(pictures, index, tmp_path):
    done = run_here(pictures, tmp_path / "out", "--dry-run", "--dedup-against", index)
    assert done.exit_code == 0 and not (tmp_path / "out").exists(), done.stderr
    assert re.search(rf"copies of test images\W+{len(PLANTED)} ", done.stdout), done.stdout
    # Images of the test set, contaminated ones, copies: of them by bytes, pixels, hash, correlation.
    lines = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.strip()}
    assert lines["birds"][1:7] == ["10", "6", "(60.0%)", "7", "2", "1"]
    assert lines["fish"][1:7] == ["6", "4", "(66.7%)", "4", "1", "0"]
    assert [sum(map(int, lines[name][7:9])) for name in ("birds", "fish")] == [4, 3]


def test_a_dataset_is_cleaned_by_converting_it(planted, index, tmp_path):
    converted(request_for(stripped(planted, tmp_path / "all"), index), tmp_path / "clean")
    removed = {row["train_key"] for row in decisions(tmp_path / "clean") if row["removed"]}
    assert removed == PLANTED.keys()
    assert Manifest.load(tmp_path / "clean").num_samples == OWN
    assert not verify(Manifest.load(tmp_path / "clean")).damage


def test_two_copies_of_one_test_image_in_two_indexes(planted, tmp_path):
    """An image that is in several test sets is told with each, and removed once."""
    birds = [(f"{i}.jpg", (planted.test_sets["birds"] / f"{i}.jpg").read_bytes()) for i in range(2)]
    for name, files in (("one", birds[:1]), ("two", birds)):
        source = source_of(write_files(tmp_path / name, *files), name, preset="photo", level=0)
        index_of(tmp_path / f"{name}.index", [source])
    write_photos(tmp_path / "images" / "x", ["a.jpg", "b.jpg"], seed=3000)
    write_files(tmp_path / "images" / "x", ("c.jpg", birds[0][1]))
    photo(1).save(tmp_path / "images" / "x" / "d.png")  # what 1.jpg was made of
    request = request_for(tmp_path / "images", tmp_path / "one.index", tmp_path / "two.index")
    manifest = Manifest.load(converted(request, tmp_path / "out"))
    assert (manifest.num_samples, manifest.num_removed) == (2, 2)
    told = {(row["train_key"], row["test_set"], row["tier"]) for row in decisions(tmp_path / "out")}
    assert told == {("x/c.jpg", "one", "bytes"), ("x/c.jpg", "two", "bytes"), ("x/d.png", "two", "hash")}
