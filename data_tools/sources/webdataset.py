"""WebDataset: tars in which the files of one sample follow each other and share a name.

A sample's name is a path up to the first dot of its last part; the rest is the extension, which names the sample's
field: `train/0001.jpg`, `train/0001.cls`, `train/0001.json`. https://github.com/webdataset/webdataset
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from data_tools.sources.archive import ArchiveSource, is_tar, open_archive, stem_of
from data_tools.sources.source import HIDDEN, Item, numbered_label, visible_path
from vitscale.data.shards.images import IMAGE_SUFFIXES
from vitscale.ground.errors import DataError

LABEL_FIELDS = ("label", "labels", "cls", "class")
OTHER_FIELD = "neither image nor label of its sample"
NO_SAMPLE_IMAGE = "sample without an image"
_MAX_LABEL_BYTES = 16 << 20
_SHOWN = 10


def sample_name(path: str) -> tuple[str, str]:
    """The name of the sample that a file belongs to, and the file's extension in lower case, empty if it has none."""
    folder, slash, name = path.rpartition("/")
    stem, _, extension = name.partition(".")
    return folder + slash + stem, extension.lower()


@dataclass
class _Sample:
    """The parts of a sample seen so far: its image, the text of its labels, and all of its extensions."""

    name: str
    where: str  # what messages call it
    image: tuple[str, bytes] | None = None  # path, content
    texts: dict[str, bytes] = field(default_factory=dict)
    extensions: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True)
class WebDatasetSource(ArchiveSource):
    """Images with labels in WebDataset shards. Keys are `<shard>/<path of the image>`."""

    image_field: str | None = None
    label_field: str | None = None
    unlabelled: bool = False

    def items(self, part: int, ignored: Counter[str]) -> Iterator[Item]:
        """The images of one shard. Raises DataError for damage, and for images with no label or an ambiguous one."""
        shard = stem_of(self.parts[part])
        for sample in self._samples(part, ignored):
            if sample.image is not None:
                path, content = sample.image
                yield Item(f"{shard}/{path}", self._labels(sample), content)
            elif any(f".{extension}".endswith(IMAGE_SUFFIXES) for extension in sample.extensions):
                seen = _listed(sample.extensions)
                raise DataError(f"{sample.where}: no file of --image-field {self.image_field}; seen: {seen}")
            else:
                ignored[NO_SAMPLE_IMAGE] += 1

    def _samples(self, part: int, ignored: Counter[str]) -> Iterator[_Sample]:
        sample, where = None, self.parts[part]
        with open_archive(where) as archive:
            for member in archive.files(ignored):
                path = visible_path(member.path, ignored)
                if path is None:
                    continue
                if is_tar(path):
                    raise DataError(
                        f"{where}: holds the archive {path!r}, which no WebDataset does. Convert archives of one kind "
                        "at a time"
                    )
                name, extension = sample_name(path)
                if name.endswith("__") and name.rpartition("/")[2].startswith("__"):
                    ignored[HIDDEN] += 1  # metadata of the shard itself
                    continue
                if not extension:
                    ignored[OTHER_FIELD] += 1
                    continue
                if sample is None or sample.name != name:
                    if sample is not None:
                        yield sample
                    sample = _Sample(name, f"{where}: sample {name!r}")
                if extension in sample.extensions:
                    raise DataError(f"{sample.where}: two files of the extension {extension!r}")
                sample.extensions[extension] = None
                if self._is_image(extension):
                    if sample.image is not None:
                        raise DataError(
                            f"{sample.where}: several images, {_listed(sample.extensions)}. Say with "
                            "--image-field which extension is the image"
                        )
                    sample.image = path, archive.content(member, self.streams)
                elif extension in ("cls", "json", self._label_extension):
                    sample.texts[extension] = archive.read(member, _MAX_LABEL_BYTES)
                else:
                    ignored[OTHER_FIELD] += 1
        if sample is not None:
            yield sample

    def _is_image(self, extension: str) -> bool:
        if self.image_field is not None:
            return extension == self.image_field.lower().lstrip(".")
        return f".{extension}".endswith(IMAGE_SUFFIXES)

    @property
    def _label_extension(self) -> str:
        return "cls" if self.label_field is None else self.label_field.lower().lstrip(".")

    def _labels(self, sample: _Sample) -> tuple[str, ...]:
        where = sample.where
        if self.unlabelled:
            return ()
        text = sample.texts.get(self._label_extension)
        if text is not None and self._label_extension != "json":
            return _labels_of(_parsed(text, where), where)
        described = sample.texts.get("json")
        if described is None:
            wanted = ".cls or .json" if self.label_field is None else f".{self._label_extension} or .json"
            raise DataError(
                f"{where}: an image without a label; seen: {_listed(sample.extensions)}. Expected {wanted} directly "
                f"before or behind it; or give a list with --labels; or say --unlabelled"
            )
        try:
            record = json.loads(described)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: its .json is damaged ({error})") from error
        names = LABEL_FIELDS if self.label_field is None else (self.label_field,)
        fields = record if isinstance(record, dict) else {}
        name = next((name for name in names if name in fields), None)
        if name is None:
            seen = f"fields {_listed(fields)}" if isinstance(record, dict) else f"no fields, but {described[:40]!r}"
            raise DataError(
                f"{where}: no label in its .json; expected {' or '.join(names)}, seen: {seen}. Say with --label-field "
                "which field is the label, -1 or [] standing for none; or --unlabelled; or give a list with --labels"
            )
        return () if fields[name] is None else _labels_of(fields[name], f"{where}, field {name!r}")


def _parsed(text: bytes, where: str) -> Any:
    """The content of a .cls: a number, a name, or a JSON list of these."""
    try:
        value = text.decode("utf-8").strip()
        if value.startswith("["):
            return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: its label is neither a number nor a name ({error})") from error
    if "\n" in value:
        raise DataError(f"{where}: its label has several lines: {value[:40]!r}. Expected a number or a name")
    return int(value) if re.fullmatch(r"-?[0-9]{1,18}", value) else value


def _labels_of(value: Any, where: str) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    labels: list[str] = []
    for each in values:
        if isinstance(each, int) and not isinstance(each, bool) and (each != -1 or len(values) == 1):
            labels += numbered_label(each, where)
        elif isinstance(each, str) and each.strip():
            labels.append(each.strip())
        else:
            raise DataError(f"{where}: label {each!r}; expected a number, a name, or a list of these")
    if len(set(labels)) < len(labels):
        raise DataError(f"{where}: labels {_listed(labels)}; expected each once (a vector of 0 and 1 is no such list)")
    return tuple(labels)


def _listed(names: Iterable[Any]) -> str:
    shown = list(islice(names, _SHOWN + 1))
    return (", ".join(map(str, shown[:_SHOWN])) + (" ..." if len(shown) > _SHOWN else "")) or "nothing"
