"""Writes views of a dataset: manifests that refer to its shards in place and leave out some of their samples."""

import io
import os
import posixpath
import tempfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import numpy as np

from vitscale.data.shards import MANIFEST_NAME, Adopted, ExcludedSlots, Manifest, SelectExclude, SelectFirst, ShardEntry
from vitscale.ground import storage
from vitscale.ground.errors import RecipeError, StorageError
from vitscale.ground.files.durable import durable_file, make_folder, remove_leftovers


class ViewWriter:
    """Writes one view, into a folder or to a URL in the dataset's bucket.

    Files are written as they are added, and removed if the `with` block ends with an error.
    """

    def __init__(self, dataset: Manifest, out: str) -> None:
        """Raises RecipeError if `out` cannot be used, or has no relative path to the shards."""
        _refuse_taken(out)
        self._dataset, self._out = dataset, out
        self._added: list[str] = []
        if not storage.is_url(out) and not storage.is_url(dataset.where):
            self._here = os.path.realpath(out)
            return
        place = _bucket(dataset.where) or str(dataset.directory.parent)
        if _bucket(dataset.where) != _bucket(out):
            raise RecipeError(
                f"OUT {out}: a view of {dataset.where} refers to its shards where they are; choose a folder in {place}"
            )
        self._here = out.rstrip("/")

    def __enter__(self) -> "ViewWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for name in self._added:
                with suppress(OSError, StorageError):
                    storage.remove(storage.join(self._out, name))

    def entry(self, index: int, kept: np.ndarray | None = None) -> ShardEntry:
        """The view's entry for shard `index` of the dataset.

        Args:
            index: the shard's number.
            kept: the selected slots to keep, (n,), sorted; None for all.

        Raises OSError or StorageError if a list of excluded slots cannot be written.
        """
        entry = self._dataset.shards[index]
        entry = entry.model_copy(update={"path": self._relative(entry.path), "adopted": self._adopted(entry)})
        if kept is not None and len(kept) < entry.num_selected:
            return entry.model_copy(update={"select": self._selection(index, entry, kept)})
        if isinstance(entry.select, SelectExclude):
            old = entry.select.exclude
            moved = old.model_copy(update={"path": self._relative(old.path)})
            return entry.model_copy(update={"select": SelectExclude(exclude=moved)})
        return entry

    def _adopted(self, entry: ShardEntry) -> Adopted | None:
        """The dataset's record of an adopted shard, with the path of its checksums relative to the view."""
        if entry.adopted is None:
            return None
        old = entry.adopted.checksums
        return entry.adopted.model_copy(update={"checksums": old.model_copy(update={"path": self._relative(old.path)})})

    def add(self, name: str, content: bytes) -> None:
        """Write a file. Raises OSError or StorageError."""
        self._added.append(name)
        if not storage.is_url(self._out):
            folder = Path(self._out)
            make_folder(folder)
            with durable_file(folder / name) as file:
                file.write(content)
            return
        with tempfile.TemporaryDirectory(prefix="vitscale-") as temporary:
            path = Path(temporary) / name
            path.write_bytes(content)
            storage.put(path, storage.join(self._out, name))

    def save(self, manifest: Manifest) -> Manifest:
        """Write the manifest, which completes the view. Raises OSError or StorageError."""
        if not storage.is_url(self._out):
            make_folder(Path(self._out))
            return manifest.save(self._out)
        with tempfile.TemporaryDirectory(prefix="vitscale-") as temporary:
            manifest.save(temporary)
            storage.put(Path(temporary) / MANIFEST_NAME, storage.join(self._out, MANIFEST_NAME))
        return Manifest.load(self._out)

    def _selection(self, index: int, entry: ShardEntry, kept: np.ndarray) -> SelectFirst | SelectExclude:
        if len(kept) == 0 or kept[-1] == len(kept) - 1:
            return SelectFirst(first=len(kept))
        excluded = np.setdiff1d(np.arange(entry.samples), kept).astype(np.uint32)
        file = io.BytesIO()
        np.save(file, excluded)
        content = file.getvalue()
        name = f"shard-{index:05d}.excluded.npy"  # by number: shards in different folders may have the same name
        self.add(name, content)
        return SelectExclude(exclude=ExcludedSlots(path=name, sha256=sha256(content).hexdigest(), count=len(excluded)))

    def _relative(self, path: str) -> str:
        there = self._dataset.location(path)
        if storage.is_url(there):
            return posixpath.relpath(there.partition("://")[2], self._here.partition("://")[2])
        # The system resolves links before `..`, so the folder is resolved here; not the file, which has companions.
        folder, name = os.path.split(there)
        return Path(os.path.relpath(os.path.realpath(folder), self._here), name).as_posix()


def _refuse_taken(out: str) -> None:
    if not storage.is_url(out) and os.path.lexists(out) and not Path(out).is_dir():
        raise RecipeError(f"OUT {out}: is not a folder. Choose a new or empty folder")
    try:
        remove_leftovers(Path(out))
        names = storage.names_in(out)
    except OSError as error:
        raise RecipeError(f"OUT {out}: cannot be read ({error.strerror or error})") from error
    if names:
        raise RecipeError(f"OUT {out}: not empty ({', '.join(names[:5])}). Choose a new or empty folder")


def _bucket(url: str) -> str | None:
    """`s3://bucket` of a URL; None for a path."""
    if not storage.is_url(url):
        return None
    scheme, _, rest = url.partition("://")
    return f"{scheme.lower()}://{rest.split('/')[0]}"
