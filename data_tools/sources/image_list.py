"""A list of images with their labels: CSV, TSV or JSON lines of paths or URLs, perhaps compressed with gzip.

    path,label              {"file_name": "a/1.jpg", "label": "cat"}
    a/1.jpg,cat             {"file_name": "a/2.jpg", "label": ["cat", "dog"]}
    a/2.jpg,cat|dog         {"file_name": "https://host/3.jpg", "label": null}

Relative paths start at the list's own folder; a list at a URL names no files of this machine. Lists have millions of
rows, so the code that runs per row is kept plain.
"""

import csv
import json
import posixpath
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import ClassVar, NamedTuple

from data_tools.sources.parts import clean_path, open_unzipped, reading
from data_tools.sources.source import (
    IMAGE_NAMES,
    Item,
    SourceOptions,
    choose_image,
    choose_label,
    label_columns,
    labels_of,
)
from vitscale.data.shards.images import IMAGE_SUFFIXES, refuse_too_large
from vitscale.ground.errors import DataError, RecipeError, turned
from vitscale.ground.safe_text import without_secrets
from vitscale.ground.storage import is_url, read_bytes, without_file_scheme
from vitscale.ground.wording import counted

CSV_DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_SUFFIXES = (".jsonl", ".ndjson")
LIST_SUFFIXES = tuple(f"{kind}{zipped}" for kind in (*CSV_DELIMITERS, *JSON_SUFFIXES) for zipped in ("", ".gz"))

_MAX_LINE_BYTES = 1 << 20
_MAX_CACHED = 100_000
_ELSEWHERE = {"http", "https", "s3", "s3a", "gs", "gcs", "hf", "abfs", "az"}  # schemes that never read this machine
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class ImageListSource:
    """Images named by lists. Content is a path or URL as written in the list, in UTF-8; of a URL with secrets, a zero
    byte and what is left without them: the list alone has them.
    """

    parts: tuple[str, ...]
    options: SourceOptions
    streams: ClassVar[bool] = False
    class_names: tuple[str, ...] | None = None

    def items(self, part: int, ignored: Counter[str]) -> Iterator[Item]:
        for key, labels, path in _rows(self.parts[part], self.options):
            yield Item(key, labels, _bare(path))

    def read(self, part: int, content: bytes) -> bytes:
        path = (_with_secrets(self, part).get(content, content) if content.startswith(b"\0") else content).decode()
        with turned(f"{path!r}: not the path of a file", OSError, ValueError):  # a NUL in a path
            where = path if is_url(path) else _beside(self.parts[part], path)
            if not is_url(where):
                refuse_too_large(Path(where).stat().st_size)
            return read_bytes(where)


def open_image_list(src: str, files: Sequence[str], options: SourceOptions) -> ImageListSource:
    """Lists of images. Columns are looked up here, so that a wrong one is reported at once.

    Raises:
        RecipeError: a suffix that is not a list's; columns that are not known.
        DataError, StorageError: a list whose first row is damaged, or that cannot be read.
    """
    for where in files:
        with closing(_rows(where, options)) as rows:
            next(rows, None)
    return ImageListSource(tuple(files), options)


def _bare(path: bytes) -> bytes:
    bare = without_secrets(path.decode()).encode() if b"=" in path or b"@" in path else path
    return path if bare == path else b"\0" + bare


@cache
def _with_secrets(source: ImageListSource, part: int) -> dict[bytes, bytes]:
    """Content of a list's images whose URLs have secrets -> their paths or URLs as written."""
    return {_bare(item.content): item.content for item in _rows(source.parts[part], source.options)}


def _beside(where: str, path: str) -> str:
    if is_url(where) and not path.startswith("/"):
        scheme, _, there = where.partition("://")
        return f"{scheme}://{posixpath.normpath(posixpath.join(posixpath.dirname(there), path))}"
    return posixpath.join(posixpath.dirname(where), path)


def _rows(where: str, options: SourceOptions) -> Generator[Item, None, None]:
    """The images of a list, their content being paths and URLs as written."""
    with reading(where), closing(open_unzipped(where)) as file:
        if file.peek(len(_BOM))[: len(_BOM)] == _BOM:
            file.read(len(_BOM))
        # In pieces: a file without line ends must not be read into memory at once.
        lines = map(bytes.decode, iter(partial(file.readline, _MAX_LINE_BYTES), b""))
        suffix = posixpath.splitext(where.lower().removesuffix(".gz"))[1]
        if suffix in CSV_DELIMITERS:
            yield from _csv_rows(lines, CSV_DELIMITERS[suffix], where, options)
        elif suffix in JSON_SUFFIXES:
            yield from _json_rows(lines, where, options)
        else:
            known = ", ".join((*CSV_DELIMITERS, *JSON_SUFFIXES))
            raise RecipeError(f"{where}: not a list of images; those end in {known}")


def _key(path: str, where: str, line: int) -> str:
    # Nearly all paths are clean already, and this runs for every row.
    if path and path[0] not in "./" and "/." not in path and "//" not in path and "::" not in path and "=" not in path:
        return path
    if is_url(without_file_scheme(where)):
        scheme, own = path.partition("://")[0].lower(), where.partition("://")[0].lower()
        if path.startswith("/") or "::" in path or (is_url(path) and scheme not in {own, *_ELSEWHERE}):
            raise DataError(
                f"{where}, line {line}: {path!r} may be on this machine. Expected a path beside the list, or a URL of "
                f"{', '.join(sorted(_ELSEWHERE))}; for others, copy the list to this machine"
            )
    folder = f"{posixpath.dirname(where)}/"  # keys of images below the list's own folder are relative to it
    key = clean_path(path.removeprefix(folder))
    key = without_secrets(key) if is_url(where) else key
    if not key:
        raise DataError(f"{where}, line {line}: no path of an image")
    return key


class _Layout(NamedTuple):
    """The number of columns, those of image and label (None for no labels), and whether the first row names them."""

    columns: int
    image: int
    label: int | None
    has_header: bool


def _csv_rows(lines: Iterator[str], delimiter: str, where: str, options: SourceOptions) -> Iterator[Item]:
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        first = next((row for row in rows if row), None)
        if first is None:
            raise DataError(f"{where}: an empty list")
        layout = _layout(first, where, options)
        columns, image_at, label_at = layout.columns, layout.image, layout.label
        labels_of: dict[str, tuple[str, ...]] = {}
        labels: tuple[str, ...] | None = ()
        body: Iterable[list[str]] = rows if layout.has_header else chain([first], rows)
        for row in body:
            if len(row) != columns:
                if not row:
                    continue
                raise DataError(
                    f"{where}, line {rows.line_num}: {counted(len(row), 'column')}; expected {columns} as in the "
                    "first row (a field with a delimiter in it needs quotes)"
                )
            path = row[image_at]
            if label_at is not None:
                text = row[label_at]
                labels = labels_of.get(text)
                if labels is None:
                    if len(labels_of) >= _MAX_CACHED:
                        labels_of.clear()
                    labels = labels_of[text] = _split_labels(text)
            yield Item(_key(path, where, rows.line_num), labels, path.encode())
    except UnicodeDecodeError as error:
        raise DataError(f"{where}, line {rows.line_num + 1}: not UTF-8 ({error.reason})") from error
    except csv.Error as error:
        raise DataError(f"{where}, line {rows.line_num}: not valid CSV ({error})") from error


def _layout(first: list[str], where: str, options: SourceOptions) -> _Layout:
    names = [field.strip() for field in first]
    images = [name for name in names if name.lower() in IMAGE_NAMES]
    if not images and options.image_field is None and (is_url(first[0]) or first[0].lower().endswith(IMAGE_SUFFIXES)):
        label = None if options.unlabelled else 1
        if len(first) == 2 or (len(first) == 1 and label is None):
            return _Layout(len(first), 0, label, has_header=False)
        raise RecipeError(
            f"{where}: {counted(len(first), 'column')} and no header. Expected two, image and label; otherwise a "
            "first row that names the columns (--unlabelled for a list without labels)"
        )
    if len(set(names)) < len(names):
        raise RecipeError(f"{where}: a column twice in the header {', '.join(names)}")
    image = choose_image(names, images, options, where)
    label_name = choose_label(names, label_columns(names), options, where)
    label_at = None if label_name is None else names.index(label_name)
    return _Layout(len(names), names.index(image), label_at, has_header=True)


def _split_labels(text: str) -> tuple[str, ...]:
    """`a|b` or `["a", "b"]` -> (a, b); an empty text and -1 mean no label."""
    if text.startswith("[") and text.endswith("]"):
        with suppress(ValueError, RecursionError):
            listed = json.loads(text)
            return tuple(label for label in dict.fromkeys(map(str, listed)) if label not in ("", "-1", "None"))
    labels = dict.fromkeys(label.strip() for label in text.split("|"))
    return tuple(label for label in labels if label not in ("", "-1"))


def _json_rows(lines: Iterator[str], where: str, options: SourceOptions) -> Iterator[Item]:
    image: str | None = None
    label: str | None = None
    number = 0
    try:
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            row = json.loads(line)
            if not isinstance(row, dict):
                raise DataError(f"{where}, line {number}: expected a JSON object, found {type(row).__name__}")
            if image is None:
                columns = list(row)
                candidates = [name for name in columns if name.lower() in IMAGE_NAMES]
                image = choose_image(columns, candidates, options, where)
                label = choose_label(columns, label_columns(columns), options, where)
            path = row.get(image)
            if not isinstance(path, str) or not path:
                raise DataError(f"{where}, line {number}: no path of an image in {image!r}")
            labels: tuple[str, ...] = ()
            if label is not None:
                if label not in row:
                    raise DataError(f"{where}, line {number}: no {label!r}; write null for an image without labels")
                labels = labels_of(row[label], f"{where}, line {number}")
                "".join(labels).encode()  # JSON can spell half a character, which UTF-8 refuses
            yield Item(_key(path, where, number), labels, path.encode())
    except UnicodeDecodeError as error:
        raise DataError(f"{where}, line {number + 1}: not UTF-8 ({error.reason})") from error
    except UnicodeEncodeError as error:
        raise DataError(f"{where}, line {number}: half a character ({error.reason})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}, line {number}: not valid JSON ({error})") from error
    if image is None:
        raise DataError(f"{where}: an empty list")
