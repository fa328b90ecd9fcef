"""Parquet files with the images inside, as Hugging Face's `datasets` writes them, or plain.

The image is a column of bytes, or a struct of `bytes` and `path`. The label is a number, a text, or a list of them;
where the file's Hugging Face metadata names the classes, numbers become names.
"""

import json
import posixpath
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from data_tools.sources.parts import open_part, part_names, reading
from data_tools.sources.source import Item, SourceOptions, choose_image, choose_label, label_columns, labels_of
from vitscale.ground.errors import DataError, RecipeError, turned
from vitscale.ground.files.unpacked import CHECKS, read_batches

_BATCH_ROWS = 16
_BUFFER_BYTES = 4 << 20
_OPENED_AT_ONCE = 8
_TEXTS = (types.is_string, types.is_large_string, types.is_string_view)
_BYTES = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
_LISTS = (types.is_list, types.is_large_list, types.is_fixed_size_list)


class _Layout(NamedTuple):
    """A file's columns: the image (and whether it is a struct), the label, and the class names."""

    image: str
    is_struct: bool
    label: str | None
    class_names: tuple[str, ...] | None


@dataclass(frozen=True)
class ParquetSource:
    """Images in parquet files, read a few rows at a time. Keys of a file's images begin with its entry in `names`."""

    parts: tuple[str, ...]
    names: tuple[str, ...]
    layout: _Layout
    streams: ClassVar[bool] = True

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return self.layout.class_names

    def items(self, part: int, ignored: Counter[str]) -> Iterator[Item]:
        where, layout = self.parts[part], self.layout
        columns = [layout.image] if layout.label is None else [layout.image, layout.label]
        row = 0
        with _opened(where) as (raw, file):
            # Row group by row group, columns in pieces: a group may be as large as the file.
            for batch in read_batches(raw, file, where, _BATCH_ROWS, columns):
                images = batch.column(layout.image)
                labels = None if layout.label is None else batch.column(layout.label)
                for i in range(batch.num_rows):
                    spot = f"{where}, row {row}"
                    data, path = _image(images[i].as_py(), layout.is_struct, spot)
                    named = () if labels is None else labels_of(labels[i].as_py(), spot, layout.class_names)
                    yield Item(f"{self.names[part]}/{row:09d}{path}", named, data)
                    row += 1
            if row != file.metadata.num_rows:
                raise DataError(f"{where}: damaged: {row:,} rows of {file.metadata.num_rows:,}")

    def read(self, part: int, content: bytes) -> bytes:
        return content


def open_parquet(src: str, files: Sequence[str], options: SourceOptions) -> ParquetSource:
    """Parquet files of one layout. All footers are read here, so that a file that differs is reported at once.

    Raises:
        RecipeError: columns that are ambiguous or unknown.
        DataError, StorageError: a file that is damaged or unreadable, or that differs from the first.
    """

    def layout_of(where: str) -> _Layout:
        with _opened(where) as (_, file):
            return _layout(file.schema_arrow, options, where)

    names = part_names(files, stem=True)
    first = layout_of(files[0])
    with ThreadPoolExecutor(_OPENED_AT_ONCE) as pool:
        for where, layout in zip(files[1:], pool.map(layout_of, files[1:]), strict=True):
            if layout != first:
                raise DataError(f"{where}: {_difference(layout, first)} in {files[0]}. Convert them one by one")
    return ParquetSource(tuple(files), names, first)


@contextmanager
def _opened(where: str) -> Iterator[tuple[BinaryIO, pq.ParquetFile]]:
    with (
        # pyarrow reports damage as any of these; its OSErrors are reported by `reading`.
        turned(f"{where}: damaged, or no parquet file", DataError, pa.ArrowException, UnicodeDecodeError, MemoryError),
        reading(where),
        closing(open_part(where)) as raw,
        pq.ParquetFile(raw, buffer_size=_BUFFER_BYTES, pre_buffer=False, **CHECKS) as file,
    ):
        yield raw, file


def _image(value: Any, is_struct: bool, spot: str) -> tuple[bytes, str]:
    """The bytes of an image, and the suffix that its path adds to the key."""
    data, path = (value.get("bytes"), value.get("path")) if is_struct and value is not None else (value, None)
    if data is None:
        if path is not None:
            raise DataError(
                f"{spot}: no bytes, only the path {path!r}: the data set was saved without its images. "
                "Save it again with them inside (datasets: Dataset.to_parquet, push_to_hub)"
            )
        raise DataError(f"{spot}: no image")
    name = posixpath.basename(path) if isinstance(path, str) else ""
    return data, f"/{name}" if name not in ("", ".", "..") else ""


def _layout(schema: pa.Schema, options: SourceOptions, where: str) -> _Layout:
    columns = schema.names
    if len(set(columns)) < len(columns):
        raise DataError(f"{where}: a column twice among {', '.join(columns)}")
    features = _features(schema, where)
    pictures = [name for name in columns if features[name].get("_type") == "Image"]
    pictures = pictures or [name for name in columns if _holds_bytes(schema.field(name).type)]
    image = choose_image(columns, pictures, options, where)
    image_type = schema.field(image).type
    if not _holds_bytes(image_type):
        raise RecipeError(
            f"{where}: column {image!r} is of type {image_type}; expected the images' bytes (binary, or a struct with "
            "`bytes`)"
        )
    classes = {name: _class_names(features[name], where) for name in columns if name != image}
    candidates = [name for name, names in classes.items() if names is not None] or label_columns(classes)
    label = choose_label(columns, candidates, options, where)
    if label == image:
        raise RecipeError(f"{where}: --label-field {label} is the column of the images")
    if label is not None and not _is_label_type(label_type := schema.field(label).type):
        raise RecipeError(f"{where}: labels in {label!r} are of type {label_type}; expected numbers, texts or lists")
    return _Layout(image, types.is_struct(image_type), label, None if label is None else classes[label])


def _features(schema: pa.Schema, where: str) -> dict[str, dict[str, Any]]:
    """Column -> its feature as `datasets` describes it; empty where there is no description."""
    with turned(f"{where}: damaged Hugging Face metadata", DataError, ValueError, AttributeError, RecursionError):
        metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = metadata.get("info", {}).get("features") or {}
        found = {name: features.get(name) for name in schema.names}
    return {name: _unlisted(feature) for name, feature in found.items()}


def _unlisted(feature: Any) -> dict[str, Any]:
    """The feature of a list's elements; releases of `datasets` spell lists in three ways."""
    if isinstance(feature, list) and len(feature) == 1:
        return _unlisted(feature[0])
    if not isinstance(feature, dict):
        return {}
    if feature.get("_type") in ("Sequence", "List", "LargeList"):
        inner = _unlisted(feature.get("feature"))
        return inner if inner.get("_type") == "ClassLabel" else {}
    return feature


def _class_names(feature: dict[str, Any], where: str) -> tuple[str, ...] | None:
    names = feature.get("names") if feature.get("_type") == "ClassLabel" else None
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{where}: damaged Hugging Face metadata: the names of classes are {str(names)[:100]}")
    if len(set(names)) < len(names):
        raise DataError(f"{where}: two classes of the same name in its Hugging Face metadata")
    return tuple(names)


def _holds_bytes(kind: pa.DataType) -> bool:
    if types.is_struct(kind):
        index = kind.get_field_index("bytes")
        kind = kind.field(index).type if index >= 0 else pa.null()
    return any(matches(kind) for matches in _BYTES)


def _is_label_type(kind: pa.DataType) -> bool:
    if any(matches(kind) for matches in _LISTS):
        kind = kind.value_type
    if types.is_dictionary(kind):
        kind = kind.value_type
    return types.is_integer(kind) or any(matches(kind) for matches in _TEXTS)


def _difference(layout: _Layout, first: _Layout) -> str:
    if layout[:3] != first[:3]:
        found, expected = (f"images in {one.image!r}, labels in {one.label!r}" for one in (layout, first))
        return f"{found}; but {expected}"
    mine, theirs = layout.class_names or (), first.class_names or ()
    pairs = [(a, b) for a, b in zip(mine, theirs, strict=False) if a != b]
    shown = f"(such as {pairs[0][0]!r} for {pairs[0][1]!r})" if pairs else "in number"
    return f"{len(mine)} names of classes, which differ {shown} from the {len(theirs)}"
