"""A certificate: one file that lists everything that a finished run's claims rest on, with one root hash.

`check_certificate.py`, a program that needs only Python's standard library, is written beside it and checks it.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from vitscale.errors import CheckpointError, DataError, RecipeError
from vitscale.files.digests import file_digests
from vitscale.files.durable import write_text
from vitscale.recipe import Recipe, recipe_sha256
from vitscale.recipe.datasets import find_dataset
from vitscale.replay import check_certificate
from vitscale.replay.seen import newest_index
from vitscale.runs.checkpoint_index import CheckpointIndex, data_root
from vitscale.runs.directory import recipe_of_run
from vitscale.runs.done import read_done, verification
from vitscale.runs.names import DONE_FILE, LAUNCH_FILE, METRICS_FILE, RECIPE_FILE, VERIFIED_FILE, checkpoints_root
from vitscale.shards import Manifest
from vitscale.storage import is_url
from vitscale.versions import versions

NAME = "certificate.json"
_OF_RUN = (RECIPE_FILE, METRICS_FILE, LAUNCH_FILE, DONE_FILE, VERIFIED_FILE)
_TABLE = ".idx.parquet"  # provenance tables are left out: they are large, and the manifest has each shard's digest


def write_certificate(run_dir: Path, report: Path | None = None, root: str | None = None) -> tuple[Path, str]:
    """Write the certificate of a finished run into its directory, and the program that checks it beside it.

    Args:
        run_dir: the run's directory.
        report: the folder of a report to include; None for none.
        root: where the data are now; by default where the recipe says.

    Returns the certificate's path and the root hash.

    Raises `RecipeError` if there is no run, or it is not finished; `CheckpointError` and `DataError` for files that are
    missing or at a URL; OSError.
    """
    recipe, done = recipe_of_run(run_dir), read_done(run_dir)
    if done is None:
        raise RecipeError(f"{run_dir} is not finished (it has no readable {DONE_FILE}): only finished runs are")
    if not (run_dir / METRICS_FILE).is_file():
        raise DataError(f"{run_dir} has no {METRICS_FILE}: there are no losses to certify")
    index = newest_index(recipe, run_dir)
    files = [*_of_run(recipe, run_dir), *_of_datasets(recipe, index, root)]
    if report is not None:
        files += [(f"report/{path.relative_to(report)}", path) for path in sorted(report.rglob("*")) if path.is_file()]
    about = {
        "run": run_dir.resolve().name,
        "recipe_sha256": recipe_sha256(recipe.dump()),
        "versions": versions(),
        "trained_with": dict(index.versions),
        "done": done,
        "verified": verification(run_dir, checkpoints_root(recipe, run_dir)),
        "begun_with": index.data.get("init"),
    }
    entries = []
    for name, path in files:
        digests = file_digests(path)
        entries.append({"name": name, "bytes": digests.bytes, "sha256": digests.sha256})
    certificate = {"version": check_certificate.VERSION, "about": about, "files": entries}
    certificate["root"] = check_certificate.root_of(certificate)
    out = run_dir / NAME
    write_text(out, json.dumps(certificate, indent=1, sort_keys=True) + "\n")
    shutil.copyfile(check_certificate.__file__, run_dir / "check_certificate.py")
    return out, str(certificate["root"])


def _of_run(recipe: Recipe, run_dir: Path) -> Iterator[tuple[str, Path]]:
    """(name, path) of each file that a run left, all kept checkpoints included."""
    for name in _OF_RUN:
        if (run_dir / name).is_file():
            yield f"run/{name}", run_dir / name
    root = checkpoints_root(recipe, run_dir)
    if is_url(root):
        raise CheckpointError(f"{root}: checkpoints at a URL; copy them into {run_dir / 'checkpoints'} first")
    for path in sorted(Path(root).glob("step-*/*")):
        place = "run/checkpoints" if Path(root).parent == run_dir else "checkpoints"
        yield f"{place}/{path.relative_to(root)}", path


def _of_datasets(recipe: Recipe, index: CheckpointIndex, root: str | None) -> Iterator[tuple[str, Path]]:
    """(name, path) of the datasets' manifests and of the files beside them, such as those of de-duplication.

    Shards are left out: their manifests have their digests.
    """
    evaluation = recipe.evaluation
    named = {"train": recipe.data.train}
    named |= {} if evaluation.validation is None else {"validation": evaluation.validation}
    for task in evaluation.fewshot.tasks if evaluation.fewshot is not None else ():
        named |= {f"fewshot_{task.name}_train": task.train, f"fewshot_{task.name}_test": task.test}
    for place, dataset in named.items():
        manifest = Manifest.load(find_dataset(dataset, root or data_root(recipe, index)))
        if is_url(manifest.where):
            raise DataError(f"{manifest.where}: a manifest at a URL; --data-root names a copy on this machine")
        shards = {entry.path for entry in manifest.shards}
        for path in sorted(manifest.directory.iterdir()):
            if path.is_file() and path.name not in shards and not path.name.endswith(_TABLE):
                yield f"{place}/{path.name}", path
