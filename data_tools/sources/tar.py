"""Tars of images, whether classes are given by folders, by tars in the tar, as a WebDataset, or not at all."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from data_tools.sources.archive import (
    ARCHIVE_INSIDE,
    TAR_SUFFIXES,
    is_tar,
    must_stream,
    open_archive,
    read_place,
)
from data_tools.sources.fields import NO_LABELS, refuse_fields
from data_tools.sources.label_list import labelled, read_label_list
from data_tools.sources.nested_tar import NestedTarSource, SynsetTarSource, are_synsets
from data_tools.sources.source import Item, Source, SourceOptions, path_item, visible_path
from data_tools.sources.webdataset import WebDatasetSource, sample_name
from vitscale.data.shards.images import IMAGE_SUFFIXES
from vitscale.ground.errors import DataError, RecipeError

__all__ = ["TAR_SUFFIXES", "TarSource", "is_tar", "open_tars"]

# How much of a tar is looked at to detect its kind.
_PEEK_FILES = 200
_PEEK_BYTES = 64 << 20


def open_tars(src: str, files: Sequence[str], options: SourceOptions) -> Source:
    """The source that consists of the tars `files`, paths or URLs, all of one kind, which the first one determines.

    Args:
        src: what messages call the source.
        files: one or more names for which `is_tar` is true.
        options: `labels` for images whose folders give no class; `image_field` and `label_field` for a WebDataset:
            giving one of them declares the tars to be one.

    Raises:
        RecipeError: options that do not apply to this kind of tar; a label list that does not exist.
        DataError: a first tar that is damaged or missing; a label list that cannot be understood.
        StorageError: a URL that does not answer.
    """
    parts = tuple(files)
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
    if are_synsets(parts):
        refuse_fields(options, "archives of one class each, named like it,")
        return SynsetTarSource(parts, streams)
    if kind is WebDatasetSource or options.image_field is not None or options.label_field is not None:
        label_field = NO_LABELS if options.unlabelled else options.label_field
        return WebDatasetSource(parts, streams, options.image_field, label_field)
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
class TarSource:
    """Images in tars. Their classes come from folders, or from the label list `labels`."""

    parts: tuple[str, ...]
    streams: bool
    labels: str | None = None
    class_names: tuple[str, ...] | None = None

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

    def read(self, part: int, content: bytes) -> bytes:
        """The bytes of one image file. Raises OSError."""
        return read_place(self.parts[part], content)
