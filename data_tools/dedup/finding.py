"""Compares an existing dataset with indexes, lists its copies of test images, and writes a dataset without them.

FOUND/found.json         which dataset, which indexes, with what settings; digests of the files; written last
FOUND/dedup.parquet      every decision, see `provenance.DECISIONS`, in order of shards
FOUND/contaminated.csv   test images that have a copy in the dataset, with the nearest
FOUND/report.json, *.png see `report.py`

The dataset itself is not changed: the one without copies is a view of its shards.
"""

import csv
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_tools import views
from data_tools.dedup.against import Comparison, NamedIndex, name_indexes, open_matcher
from data_tools.dedup.building import TestSource, build_index
from data_tools.dedup.embedding import Embedder
from data_tools.dedup.matches import TIERS, Findings
from data_tools.dedup.matching import Matcher
from data_tools.dedup.queries import ShardQueries
from data_tools.dedup.report import write_report
from data_tools.machine import Machine
from data_tools.sources import SourceOptions, open_source
from data_tools.tasks import Progress, Run, Task, Tick
from vitscale.data.shards import Manifest
from vitscale.data.shards.opening import known_manifest, local_copy
from vitscale.data.shards.provenance import DECISIONS, DECISIONS_NAME, read_table, write_tables
from vitscale.ground import storage
from vitscale.ground.errors import DataError, RecipeError, os_errors
from vitscale.ground.files.digests import file_digests
from vitscale.ground.files.durable import new_folder
from vitscale.ground.safe_text import without_secrets

FOUND_NAME = "found.json"
CONTAMINATED_NAME = "contaminated.csv"
VERSION = 1

_COLUMNS = ("test_set", "test_key", "train_key", "tier", "distance", "correlation")
_OPTION = "dedup_against"  # the manifest's option, which conversion writes, too
_AGAIN = "Run `vitscale dedup find` again"


@dataclass(frozen=True)
class Finding:
    """The result of a comparison."""

    matcher: Matcher  # with the test sets and settings that were used
    findings: Findings
    made_anew: int  # number of shards whose tables had no fingerprints, or those of another algorithm
    files: list[str]  # names of the files written


def find(
    dataset: str,
    indexes: Sequence[str],
    out: str,
    run: Run,
    *,
    embedder: Embedder | None = None,
    tick: Tick = lambda done, rejected: None,
) -> Finding:
    """Compare a dataset with indexes and write the findings to a new folder; either complete or not at all.

    Args:
        dataset: the dataset's folder, manifest file or URL.
        indexes: the indexes' folders.
        out: a folder that does not exist, or is empty.
        run: runs the tasks, one per shard.
        embedder: the model of the indexes that have vectors.
        tick: called several times a second with the number of samples done.

    Raises:
        RecipeError: an `out` that is not empty; two test sets with the same name; another model
            than the indexes'.
        DataError: a dataset or an index that is missing or damaged; a disk that refuses.
        StorageError: a URL that does not answer.
    """
    manifest = Manifest.load(dataset)
    named = name_indexes(indexes, "INDEX", embedder)
    matcher = open_matcher(named)
    with new_folder(out, "--out") as folder:
        pieces = folder / "pieces"
        pieces.mkdir()
        tasks = (
            _Task(manifest.where, manifest.sha256, named, index, entry.path, pieces)
            for index, entry in enumerate(manifest.shards)
        )
        findings, made_anew = Findings(matcher.names), 0
        for of_shard, are_fresh in run(tasks, tick):
            findings.add(of_shard)
            made_anew += are_fresh
        _join(pieces, len(manifest.shards), folder, matcher.names)
        shutil.rmtree(pieces)
        files = [DECISIONS_NAME, CONTAMINATED_NAME]
        files += write_report(folder, matcher, findings)
        _describe(folder, manifest, named, findings.removed, files)
    return Finding(matcher, findings, made_anew, files)


@dataclass(frozen=True)
class _Task(Task):
    """One shard to compare. Paths only, because the contents are large. Its decisions, if any, become a file."""

    manifest: str
    manifest_sha256: str
    indexes: tuple[NamedIndex, ...]
    shard: int
    path: str
    folder: Path  # of the decisions

    @property
    def name(self) -> str:
        return f"shard {self.path}"

    def run(self, progress: Progress) -> tuple[Findings, bool]:
        """Returns the findings, and whether the fingerprints had to be made for them.

        Raises DataError: a shard, a table or an index that is damaged; StorageError.
        """
        manifest = known_manifest(self.manifest, self.manifest_sha256)
        comparison = Comparison(open_matcher(self.indexes))
        with ShardQueries(manifest, self.shard) as queries:
            for batch in queries.batches():
                comparison.compare(batch)
                for _ in batch:
                    progress.advance()
            are_fresh = queries.are_fresh
        decided = comparison.decisions()
        if decided.num_rows:
            path = _piece(self.folder, self.shard)
            with os_errors(f"{path}: cannot be written"):
                write_tables(path, [decided], DECISIONS)
        return comparison.findings, are_fresh


def _piece(folder: Path, shard: int) -> Path:
    return folder / f"{shard:06d}.parquet"


def _join(pieces: Path, shards: int, folder: Path, names: Sequence[str]) -> None:
    """Write the decisions of all shards in order, and the test images that are contaminated."""
    best: dict[tuple[str, str], dict[str, Any]] = {}

    def tables() -> Iterator[pa.Table]:
        for path in filter(Path.exists, (_piece(pieces, shard) for shard in range(shards))):
            table = read_table(path, DECISIONS)
            for row in table.filter(pc.field("removed")).to_pylist():
                image = row["test_set"], row["test_key"]
                if image not in best or _order(row) < _order(best[image]):
                    best[image] = row
            yield table

    write_tables(folder / DECISIONS_NAME, tables(), DECISIONS)
    with (folder / CONTAMINATED_NAME).open("x", encoding="utf-8", newline="") as file:
        rows = csv.DictWriter(file, _COLUMNS, extrasaction="ignore", lineterminator="\n")
        rows.writeheader()
        for row in sorted(best.values(), key=lambda row: (names.index(row["test_set"]), *_order(row), row["test_key"])):
            correlation = "" if row["correlation"] is None else f"{row['correlation']:.3f}"
            rows.writerow(row | {"correlation": correlation})


def _order(row: dict[str, Any]) -> tuple[int, float, float, str]:
    distance = math.inf if row["distance"] is None else row["distance"]
    correlation = -1.0 if row["correlation"] is None else row["correlation"]
    return TIERS.index(row["tier"]), distance, -correlation, row["train_key"]


def _describe(
    folder: Path, manifest: Manifest, indexes: Sequence[NamedIndex], removed: int, names: Sequence[str]
) -> None:
    digests = {name: file_digests(folder / name) for name in names}
    content = {
        "version": VERSION,
        "dataset": {
            "manifest": without_secrets(manifest.where),
            "sha256": manifest.sha256,
            "samples": manifest.num_samples,
        },
        "removed": removed,
        "indexes": [index.described() for index in indexes],
        "files": {name: {"bytes": of.bytes, "sha256": of.sha256} for name, of in digests.items()},
    }
    (folder / FOUND_NAME).write_text(json.dumps(content, indent=1) + "\n", "utf-8")


@dataclass(frozen=True)
class Removal:
    """The samples to remove from a dataset."""

    manifest: Manifest  # the dataset
    decisions: Path  # the file of decisions that names them
    indexes: list[dict[str, Any]]  # what the dataset was compared with, as `NamedIndex.described` gives it
    uids: np.ndarray  # of the samples to remove, int64 (n,), sorted
    by_test_set: dict[str, int]  # how many of them match each test set

    @classmethod
    def of(cls, dataset: str, found: str) -> "Removal":
        """Read what `find` wrote.

        Raises:
            RecipeError: it is about another dataset, or no sample would be left.
            DataError: the dataset or the findings are missing or damaged.
            StorageError: a URL that does not answer.
        """
        folder = Path(storage.without_file_scheme(found))
        manifest, described = Manifest.load(dataset), _described(folder)
        searched = described["dataset"]
        if searched["sha256"] != manifest.sha256:
            raise RecipeError(
                f"FOUND {found}: was found in {searched['manifest']}, a manifest of the sha256 {searched['sha256']}; "
                f"that of {dataset} has {manifest.sha256}. Run `vitscale dedup find` on this dataset"
            )
        decisions = folder / DECISIONS_NAME
        table = read_table(decisions, DECISIONS, ["train_uid", "test_set", "removed"]).filter(pc.field("removed"))
        uids = np.unique(table["train_uid"].to_numpy())
        if len(uids) >= manifest.num_samples:
            raise RecipeError(
                f"FOUND {found}: all {manifest.num_samples:,} samples are to be removed, so none would be left"
            )
        counts = table.group_by("test_set").aggregate([("train_uid", "count_distinct")]).to_pylist()
        of_sets = {row["test_set"]: row["train_uid_count_distinct"] for row in counts}
        names = [name for index in described["indexes"] for name in index["test_sets"]]
        return cls(manifest, decisions, described["indexes"], uids, {name: of_sets.get(name, 0) for name in names})

    @property
    def emptied(self) -> int:
        """The number of shards of which nothing is left."""
        of_shards = views.uids_by_shard(self.manifest, self.uids)
        return sum(len(uids) == shard.num_selected for uids, shard in zip(of_shards, self.manifest.shards, strict=True))

    def write(self, out: str) -> Manifest:
        """Write a manifest of the remaining samples, which refers to the dataset's shards where they are.

        `out` is a new or empty folder; if the dataset is at a URL, a place in the same bucket.

        Raises:
            RecipeError: an `out` that cannot be used, or from which no relative path leads to the shards.
            DataError: a shard that is missing or damaged; earlier decisions that are; a disk that refuses.
            StorageError: a URL that does not answer.
        """
        old = self.manifest
        return views.write_view(
            old,
            out,
            views.kept_without(old, self.uids),
            {DECISIONS_NAME: self._all_decisions()},
            num_removed=old.num_removed + len(self.uids),
            options=old.options | {_OPTION: [*old.options.get(_OPTION, []), *self.indexes]},
        )

    def _all_decisions(self) -> bytes:
        """The content of `dedup.parquet` for the remaining dataset: its earlier decisions, then these."""
        tables = [read_table(self.decisions, DECISIONS)]
        earlier = self.manifest.location(DECISIONS_NAME)
        if storage.size_of(earlier) is not None:
            with local_copy(earlier) as path:
                tables.insert(0, read_table(path, DECISIONS))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / DECISIONS_NAME
            write_tables(path, tables, DECISIONS)
            return path.read_bytes()


def _described(folder: Path) -> dict[str, Any]:
    """The content of `found.json`. Raises DataError if it or the decisions beside it are missing or damaged."""
    path, decisions = folder / FOUND_NAME, folder / DECISIONS_NAME
    try:
        described = json.loads(storage.read_bytes(path))
        version, expected = described["version"], described["files"][DECISIONS_NAME]["sha256"]
        if version == VERSION:
            dataset = described["dataset"]
            texts = [dataset["sha256"], dataset["manifest"], *(index["sha256"] for index in described["indexes"])]
            texts += [name for index in described["indexes"] for name in index["test_sets"]]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError(texts)
        found = file_digests(decisions).sha256
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"{error.filename}: no such file; `vitscale dedup find` writes it") from error
    except OSError as error:
        raise DataError(f"{error.filename or path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"{path}: damaged ({error!r}). {_AGAIN}") from error
    if version != VERSION:
        raise DataError(f"{path}: version {version!r}; this version of vitscale reads {VERSION}. {_AGAIN}")
    if found != expected:
        raise DataError(f"{decisions}: damaged: sha256 {found}; {FOUND_NAME} says {expected}. {_AGAIN}")
    return described


def copies_of(images: Sequence[Path], dataset: str) -> list[tuple[str, int, str]]:
    """The copies of images in a dataset, at a path or URL: the image's file, the copy's uid, the rule that found it.

    Raises as `build_index` and `find` do.
    """
    with tempfile.TemporaryDirectory(prefix="vitscale-") as temporary:
        listed, index, found = (Path(temporary, name) for name in ("images.jsonl", "index", "found"))
        listed.write_text("".join(json.dumps({"path": str(image.absolute())}) + "\n" for image in images))
        source = open_source(str(listed), "list", SourceOptions(unlabelled=True))
        build_index([TestSource("asked", str(listed), source)], index, workers=1)
        find(dataset, [str(index)], str(found), Machine(None).runner(dataset))
        rows = read_table(found / DECISIONS_NAME, DECISIONS).to_pylist()
    return [(row["test_key"], row["train_uid"], row["tier"]) for row in rows if row["removed"]]
