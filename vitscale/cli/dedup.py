"""`vitscale dedup`: which training images are copies of test images, and datasets without them."""

from typing import Annotated

import typer

from data_tools.dedup.settings import Preset
from vitscale.cli.embedding import Embedding, EmbeddingModel, EmbeddingSize

app = typer.Typer(help="Keep test images out of training data.", no_args_is_help=True, rich_markup_mode=None)

Dataset = Annotated[str, typer.Argument(help="A dataset's folder or manifest.json, here or at a URL (s3://, gs://).")]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes.", show_default="one per core")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Distance = Annotated[int | None, typer.Option(help="Largest distance (of 256 bits) at which a hash decides.")]
Candidates = Annotated[int | None, typer.Option(help="Largest distance at which pictures are compared.")]
Correlation = Annotated[float | None, typer.Option(help="Least correlation of those pictures, 0 to 1.")]
Cosine = Annotated[float | None, typer.Option(help="Least cosine of --embedding features, 0 to 1.")]


@app.command()
def index(
    testsets: Annotated[
        list[str],
        typer.Argument(
            metavar="TESTSET...", help="Anything that vitscale-convert reads; NAME=PATH sets its name in reports."
        ),
    ],
    out: Annotated[str, typer.Option(help="Folder of the index; new or empty.")],
    preset: Annotated[
        Preset | None, typer.Option(help="Kind of images to expect.", show_default="by the images' size")
    ] = None,
    level: Annotated[
        int | None,
        typer.Option(min=0, max=3, help="How many crops of a test image are indexed.", show_default="2; 3 if small"),
    ] = None,
    distance: Distance = None,
    candidates: Candidates = None,
    correlation: Correlation = None,
    min_quality: Annotated[
        int | None, typer.Option(help="Least quality of a hash, 0 (flat) to 100; below, only equal pixels count.")
    ] = None,
    embedding: Embedding = None,
    embedding_model: EmbeddingModel = None,
    embedding_size: EmbeddingSize = None,
    cosine: Cosine = None,
    kind: Annotated[str | None, typer.Option("--format", help="Format of TESTSET.", show_default="detected")] = None,
    image_field: Annotated[
        str | None, typer.Option(help="Column, feature or suffix of the image.", show_default="detected")
    ] = None,
    workers: Workers = None,
) -> None:
    """Make an index, by which copies of these test images are recognised. Settings hold for all of them."""
    from vitscale.cli.dedup_output import run_index
    from vitscale.cli.embedding import opened_embedder

    settings = {
        "distance": distance,
        "candidates": candidates,
        "correlation": correlation,
        "min_quality": min_quality,
        "cosine": cosine,
    }
    embedder = opened_embedder(embedding, embedding_model, embedding_size, cosine)
    run_index(testsets, out, preset, level, settings, embedder, kind, image_field, workers)


@app.command()
def find(
    dataset: Dataset,
    indexes: Annotated[list[str], typer.Argument(metavar="INDEX...", help="Folders that `index` made.")],
    out: Annotated[str, typer.Option(help="Folder of the report; new or empty.")],
    distance: Distance = None,
    candidates: Candidates = None,
    correlation: Correlation = None,
    embedding: Embedding = None,
    embedding_model: EmbeddingModel = None,
    embedding_size: EmbeddingSize = None,
    cosine: Cosine = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Report which samples of a dataset are copies of test images."""
    from vitscale.cli.dedup_output import run_find
    from vitscale.cli.embedding import opened_embedder

    settings = {"distance": distance, "candidates": candidates, "correlation": correlation, "cosine": cosine}
    embedder = opened_embedder(embedding, embedding_model, embedding_size, cosine)
    run_find(dataset, indexes, out, settings, embedder, workers, as_json)


@app.command()
def apply(
    dataset: Dataset,
    found: Annotated[str, typer.Argument(help="The folder that `find` wrote.")],
    out: Annotated[str, typer.Argument(help="A new or empty folder; beside the dataset if that is at a URL.")],
    is_dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed.")] = False,
) -> None:
    """Write a dataset without what `find` found; the old one stays."""
    from vitscale.cli.dedup_output import run_apply

    run_apply(dataset, found, out, is_dry_run)
