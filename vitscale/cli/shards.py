"""`vitscale shards`: look at datasets, check them, compare them, get their images back; and adopt what FFCV wrote."""

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(help="Look at, check, compare, export, adopt datasets.", no_args_is_help=True, rich_markup_mode=None)

Dataset = Annotated[str, typer.Argument(help="A dataset's folder or manifest.json, here or at a URL (s3://, gs://).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def info(
    dataset: Dataset,
    classes: Annotated[
        bool, typer.Option("--classes", help="Open the shards: samples of each class, size of images.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what a dataset is: samples, classes, shards, bytes, options."""
    from vitscale.cli.shards_output import show_info

    show_info(dataset, classes, as_json)


@app.command()
def verify(
    dataset: Dataset,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of shards read at a time.", show_default="one per core")
    ] = None,
    decode: Annotated[bool, typer.Option("--decode", help="Decode every image, too, as training will.")] = False,
    as_json: Json = False,
) -> None:
    """Read every byte and list what is missing or damaged (exit code 3)."""
    from vitscale.cli.shards_output import show_verdict

    show_verdict(dataset, workers, decode, as_json)


@app.command()
def head(
    dataset: Dataset,
    count: Annotated[int, typer.Option("-n", min=1, max=400, help="Samples.")] = 16,
    out: Annotated[Path | None, typer.Option(help="A .png to draw their pictures into.")] = None,
) -> None:
    """List the first samples, and draw a contact sheet of them."""
    from vitscale.cli.shards_output import show_head

    show_head(dataset, count, out)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(help="A dataset.")],
    b: Annotated[str, typer.Argument(help="Another one.")],
    by: Annotated[
        Literal["key", "content"],
        typer.Option(help="What makes a sample of A the same as one of B: its name, or the source image's SHA-256."),
    ] = "key",
    as_json: Json = False,
) -> None:
    """Say what differs between two datasets (exit code 1)."""
    from vitscale.cli.shards_output import show_difference

    show_difference(a, b, by, as_json)


@app.command()
def split(
    dataset: Dataset,
    parts: Annotated[
        str,
        typer.Option(help="Shares of the samples, such as 98,2, or with names train98=98,dev=2.", metavar="SHARES"),
    ],
    out: Annotated[
        str | None, typer.Option(help="The folder of the parts' folders.", show_default="that of DATASET")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the division.")] = 0,
) -> None:
    """Divide a dataset at random into parts; nothing is copied."""
    from vitscale.cli.shards_output import run_split

    run_split(dataset, parts, out, seed)


@app.command()
def export(
    dataset: Dataset,
    out: Annotated[str, typer.Argument(help="A new or empty folder.")],
) -> None:
    """Write the images back as files in class folders, unchanged."""
    from vitscale.cli.shards_output import run_export

    run_export(dataset, out)


@app.command()
def adopt(
    file: Annotated[str, typer.Argument(help="A .beton that FFCV wrote; it stays where and as it is.")],
    out: Annotated[
        str | None, typer.Argument(help="A new or empty folder.", show_default="FILE without its suffix")
    ] = None,
    classes: Annotated[
        Path | None, typer.Option(help="Class names by label: a text file, one per line, or a dataset.")
    ] = None,
    image_field: Annotated[str | None, typer.Option(help="Which field has the images, if there are several.")] = None,
    label_field: Annotated[
        str | None, typer.Option(help="Which integer field has the labels, if there are several; none for no labels.")
    ] = None,
    decode: Annotated[bool, typer.Option("--decode", help="Decode every image, too, as training will.")] = False,
) -> None:
    """Make a dataset of a single .beton, without a copy of it."""
    from vitscale.cli.shards_output import run_adopt

    run_adopt(file, out, classes, image_field, label_field, decode)
