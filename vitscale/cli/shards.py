"""`vitscale shards`: look at datasets, check them, get their images back; and adopt what FFCV wrote."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from rich.table import Table
from typer import Argument, Exit, Option, Typer

from vitscale.cli.console import interruptible, plain, progress, say
from vitscale.cli.options import Dataset, Json
from vitscale.data.shards import MANIFEST_NAME, Manifest
from vitscale.ground.errors import DataError, RecipeError, os_errors
from vitscale.ground.files.durable import durable_file
from vitscale.ground.safe_text import printable
from vitscale.ground.storage import without_file_scheme
from vitscale.ground.table import Console, hanging
from vitscale.ground.wording import counted

_SHOWN_DAMAGE = 100

app = Typer(
    help="Show, check, split, export, adopt data.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)


@app.command()
def info(
    dataset: Dataset,
    classes: Annotated[
        bool, Option("--classes", help="Open the shards: samples of each class, size of images.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what a dataset is: samples, classes, shards, bytes, options."""
    from vitscale.data.shards.info import census, describe

    manifest = Manifest.load(dataset)
    facts = describe(manifest)
    found = census(manifest) if classes else None
    image_bytes = None if found is None else round(found.image_bytes / max(1, manifest.num_samples))
    if as_json:
        if found is not None:
            facts |= {"class_counts": found.classes, "unlabelled": found.unlabelled}
            facts["mean_image_bytes"] = image_bytes
        print(json.dumps(facts, indent=1))
        return
    selecting = facts["selecting_shards"]
    rows = {
        "samples": f"{facts['samples']:,}",
        "of stored": f"{facts['stored_samples']:,}" if selecting else None,
        "classes": f"{facts['classes']:,}",
        "fields": ", ".join(facts["fields"]),
        "shards": f"{facts['shards']:,}" + (f", of {selecting:,} only a part" if selecting else ""),
        "bytes": f"{facts['bytes']:,}",
        "file bytes a sample": f"{facts['mean_bytes_per_sample']:,}",
        "image bytes a sample": None if image_bytes is None else f"{image_bytes:,}",
        "rejected": f"{facts['rejected']:,}",
        "removed": f"{facts['removed']:,}",
        "shuffle seed": str(facts["shuffle_seed"]),
        "schema version": str(facts["schema_version"]),
        "sha256": facts["sha256"],
    }
    for which in ("largest", "smallest"):
        if shard := facts[f"{which}_shard"]:
            rows[f"{which} shard"] = f"{shard['path']}, {shard['bytes']:,} bytes"
    rows |= {f"option {name}": json.dumps(value) for name, value in sorted(facts["options"].items())}
    width = max(map(len, rows))
    say(printable(facts["manifest"]))
    for name, value in rows.items():
        if value is not None:
            say(f"  {name:<{width}}  {hanging(printable(value), width + 4)}")
    if found is not None:
        table = _table("samples of each class", "label", "class", "samples")
        for label, (name, count) in enumerate(found.classes.items()):
            table.add_row(str(label), plain(name), f"{count:,}")
        if found.unlabelled:
            table.add_row("", "(no label)", f"{found.unlabelled:,}")
        Console().print(table)


@app.command()
def verify(
    dataset: Dataset,
    workers: Annotated[
        int | None, Option(min=1, help="Number of shards read at a time.", show_default="one per core")
    ] = None,
    decode: Annotated[bool, Option("--decode", help="Decode every image, too, as training will.")] = False,
    stock: Annotated[
        bool, Option("--stock", help="Read every image by stock FFCV, too, and compare its pixels with ours.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Read every byte and list what is missing or damaged (exit code 3)."""
    from vitscale.data.shards.verify import StockReader, verify

    ffcv = StockReader() if stock else None
    manifest = Manifest.load(dataset)
    workers = workers or len(os.sched_getaffinity(0))
    started = time.monotonic()
    with progress("shards", len(manifest.shards)) as done:
        verdict = verify(manifest, workers=workers, decode=decode, stock=ffcv, progress=done)
    seconds = time.monotonic() - started
    if as_json:
        print(json.dumps({"ok": not verdict.damage, **asdict(verdict)}, indent=1))
    else:
        if verdict.damage:
            console = Console()
            table = _table(counted(len(verdict.damage), "finding"), "file", "sample", "what is wrong")
            for damage in verdict.damage[:_SHOWN_DAMAGE]:
                sample = "" if damage.uid is None else f"uid {damage.uid}"
                table.add_row(*map(plain, (damage.path, f"{sample} {damage.key or ''}".strip(), damage.what)))
            console.print(table)
            if len(verdict.damage) > _SHOWN_DAMAGE:
                console.print(f"... and {len(verdict.damage) - _SHOWN_DAMAGE:,} more; --json lists all")
        for note in verdict.notes:
            say(f"note: {printable(note)}")
        rate = verdict.bytes / max(seconds, 1e-9) / 1e6
        by_stock = f", all read by FFCV {ffcv.version}" if ffcv is not None else ""
        result = f"DAMAGED: {counted(len(verdict.damage), 'finding')}; read" if verdict.damage else "whole:"
        say(
            f"{result} {counted(verdict.shards, 'shard')}, "
            f"{counted(verdict.samples, 'sample')}{', all decoded' if decode else ''}{by_stock}, "
            f"{verdict.bytes:,} bytes in {seconds:,.1f} s ({rate:,.1f} MB/s)"
        )
        if verdict.damage:
            say(
                "Copy these files again from where they are whole, or convert the dataset again. What a run does with "
                "damaged samples: data.bad_samples"
            )
    if verdict.damage:
        raise Exit(DataError.exit_code)


@app.command()
def head(
    dataset: Dataset,
    count: Annotated[int, Option("-n", min=1, max=400, help="Samples.")] = 16,
    out: Annotated[Path | None, Option(help="A .png to draw their pictures into.")] = None,
) -> None:
    """List the first samples, and draw a contact sheet of them."""
    from vitscale.data.shards.contact_sheet import contact_sheet, first_samples

    if out is not None and out.suffix.lower() != ".png":
        raise RecipeError(f"--out {out}: a contact sheet is a .png")
    manifest = Manifest.load(dataset)
    samples = list(first_samples(manifest, count))
    title = plain(f"first {len(samples):,} of {counted(manifest.num_samples, 'sample')}")
    table = _table(title, "uid", "height", "width", "bytes", "class", "key")
    for sample in samples:
        numbers = (sample.uid, sample.height, sample.width, f"{sample.bytes:,}")
        table.add_row(*map(str, numbers), plain(", ".join(sample.class_names)), plain(sample.key or ""))
    Console().print(table)
    if out is not None:
        sheet = contact_sheet(samples)
        with os_errors(f"--out {out}: cannot be written", RecipeError), durable_file(out) as file:
            sheet.save(file, "PNG")
        say(f"drawn: {printable(str(out))}")


@app.command()
def split(
    dataset: Dataset,
    parts: Annotated[
        str, Option(help="Shares of the samples, such as 98,2, or with names train98=98,dev=2.", metavar="SHARES")
    ],
    out: Annotated[str | None, Option(help="The folder of the parts' folders.", show_default="that of DATASET")] = None,
    seed: Annotated[int, Option(min=0, help="Seed of the division.")] = 0,
) -> None:
    """Divide a dataset at random into parts; nothing is copied."""
    from data_tools.views import parse_parts, place_of_parts, write_parts

    with interruptible("parts whose manifest.json is there are complete"):
        written = write_parts(dataset, out or place_of_parts(dataset), parse_parts(parts, dataset), seed)
    for manifest in written:
        folder = manifest.where.removesuffix(f"/{MANIFEST_NAME}")
        print(f"{folder}: {counted(manifest.num_samples, 'sample')} of {dataset}")


@app.command()
def export(dataset: Dataset, out: Annotated[str, Argument(help="A new or empty folder.")]) -> None:
    """Write the images back as files in class folders, unchanged."""
    from vitscale.data.shards.export import export

    manifest = Manifest.load(dataset)
    with progress("images", manifest.num_samples) as done:
        written = export(manifest, out, done)
    print(f"wrote {out}: {counted(written, 'image')}, {counted(len(manifest.class_names), 'class')}")


@app.command()
def adopt(
    file: Annotated[str, Argument(help="A .beton that FFCV wrote; it stays where and as it is.")],
    out: Annotated[str | None, Argument(help="A new or empty folder.", show_default="FILE without its suffix")] = None,
    classes: Annotated[
        Path | None, Option(help="Class names by label: a text file, one per line, or a dataset.")
    ] = None,
    image_field: Annotated[str | None, Option(help="Which field has the images, if there are several.")] = None,
    label_field: Annotated[
        str | None, Option(help="Which integer field has the labels, if there are several; none for no labels.")
    ] = None,
    decode: Annotated[bool, Option("--decode", help="Decode every image, too, as training will.")] = False,
) -> None:
    """Make a dataset of a single .beton, without a copy of it."""
    from data_tools.classes import read_classes
    from vitscale.data.shards.adopt import adopt, default_out

    names = None if classes is None else read_classes(classes)
    fields = {"image_field": image_field, "label_field": label_field}
    out, local = out or default_out(file), Path(without_file_scheme(file))
    size = local.stat().st_size if local.is_file() else 0
    with interruptible("nothing was written"), progress("bytes", size) as done:
        adoption = adopt(file, out, **fields, class_names=names, decode=decode, progress=done)
    manifest = adoption.manifest
    kinds = {"JPEG": manifest.num_samples - adoption.raw, "raw image": adoption.raw}
    stored = [counted(count, what) for what, count in kinds.items() if count]
    label = "no labels" if adoption.label_field is None else f"labels from {adoption.label_field!r}"
    unused = f"; not used: {', '.join(map(repr, adoption.unused_fields))}" if adoption.unused_fields else ""
    say(printable(f"{out}: {' and '.join(stored)} of {file}, {counted(len(manifest.class_names), 'class')}"))
    say(printable(f"images from {adoption.image_field!r}, {label}{unused}"))
    if names is None and manifest.class_names:
        say(printable(f"classes are called 0 to {len(manifest.class_names) - 1:,}; --classes names them"))


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        if heading in ("label", "samples", "uid", "height", "width", "bytes"):
            table.add_column(heading, justify="right")
        else:
            table.add_column(heading, overflow="fold")
    return table
