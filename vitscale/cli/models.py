"""`vitscale models`: the models by name, with their parameters, tokens and multiply-adds."""

import json
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from vitscale.architectures import REGISTRY, ResNetShape, Shape, ViTShape, architecture
from vitscale.errors import RecipeError
from vitscale.flops import model_work
from vitscale.flops.vit import num_tokens
from vitscale.recipe.schema import Model
from vitscale.wording import counted


@dataclass(frozen=True)
class _Row:
    """One model; the names of the fields are those of the JSON. GMACs are 1e9 multiply-adds of one forward pass."""

    name: str
    family: str
    image_size: int
    tokens: int | None
    params: int
    gmacs: float
    accounting_gmacs: float


def list_models(names: list[str], *, as_json: bool, image_size: int, num_classes: int) -> None:
    """Print the named models, or all of the registry, with a linear head of `num_classes`.

    Raises `RecipeError` for an unknown name, and where an image is smaller than a patch.
    """
    rows, notes = [], []
    for name in names or REGISTRY:
        try:
            shape = architecture(name)
        except ValueError as error:
            raise RecipeError(str(error)) from None
        if isinstance(shape, ViTShape):
            _check_patch(name, shape, image_size)
            border = shape.describe_border(image_size)
            notes += [f"{name}: {border}"] if border else []
        rows.append(_row(name, shape, image_size, num_classes))
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    console = Console()
    console.print(_table(rows, image_size, num_classes))
    for note in ("GMACs/image: 1e9 multiply-adds of a forward pass, taps on zero padding counted", *notes):
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def _row(name: str, shape: Shape, image_size: int, num_classes: int) -> _Row:
    model = Model(name=name, head="linear")
    work = model_work(model, image_size, num_classes)
    return _Row(
        name=name,
        family=_family(shape),
        image_size=image_size,
        tokens=num_tokens(shape, image_size, model.pool_or_default()) if isinstance(shape, ViTShape) else None,
        params=work.params,
        gmacs=work.macs / 1e9,
        accounting_gmacs=work.accounting_macs / 1e9,
    )


def _family(shape: Shape) -> str:
    if isinstance(shape, ResNetShape):
        return "resnet" if shape.mixing == "conv" else "axial"
    if shape.attention == "axial":
        return "axial"
    return "vit" if shape.stem is None else "hybrid"


def _check_patch(name: str, shape: ViTShape, image_size: int) -> None:
    size, patch = shape.cut_size(image_size), shape.patch_size
    if size < patch:
        cut = "the image" if shape.stem is None else "the feature map"
        raise RecipeError(
            f"{name} at {image_size}: {cut} of {size} x {size} is smaller than one patch of {patch} x {patch}; "
            f"give a larger --image-size"
        )


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
