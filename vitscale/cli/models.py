"""`vitscale models`: the models by name, with their parameters, tokens and multiply-adds."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import typer
from rich.table import Table

from vitscale.flops import model_work
from vitscale.ground.errors import RecipeError
from vitscale.ground.table import Console
from vitscale.ground.wording import counted
from vitscale.recipe.families import REGISTRY, model_of


@dataclass(frozen=True)
class _Row:
    """One model, with the fields of the JSON output. GMACs are 1e9 multiply-adds of one forward pass."""

    name: str
    family: str
    image_size: int
    tokens: int | None
    params: int
    gmacs: float
    accounting_gmacs: float


def models(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Such as ViT-B/16; all by default.")] = None,
    form: Annotated[Literal["table", "json"], typer.Option("--format", help="What to print.")] = "table",
    image_size: Annotated[int, typer.Option(min=1, max=8192, help="Side of the image in pixels.")] = 224,
    num_classes: Annotated[int, typer.Option(min=1, max=10**9, help="Outputs of the linear head.")] = 1000,
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
        tokens, macs = model.num_tokens(image_size), (work.macs / 1e9, work.accounting_macs / 1e9)
        rows.append(_Row(name, model.kind, image_size, tokens, work.params, *macs))
    if form == "json":
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    console = Console()
    console.print(_table(rows, image_size, num_classes))
    for note in ("GMACs/image: 1e9 multiply-adds of a forward pass, taps on zero padding counted", *notes):
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def _table(rows: list[_Row], image_size: int, num_classes: int) -> Table:
    table = Table(title=f"{image_size} x {image_size} pixels, {counted(num_classes, 'class')}")
    table.add_column("model", no_wrap=True)
    table.add_column("family")
    for heading in ("tokens", "parameters", "GMACs/image"):
        table.add_column(heading, justify="right")
    for row in rows:
        tokens = "" if row.tokens is None else f"{row.tokens:,}"
        table.add_row(row.name, row.family, tokens, f"{row.params:,}", f"{row.gmacs:,.2f}")
    return table
