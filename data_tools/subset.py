"""Nested random subsets of a dataset, as the paper's 9M, 30M and 90M images of JFT-300M: manifests, not copies.

Conversion shuffles once, so the first samples of a dataset are a random subset of it, and every smaller one is within
every larger one.
"""

import io
import os
import posixpath
import tempfile
from hashlib import sha256
from pathlib import Path

import numpy as np

from vitscale import storage
from vitscale.durable import durable_file
from vitscale.errors import DataError, RecipeError
from vitscale.shards import MANIFEST_NAME, ExcludedSlots, Manifest, SelectExclude, SelectFirst, ShardEntry


def write_subset(dataset: str, out: str, count: int) -> Manifest:
    """Write a manifest of the first `count` samples of a dataset, which refers to its shards where they are.

    Args:
        dataset: its folder, manifest file or URL.
        out: a new or empty folder; beside the dataset in the same bucket if that is at a URL.
        count: samples.

    Raises:
        RecipeError: too many samples, an `out` that cannot be taken, or one from which no path leads to the shards.
        DataError: the dataset is missing or damaged.
        StorageError: a URL that does not answer.
    """
    whole = Manifest.load(dataset)
    if not 1 <= count <= whole.num_samples:
        raise RecipeError(f"a subset of {count:,} samples: {dataset} has {whole.num_samples:,}")
    _refuse_out(out)
    between = _Between(whole, out)
    shards: list[ShardEntry] = []
    excluded: dict[str, bytes] = {}
    left = count
    for index, entry in enumerate(whole.shards):
        if left == 0:
            break
        entry = entry.model_copy(update={"path": between.relative(entry.path)})
        if entry.num_selected <= left:
            if isinstance(entry.select, SelectExclude):
                old = entry.select.exclude
                moved = old.model_copy(update={"path": between.relative(old.path)})
                entry = entry.model_copy(update={"select": SelectExclude(exclude=moved)})
        else:
            entry, content = _cut(entry, whole.selected_slots(index), left)
            excluded |= content
        shards.append(entry)
        left -= entry.num_selected
    kept = {name: getattr(whole, name) for name in Manifest.model_fields}
    subset = Manifest(**kept | {"num_samples": count, "shards": tuple(shards)})
    try:
        return _save(subset, out, excluded)
    except OSError as error:
        raise DataError(f"OUT {out}: cannot be written ({error.strerror or error})") from error


def _cut(entry: ShardEntry, selected: np.ndarray | None, count: int) -> tuple[ShardEntry, dict[str, bytes]]:
    """A shard with the first `count` of its selected slots, and the file that this needs, if any: name -> content."""
    slots = np.arange(entry.samples) if selected is None else selected
    taken = slots[:count]
    if taken[-1] == count - 1:
        return entry.model_copy(update={"select": SelectFirst(first=count)}), {}
    excluded = np.setdiff1d(np.arange(entry.samples), taken).astype(np.uint32)
    file = io.BytesIO()
    np.save(file, excluded)
    content = file.getvalue()
    name = posixpath.basename(entry.path).removesuffix(".beton") + ".excluded.npy"
    listed = ExcludedSlots(path=name, sha256=sha256(content).hexdigest(), count=len(excluded))
    return entry.model_copy(update={"select": SelectExclude(exclude=listed)}), {name: content}


def _refuse_out(out: str) -> None:
    if not storage.is_url(out) and os.path.lexists(out) and not Path(out).is_dir():
        raise RecipeError(f"OUT {out}: is no folder. Choose a new or empty one")
    try:
        names = storage.names_in(out)
    except OSError as error:
        raise RecipeError(f"OUT {out}: cannot be read ({error.strerror or error})") from error
    if names:
        raise RecipeError(f"OUT {out}: not empty ({', '.join(names[:5])}). Choose a new or empty folder")


class _Between:
    """Turns paths relative to a dataset into paths relative to `out`. Raises RecipeError if none leads there."""

    def __init__(self, dataset: Manifest, out: str) -> None:
        self._dataset = dataset
        if storage.is_url(out):
            self._here = out.rstrip("/")
            if _bucket(dataset.where) != _bucket(out):
                raise RecipeError(
                    f"OUT {out}: a subset of {dataset.where} refers to its shards where they are; choose a folder in "
                    f"{_bucket(dataset.where) or dataset.directory.parent}"
                )
        elif storage.is_url(dataset.where):
            raise RecipeError(f"OUT {out}: a subset of {dataset.where} lies beside it: choose a folder in "
                              f"{_bucket(dataset.where)}")  # fmt: skip
        else:
            self._here = os.path.realpath(out)

    def relative(self, path: str) -> str:
        there = self._dataset.location(path)
        if storage.is_url(there):
            return posixpath.relpath(there.partition("://")[2], self._here.partition("://")[2])
        # Links are followed by the system before `..` is; the last part keeps its name, as others lie beside it.
        folder, name = os.path.split(there)
        return Path(os.path.relpath(os.path.realpath(folder), self._here), name).as_posix()


def _bucket(url: str) -> str | None:
    """`s3://bucket` of a URL; None for a path."""
    if not storage.is_url(url):
        return None
    scheme, _, rest = url.partition("://")
    return f"{scheme.lower()}://{rest.split('/')[0]}"


def _save(subset: Manifest, out: str, excluded: dict[str, bytes]) -> Manifest:
    """Write the manifest last. Raises OSError and StorageError."""
    if not storage.is_url(out):
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in excluded.items():
            with durable_file(folder / name) as file:
                file.write(content)
        return subset.save(folder)
    with tempfile.TemporaryDirectory(prefix="vitscale-") as temporary:
        folder = Path(temporary)
        subset.save(folder)
        for name, content in excluded.items():
            (folder / name).write_bytes(content)
        for name in (*excluded, MANIFEST_NAME):
            storage.put(folder / name, storage.join(out, name))
    return Manifest.load(out)
