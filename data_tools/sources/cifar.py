"""CIFAR-10 and CIFAR-100 in the binary version of their authors, packed or unpacked.

    data_batch_1..5.bin, test_batch.bin (CIFAR-100: train.bin, test.bin): records of the label (CIFAR-100: coarse, then
             fine) and 3072 bytes of pixels
    batches.meta.txt (CIFAR-100: fine_label_names.txt, coarse_label_names.txt): a name a line

The Python version is recognised and refused: it is made of pickles, which are programs.

Pixels are red, green and blue planes of 32 x 32, row by row. Each image is passed on as a binary PPM file, which is
those pixels after a line of text. Source: https://www.cs.toronto.edu/~kriz/cifar.html
"""

import posixpath
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from data_tools.sources.archive import is_tar, open_archive
from data_tools.sources.parts import open_part, reading
from data_tools.sources.source import Item, SourceOptions
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.storage import base_name
from vitscale.ground.wording import counted

_PIXELS = 3 * 32 * 32
_PPM_HEAD = b"P6\n32 32\n255\n"
_MAX_FILE_BYTES = 1 << 30
_CLASSES = {"labels": 10, "fine_labels": 100, "coarse_labels": 20}
_BINARY = ".bin"
_CIFAR10 = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_CIFAR100 = ("train", "test")
_BATCHES = frozenset(name + suffix for name in _CIFAR10 + _CIFAR100 for suffix in ("", _BINARY))


class _Batch(NamedTuple):
    """A file on its own, or a member of a tar."""

    where: str
    member: str | None = None

    @property
    def name(self) -> str:
        """The batch's name: the file name without suffix."""
        return base_name(self.member or self.where).removesuffix(_BINARY)

    def beside(self, name: str) -> "_Batch":
        """Another file in the same folder."""
        if self.member is not None:
            return _Batch(self.where, posixpath.join(posixpath.dirname(self.member), name))
        return _Batch(self.where[: -len(base_name(self.where))] + name)

    def __str__(self) -> str:
        return self.where if self.member is None else f"{self.where}: {self.member}"

    def read(self) -> bytes:
        """The whole file. Raises DataError or StorageError."""
        if self.member is None:
            with reading(self.where), closing(open_part(self.where)) as file:
                data = file.read(_MAX_FILE_BYTES + 1)
            if len(data) > _MAX_FILE_BYTES:
                raise DataError(f"{self}: more than {_MAX_FILE_BYTES:,} bytes; no batch of CIFAR is so large")
            return data
        with open_archive(self.where) as archive:
            for member in archive.files(Counter()):
                if member.path.decode("utf-8", "backslashreplace") == self.member:
                    return archive.read(member, _MAX_FILE_BYTES)
        raise DataError(f"{self}: missing")


@dataclass(frozen=True)
class CifarSource:
    """Batches of CIFAR. `labels` names the batch's list of labels to use; None for no labels."""

    places: tuple[_Batch, ...]
    labels: str | None
    class_names: tuple[str, ...] | None
    streams: ClassVar[bool] = True

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(place.where for place in self.places)

    def items(self, part: int, ignored: Counter[str]) -> Iterator[Item]:
        place = self.places[part]
        data = place.read()
        fields = ("coarse_labels", "fine_labels") if place.name in _CIFAR100 else ("labels",)
        size = len(fields) + _PIXELS
        if not data or len(data) % size:
            raise DataError(
                f"{place}: {len(data):,} bytes; expected records of {size:,}: truncated, or no batch of CIFAR"
            )
        for i, record in enumerate(np.frombuffer(data, np.uint8).reshape(-1, size)):
            labels: tuple[str, ...] = ()
            if self.labels is not None and self.class_names is not None:
                label, classes = int(record[fields.index(self.labels)]), len(self.class_names)
                if label >= classes:
                    raise DataError(f"{place}: image {i} has the label {label}; there are {classes} classes")
                labels = (self.class_names[label],)
            pixels = record[len(fields) :].reshape(3, 32, 32).transpose(1, 2, 0)
            yield Item(f"{place.name}/{i:05d}", labels, _PPM_HEAD + pixels.tobytes())

    def read(self, part: int, content: bytes) -> bytes:
        return content


def is_cifar(names: Collection[str]) -> bool:
    """Whether these are the file names of CIFAR: all names of a folder or archive, or a single one."""
    found = {base_name(name) for name in names} - {"file.txt~"}  # part of CIFAR-100's archive by mistake
    # Folders of images may be called `train` and `test`, too.
    return bool(found & (_BATCHES - set(_CIFAR100))) or (
        "meta" in found and len(found) > 1 and found <= {*_CIFAR100, "meta"}
    )


def open_cifar(src: str, files: Sequence[str], options: SourceOptions, mixed_ok: bool = False) -> CifarSource:
    """CIFAR from files of one version: batches, or tars of them; other files are ignored.

    For CIFAR-100 `options.label_field` may be fine_labels or coarse_labels. `mixed_ok`: training and test images may
    come together, because they are separated later.

    Raises:
        RecipeError: no batches, several versions, training and test images together, an unknown field.
        DataError, StorageError: class names that are missing or damaged; a damaged archive.
    """
    places = [place for file in files for place in _batches(file)]
    names = [place.name for place in places]
    if not places:
        raise RecipeError(f"{src}: no batches of CIFAR ({', '.join(name + _BINARY for name in _CIFAR10 + _CIFAR100)})")
    if pickled := [place for place in places if not str(place).endswith(_BINARY)]:
        raise RecipeError(
            f"{pickled[0]}: is a pickle, which is a program and is not read. Take the binary version, of the same site "
            f"(cifar-10-binary.tar.gz, cifar-100-binary.tar.gz), or parquet of the Hugging Face hub"
        )
    is_fine = names[0] in _CIFAR100
    if len(set(names)) < len(names) or any((name in _CIFAR100) != is_fine for name in names):
        shown = ", ".join(map(str, places))
        raise RecipeError(f"{src}: holds more than one version of CIFAR: {shown}. Convert them one by one")
    if not mixed_ok and len({name.startswith("test") for name in names}) > 1:
        train = "train" if is_fine else "data_batch_*"
        raise RecipeError(
            f"{src}: holds training and test images ({', '.join(names)}). Keep them apart: --split 'train={train}/*' "
            f"--split '{'test=test' if is_fine else 'test=test_batch'}/*'; or name the files of one of them as SRC"
        )
    if options.image_field is not None:
        raise RecipeError(f"--image-field {options.image_field}: CIFAR has one image a record; leave it out")
    fields = ("fine_labels", "coarse_labels") if is_fine else ("labels",)
    field = options.label_field or fields[0]
    if options.unlabelled:
        return CifarSource(tuple(places), None, None)
    if field not in fields:
        raise RecipeError(f"--label-field {field}: expected {' or '.join(fields)}, or --unlabelled")
    return CifarSource(tuple(places), field, _class_names(places[0], field))


def _batches(file: str) -> list[_Batch]:
    if not is_tar(file):
        return [_Batch(file)] if base_name(file) in _BATCHES else []
    with open_archive(file) as archive:
        paths = [member.path.decode("utf-8", "backslashreplace") for member in archive.files(Counter())]
    return [_Batch(file, path) for path in sorted(paths) if base_name(path) in _BATCHES]


def _class_names(place: _Batch, field: str) -> tuple[str, ...]:
    """The class names, from the file beside a batch."""
    meta = place.beside("batches.meta.txt" if field == "labels" else f"{field.removesuffix('s')}_names.txt")
    names = [line.strip() for line in meta.read().decode("utf-8", "replace").splitlines() if line.strip()]
    count = _CLASSES[field]
    if len(names) != count or len(set(names)) < count:
        raise DataError(
            f"{meta}: expected the names of {count} classes, all different, found {counted(len(names), 'entry')}"
        )
    return tuple(names)
