"""Tars of images, whether classes are given by folders, by tars in the tar, as a WebDataset, or not at all.

ImageNet comes as tars of one class each, in a tar: ILSVRC2012_img_train.tar holds n01440764.tar and 999 more. In a
plain tar the inner ones are contiguous, so their images too are read by offset, without unpacking anything.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from data_tools.sources.archive import (
    TAR_SUFFIXES,
    Archive,
    ArchiveSource,
    is_tar,
    must_stream,
    open_archive,
    stem_of,
    suffix_of,
)
from data_tools.sources.label_list import labelled, read_label_list
from data_tools.sources.source import NO_IMAGE, Item, Source, SourceOptions, path_item, refuse_fields, visible_path
from data_tools.sources.webdataset import WebDatasetSource, sample_name
from vitscale.data.shards.images import IMAGE_SUFFIXES
from vitscale.ground.errors import DataError, RecipeError

ARCHIVE_INSIDE = "archive inside of the archive"
# How much of a tar is looked at to detect its kind.
_PEEK_FILES = 200
_PEEK_BYTES = 64 << 20
_SYNSET = re.compile(r"n[0-9]{8}")  # WordNet's, which are ImageNet's classes


def open_tars(src: str, files: Sequence[str], options: SourceOptions) -> Source:
    """The source that consists of the tars `files`, paths or URLs, all of one kind, which the first one determines.

    Of the options, `labels` is for images whose folders give no class; `image_field` and `label_field` are for a
    WebDataset: giving one of them declares the tars to be one. `src` is what messages call the source.

    Raises:
        RecipeError: options that do not apply to this kind of tar; a label list that does not exist; a name without a
            suffix of tars.
        DataError: a first tar that is damaged or missing; a label list that cannot be understood.
        StorageError: a URL that does not answer.
    """
    parts = tuple(files)
    for part in parts:
        if not is_tar(part):
            raise RecipeError(f"SRC {part}: a tar is read by the suffix of its name, one of {' '.join(TAR_SUFFIXES)}")
    streams = any(must_stream(file) for file in parts)
    kind = _kind(parts[0])
    if kind is NestedTarSource:
        refuse_fields(options, "an archive of archives, one a class,")
        if options.labels is not None:
            raise RecipeError(f"--labels: SRC {src} holds one archive a class, which says the label; leave it out")
        return NestedTarSource(parts, streams)
    if options.labels is not None:
        refuse_fields(options, "a tar with a list of labels")
        if len(parts) > 1:  # an entry might match an image in each of them
            raise RecipeError(f"--labels: SRC {src} is {len(parts):,} tars; a list of labels goes with one tar")
        read_label_list(options.labels)  # before anything long starts
        return TarSource(parts, streams, options.labels)
    if all(_SYNSET.fullmatch(stem_of(part)) for part in parts):
        refuse_fields(options, "archives of one class each, named like it,")
        return SynsetTarSource(parts, streams)
    if kind is WebDatasetSource or options.image_field is not None or options.label_field is not None:
        return WebDatasetSource(parts, streams, options.image_field, options.label_field, options.unlabelled)
    return TarSource(parts, streams)


def _kind(where: str) -> type[Source]:
    """The kind of a tar, from its first files. Raises DataError for images beside archives."""
    images: set[str] = set()
    described: set[str] = set()
    archives = seen = 0
    with open_archive(where) as archive:
        for header in archive.headers():
            if seen == _PEEK_FILES or header.offset > _PEEK_BYTES:
                break
            path = visible_path(header.name.encode("utf-8", "surrogateescape"), Counter())
            if path is None or header.isdir():
                continue
            seen += 1
            archives += is_tar(path)
            if archives and not images:
                return NestedTarSource
            name, extension = sample_name(path)
            if path.lower().endswith(IMAGE_SUFFIXES):
                images.add(name)
            elif extension in ("cls", "json"):
                described.add(name)
            if name in images and name in described:
                return WebDatasetSource
    if archives > len(images):
        raise DataError(
            f"{where}: holds {len(images):,} images among {archives:,} archives, which may be of one class each. "
            "Expected either images or archives: take them apart"
        )
    return TarSource


@dataclass(frozen=True)
class TarSource(ArchiveSource):
    """Images in tars. Their classes come from folders, or from the label list `labels`."""

    labels: str | None = None

    def items(self, part: int, ignored: Counter[str]) -> Iterator[Item]:
        """The images of one tar. Raises DataError for damage, and for images that the label list does not name."""
        images = self._images(part, ignored)
        return images if self.labels is None else labelled(images, self.labels, self.parts[part])

    def _images(self, part: int, ignored: Counter[str]) -> Iterator[Item]:
        with open_archive(self.parts[part]) as archive:
            for member in archive.files(ignored):
                if is_tar(member.path.decode("utf-8", "replace")) and visible_path(member.path, Counter()):
                    ignored[ARCHIVE_INSIDE] += 1
                    continue
                if member.path.lower().endswith(b".cls"):
                    raise DataError(
                        f"{self.parts[part]}: holds the label {os.fsdecode(member.path)!r}, as a WebDataset does, "
                        "unlike the first files of the source. Convert archives of one kind at a time, or say "
                        "--label-field cls"
                    )
                item = path_item(member.path, b"", ignored)
                if item is not None:
                    yield item._replace(content=archive.content(member, self.streams))


@dataclass(frozen=True)
class SynsetTarSource(ArchiveSource):
    """Tars of one class each. The class is the tar's name, the key `<class>/<path in the tar>`."""

    def items(self, part: int, ignored: Counter[str]) -> Iterator[Item]:
        """The images of one class. Raises DataError for damage."""
        with open_archive(self.parts[part]) as archive:
            yield from self._images(archive, stem_of(self.parts[part]), ignored)

    def _images(self, archive: Archive, name: str, ignored: Counter[str]) -> Iterator[Item]:
        for member in archive.files(ignored):
            item = path_item(name.encode() + b"/" + member.path, b"", ignored)
            if item is not None:
                yield Item(item.key, (name,), archive.content(member, self.streams))


@dataclass(frozen=True)
class NestedTarSource(SynsetTarSource):
    """Tars of one class each, inside of tars: the parts."""

    def items(self, part: int, ignored: Counter[str]) -> Iterator[Item]:
        """The images of all inner tars. Raises DataError for damage, and for images beside the inner tars."""
        where = self.parts[part]
        with open_archive(where) as outer:
            for member in outer.files(ignored):
                path = visible_path(member.path, ignored)
                if path is None:
                    continue
                if is_tar(path):
                    if suffix_of(path) != ".tar":
                        raise DataError(
                            f"{where}: {path!r} is compressed, in an archive. Expected plain .tar files in it, one a "
                            "class. Unpack the outer archive, decompress the others, pack them again"
                        )
                    yield from self._images(outer.inside(member), stem_of(path), ignored)
                elif path.lower().endswith(IMAGE_SUFFIXES):
                    raise DataError(
                        f"{where}: the image {path!r} lies beside archives. Expected one archive a class, with all of "
                        "the images in them"
                    )
                else:
                    ignored[NO_IMAGE] += 1
