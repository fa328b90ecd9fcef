"""Where the datasets are that recipes name.

A recipe names its data (`jft300m/train`), not their place, so that it is the same recipe on every cluster. The place is
given by `data.root`, by a file `datasets.yaml` of the user's, or by an environment variable, in this order.
"""

import os
from pathlib import Path

from vitscale.errors import RecipeError
from vitscale.recipe.strict_yaml import parse_yaml

DATA_ROOT_VARIABLE = "VITSCALE_DATA_ROOT"
DATASETS_FILE = "datasets.yaml"


def find_dataset(dataset: str, root: str | None) -> Path:
    """The folder of the dataset `NAME[/SPLIT] | PATH`.

    Args:
        dataset: a name, or a path that begins with /, ./, ../ or ~.
        root: the recipe's `data.root`, under which every name is looked for.

    Raises `RecipeError` where a name has no place, or nothing is there.
    """
    try:
        is_path = dataset.startswith(("/", "./", "../", "~"))
        path, said_by = (Path(dataset).expanduser(), "") if is_path else _place(dataset, root)
        if path.exists():
            return path
    except (OSError, RuntimeError) as error:  # too long a name, an unknown user behind ~
        raise RecipeError(f"dataset {dataset!r}: {error}") from None
    raise RecipeError(f"dataset {dataset!r}: there is no {path}{said_by}")


def _place(name: str, root: str | None) -> tuple[Path, str]:
    """Where a name is, and what says so."""
    if root:
        return Path(root).expanduser() / name, " (by data.root)"
    for file in _files():
        if file.is_file():
            places = _read(file)
            # The whole name, or the part before the split: `jft300m` is the place of `jft300m/train` too.
            for key in (name, name.partition("/")[0]):
                if key in places:
                    place = file.parent / Path(places[key]).expanduser() / name[len(key) :].lstrip("/")
                    return place, f" (by {file})"
    if os.environ.get(DATA_ROOT_VARIABLE):
        return Path(os.environ[DATA_ROOT_VARIABLE]).expanduser() / name, f" (by {DATA_ROOT_VARIABLE})"
    raise RecipeError(
        f"the recipe names the dataset {name!r}, but not where it is; set the folder that holds the datasets with "
        f"--set data.root=DIR or the environment variable {DATA_ROOT_VARIABLE}, or write a line "
        f"`{name.partition('/')[0]}: DIR` into {DATASETS_FILE} (here or in ~/.config/vitscale)"
    )


def _files() -> list[Path]:
    try:
        return [Path(DATASETS_FILE), Path.home() / ".config" / "vitscale" / DATASETS_FILE]
    except RuntimeError:  # a container's user need not have a home
        return [Path(DATASETS_FILE)]


def _read(file: Path) -> dict[str, str]:
    try:
        places = parse_yaml(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{file}: cannot be read: {error}") from None
    places = {} if places is None else places  # nothing but comments
    if not isinstance(places, dict):
        raise RecipeError(f"{file}: expected lines `NAME: DIR`, such as `imagenet: /data/imagenet`")
    for name, place in places.items():
        if not isinstance(place, str) or not place:
            raise RecipeError(f'{file}: {name}: {place!r}: expected a folder; in YAML a lone ~ is nothing, write "~"')
    return places
