"""Where images come from: one file a kind of source, all behind the interface in `source.py`."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from typing import Literal, get_args

from data_tools.classes import SPLIT_NAMES
from data_tools.sources.archive import TAR_SUFFIXES
from data_tools.sources.cifar import is_cifar, open_cifar
from data_tools.sources.dataset import open_dataset
from data_tools.sources.folder import FolderSource
from data_tools.sources.image_list import LIST_SUFFIXES, open_image_list
from data_tools.sources.parquet import open_parquet
from data_tools.sources.source import Item, Source, SourceOptions, refuse_fields
from data_tools.sources.tar import open_tars
from data_tools.sources.tfrecord import open_tfrecords
from vitscale.data.shards import MANIFEST_NAME
from vitscale.data.shards.images import IMAGE_SUFFIXES
from vitscale.ground import storage
from vitscale.ground.errors import RecipeError

Kind = Literal["folder", "tar", "list", "parquet", "tfrecord", "cifar", "dataset"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_RECORD_NAME = re.compile(r".*\.(tfrecords?|tfrec)(\.gz)?|.+-\d{5}-of-\d{5}(\.gz)?")
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_OPENERS: dict[Kind, Callable[[str, Sequence[str], SourceOptions], Source]] = {
    "tar": open_tars,
    "list": open_image_list,
    "parquet": open_parquet,
    "tfrecord": open_tfrecords,
}
_SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "tar": tuple(TAR_SUFFIXES),
    "list": LIST_SUFFIXES,
    "parquet": (".parquet", ".parq", ".pq"),
}
_WORD = re.compile(r"[A-Za-z]+")


def open_source(src: str, kind: Kind | None, options: SourceOptions, *, has_splits: bool = False) -> Source:
    """The source at a path, a URL, or a pattern of either (`*`, `?`, `{000..123}`).

    `kind` is detected if None. `has_splits`: training and test images are separated later, so a source may hold both.

    Raises:
        RecipeError: nothing is there, or nothing of a known kind; options that do not fit the kind.
        DataError: a damaged source.
    """
    files = _files(src)
    kind = kind or _kind_of(src, files)
    if options.labels is not None and kind not in ("folder", "tar"):
        raise RecipeError(f"--labels: SRC {src} is of the kind {kind}, which has its own labels")
    if kind == "folder":
        refuse_fields(options, "a folder")
        return FolderSource((files[0],), options.labels)
    if kind == "dataset":
        return open_dataset(src, files, options)
    if len(files) == 1 and storage.is_folder(files[0]):
        files = _members(src, files[0], kind)
    if kind == "cifar":
        return open_cifar(src, files, options, mixed_ok=has_splits)
    if not has_splits:
        _refuse_mixed(src, files)
    return _OPENERS[kind](src, files, options)


def _files(src: str) -> list[str]:
    """The paths or URLs that `src` names: itself, or a pattern's matches. Raises RecipeError if there are none."""
    expanded = _expand(src)
    files: list[str] = []
    for name in expanded:
        if not has_magic(name) or (not storage.is_url(name) and storage.exists(name)):
            files.append(name)
        elif storage.is_url(name):
            fs, pattern = storage.filesystem(name)
            matched = storage.patiently(name, partial(fs.glob, pattern))
            files += sorted(fs.unstrip_protocol(match) for match in matched)
        else:
            files += sorted(glob(name, recursive=True))  # noqa: PTH207 -- a pattern, not below a folder
    if not files:
        raise RecipeError(f"SRC {src}: nothing matches")
    for name in files if len(files) == 1 or len(expanded) > 1 else ():
        if not storage.exists(name):
            raise RecipeError(f"SRC {name}: no such file or directory")
        if not storage.is_url(name) and not Path(name).is_file() and not Path(name).is_dir():
            raise RecipeError(f"SRC {name}: neither a file nor a folder (a pipe, a device or a broken link)")
    return files


def _expand(src: str) -> list[str]:
    """The names that `shard-{000..123}.tar` expands to."""
    match = _BRACES.search(src)
    if match is None:
        return [src]
    first, last = match[1], match[2]
    numbers = range(int(first), int(last) + 1)
    if not numbers:
        raise RecipeError(f"SRC {src}: {match[0]} counts down; expected the smaller number first")
    names = [f"{src[: match.start()]}{number:0{len(first)}d}{src[match.end() :]}" for number in numbers]
    return [expanded for name in names for expanded in _expand(name)]


def _kind_of(src: str, files: list[str]) -> Kind:
    """The kind implied by the names. Raises RecipeError if they imply none, or several."""
    if len(files) == 1 and storage.is_folder(files[0]):
        return _kind_of_folder(files[0])
    kinds = {_kind_of_file(name) for name in files}
    if len(kinds) == 1 and (kind := kinds.pop()) is not None:
        return kind
    shown = ", ".join(storage.base_name(name) for name in files[:5])
    raise RecipeError(
        f"SRC {src}: its kind cannot be told from {'the name' if len(files) == 1 else 'the names'} {shown}. Expected "
        f"a folder of images, or files ending in {' '.join([*TAR_SUFFIXES, '.csv .tsv .jsonl .parquet .tfrecord'])}; "
        f"or say --format {'|'.join(KINDS)}"
    )


def _kind_of_file(name: str) -> Kind | None:
    name = storage.base_name(name)
    low = name.lower()
    for kind, suffixes in _SUFFIXES.items():
        if low.endswith(suffixes):
            return "cifar" if kind == "tar" and low.startswith("cifar-") else kind
    if name == MANIFEST_NAME:
        return "dataset"
    if _RECORD_NAME.fullmatch(low):
        return "tfrecord"
    return "cifar" if is_cifar([name]) else None


def _kind_of_folder(folder: str) -> Kind:
    """The kind of a folder's contents: a dataset, files of one of the other kinds, or else images."""
    names = [name for name in storage.names_in(folder) if not name.startswith(".")]
    if MANIFEST_NAME in names:
        return "dataset"
    if is_cifar(names):
        return "cifar"
    if any(name.lower().endswith(IMAGE_SUFFIXES) for name in names):
        return "folder"
    kinds = {kind for name in names if (kind := _kind_of_file(name)) is not None and kind != "list"}
    if not kinds:
        return "folder"  # a folder of class folders, perhaps with a label list beside them
    if len(kinds) > 1 or any(storage.is_folder(storage.join(folder, name)) for name in names):
        raise RecipeError(
            f"SRC {folder}: holds {' and '.join(sorted(kinds))} files"
            f"{' beside folders' if len(kinds) == 1 else ''}. Say which are meant with a pattern, such as "
            f"'{storage.join(folder, '*.tar')}', or with --format {'|'.join(KINDS)}"
        )
    return kinds.pop()


def _members(src: str, folder: str, kind: Kind) -> list[str]:
    names = storage.names_in(folder)
    if kind == "cifar":
        return [storage.join(folder, name) for name in names]
    members = [name for name in names if _kind_of_file(name) == kind and not name.startswith(".")]
    if not members:
        raise RecipeError(f"SRC {src}: no {kind} files in this folder; it holds {', '.join(names[:10]) or 'nothing'}")
    return [storage.join(folder, name) for name in members]


def _refuse_mixed(src: str, files: Sequence[str]) -> None:
    """Refuse files of several splits: `train-00000-of-00005` and `validation-00000-of-00001` would become one set."""
    paths = [name.split("/") for name in files]
    shared = next((i for i, parts in enumerate(zip(*paths, strict=False)) if len(set(parts)) > 1), 0)
    splits: dict[str, str] = {}
    for path in paths:
        words = (SPLIT_NAMES.get(word.lower()) for word in _WORD.findall("/".join(path[shared:])))
        split = next(filter(None, words), None)
        if split is not None:
            splits.setdefault(split, "/".join(path[shared:]))
    if len(splits) > 1:
        raise RecipeError(
            f"SRC {src}: holds files of several splits: {', '.join(splits.values())}. Say which is meant with a "
            "pattern, such as 'FOLDER/train-*', or tell them apart with --split"
        )
