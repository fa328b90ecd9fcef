"""`vitscale prove`: the command line of vitscale.proof.proving."""
import json
from typing import Annotated
import typer
from vitscale.cli.looking import Settings
from vitscale.errors import ProofError

def prove(
    recipe: Annotated[str, typer.Argument(help="A file, or the stem of a recipe that comes with vitscale.")],
    ranks: Annotated[
        int | None, typer.Option("--world", min=1, max=1024, help="Ranks.", show_default="one a device, or 2")
    ] = None,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all that was found as JSON.")] = False,
) -> None:
    """Prove."""
    from vitscale.proof.proving import prove_recipe
    found = prove_recipe(recipe, settings or [], ranks)
    print(json.dumps(found, indent=1))
