"""`vitscale dedup`: which training images are copies of test images, and datasets without them."""

import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table
from typer import Argument, Option, Typer

from data_tools.dedup.settings import PRESETS, Preset, Settings
from data_tools.machine import Machine
from data_tools.report import ProgressDisplay
from data_tools.sources.source import Source
from vitscale.cli.console import interruptible, plain, say
from vitscale.cli.options import Dataset, Embedding, ImageField, ImageSize, Json, ModelName, Workers, opened_embedder
from vitscale.data.shards import MANIFEST_NAME, Manifest
from vitscale.ground import storage
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.safe_text import printable, without_secrets
from vitscale.ground.table import Console
from vitscale.ground.wording import counted

_NAMED = re.compile(r"([^/=:]+)=(.+)", re.DOTALL)
_SUFFIXES = re.compile(r"(\.[A-Za-z][A-Za-z0-9]*)+$")

app = Typer(
    help="Keep test images out of training data.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)

Distance = Annotated[int | None, Option(help="Largest distance (of 256 bits) at which a hash decides.")]
Candidates = Annotated[int | None, Option(help="Largest distance at which pictures are compared.")]
Correlation = Annotated[float | None, Option(help="Least correlation of those pictures, 0 to 1.")]
Cosine = Annotated[float | None, Option(help="Least cosine of --embedding features, 0 to 1.")]


@app.command()
def index(
    testsets: Annotated[
        list[str],
        Argument(
            metavar="TESTSET...", help="Anything that vitscale-convert reads; NAME=PATH sets its name in reports."
        ),
    ],
    out: Annotated[str, Option(help="Folder of the index; new or empty.")],
    preset: Annotated[
        Preset | None, Option(help="Kind of images to expect.", show_default="by the images' size")
    ] = None,
    level: Annotated[
        int | None,
        Option(min=0, max=3, help="How many crops of a test image are indexed.", show_default="2; 3 if small"),
    ] = None,
    distance: Distance = None,
    candidates: Candidates = None,
    correlation: Correlation = None,
    min_quality: Annotated[
        int | None, Option(help="Least quality of a hash, 0 (flat) to 100; below, only equal pixels count.")
    ] = None,
    embedding: Embedding = None,
    embedding_model: ModelName = None,
    embedding_size: ImageSize = None,
    cosine: Cosine = None,
    kind: Annotated[str | None, Option("--format", help="Format of TESTSET.", show_default="detected")] = None,
    image_field: ImageField = None,
    workers: Workers = None,
) -> None:
    """Make an index, by which copies of these test images are recognised. Settings hold for all of them."""
    from data_tools.dedup.building import TestSource, build_index
    from data_tools.dedup.index import TestSet

    settings: dict[str, Any] = {"distance": distance, "candidates": candidates, "correlation": correlation}
    settings |= {"min_quality": min_quality, "cosine": cosine}
    embedder = opened_embedder(embedding, embedding_model, embedding_size, cosine)
    given, console = _settings(preset, settings), Console()
    sources = []
    for name, src in _named(testsets):
        sources.append(TestSource(name, src, _opened(src, kind, image_field), preset, level, given))
    done: list[TestSet] = []
    with interruptible("no index was written"), ProgressDisplay(Console(stderr=True), "indexing", None) as view:
        build_index(
            sources,
            out,
            workers=Machine(workers).processes,
            embedder=embedder,
            tick=lambda images, bad: view.update(sum(one.images for one in done) + images, bad),
            told=done.append,
        )
    say(printable(f"{out}:"))
    table = Table("test set")
    for heading in ("images", "hashes", "level"):
        table.add_column(heading, justify="right")
    table.add_column("preset")
    table.add_column("copies are", overflow="fold")
    for one in done:
        counts = (f"{one.images:,}", f"{one.hashes:,}", str(one.level))
        table.add_row(plain(one.name), *counts, one.preset, _rule(one.settings, embedder is not None))
    console.print(table)
    if preset is None:
        say("presets were chosen by the size of the images; --preset photo|small|exact says otherwise")
    for one in done:
        if one.unreadable:
            images = f"{counted(one.unreadable, 'image')} of {printable(one.name)}"
            say(f"warning: {images} cannot be decoded: only copies of their same bytes will be found")


@app.command()
def find(
    dataset: Dataset,
    indexes: Annotated[list[str], Argument(metavar="INDEX...", help="Folders that `index` made.")],
    out: Annotated[str, Option(help="Folder of the report; new or empty.")],
    embedding: Embedding = None,
    embedding_model: ModelName = None,
    embedding_size: ImageSize = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Report which samples of a dataset are copies of test images."""
    from data_tools.dedup.finding import find
    from data_tools.dedup.report import described, tables

    embedder = opened_embedder(embedding, embedding_model, embedding_size)
    errors = Console(stderr=True)
    samples = Manifest.load(dataset).num_samples
    with interruptible("no report was written"), ProgressDisplay(errors, "comparing", samples) as view:
        found = find(dataset, indexes, out, Machine(workers).runner(dataset), embedder=embedder, tick=view.update)
    if found.made_anew:
        say(
            f"note: the tables of {counted(found.made_anew, 'shard')} have no fingerprints of this version: all of "
            "their images were decoded, and `pixels` are those of the stored JPEGs, not of what these were made of",
            errors,
        )
    if as_json:
        print(json.dumps({"out": out, "files": found.files, **described(found.matcher, found.findings)}, indent=1))
        return
    console = Console()
    for table in tables(found.matcher, found.findings):
        console.print(table)
    say(printable(f"written: {out}: {', '.join(found.files)}"))
    if found.findings.removed:
        say(printable(f"nothing was removed yet: vitscale dedup apply {dataset} {out} OUT"))


@app.command()
def apply(
    dataset: Dataset,
    found: Annotated[str, Argument(help="The folder that `find` wrote.")],
    out: Annotated[str, Argument(help="A new or empty folder; beside the dataset if that is at a URL.")],
    is_dry_run: Annotated[bool, Option("--dry-run", help="Show what would be removed.")] = False,
) -> None:
    """Write a dataset without what `find` found; the old one stays."""
    from data_tools.dedup.finding import Removal

    removal, console = Removal.of(dataset, found), Console()
    old = removal.manifest
    left = old.num_samples - len(removal.uids)
    if not is_dry_run:
        with interruptible("no manifest was written"):
            removal.write(out)
    table = Table("test set")
    table.add_column("copies removed", justify="right")
    for name, count in removal.by_test_set.items():
        table.add_row(plain(name), f"{count:,}")
    console.print(table)
    vanished = f" and without {counted(removal.emptied, 'shard')} of which nothing is left" if removal.emptied else ""
    copies = f"{len(removal.uids):,} {'copy' if len(removal.uids) == 1 else 'copies'}{vanished}"
    unwritten = " (a dry run: nothing was written)" if is_dry_run else ""
    say(printable(f"{out}: {left:,} of {counted(old.num_samples, 'sample')}, without {copies}{unwritten}"))


def _opened(src: str, kind: str | None, image_field: str | None) -> Source:
    """Open a test set's source. Raises RecipeError, also if training images are among those of the test set."""
    from data_tools.sources import KINDS, SourceOptions, open_source

    if kind is not None and kind not in KINDS:
        raise RecipeError(f"--format {kind}: expected {', '.join(KINDS)}")
    options = SourceOptions(unlabelled=True, image_field=image_field)
    try:
        return open_source(src, kind, options)
    except OSError as error:
        raise DataError(f"TESTSET {src}: cannot be read ({error.strerror or error})") from error
    except RecipeError:
        open_source(src, kind, options, has_splits=True)
        raise RecipeError(
            f"TESTSET {src}: holds images of several splits. Name the files of the test set alone; or convert it with "
            "vitscale-convert --split first, and give the dataset of the test images"
        ) from None


def _settings(preset: Preset | None, settings: dict[str, Any]) -> Settings | None:
    """A preset's settings with the given ones replaced; None if none were given."""
    given = {name: value for name, value in settings.items() if value is not None}
    if not given:
        return None
    options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
    if preset is None:
        raise RecipeError(f"{options}: replaces a value of a preset; name the preset with --preset photo or small")
    if not PRESETS[preset].near:
        raise RecipeError(f"{options}: --preset {preset} compares nothing but bytes and pixels")
    return replace(PRESETS[preset], **given)


def _named(testsets: Sequence[str]) -> list[tuple[str, str]]:
    """(name, source) of each test set. Raises RecipeError if two have the same name."""
    named = []
    for text in testsets:
        match = None if storage.is_url(text) or os.path.exists(text) else _NAMED.fullmatch(text)  # noqa: PTH110
        named.append((match[1].strip(), match[2]) if match else (_name_of(text), text))
    counts = Counter(name for name, _ in named)
    for name, src in named:
        if not name or counts[name] > 1:
            what = "a name is missing" if not name else f"two test sets would be called {name!r}"
            raise RecipeError(f"TESTSET {src}: {what}. Name them: NAME={src}")
    return named


def _name_of(src: str) -> str:
    """The last part of a path or URL that names no split, without suffixes."""
    src = without_secrets(src)
    if storage.base_name(src) == MANIFEST_NAME:
        src = src.rstrip("/").removesuffix(MANIFEST_NAME)
    name = storage.collection_name(src if storage.is_url(src) else str(Path(src).absolute()))
    return _SUFFIXES.sub("", name) or name


def _rule(settings: Settings, with_model: bool) -> str:
    if not settings.near:
        return "equal bytes or pixels"
    judges = f"correlation {settings.correlation:g}" + (f" or cosine {settings.cosine:g}" if with_model else "")
    return f"<= {settings.distance} bits; <= {settings.candidates} and {judges}"
