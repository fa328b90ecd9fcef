"""`vitscale models`: the models by name, with their parameters, tokens and multiply-adds."""

import json
from typing import Annotated, Any, Literal

from rich.table import Table
from typer import Argument, Option

from vitscale.cli.console import say
from vitscale.flops import model_work
from vitscale.ground.errors import RecipeError
from vitscale.ground.table import Console
from vitscale.ground.wording import counted
from vitscale.recipe.families import REGISTRY, model_of


def models(
    names: Annotated[list[str] | None, Argument(metavar="NAME", help="Such as ViT-B/16; all by default.")] = None,
    form: Annotated[Literal["table", "json"], Option("--format", help="What to print.")] = "table",
    image_size: Annotated[int, Option(min=1, max=8192, help="Side of the image in pixels.")] = 224,
    num_classes: Annotated[int, Option(min=1, max=10**9, help="Outputs of the linear head.")] = 1000,
) -> None:
    """List models with their parameters, tokens and multiply-adds."""
    rows, notes = [], []
    for name in names or REGISTRY:
        try:
            model = model_of(name=name, head="linear")
        except ValueError as error:
            raise RecipeError(str(error)) from None
        try:
            model.check_image_size(image_size)
        except ValueError as error:
            raise RecipeError(f"{name} at {image_size}: {error}; give a larger --image-size") from None
        border = model.describe_border(image_size)
        notes += [f"{name}: {border}"] if border else []
        work = model_work(model, image_size, num_classes)
        row: dict[str, Any] = {"name": name, "family": model.kind, "image_size": image_size}
        row |= {"tokens": model.num_tokens(image_size), "params": work.params}
        rows.append(row | {"gmacs": work.macs / 1e9, "accounting_gmacs": work.accounting_macs / 1e9})
    if form == "json":
        print(json.dumps(rows, indent=1))
        return
    table = Table(title=f"{image_size} x {image_size} pixels, {counted(num_classes, 'class')}")
    table.add_column("model", no_wrap=True)
    table.add_column("family")
    for heading in ("tokens", "parameters", "GMACs/image"):
        table.add_column(heading, justify="right")
    for row in rows:
        tokens = "" if row["tokens"] is None else f"{row['tokens']:,}"
        table.add_row(row["name"], row["family"], tokens, f"{row['params']:,}", f"{row['gmacs']:,.2f}")
    Console().print(table)
    for note in ("GMACs/image: 1e9 multiply-adds of a forward pass, taps on zero padding counted", *notes):
        say(note)
