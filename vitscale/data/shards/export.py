"""Turns a dataset back into image files: class folders of unchanged stored bytes, which convert to an equal dataset.

OUT/cat/1.jpg       named by the key, in the folder of the sample's first class; .png for images stored as raw pixels
OUT/classes.txt     class folders in order of labels: the file for --classes
OUT/labels.csv      path and all labels of every image: the file for --labels, in case folders could be misread
"""

import csv
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from itertools import chain, count
from pathlib import Path

from PIL import Image

from vitscale.data.shards.manifest import Manifest
from vitscale.data.shards.opening import open_shard
from vitscale.ground.errors import DataError
from vitscale.ground.files.durable import new_folder

CLASSES_NAME = "classes.txt"
LABELS_NAME = "labels.csv"
UNLABELLED = "unlabelled"

_MAX_NAME_BYTES = 200  # file systems take 255, and a uid may be added
_MAX_PATH_BYTES = 1000
_REPLACED = frozenset("/|")  # the latter separates labels in labels.csv
_REPLACED_CATEGORIES = frozenset(("Cc", "Cs", "Zl", "Zp"))  # controls, surrogates, line and paragraph separators


def export(manifest: Manifest, out: str, progress: Callable[[int], None] | None = None) -> int:
    """Write the selected samples of a dataset as files; returns their number.

    The folder `out`, new or empty and on this machine, appears under its name only once it is complete and on the disk.
    `progress` is called now and then with the number of images written.

    Raises RecipeError if `out` cannot be used, DataError if a sample or shard is damaged or the disk is full, and
    StorageError if a URL does not answer. Nothing is left behind.
    """
    with new_folder(out) as folder:
        return _Writer(folder, manifest).write(progress or (lambda _: None))


class _Writer:
    """Writes the files into `folder`, and lets the file system tell which names are taken."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._image_suffixes = frozenset(Image.registered_extensions())
        self._folder, self._manifest = folder, manifest
        self._numbers: defaultdict[tuple[str, str], Iterator[int]] = defaultdict(lambda: count(1))
        names = manifest.class_names
        self._class_folders = [""] * len(names)
        # Names that can stay as they are come first, so that no other takes them.
        for label in sorted(range(len(names)), key=lambda label: _safe(names[label]) != names[label]):
            self._class_folders[label] = self._new_folder(names[label], f"class-{label}")
        self._unlabelled: str | None = None

    def write(self, progress: Callable[[int], None]) -> int:
        names, written = self._manifest.class_names, 0
        with (self._folder / LABELS_NAME).open("x", encoding="utf-8", newline="") as table:
            rows = csv.writer(table, lineterminator="\n")
            rows.writerow(["path", "label"])
            for index in range(len(self._manifest.shards)):
                with open_shard(self._manifest, index) as shard:
                    for slot in shard.slots.tolist():
                        uid, labels = int(shard.file.uid[slot]), shard.labels(slot)
                        if max(labels, default=-1) >= len(names):
                            what = f"{shard.name(slot)} has label {max(labels)}"
                            raise DataError(f"{shard.file.path}: {what}; the manifest names {len(names):,} classes")
                        key = f"{uid:09d}" if shard.keys is None else shard.keys[slot]
                        path = self._write_image(key, labels, uid, *shard.image_file(slot))
                        rows.writerow([path, "|".join(self._class_folders[label] for label in labels)])
                        written += 1
                progress(written)
        if names:
            content = "".join(f"{name}\n" for name in self._class_folders)
            (self._folder / CLASSES_NAME).write_text(content, "utf-8", newline="\n")
        return written

    def _write_image(self, key: str, labels: list[int], uid: int, image: bytes, ending: str) -> str:
        """Write one image; returns the file's path relative to the folder, with parts joined by /."""
        parts = key.split("/")
        if labels:
            name, folder = self._manifest.class_names[labels[0]], self._class_folders[labels[0]]
        else:
            self._unlabelled = self._unlabelled or self._new_folder(UNLABELLED, UNLABELLED)
            name, folder = UNLABELLED, self._unlabelled
        if len(parts) > 1 and parts[0] in (name, folder):
            parts = parts[1:]
        *above, name = parts
        stem, dot, suffix = name.rpartition(".")
        if not (stem and dot + suffix.lower() in self._image_suffixes):
            stem = name
        stem = _safe(stem) or str(uid)
        inner = "/".join([folder, *filter(None, map(_safe, above))])
        if len(inner.encode()) > _MAX_PATH_BYTES:
            inner = folder
        first = (f"{inner}/{stem}{ending}", f"{inner}/{stem}-{uid}{ending}", f"{folder}/{stem}-{uid}{ending}")
        for path in chain(first, self._numbered(f"{folder}/{stem}-{uid}-", ending)):
            # FileExistsError: the name is taken; NotADirectoryError: a file is where a folder should be.
            with suppress(FileExistsError, NotADirectoryError):
                (self._folder / path).parent.mkdir(parents=True, exist_ok=True)
                with (self._folder / path).open("xb") as file:
                    file.write(image)
                return path
        raise AssertionError

    def _new_folder(self, name: str, otherwise: str) -> str:
        """Make a folder for a class, with a name that is free and as close to the class's as possible."""
        safe = _safe(name)
        # -1 would read as no label; the other two names are those of files.
        first = otherwise if safe in ("", "-1", CLASSES_NAME, LABELS_NAME) else safe
        for attempt in chain((first,), self._numbered(f"{first}-", "")):
            with suppress(FileExistsError):
                (self._folder / attempt).mkdir()
                return attempt
        raise AssertionError

    def _numbered(self, before: str, after: str) -> Iterator[str]:
        """Names with the next numbers: to begin at 1 for each name would take quadratic time."""
        for number in self._numbers[before, after]:
            yield f"{before}{number}{after}"


def _safe(part: str) -> str:
    """The name with what file systems or converters would misread replaced; empty if nothing usable remains."""
    name = "".join(
        "_" if char in _REPLACED or unicodedata.category(char) in _REPLACED_CATEGORIES else char for char in part
    ).strip()
    if name in ("", ".", ".."):
        return ""
    if name.startswith(".") or name == "__MACOSX":  # converters would skip these as hidden
        name = f"_{name}"
    encoded = name.encode()
    if len(encoded) > _MAX_NAME_BYTES:
        name = f"{encoded[:_MAX_NAME_BYTES].decode(errors='ignore')}-{sha256(encoded).hexdigest()[:16]}"
    return name
