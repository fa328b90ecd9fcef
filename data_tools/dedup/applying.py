"""Removes the copies that `find` found: a view of the dataset's shards without them. The dataset is not changed."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from data_tools import views
from data_tools.dedup.finding import FOUND_NAME, VERSION
from vitscale.data.shards import Manifest
from vitscale.data.shards.opening import local_copy
from vitscale.data.shards.provenance import DECISIONS, DECISIONS_NAME, read_table, write_tables
from vitscale.ground import storage
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.files.digests import file_digests

_OPTION = "dedup_against"  # the manifest's option, which conversion writes, too
_AGAIN = "Run `vitscale dedup find` again"


@dataclass(frozen=True)
class Removal:
    """The samples to remove from a dataset.

    Attributes:
        manifest: the dataset.
        decisions: the file of decisions that names them.
        sha256: that file's digest.
        indexes: the indexes that the dataset was compared with, as `NamedIndex.described` gives them.
        uids: int64 (n,), uids of the samples to remove, sorted.
        by_test_set: how many of them match each test set.
    """

    manifest: Manifest
    decisions: Path
    sha256: str
    indexes: list[dict[str, Any]]
    uids: np.ndarray
    by_test_set: dict[str, int]

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
        return cls(
            manifest=manifest,
            decisions=decisions,
            sha256=described["files"][DECISIONS_NAME]["sha256"],
            indexes=described["indexes"],
            uids=uids,
            by_test_set={name: of_sets.get(name, 0) for name in names},
        )

    @property
    def emptied(self) -> int:
        """The number of shards of which nothing is left."""
        of_shards = views.uids_by_shard(self.manifest, self.uids)
        return sum(len(uids) == shard.num_selected for uids, shard in zip(of_shards, self.manifest.shards, strict=True))

    def all_decisions(self) -> bytes:
        """The content of `dedup.parquet` for the remaining dataset: its earlier decisions, then these.

        Raises DataError for earlier ones that are damaged, and StorageError.
        """
        tables = [read_table(self.decisions, DECISIONS)]
        earlier = self.manifest.location(DECISIONS_NAME)
        if storage.size_of(earlier) is not None:
            with local_copy(earlier) as path:
                tables.insert(0, read_table(path, DECISIONS))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / DECISIONS_NAME
            write_tables(path, tables, DECISIONS)
            return path.read_bytes()


def write_view(removal: Removal, out: str) -> Manifest:
    """Write a manifest of the remaining samples, which refers to the dataset's shards where they are.

    Args:
        removal: the samples to remove.
        out: a new or empty folder; if the dataset is at a URL, a place in the same bucket.

    Raises:
        RecipeError: an `out` that cannot be used, or from which no relative path leads to the shards.
        DataError: a shard that is missing or damaged; a disk that refuses.
        StorageError: a URL that does not answer.
    """
    old = removal.manifest
    return views.write_view(
        old,
        out,
        views.kept_without(old, removal.uids),
        {DECISIONS_NAME: removal.all_decisions()},
        num_removed=old.num_removed + len(removal.uids),
        options=old.options | {_OPTION: [*old.options.get(_OPTION, []), *removal.indexes]},
    )


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
