"""Compares an existing dataset with indexes and lists its copies of test images. Removes nothing.

FOUND/found.json         which dataset, which indexes, with what settings; digests of the files; written last
FOUND/dedup.parquet      every decision, see `decisions.py`, in order of shards
FOUND/contaminated.csv   test images that have a copy in the dataset, with the nearest
FOUND/report.json, *.png see `report.py`
"""

import csv
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from data_tools.dedup.against import Comparison, Findings, NamedIndex, name_indexes, open_matcher
from data_tools.dedup.embedding import Embedder
from data_tools.dedup.index import TestSet
from data_tools.dedup.match import TIERS
from data_tools.dedup.matching import Matcher
from data_tools.dedup.report import write_report
from data_tools.dedup.settings import Settings
from data_tools.dedup.stored import shard_queries
from data_tools.dedup.tally import Tally
from data_tools.engines.task import Progress, Run, Tick
from vitscale.data.shards import Manifest
from vitscale.data.shards.opening import known_manifest
from vitscale.data.shards.provenance import DECISIONS, DECISIONS_NAME, read_table, write_tables
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.files.digests import file_digests
from vitscale.ground.files.durable import new_folder
from vitscale.ground.safe_text import without_secrets

FOUND_NAME = "found.json"
CONTAMINATED_NAME = "contaminated.csv"
VERSION = 1

_COLUMNS = ("test_set", "test_key", "train_key", "tier", "distance", "correlation")


@dataclass(frozen=True)
class Finding:
    """The result of a comparison.

    Attributes:
        matcher: the matcher, with the test sets and settings that were used.
        tally: the counts.
        made_anew: number of shards whose tables had no fingerprints, or those of another algorithm.
        files: names of the files written.
    """

    matcher: Matcher
    tally: Tally
    made_anew: int
    files: list[str]


def find(
    dataset: str,
    indexes: Sequence[str],
    out: str,
    run: Run,
    *,
    overrides: dict[str, Any] | None = None,
    embedder: Embedder | None = None,
    tick: Tick = lambda done, rejected: None,
) -> Finding:
    """Compare a dataset with indexes and write the findings to a new folder; either complete or not at all.

    Args:
        dataset: the dataset's folder, manifest file or URL.
        indexes: the indexes' folders.
        out: a folder that does not exist, or is empty.
        run: runs the tasks, one per shard.
        overrides: fields of `Settings` that replace the indexes', for every test set.
        embedder: the model of the indexes that have vectors.
        tick: called several times a second with the number of samples done.

    Raises:
        RecipeError: an `out` that is not empty; settings out of range; two test sets with the same name; another model
            than the indexes'.
        DataError: a dataset or an index that is missing or damaged; a disk that refuses.
        StorageError: a URL that does not answer.
    """
    manifest = Manifest.load(dataset)
    named = name_indexes(indexes, "INDEX", embedder)
    settings = _overridden(open_matcher(named).test_sets, overrides) if overrides else ()
    matcher = open_matcher(named, settings)
    searched = _Searched(manifest.where, manifest.sha256, named, settings)
    with new_folder(out, "--out") as folder:
        pieces = folder / "pieces"
        pieces.mkdir()
        tasks = (_Task(searched, index, entry.path, pieces) for index, entry in enumerate(manifest.shards))
        findings, made_anew = Findings.none(matcher), 0
        for of_shard, are_fresh in run(tasks, tick):
            findings.add(of_shard)
            made_anew += are_fresh
        _join(pieces, len(manifest.shards), folder, [one.name for one in matcher.test_sets])
        shutil.rmtree(pieces)
        files = [DECISIONS_NAME, CONTAMINATED_NAME]
        files += write_report(folder, matcher, findings.tally, findings.closest)
        _describe(folder, manifest, named, findings.tally, files)
    return Finding(matcher, findings.tally, made_anew, files)


def _overridden(test_sets: Sequence[TestSet], overrides: dict[str, Any]) -> tuple[tuple[str, Settings], ...]:
    """The test sets' settings with the overrides applied, by name. Raises RecipeError."""
    if not any(one.settings.near for one in test_sets):
        raise RecipeError(
            f"{', '.join(f'--{name}' for name in overrides)}: these test sets are compared by bytes and pixels alone; "
            "make an index with another --preset"
        )
    replaced = []
    for one in test_sets:
        try:
            replaced.append((one.name, Settings(**asdict(one.settings) | overrides)))
        except RecipeError as error:
            raise RecipeError(f"test set {one.name}: {error}") from error
    return tuple(replaced)


# ---------------------------------------------------------------------------------------------------------- one shard


@dataclass(frozen=True)
class _Searched:
    """What is compared with what. Paths only, because the contents are large. Sent to every worker."""

    manifest: str
    manifest_sha256: str
    indexes: tuple[NamedIndex, ...]
    settings: tuple[tuple[str, Settings], ...]


@dataclass(frozen=True)
class _Task:
    """One shard to compare. Its decisions, if any, become a file in `folder`."""

    searched: _Searched
    shard: int
    path: str
    folder: Path

    @property
    def name(self) -> str:
        return f"shard {self.path}"

    def describe(self, position: int) -> str:
        """What messages call the image at a position."""
        return f"image {position:,} of {self.path}"

    def without(self, position: int, reason: str) -> None:
        """None: no sample may be left out unnoticed."""
        return None

    def run(self, progress: Progress) -> tuple[Findings, bool]:
        """Returns the findings, and whether the fingerprints had to be made for them.

        Raises DataError: a shard, a table or an index that is damaged; StorageError.
        """
        searched = self.searched
        manifest = known_manifest(searched.manifest, searched.manifest_sha256)
        comparison = Comparison(open_matcher(searched.indexes, searched.settings))
        with shard_queries(manifest, self.shard) as queries:
            for batch in queries.batches():
                comparison.compare(batch)
                for _ in batch:
                    progress.advance()
            are_fresh = queries.are_fresh
        decided = comparison.decisions()
        if decided.num_rows:
            path = _piece(self.folder, self.shard)
            try:
                write_tables(path, [decided], DECISIONS)
            except OSError as error:
                raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error
        return comparison.findings, are_fresh


# ------------------------------------------------------------------------------------------------------- all together


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
    """Sort key of matches, nearest first."""
    distance = math.inf if row["distance"] is None else row["distance"]
    correlation = -1.0 if row["correlation"] is None else row["correlation"]
    return TIERS.index(row["tier"]), distance, -correlation, row["train_key"]


def _describe(
    folder: Path, manifest: Manifest, indexes: Sequence[NamedIndex], tally: Tally, names: Sequence[str]
) -> None:
    digests = {name: file_digests(folder / name) for name in names}
    content = {
        "version": VERSION,
        "dataset": {
            "manifest": without_secrets(manifest.where),
            "sha256": manifest.sha256,
            "samples": manifest.num_samples,
        },
        "removed": tally.removed,
        "indexes": [index.described() for index in indexes],
        "files": {name: {"bytes": of.bytes, "sha256": of.sha256} for name, of in digests.items()},
    }
    (folder / FOUND_NAME).write_text(json.dumps(content, indent=1) + "\n", "utf-8")
