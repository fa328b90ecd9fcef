"""A folder of images: `class/file`, at any depth below; links are followed."""

import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_tools.sources.listing import NO_FILE
from vitscale.errors import DataError


@dataclass(frozen=True)
class FolderSource:
    """Images in the folder `root`. A location is the path below it, as the bytes that the file system knows."""

    root: Path

    def files(self, ignored: Counter[str]) -> Iterator[tuple[bytes, bytes]]:
        """Every file below the root. Raises DataError for a folder that cannot be listed."""
        # Bytes throughout: names that are no UTF-8 exist, and the result must not depend on the locale.
        root = os.fsencode(self.root)
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
                    items = sorted(listing, key=lambda item: item.name)
            except OSError as error:
                raise DataError(f"{os.fsdecode(error.filename)}: cannot be listed ({error.strerror})") from error
            for item in items:
                path = folder + b"/" + item.name if folder else item.name
                if item.is_dir():
                    pending.append(path)
                elif item.is_file() or not _exists(item):  # a broken link is an image that cannot be read
                    yield path, path
                else:
                    ignored[NO_FILE] += 1

    def read(self, location: bytes) -> bytes:
        """The bytes of a file. Raises OSError."""
        with open(os.path.join(os.fsencode(self.root), location), "rb", buffering=0) as file:  # noqa: PTH118, PTH123
            return file.readall()


def _exists(item: os.DirEntry[bytes]) -> bool:
    try:
        return stat.S_IFMT(item.stat().st_mode) != 0
    except OSError:
        return False
