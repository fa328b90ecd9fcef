"""What `vitscale recipe` prints."""

import json
import sys
from collections.abc import Sequence

import typer
import yaml

from vitscale.ground.errors import RecipeError
from vitscale.ground.table import hanging
from vitscale.recipe import differences, explain_fields, json_schema, list_recipes, load_recipe

_EXIT_DIFFERENT = 1


def show_recipes() -> None:
    """Print the recipes that come with vitscale, one per line."""
    for shipped, title in list_recipes().items():
        print(f"{shipped:<23}  {hanging(title, 25)}")


def show_recipe(name: str, settings: Sequence[str]) -> None:
    """Print a recipe with all its defaults."""
    loaded = load_recipe(name, settings)
    print(yaml.safe_dump(loaded.dump(), sort_keys=False), end="")
    if border := loaded.describe_border():
        print(f"note: {border}", file=sys.stderr)


def show_fields(key: str | None = None, recipe: str | None = None) -> None:
    """Print what a field means, or all of them; blocks of other packages count if a recipe that names them is given."""
    if recipe is not None:
        load_recipe(recipe)
    print(explain_fields(key))


def show_schema() -> None:
    """Print the JSON schema of recipes."""
    print(json.dumps(json_schema(), indent=1))


def show_difference(names: Sequence[str], settings: Sequence[str]) -> None:
    """Print the differences between two recipes, including defaults and what they extend; exit code 1 if any."""
    if len(names) != 2:
        raise RecipeError(f"--diff takes two recipes, not {len(names)}")
    one, other = (load_recipe(name, settings).dump() for name in names)
    found = differences(one, other, free=())
    print("\n".join(found) or "equal")
    if found:
        raise typer.Exit(_EXIT_DIFFERENT)
