"""What `vitscale shards` prints."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from vitscale.cli.entry import EXIT_INTERRUPTED
from vitscale.data.shards import MANIFEST_NAME, Manifest
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.files.durable import durable_file
from vitscale.ground.safe_text import printable
from vitscale.ground.storage import without_file_scheme
from vitscale.ground.table import Console, hanging
from vitscale.ground.wording import counted

_LINE_SECONDS = 10.0
_SHOWN_DAMAGE = 100
_SHOWN_NAMES = 10
_EXIT_DIFFERENT = 1


def show_info(dataset: str, classes: bool, as_json: bool) -> None:
    """Print what a dataset is. Raises DataError and StorageError, as all functions here do."""
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
    console = Console()
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
    say, width = partial(console.print, highlight=False, soft_wrap=True), max(map(len, rows))
    say(plain(facts["manifest"]))
    for name, value in rows.items():
        if value is not None:
            say(f"  {name:<{width}}  {hanging(plain(value), width + 4)}")
    if found is not None:
        _print_counts(console, found.classes, found.unlabelled)


def show_verdict(dataset: str, workers: int | None, decode: bool, as_json: bool) -> None:
    """Raises typer.Exit(3) for a damaged dataset."""
    from vitscale.data.shards.verify import verify

    manifest = Manifest.load(dataset)
    workers = workers or len(os.sched_getaffinity(0))
    started = time.monotonic()
    with _progress("shards", len(manifest.shards)) as progress:
        verdict = verify(manifest, workers=workers, decode=decode, progress=progress)
    seconds = time.monotonic() - started
    if as_json:
        print(json.dumps({"ok": not verdict.damage, **asdict(verdict)}, indent=1))
    else:
        console = Console()
        if verdict.damage:
            table = Table(title=counted(len(verdict.damage), "finding"), title_justify="left")
            for heading in ("file", "sample", "what is wrong"):
                table.add_column(heading, overflow="fold")
            for damage in verdict.damage[:_SHOWN_DAMAGE]:
                sample = "" if damage.uid is None else f"uid {damage.uid}"
                table.add_row(*map(plain, (damage.path, f"{sample} {damage.key or ''}".strip(), damage.what)))
            console.print(table)
            if len(verdict.damage) > _SHOWN_DAMAGE:
                console.print(f"... and {len(verdict.damage) - _SHOWN_DAMAGE:,} more; --json lists all")
        for note in verdict.notes:
            console.print(f"note: {plain(note)}", highlight=False, soft_wrap=True)
        rate = verdict.bytes / max(seconds, 1e-9) / 1e6
        result = f"DAMAGED: {counted(len(verdict.damage), 'finding')}; read" if verdict.damage else "whole:"
        console.print(
            f"{result} {counted(verdict.shards, 'shard')}, "
            f"{counted(verdict.samples, 'sample')}{', all decoded' if decode else ''}, "
            f"{verdict.bytes:,} bytes in {seconds:,.1f} s ({rate:,.1f} MB/s)",
            highlight=False,
            soft_wrap=True,
        )
        if verdict.damage:
            console.print(
                "Copy these files again from where they are whole, or convert the dataset again. What a run does with "
                "damaged samples: data.bad_samples",
                highlight=False,
                soft_wrap=True,
            )
    if verdict.damage:
        raise typer.Exit(DataError.exit_code)


def show_head(dataset: str, count: int, out: Path | None) -> None:
    """Print the first samples and draw a contact sheet. Also raises RecipeError if `out` cannot be written."""
    from vitscale.data.shards.contact_sheet import contact_sheet, first_samples

    if out is not None and out.suffix.lower() != ".png":
        raise RecipeError(f"--out {out}: a contact sheet is a .png")
    manifest = Manifest.load(dataset)
    samples = list(first_samples(manifest, count))
    table = Table(
        title=plain(f"first {len(samples):,} of {counted(manifest.num_samples, 'sample')}"), title_justify="left"
    )
    for heading in ("uid", "height", "width", "bytes"):
        table.add_column(heading, justify="right")
    table.add_column("class", overflow="fold")
    table.add_column("key", overflow="fold")
    for sample in samples:
        numbers = (sample.uid, sample.height, sample.width, f"{sample.bytes:,}")
        table.add_row(*map(str, numbers), plain(", ".join(sample.class_names)), plain(sample.key or ""))
    console = Console()
    console.print(table)
    if out is not None:
        sheet = contact_sheet(samples)
        try:
            with durable_file(out) as file:
                sheet.save(file, "PNG")
        except OSError as error:
            raise RecipeError(f"--out {out}: cannot be written ({error.strerror})") from error
        console.print(f"drawn: {plain(str(out))}", highlight=False, soft_wrap=True)


def show_difference(a: str, b: str, by: Literal["key", "content"], as_json: bool) -> None:
    """Raises typer.Exit(1) if the datasets differ."""
    from vitscale.data.shards.diff import diff

    found = diff(Manifest.load(a), Manifest.load(b), by)
    if as_json:
        print(json.dumps({"equal": not found, **asdict(found)}, indent=1, default=str))
    else:
        console = Console()

        def say(line: str) -> None:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

        for name, (of_a, of_b) in found.facts.items():
            say(f"{name}: {_shown(of_a)} -> {_shown(of_b)}")
        for what, names in (("removed", found.classes_removed), ("added", found.classes_added)):
            if names:
                more = f" and {len(names) - _SHOWN_NAMES:,} more" if len(names) > _SHOWN_NAMES else ""
                say(f"classes {what}: {', '.join(map(repr, names[:_SHOWN_NAMES]))}{more}")
        if found.classes_reordered:
            say("classes that both have come in another order")
        for what, count in found.counts.items():
            say(f"{what}: {counted(count, 'sample')}")
            for key, of_a, of_b in found.examples[what]:
                say(f"    {key!r}: {' -> '.join(filter(None, (of_a, of_b)))}")
            if count > len(found.examples[what]):
                say("    ...")
        if not found:
            say(f"equal: {counted(found.equal_shards, 'shard')} in common" if found.equal_shards else "equal")
            if any(found.unequal_shards):
                of_a, of_b = (counted(number, "shard") for number in found.unequal_shards)
                say(
                    f"By their lists of samples, that is: {of_a} of A and {of_b} of B have a sha256 of their own. "
                    f"vitscale shards verify reads the images themselves"
                )
        elif by == "key" and {"only in A", "only in B"} <= found.counts.keys():
            say("the same images under other names? --by content tells")
    if found:
        raise typer.Exit(_EXIT_DIFFERENT)


def run_export(dataset: str, out: str) -> None:
    """Write the images and print one line."""
    from vitscale.data.shards.export import export

    manifest = Manifest.load(dataset)
    with _progress("images", manifest.num_samples) as progress:
        written = export(manifest, out, progress)
    print(f"wrote {out}: {counted(written, 'image')}, {counted(len(manifest.class_names), 'class')}")


def run_split(dataset: str, parts: str, out: str | None, seed: int) -> None:
    """Write the parts and print a line for each. Raises RecipeError."""
    from data_tools.dividing import parse_parts, place_of_parts, write_parts

    with interruptible("parts whose manifest.json is there are complete"):
        wanted = parse_parts(parts, dataset)
        written = write_parts(dataset, out or place_of_parts(dataset), wanted, seed)
    for manifest in written:
        folder = manifest.where.removesuffix(f"/{MANIFEST_NAME}")
        print(f"{folder}: {counted(manifest.num_samples, 'sample')} of {dataset}")


def run_adopt(
    file: str,
    out: str | None,
    classes: Path | None,
    image_field: str | None,
    label_field: str | None,
    decode: bool,
) -> None:
    """Make a dataset from FFCV's file and print how its fields were interpreted. Raises RecipeError."""
    from data_tools.classes import read_classes
    from vitscale.data.shards.adopt import adopt, default_out

    names = None if classes is None else read_classes(classes)
    out, local = out or default_out(file), Path(without_file_scheme(file))
    size = local.stat().st_size if local.is_file() else 0
    with interruptible("nothing was written"), _progress("bytes", size) as progress:
        adoption = adopt(
            file,
            out,
            image_field=image_field,
            label_field=label_field,
            class_names=names,
            decode=decode,
            progress=progress,
        )
    manifest = adoption.manifest
    kinds = {"JPEG": manifest.num_samples - adoption.raw, "raw image": adoption.raw}
    stored = [counted(count, what) for what, count in kinds.items() if count]
    label = "no labels" if adoption.label_field is None else f"labels from {adoption.label_field!r}"
    unused = f"; not used: {', '.join(map(repr, adoption.unused_fields))}" if adoption.unused_fields else ""
    say = partial(Console().print, highlight=False, soft_wrap=True)
    say(plain(f"{out}: {' and '.join(stored)} of {file}, {counted(len(manifest.class_names), 'class')}"))
    say(plain(f"images from {adoption.image_field!r}, {label}{unused}"))
    if names is None and manifest.class_names:
        say(plain(f"classes are called 0 to {len(manifest.class_names) - 1:,}; --classes names them"))


@contextmanager
def interruptible(state: str) -> Iterator[None]:
    """Ctrl-C, or what a scheduler ends a job by, gives one line, not a trace. Raises typer.Exit(130)."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print(f"interrupted: {state}", highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Progress on stderr: a bar on a terminal, else a line every ten seconds."""
    console = Console(stderr=True)
    if console.is_terminal:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(what), BarColumn(None), MofNCompleteColumn(), TextColumn("left"), TimeRemainingColumn())
        with Progress(*columns, console=console, expand=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda done: bar.update(task, completed=done)
        return
    said = time.monotonic()

    def say(done: int) -> None:
        nonlocal said
        if time.monotonic() - said >= _LINE_SECONDS:
            said = time.monotonic()
            console.print(f"{done:,} of {total:,} {what}", highlight=False)

    yield say


def _print_counts(console: Console, counts: dict[str, int], unlabelled: int) -> None:
    table = Table(title="samples of each class", title_justify="left")
    table.add_column("label", justify="right")
    table.add_column("class", overflow="fold")
    table.add_column("samples", justify="right")
    for label, (name, count) in enumerate(counts.items()):
        table.add_row(str(label), plain(name), f"{count:,}")
    if unlabelled:
        table.add_row("", "(no label)", f"{unlabelled:,}")
    console.print(table)


def plain(text: str) -> str:
    """Text to be printed literally: rich's markup and unprintable characters are escaped."""
    return escape(printable(text))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 300 else f"{text[:300]}..."
