"""A folder of images, here or at a URL: `class/file`, at any depth below; links are followed."""

import errno
import os
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from data_tools.sources.label_list import labelled
from data_tools.sources.source import NO_FILE, Item, path_item
from vitscale.data.shards.images import MAX_IMAGE_BYTES, refuse_too_large
from vitscale.ground import storage
from vitscale.ground.errors import DataError

_STATE = struct.Struct("<qq")  # size in bytes, time of the last change in ns
_UNKNOWN = (-1, -1)
_DEEPEST = 100  # folders in each other at a URL
CIRCLE = "link to a folder above"
TOO_LARGE = f"of more than {MAX_IMAGE_BYTES:,} bytes"


@dataclass(frozen=True)
class FolderSource:
    """Images in a folder. Content is a file's size, time and path, the path as the bytes that the file system uses.

    With `labels`, a path or URL, the classes come from that list instead of from folders.
    """

    parts: tuple[str, ...]
    labels: str | None = None
    class_names: tuple[str, ...] | None = None
    streams: bool = False

    def items(self, part: int, ignored: Counter[str]) -> Iterator[Item]:
        """Every image below the root. Raises DataError for a folder that cannot be listed."""
        root = self.parts[part]
        files = _files_at(root, ignored) if storage.is_url(root) else _files_below(os.fsencode(root), ignored)
        items = (item for path in files if (item := _item(root, path, ignored)) is not None)
        return items if self.labels is None else labelled(items, self.labels, root)

    def read(self, part: int, content: bytes) -> bytes:
        """The bytes of a file. Raises OSError or StorageError."""
        root = self.parts[part]
        if storage.is_url(root):
            return storage.read_bytes(storage.join(root, content.decode("utf-8")))
        size, time, path = *_STATE.unpack_from(content), content[_STATE.size :]
        full = os.path.join(os.fsencode(root), path)  # noqa: PTH118
        with open(full, "rb", buffering=0) as file:  # noqa: PTH123
            status = os.fstat(file.fileno())
            if (status.st_size, status.st_mtime_ns) != (size, time) and (size, time) != _UNKNOWN:
                raise DataError(
                    f"{os.fsdecode(full)}: has changed since it was listed, so that its class may not be what the plan "
                    "says. Put it back, or remove the output and start anew"
                )
            refuse_too_large(status.st_size)
            return file.readall()


def _item(root: str, path: bytes, ignored: Counter[str]) -> Item | None:
    item = path_item(path, path, ignored)
    if item is None or storage.is_url(root):
        return item
    if item.key.encode() != path:
        twin = os.path.join(os.fsencode(root), item.key.encode())  # noqa: PTH118
        if os.path.lexists(twin):
            raise DataError(f"{os.fsdecode(twin)}: another file's name, which is no UTF-8, is written like this one's")
    try:
        status = os.stat(os.path.join(os.fsencode(root), path))  # noqa: PTH116, PTH118
        state = _STATE.pack(status.st_size, status.st_mtime_ns)
    except OSError:  # a broken link, reported when it is read
        state = _STATE.pack(*_UNKNOWN)
    return item._replace(content=state + path)


def _files_below(root: bytes, ignored: Counter[str]) -> Iterator[bytes]:
    # Bytes throughout: some names are not UTF-8, and the result must not depend on the locale.
    pending: list[tuple[bytes, frozenset[tuple[int, int]]]] = [(b"", frozenset())]
    while pending:
        folder, above = pending.pop()  # and the identities of the folders above it: links may form a circle
        try:
            status = os.stat(os.path.join(root, folder))  # noqa: PTH116, PTH118 -- Path knows no bytes
            identity = (status.st_dev, status.st_ino)
            if identity in above:
                ignored[CIRCLE] += 1
                continue
            with os.scandir(os.path.join(root, folder)) as listing:  # noqa: PTH118
                for item in listing:
                    path = folder + b"/" + item.name if folder else item.name
                    if item.is_symlink() and _examined(item) == errno.ELOOP:
                        ignored[NO_FILE] += 1
                    elif item.is_dir():
                        pending.append((path, above | {identity}))
                    elif item.is_file() or _examined(item):  # a broken link is an image that cannot be read
                        yield path
                    else:
                        ignored[NO_FILE] += 1
        except OSError as error:
            raise DataError(f"{os.fsdecode(error.filename)}: cannot be listed ({error.strerror})") from error


def _files_at(url: str, ignored: Counter[str]) -> Iterator[bytes]:
    fs, root = storage.filesystem(url)
    pending = [root.rstrip("/")]
    while pending:
        folder = pending.pop()
        for entry in storage.patiently(url, partial(fs.ls, folder, detail=True)):
            name = entry["name"].rstrip("/")
            if name == folder.rstrip("/"):
                continue  # some stores list a folder in itself
            if entry["type"] == "directory":
                if name.count("/") - root.count("/") > _DEEPEST:  # a server's links may go on for ever
                    raise DataError(f"{url}: more than {_DEEPEST} folders in each other: .../{name[-60:]}")
                pending.append(name)
            elif (entry.get("size") or 0) > MAX_IMAGE_BYTES:  # asking for sizes later would cost a request per image
                ignored[TOO_LARGE] += 1
            else:
                yield name.removeprefix(root.rstrip("/") + "/").encode("utf-8")


def _examined(item: os.DirEntry[bytes]) -> int | None:
    """The error number of examining an entry, or what a link points at; 0 for none."""
    try:
        item.stat()
    except OSError as error:
        return error.errno
    return 0
