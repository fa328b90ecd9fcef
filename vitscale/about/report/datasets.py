"""The datasets that runs have used: their manifests, and what was left out of training sets because of test sets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from vitscale.data.shards import Manifest
from vitscale.data.shards.opening import local_copy
from vitscale.data.shards.provenance import DECISIONS, DECISIONS_NAME, read_table
from vitscale.ground.errors import VitscaleError
from vitscale.ground.storage import collection_name, size_of
from vitscale.runs.run import Run

_AGAINST = "dedup_against"  # a key of a manifest's options


@dataclass(frozen=True)
class Dataset:
    """A dataset as recipes name it; if it cannot be read, `manifest` is None and `problem` says why."""

    name: str
    manifest: Manifest | None
    problem: str = ""

    @property
    def samples(self) -> int | None:  # the number of them
        return None if self.manifest is None else self.manifest.num_samples


@dataclass(frozen=True)
class DatasetRecord:
    """What a dataset's manifest tells; nothing if it cannot be read, and `problem` says why."""

    name: str
    where: str | None = None
    manifest_sha256: str | None = None
    samples: int | None = None
    classes: int | None = None
    rejected: int | None = None
    left_out: int | None = None
    compared_with: Sequence[dict[str, Any]] = ()
    problem: str = ""


@dataclass(frozen=True)
class Deduplication:
    """What a training set's manifest records about a test set."""

    train: str
    role: str  # `training`, or `pre-training` if the trained model began with such a run
    test: str
    status: str = "unknown"  # the manifest cannot be read; or `recorded`, `none recorded`
    index_test_set: str | None = None
    index_sha256: str | None = None
    left_out_for_it: int | None = None  # training images, as copies of that test set's
    left_out_in_all: int | None = None  # the same for all test sets
    samples_left: int | None = None


def tests_of(run: Run) -> list[str]:
    """The datasets that a run is evaluated on, as its recipe names them."""
    evaluation = run.recipe.evaluation
    fewshot, knn, validation = evaluation.fewshot, evaluation.knn, evaluation.validation
    names = [] if fewshot is None else [task.test for task in fewshot.tasks]
    names += [] if knn is None else [knn.test]
    names += [splits[1] for each in evaluation.evaluators if (splits := each.splits()) is not None]
    return names if validation is None else [*names, validation]


def open_dataset(run: Run, name: str) -> Dataset:
    """A dataset of a run's recipe. Raises nothing: a report of runs whose data have gone still has all the rest."""
    try:
        return Dataset(name, Manifest.load(run.place_of(name)))
    except VitscaleError as error:
        return Dataset(name, None, str(error))


def record_of(dataset: Dataset) -> DatasetRecord:
    """What the report says of a dataset."""
    manifest = dataset.manifest
    if manifest is None:
        return DatasetRecord(dataset.name, problem=dataset.problem)
    return DatasetRecord(
        name=dataset.name,
        where=shown_path(manifest.where),
        manifest_sha256=manifest.sha256,
        samples=manifest.num_samples,
        classes=len(manifest.class_names),
        rejected=manifest.num_rejected,
        left_out=_removed(manifest),
        compared_with=_indexes(manifest),
    )


def deduplication(train: Dataset, test: Dataset, role: str) -> Deduplication:
    """What a training set's manifest records about a test set.

    Test sets are compared by name: that of an index covers the dataset of the same name, and the splits of the
    collection of that name (`pets` covers `pets/test`; `test` covers no split of any).
    """
    found, manifest = Deduplication(train.name, role, test.name), train.manifest
    if manifest is None:
        return found
    found = replace(found, left_out_in_all=_removed(manifest), samples_left=manifest.num_samples)
    names = {test.name, test.name.rpartition("/")[0], collection_name(test.name)} - {""}
    for index in _indexes(manifest):
        for covered in index.get("test_sets", []):
            if covered in names:
                found = replace(found, status="recorded", index_test_set=covered, index_sha256=index.get("sha256"))
                return replace(found, left_out_for_it=_left_out(manifest, covered))
    return replace(found, status="none recorded")


def shown_path(where: str) -> str:
    """A path below the current folder relative to that folder, as people name it: a report goes to other machines."""
    here = Path.cwd()
    return str(Path(where).relative_to(here)) if Path(where).is_relative_to(here) else where


def _indexes(manifest: Manifest) -> list[dict[str, Any]]:
    recorded = manifest.options.get(_AGAINST)
    return [one for one in recorded if isinstance(one, dict)] if isinstance(recorded, list) else []


def _removed(manifest: Manifest) -> int | None:
    """Samples left out as copies; None if nobody has looked, as far as the manifest tells."""
    return manifest.num_removed if manifest.num_removed or _indexes(manifest) else None


def _left_out(manifest: Manifest, test_set: str) -> int | None:
    """Training images left out as copies of a test set's; None if there is no list of them beside the manifest."""
    try:
        where = manifest.location(DECISIONS_NAME)
        if size_of(where) is None:
            return None
        with local_copy(where) as path:
            table = read_table(path, DECISIONS, ["train_uid", "test_set", "removed"])
    except (VitscaleError, OSError):
        return None
    chosen = table.filter(pc.and_(table["removed"], pc.equal(table["test_set"], test_set)))
    return len(pc.unique(chosen["train_uid"]))
