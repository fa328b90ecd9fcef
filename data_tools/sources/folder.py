"""A folder of images, here or at a URL: `class/file`, at any depth below; links are followed."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from data_tools.sources.label_list import labelled
from data_tools.sources.source import NO_FILE, Item, path_item
from vitscale import storage
from vitscale.errors import DataError


@dataclass(frozen=True)
class FolderSource:
    """Images in a folder. What `read` needs is the path below it, as the bytes that the file system knows.

    With `labels`, a path or URL, the classes come from that list, not from folders.
    """

    parts: tuple[str, ...]
    labels: str | None = None
    class_names: tuple[str, ...] | None = None
    streams: bool = False

    def items(self, part: int, ignored: Counter[str]) -> Iterator[Item]:
        """Every image below the root. Raises DataError for a folder that cannot be listed."""
        root = self.parts[part]
        files = _files_at(root) if storage.is_url(root) else _files_below(os.fsencode(root), ignored)
        items = (item for path in files if (item := path_item(path, path, ignored)) is not None)
        return items if self.labels is None else labelled(items, self.labels, root)

    def read(self, part: int, content: bytes) -> bytes:
        """The bytes of a file. Raises OSError or StorageError."""
        root = self.parts[part]
        if storage.is_url(root):
            return storage.read_bytes(storage.join(root, content.decode("utf-8")))
        with open(os.path.join(os.fsencode(root), content), "rb", buffering=0) as file:  # noqa: PTH118, PTH123
            return file.readall()


def _files_below(root: bytes, ignored: Counter[str]) -> Iterator[bytes]:
    # Bytes throughout: names that are no UTF-8 exist, and the result must not depend on the locale.
    pending = [b""]
    visited: set[tuple[int, int]] = set()  # folders by identity: links may lead in circles
    while pending:
        folder = pending.pop()
        try:
            identity = os.stat(os.path.join(root, folder))  # noqa: PTH116, PTH118 -- Path knows no bytes
            if (identity.st_dev, identity.st_ino) in visited:
                continue
            visited.add((identity.st_dev, identity.st_ino))
            with os.scandir(os.path.join(root, folder)) as listing:  # noqa: PTH118
                for item in listing:
                    path = folder + b"/" + item.name if folder else item.name
                    if item.is_dir():
                        pending.append(path)
                    elif item.is_file() or not _exists(item):  # a broken link is an image that cannot be read
                        yield path
                    else:
                        ignored[NO_FILE] += 1
        except OSError as error:
            raise DataError(f"{os.fsdecode(error.filename)}: cannot be listed ({error.strerror})") from error


def _files_at(url: str) -> Iterator[bytes]:
    fs, root = storage.filesystem(url)
    pending = [root.rstrip("/")]
    while pending:
        folder = pending.pop()
        for entry in storage.patiently(url, partial(fs.ls, folder, detail=True)):
            name = entry["name"].rstrip("/")
            if name == folder.rstrip("/"):
                continue  # some stores list a folder in itself
            if entry["type"] == "directory":
                pending.append(name)
            else:
                yield name.removeprefix(root.rstrip("/") + "/").encode("utf-8")


def _exists(item: os.DirEntry[bytes]) -> bool:
    try:
        item.stat()
    except OSError:
        return False
    return True
