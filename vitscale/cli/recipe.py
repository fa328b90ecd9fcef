"""`vitscale recipe`: recipes in full, their schema and differences, and what their fields mean."""

import json
import sys
from collections.abc import Sequence
from typing import Annotated

from typer import Argument, Exit, Option

from vitscale.cli.options import Settings
from vitscale.ground.errors import RecipeError
from vitscale.ground.table import hanging
from vitscale.recipe import differences, explain_fields, json_schema, list_recipes, load_recipe
from vitscale.recipe.strict_yaml import dump_yaml

_EXIT_DIFFERENT = 1


def recipe(
    names: Annotated[
        list[str] | None,
        Argument(
            metavar="NAME",
            help="A file, or the name of one that comes with vitscale; --diff: two of them; --explain: a field's key, "
            "for a field of your own package after a recipe that names it.",
        ),
    ] = None,
    settings: Settings = None,
    explain: Annotated[
        bool, Option("--explain", help="Say what the field (data.flip) or block (data) means; without one, all.")
    ] = False,
    diff: Annotated[bool, Option("--diff", help="Say what two recipes differ in (exit code 1).")] = False,
    schema: Annotated[bool, Option("--schema", help="Print the JSON schema of recipes, for editors.")] = False,
) -> None:
    """Check a recipe and print it in full; without a name, list all."""
    asked = names or []
    if explain + diff + schema > 1 or (schema and asked) or (settings and (explain or not asked)):
        raise RecipeError(
            "--explain takes a field's key (a recipe may precede it), --diff two recipes, and --schema nothing"
        )
    if diff:
        show_difference(asked, settings or [])
    elif len(asked) > (2 if explain else 1):
        raise RecipeError(
            f"expected one name, not {len(asked)}; --diff takes two recipes, --explain a recipe and a key"
        )
    elif schema:
        print(json.dumps(json_schema(), indent=1))
    elif explain:
        if len(asked) == 2:
            load_recipe(asked[0])  # blocks of other packages that it names count
        print(explain_fields(asked[-1] if asked else None))
    elif asked:
        loaded = load_recipe(asked[0], settings or [])
        print(dump_yaml(loaded.dump()), end="")
        if border := loaded.describe_border():
            print(f"note: {border}", file=sys.stderr)
    else:
        for shipped, title in list_recipes().items():
            print(f"{shipped:<23}  {hanging(title, 25)}")


def show_difference(names: Sequence[str], settings: Sequence[str]) -> None:
    """Print the differences between two recipes, including defaults and what they extend; exit code 1 if any."""
    if len(names) != 2:
        raise RecipeError(f"--diff takes two recipes, not {len(names)}")
    one, other = (load_recipe(name, settings).dump() for name in names)
    found = differences(one, other, free=())
    print("\n".join(found) or "equal")
    if found:
        raise Exit(_EXIT_DIFFERENT)
