"""The datasets that runs have used: their manifests, and what was left out of training sets because of test sets."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from vitscale.data.shards import Manifest
from vitscale.data.shards.decisions import DECISIONS_NAME, read_decisions
from vitscale.data.shards.opening import local_copy
from vitscale.ground.errors import VitscaleError
from vitscale.ground.storage import base_name, size_of
from vitscale.runs.run import Run

_AGAINST = "dedup_against"  # a key of a manifest's options


@dataclass(frozen=True)
class Dataset:
    """A dataset as recipes name it; if it cannot be read, `manifest` is None and `problem` says why."""

    name: str
    manifest: Manifest | None
    problem: str = ""

    def content(self) -> dict[str, Any]:
        """The dataset's content of results.json."""
        manifest = self.manifest
        return {
            "name": self.name,
            "where": None if manifest is None else shown_path(manifest.where),
            "manifest_sha256": None if manifest is None else manifest.sha256,
            "samples": None if manifest is None else manifest.num_samples,
            "classes": None if manifest is None else len(manifest.class_names),
            "rejected": None if manifest is None else manifest.num_rejected,
            "left_out": _removed(manifest),
            "compared_with": [] if manifest is None else [dict(one) for one in _indexes(manifest)],
            "problem": self.problem,
        }


def open_dataset(run: Run, name: str) -> Dataset:
    """A dataset of a run's recipe. Raises nothing: a report of runs whose data have gone still has all the rest."""
    try:
        return Dataset(name, Manifest.load(run.place_of(name)))
    except VitscaleError as error:
        return Dataset(name, None, str(error))


def deduplication(train: Dataset, test: Dataset, role: str) -> dict[str, Any]:
    """What a training set's manifest records about a test set.

    `status` is "recorded", "none recorded", or "unknown" if the manifest cannot be read. Test sets are compared by
    name: that of an index covers the dataset of the same name, or the one whose first part is its name (`pets` for
    `pets/test`).
    """
    found: dict[str, Any] = {
        "train": train.name,
        "role": role,
        "test": test.name,
        "status": "unknown",
        "index_test_set": None,
        "index_sha256": None,
        "left_out_for_it": None,
        "left_out_in_all": None,
        "samples_left": None,
    }
    if train.manifest is None:
        return found
    found |= {"left_out_in_all": _removed(train.manifest), "samples_left": train.manifest.num_samples}
    names = {test.name, test.name.rpartition("/")[0], base_name(test.name)} - {""}
    for index in _indexes(train.manifest):
        for covered in index.get("test_sets", []):
            if covered in names:
                return found | {
                    "status": "recorded",
                    "index_test_set": covered,
                    "index_sha256": index.get("sha256"),
                    "left_out_for_it": _left_out(train.manifest, covered),
                }
    return found | {"status": "none recorded"}


def shown_path(where: str) -> str:
    """A path below the current folder relative to that folder, as people name it: a report goes to other machines."""
    here = Path.cwd()
    return str(Path(where).relative_to(here)) if Path(where).is_relative_to(here) else where


def _indexes(manifest: Manifest) -> list[dict[str, Any]]:
    recorded = manifest.options.get(_AGAINST)
    return [one for one in recorded if isinstance(one, dict)] if isinstance(recorded, list) else []


def _removed(manifest: Manifest | None) -> int | None:
    """Samples left out as copies; None if nobody has looked, as far as the manifest tells."""
    return None if manifest is None or not (manifest.num_removed or _indexes(manifest)) else manifest.num_removed


def _left_out(manifest: Manifest, test_set: str) -> int | None:
    """Training images left out as copies of a test set's; None if there is no list of them beside the manifest."""
    try:
        where = manifest.location(DECISIONS_NAME)
        if size_of(where) is None:
            return None
        with local_copy(where) as path:
            table = read_decisions(path, ["train_uid", "test_set", "removed"])
    except (VitscaleError, OSError):
        return None
    chosen = table.filter(pc.and_(table["removed"], pc.equal(table["test_set"], test_set)))
    return len(pc.unique(chosen["train_uid"]))
