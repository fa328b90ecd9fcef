"""Tars of one class each, in a tar, as ImageNet comes: ILSVRC2012_img_train.tar holds n01440764.tar and 999 more.

In a plain tar the inner ones are contiguous, so their images too are read by offset, without unpacking anything.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from data_tools.sources.archive import (
    Archive,
    is_tar,
    open_archive,
    read_place,
    stem_of,
    suffix_of,
)
from data_tools.sources.source import NO_IMAGE, Item, path_item, visible_path
from vitscale.data.shards.images import IMAGE_SUFFIXES
from vitscale.ground.errors import DataError


@dataclass(frozen=True)
class NestedTarSource:
    """Images in tars inside tars. The class is the inner tar's name, the key `<class>/<path in the inner tar>`."""

    parts: tuple[str, ...]
    streams: bool
    class_names: tuple[str, ...] | None = None

    def items(self, part: int, ignored: Counter[str]) -> Iterator[Item]:
        """The images of all inner tars. Raises DataError for damage, and for images beside the inner tars."""
        with open_archive(self.parts[part]) as outer:
            for member in outer.files(ignored):
                path = visible_path(member.path, ignored)
                if path is None:
                    continue
                if is_tar(path):
                    if suffix_of(path) != ".tar":
                        raise DataError(
                            f"{self.parts[part]}: {path!r} is compressed, in an archive. Expected plain .tar files "
                            "in it, one a class. Unpack the outer archive, decompress the others, pack them again"
                        )
                    yield from _images_of_class(outer.inside(member), stem_of(path), self.streams, ignored)
                elif path.lower().endswith(IMAGE_SUFFIXES):
                    raise DataError(
                        f"{self.parts[part]}: the image {path!r} lies beside archives. Expected one archive a class, "
                        "with all of the images in them"
                    )
                else:
                    ignored[NO_IMAGE] += 1

    def read(self, part: int, content: bytes) -> bytes:
        """The bytes of one image file. Raises OSError."""
        return read_place(self.parts[part], content)


@dataclass(frozen=True)
class SynsetTarSource:
    """The same with the outer tar unpacked: every part is the tar of one class, named like n01440764.tar."""

    parts: tuple[str, ...]
    streams: bool
    class_names: tuple[str, ...] | None = None

    def items(self, part: int, ignored: Counter[str]) -> Iterator[Item]:
        """The images of one class. Raises DataError for damage."""
        with open_archive(self.parts[part]) as archive:
            yield from _images_of_class(archive, stem_of(self.parts[part]), self.streams, ignored)

    def read(self, part: int, content: bytes) -> bytes:
        """The bytes of one image file. Raises OSError."""
        return read_place(self.parts[part], content)


def are_synsets(parts: Iterable[str]) -> bool:
    """Whether all tars are named like WordNet's synsets, that is, like ImageNet's classes."""
    return all(re.fullmatch(r"n[0-9]{8}", stem_of(part)) for part in parts)


def _images_of_class(archive: Archive, name: str, streams: bool, ignored: Counter[str]) -> Iterator[Item]:
    for member in archive.files(ignored):
        item = path_item(name.encode() + b"/" + member.path, b"", ignored)
        if item is not None:
            yield Item(item.key, (name,), archive.content(member, streams))
