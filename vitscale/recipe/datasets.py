"""Finds the datasets that recipes name.

A recipe names its data (`jft300m/train`), not their place, so that it is the same recipe on every cluster. The place
comes from `data.root`, the user's `datasets.yaml`, or an environment variable, in this order. It is a folder, or a URL
that fsspec knows, such as `s3://bucket/datasets`. Nothing here uses the network.
"""

import difflib
import os
from pathlib import Path

from vitscale.ground.errors import DataError, RecipeError, turned
from vitscale.ground.storage import is_url, join, without_file_scheme
from vitscale.recipe.strict_yaml import read_yaml

DATA_ROOT_VARIABLE = "VITSCALE_DATA_ROOT"
DATASETS_FILE = "datasets.yaml"


def find_dataset(dataset: str, root: str | None) -> str:
    """The folder or URL of the dataset `NAME[/SPLIT] | PATH | URL`.

    A path begins with /, ./, ../ or ~. With `root`, the recipe's `data.root`, every name is looked up under it.

    Raises `RecipeError` if a name has no place, and `DataError` if a local place does not exist; a URL is only checked
    when it is read.
    """
    with turned(f"dataset {dataset!r}", RecipeError, OSError, RuntimeError):  # a name too long, ~ of an unknown user
        is_here = (Path(dataset) / "manifest.json").is_file()  # otherwise such a folder can be the images themselves
        here = f"; the dataset here of this name is ./{dataset}" if is_here else ""
        where, said_by = (_folder(dataset), "") if is_place(dataset) else _place(dataset, root, here)
        if is_url(where) or Path(where).exists():
            return where
    hint = _hint(dataset, Path(where)) if is_place(dataset) else here or _hint(dataset, Path(where))
    raise DataError(f"dataset {dataset!r}: there is no {Path(where).absolute()}{said_by}{hint}")


def is_place(dataset: str) -> bool:
    """Whether a dataset is named by its path or URL, which no root changes."""
    return dataset.startswith(("/", "./", "../", "~")) or is_url(dataset)


def find_dataset_or_folder(dataset: str, root: str | None) -> str:
    """As `find_dataset`, or else a folder here, whose path need not begin with ./: one that holds a dataset, or any."""
    try:
        return find_dataset(dataset, root)
    except (RecipeError, DataError) as error:
        is_dataset = os.path.isfile(os.path.join(dataset, "manifest.json"))  # noqa: PTH113, PTH118 (without an error)
        if is_dataset or (isinstance(error, RecipeError) and os.path.isdir(dataset)):  # noqa: PTH112
            return dataset
        raise


def _hint(dataset: str, missing: Path) -> str:
    """Suggest the name with its first missing part replaced by the most similar existing one; "" if there is none."""
    parts, after = dataset.split("/"), 1
    while not missing.parent.is_dir() and missing.parent != missing:
        missing, after = missing.parent, after + 1
    if after > len(parts):
        return ""  # the place of all datasets is missing
    try:
        near = difflib.get_close_matches(missing.name, [file.name for file in missing.parent.iterdir()], n=1)
    except OSError:
        return ""
    return f"; did you mean {'/'.join([*parts[:-after], near[0], *parts[len(parts) - after + 1 :]])!r}?" if near else ""


def _folder(place: str, beside: Path | None = None) -> str:
    """A URL, or a path, which may begin with ~ or be relative to the folder `beside`."""
    place = without_file_scheme(place)
    if is_url(place):
        return place.rstrip("/")
    path = Path(place).expanduser()
    return str(path if beside is None else beside / path)


def _place(name: str, root: str | None, hint: str) -> tuple[str, str]:
    """(a name's place, what defines it). Raises `RecipeError`, with `hint` at the end, if nothing does."""
    if ".." in name.split("/"):
        raise RecipeError(
            f"dataset {name!r}: a name leads below the folder that holds the datasets, and .. out of it; "
            "a path begins with /, ./, ../ or ~"
        )
    if root:
        return join(_folder(root), name), " (by data.root, which --set data.root=DIR or --data-root DIR changes)"
    for file in _files():
        if file.is_file():
            places = _read(file)
            # The whole name, or the part before the split: the place of `jft300m` also holds `jft300m/train`.
            for key in (name, name.partition("/")[0]):
                if key in places:
                    place, rest = _folder(places[key], file.parent), name[len(key) :].lstrip("/")
                    return join(place, rest) if rest else place, f" (by {file})"
    if os.environ.get(DATA_ROOT_VARIABLE):
        return join(_folder(os.environ[DATA_ROOT_VARIABLE]), name), f" (by {DATA_ROOT_VARIABLE})"
    raise RecipeError(
        f"dataset {name!r}: nothing says where it is; give its path, ./{name}, or set the folder or URL that holds the "
        f"datasets, with --set data.root=DIR or the environment variable {DATA_ROOT_VARIABLE}, or write a line "
        f"`{name.partition('/')[0]}: DIR` into {DATASETS_FILE} (here or in ~/.config/vitscale){hint}"
    )


def _files() -> list[Path]:
    try:
        return [Path(DATASETS_FILE), Path.home() / ".config" / "vitscale" / DATASETS_FILE]
    except RuntimeError:  # a container's user need not have a home
        return [Path(DATASETS_FILE)]


def _read(file: Path) -> dict[str, str]:
    places = read_yaml(file)
    places = {} if places is None else places  # nothing but comments
    if not isinstance(places, dict):
        raise RecipeError(f"{file}: expected lines `NAME: DIR`, such as `imagenet: /data/imagenet`")
    for name, place in places.items():
        if not isinstance(place, str) or not place:
            raise RecipeError(
                f'{file}: {name}: {place!r}: expected a folder or URL; in YAML a lone ~ is nothing, write "~"'
            )
    return places
