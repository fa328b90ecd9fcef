"""`vitscale models`: the models by name, with their parameters, tokens and multiply-adds."""

from typing import Annotated

from typer import Argument, Option

from vitscale.flops import model_work
from vitscale.ground.errors import RecipeError
from vitscale.ground.table import Column, Form, ResultTable, Row, number, render
from vitscale.ground.wording import counted
from vitscale.recipe.families import REGISTRY, model_of

_COLUMNS = (
    Column("name", "model", is_text=True),
    Column("family", "family", is_text=True),
    Column("image_size", "pixels"),
    Column("tokens", "tokens", number(0)),
    Column("params", "parameters", number(0)),
    Column("gmacs", "GMACs/image", number(2)),
    Column("accounting_gmacs", "for exaFLOPs", number(2), spare=1),
)
_LEGEND = "GMACs/image: 1e9 multiply-adds of a forward pass, taps on zero padding counted; for exaFLOPs, without these"


def models(
    names: Annotated[list[str] | None, Argument(metavar="NAME", help="Such as ViT-B/16; all by default.")] = None,
    form: Annotated[Form, Option("--format", help="What to print.")] = "table",
    image_size: Annotated[int, Option(min=1, max=8192, help="Side of the image in pixels.")] = 224,
    num_classes: Annotated[int, Option(min=1, max=10**9, help="Outputs of the linear head.")] = 1000,
) -> None:
    """List models with their parameters, tokens and multiply-adds."""
    rows: list[Row] = []
    notes = []
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
        row: Row = {"name": name, "family": model.kind, "image_size": image_size}
        row |= {"tokens": model.num_tokens(image_size), "params": work.params}
        rows.append(row | {"gmacs": work.macs / 1e9, "accounting_gmacs": work.accounting_macs / 1e9})
    render(ResultTable(_COLUMNS, rows, [f"{counted(num_classes, 'class')}. {_LEGEND}"], notes), form)
