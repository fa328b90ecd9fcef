"""Label lists: a file beside a collection of images whose folders do not give the labels.

There are three kinds:

- One label a line: the n-th line is for the image whose name ends in the number n, counted from 1.
- A table (.csv, .tsv, or a text of image names, each followed by blank or tab): the path or name of an image, then its
  label, or several separated by |. Further columns need a header. Kaggle's LOC_val_solution.csv is such a table.
- ILSVRC2012_devkit_t12.tar.gz: the labels of ImageNet's validation images as they are published.
"""

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from data_tools.sources.archive import is_tar, open_archive
from data_tools.sources.image_list import CSV_DELIMITERS
from data_tools.sources.parts import open_part
from data_tools.sources.source import Item, numbered_label
from vitscale.data.shards.images import IMAGE_SUFFIXES
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.wording import counted, quoted

_GROUND_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
_META = "data/meta.mat"
_ILSVRC_NAME = re.compile(r"ILSVRC2012_val_\d{8}\.", re.IGNORECASE)
_NAME_COLUMNS = ("path", "filepath", "file_path", "filename", "file_name", "file", "image", "image_id", "imageid")
_LABEL_COLUMNS = ("label", "labels", "cls", "class", "class_name", "target", "predictionstring")
_BOXES = "predictionstring"  # Kaggle's: class, x, y, x, y; class, ...
_MAX_MEMBER_BYTES = 64 << 20
_MAX_LINE = 1 << 20
_MOST_SYNSETS = 100_000
_EXAMPLES = 5

# Name or path of an image (None if images are numbered), and its labels.
Row = tuple[str | None, tuple[str, ...]]


class LabelList:
    """The labels of images, by path.

    Args:
        where: what messages call the list: `--labels` and its path.
        rows: one per image, either all with names or all without. Raises DataError if two have the same name.
    """

    def __init__(self, where: str, rows: Iterable[Row]):
        self.where = where
        self._labels: list[tuple[str, ...]] = []  # by row
        self._rows: dict[str, int] = {}  # by name; empty if images are numbered
        self._taken_by: dict[int, str] = {}  # row -> the image's path
        known: dict[tuple[str, ...], tuple[str, ...]] = {}
        for number, (name, labels) in enumerate(rows):
            self._labels.append(known.setdefault(labels, labels))
            if name is not None and (first := self._rows.setdefault(_clean(name), number)) != number:
                raise DataError(
                    f"{where}: rows {first + 1:,} and {number + 1:,} (without the header) are of one image. Expected "
                    "one row per image, several labels with | between them"
                )
        if not known:
            raise DataError(f"{where}: no labels in it")
        self._only_counts = all(len(each) == 1 and re.fullmatch("[1-9][0-9]{0,17}", each[0]) for each in known)
        # How many parts the names have: to try each tail of a path of n parts takes n² steps.
        self._depths = sorted({name.count("/") + 1 for name in self._rows}, reverse=True)

    def labels_of(self, path: str) -> tuple[str, ...] | None:
        """The labels of the image at a path; None if the list does not name it.

        A list may give the whole path, or its last parts, with or without the suffix. Raises DataError for a second
        image that matches the same entry and, in a list by line number, for one whose name has no number or a number
        beyond the lines.
        """
        at = self._by_name(path) if self._rows else self._by_number(path)
        if at is None:
            return None
        if self._taken_by.setdefault(at, path) != path:
            raise DataError(
                f"{self.where}: {path!r} is the second image that one entry fits; expected one each. Name "
                "images by their paths, not by file names alone"
            )
        return self._labels[at]

    def _by_name(self, path: str) -> int | None:
        parts = path.split("/")
        for depth in self._depths:
            tail = "/".join(parts[-depth:])
            for name in (tail, tail.rpartition(".")[0]):
                if (at := self._rows.get(name)) is not None:
                    return at
        return None

    def _by_number(self, path: str) -> int:
        name = path.rpartition("/")[2]
        if _ILSVRC_NAME.match(name) and self._only_counts:
            raise DataError(
                f"{self.where}: numbers from 1 are no labels for {name}: they are ILSVRC2012_IDs, in an order of their "
                "own. Give ILSVRC2012_devkit_t12.tar.gz itself, which says what they mean, or a list of synset names"
            )
        digits = re.search(r"([0-9]{1,18})$", name.rpartition(".")[0])
        if digits is None:
            raise DataError(
                f"{self.where}: one label a line, for images whose names end in their number; {path!r} does not. Give "
                "a table (.csv) of names and labels"
            )
        number = int(digits[1])
        if not 1 <= number <= len(self._labels):
            raise DataError(f"{self.where}: has lines 1 to {len(self._labels):,}; {path!r} asks for line {number:,}")
        return number - 1


def labelled(items: Iterable[Item], labels: str, where: str) -> Iterator[Item]:
    """The same items, with their labels from the list at the path or URL `labels`.

    Raises as `read_label_list` and, after the last item, DataError for images that the list does not name.
    """
    known = read_label_list(labels)
    missing = 0
    examples: list[str] = []
    for item in items:
        found = known.labels_of(item.key)
        if found is not None:
            yield item._replace(labels=found)
            continue
        missing += 1
        if len(examples) < _EXAMPLES:
            examples.append(item.key)
    if missing:
        shown = quoted(examples, _EXAMPLES, missing)
        raise DataError(f"--labels {labels}: does not name {counted(missing, 'image')} of {where}: {shown}")


def read_label_list(path: str) -> LabelList:
    """The label list at a path or URL. Raises RecipeError if there is none, DataError if it cannot be understood."""
    where = f"--labels {path}"
    if is_tar(path):
        return LabelList(where, _devkit_rows(path, where))
    try:
        with open_part(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
            return LabelList(where, _text_rows(where, _lines(where, text)))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{where}: expected a text in UTF-8, or a table ({error})") from error
    except OSError as error:
        raise RecipeError(f"{where}: {error.strerror or error}") from error


def _lines(where: str, text: io.TextIOWrapper) -> Iterator[str]:
    while line := text.readline(_MAX_LINE):
        if len(line) == _MAX_LINE:
            raise DataError(f"{where}: a line of more than {_MAX_LINE:,} characters; expected a label a line")
        yield line


def _text_rows(where: str, lines: Iterator[str]) -> Iterator[Row]:
    first = next(lines, "")
    lines = chain([first], lines)
    delimiter = CSV_DELIMITERS.get(where[-4:].lower())
    if delimiter is not None:
        yield from _table_rows(where, csv.reader(lines, delimiter=delimiter))
        return
    for separator in ("\t", ",", None):
        cells = first.strip().split(separator, 1)
        if len(cells) == 2 and cells[0].strip().lower().endswith(IMAGE_SUFFIXES):
            yield from _table_rows(where, (line.strip().split(separator, 1) for line in lines))
            return
    end = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            end = end or number
        elif end:
            raise DataError(f"{where}: line {end:,} is empty, later ones are not; expected a label a line")
        else:
            yield None, _labels(line, f"{where}, line {number:,}")


def _table_rows(where: str, rows: Iterable[list[str]]) -> Iterator[Row]:
    name_column, label_column, boxes, width = 0, 1, False, 2
    for number, row in enumerate(rows, 1):
        if not any(cell.strip() for cell in row):
            continue
        if number == 1:
            names = [cell.strip().lower() for cell in row]
            label_names = [name for name in _LABEL_COLUMNS if name in names]
            if len(row) > 1 and label_names and not any(name.endswith(IMAGE_SUFFIXES) for name in names):
                label_column, boxes, width = names.index(label_names[0]), label_names[0] == _BOXES, len(row)
                others = [name for name in _NAME_COLUMNS if name in names] or [names[label_column == 0]]
                name_column = names.index(others[0])
                continue
        if len(row) != width:
            raise DataError(
                f"{where}, line {number:,}: {counted(len(row), 'column')}; expected {width}: name and label "
                "of an image" + (" (or more, with a header that calls one of them 'label')" if width == 2 else "")
            )
        cell = row[label_column]
        if boxes:
            cell = "|".join(dict.fromkeys(cell.split()[::5]))
        yield row[name_column].strip(), _labels(cell, f"{where}, line {number:,}")


def _devkit_rows(path: str, where: str) -> Iterator[Row]:
    """ImageNet's validation labels as synsets; the development kit has them as numbers in an order of its own."""
    files: dict[str, bytes] = {}
    with open_archive(path) as archive:
        for member in archive.files(Counter()):
            for name in (_META, _GROUND_TRUTH):
                if member.path.endswith(name.encode()):
                    files[name] = archive.read(member, _MAX_MEMBER_BYTES)
    if len(files) < 2:
        raise DataError(f"{where}: expected the kit ILSVRC2012_devkit_t12.tar.gz, with {_META}, {_GROUND_TRUTH}")
    synsets = _synsets(where, files[_META])
    for number, line in enumerate(files[_GROUND_TRUTH].split(), 1):
        synset = synsets.get(line.decode("ascii", "replace"))
        if synset is None:
            raise DataError(f"{where}: line {number:,} of {_GROUND_TRUTH}, {line[:20]!r}, is no ILSVRC2012_ID")
        yield f"ILSVRC2012_val_{number:08d}", (synset,)


def _synsets(where: str, meta: bytes) -> dict[str, str]:
    """ILSVRC2012_ID -> synset, such as n02119789."""
    try:
        from scipy.io import loadmat, whosmat  # type: ignore[import-untyped]
    except ImportError as error:
        raise RecipeError(f"{where}: reading {_META} needs SciPy: pip install scipy") from error
    try:
        if any(math.prod(shape) > _MOST_SYNSETS for _, shape, _ in whosmat(io.BytesIO(meta))):
            raise ValueError(f"more than {_MOST_SYNSETS:,} entries")
        table = loadmat(io.BytesIO(meta), squeeze_me=True, variable_names=["synsets"])["synsets"]
        return {str(int(row["ILSVRC2012_ID"])): str(row["WNID"]) for row in table}
    except Exception as error:  # SciPy raises nearly anything on a damaged file
        what = f"{type(error).__name__}: {error}"
        raise DataError(f"{where}: {_META} is damaged or of another kind ({what})") from error


def _labels(cell: str, where: str) -> tuple[str, ...]:
    labels: list[str] = []
    for name in cell.split("|"):
        if not name.strip():
            raise DataError(f"{where}: no label (-1 stands for none)")
        is_number = re.fullmatch(r"-?[0-9]{1,18}", name.strip())
        labels += numbered_label(int(name), where) if is_number else (name.strip(),)
    return tuple(labels)


def _clean(name: str) -> str:
    return "/".join(part for part in name.split("/") if part not in ("", ".", ".."))
