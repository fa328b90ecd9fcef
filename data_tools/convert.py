"""vitscale-convert: an image folder or a tar of one becomes a dataset of shards.

    list -> shuffle by seed -> one task a shard, in worker processes -> manifest, written last

The output depends on the source's images and the options, not on the number of workers, nor on the kind of source.
"""

import os
import platform
import time
from pathlib import Path
from typing import Annotated

import numpy
import PIL
import typer
from rich.console import Console
from rich.markup import escape

from data_tools.output import REJECTS_NAME, claimed, log
from data_tools.plan import shard_ranges, shuffled
from data_tools.report import ProgressView, Totals, summary
from data_tools.shard_task import ShardReport, ShardTask, write_rejects
from data_tools.sources import IMAGE_SUFFIXES, Entry, check_source, list_images, open_source
from data_tools.workers import run_tasks
from vitscale.errors import DataError, RecipeError, VitscaleError
from vitscale.shards import DEFAULT_CAPACITY, Manifest, field_names

_SHOWN_REJECTS = 20
_EXIT_INTERRUPTED = 130


def convert(
    src: Path,
    out: Path,
    *,
    shard_samples: int = DEFAULT_CAPACITY,
    shuffle_seed: int = 0,
    classes: Path | None = None,
    max_reject_rate: float = 0.01,
    workers: int | None = None,
    console: Console | None = None,
) -> tuple[Manifest, Totals]:
    """Convert `src` into a dataset in the directory `out`; see `vitscale-convert --help` for the arguments.

    Raises:
        RecipeError: arguments that cannot be followed.
        DataError: a source that is empty, damaged or has too many images that cannot be decoded. The directory then
            has no manifest.
    """
    console = console or Console(quiet=True)
    if out.resolve().is_relative_to(src.resolve()):
        raise RecipeError(f"OUT {out} lies inside of SRC {src}: choose a directory elsewhere")
    # Before anything long starts: FFCV is loaded (or missed) here, not first in a worker.
    from data_tools.images import JPEG_QUALITY, JPEG_SUBSAMPLING

    check_source(src)
    known = None if classes is None else read_classes(classes)
    with claimed(out) as work:
        started = time.monotonic()
        try:
            workers = workers or len(os.sched_getaffinity(0))
            log(out, "start", source=str(src), workers=workers, host=platform.node(), versions=_versions())
            console.print(f"listing {escape(str(src))}", highlight=False)
            source = open_source(src, work)
            listing = list_images(source, known)
            class_names = known or tuple(sorted({entry.class_name for entry in listing.entries}))
            console.print(
                f"{len(listing.entries):,} images of {len(class_names):,} classes, {workers} workers", highlight=False
            )
            label_of = {name: label for label, name in enumerate(class_names)}
            order = shuffled([entry.key for entry in listing.entries], shuffle_seed)
            tasks = []
            for index, positions in enumerate(shard_ranges(len(order), shard_samples)):
                entries: list[Entry] = [listing.entries[i] for i in order[positions.start : positions.stop]]
                labels = [label_of[entry.class_name] for entry in entries]
                tasks.append(ShardTask(index, out, source, positions.start, entries, labels, shard_samples))

            reports: list[ShardReport] = []
            with ProgressView(console, len(order)) as view:
                for report in run_tasks(tasks, workers, view.update):
                    reports.append(report)
                    log(out, "shard", index=report.index, seconds=round(report.seconds, 3), rejects=len(report.rejects))
            reports.sort(key=lambda report: report.index)
            totals = _totals(reports, time.monotonic() - started)
            totals.ignored = listing.ignored
            log(out, "converted", **_loggable(totals))
            _judge_rejects(reports, len(order), max_reject_rate, out)
            manifest = Manifest(
                fields=field_names(with_labels=False),
                num_samples=totals.samples,
                class_names=class_names,
                shuffle_seed=shuffle_seed,
                options={
                    "image_suffixes": list(IMAGE_SUFFIXES),
                    "jpeg_quality": JPEG_QUALITY,
                    "jpeg_subsampling": JPEG_SUBSAMPLING,
                    "pass_through": True,
                    "shard_samples": shard_samples,
                },
                num_rejected=totals.rejected,
                shards=tuple(report.entry for report in reports if report.entry is not None),
            ).save(out)
        except OSError as error:
            raise DataError(f"{error.filename or out}: {error.strerror or error}") from error
    return manifest, totals


def read_classes(path: Path) -> tuple[str, ...]:
    """Class names from a text file, one a line, or from another dataset. Raises RecipeError or DataError."""
    if path.is_dir() or path.suffix == ".json":
        names = Manifest.load(path).class_names
    else:
        try:
            names = tuple(line for line in path.read_text("utf-8").splitlines() if line.strip())
        except (OSError, UnicodeDecodeError) as error:
            what = error.strerror if isinstance(error, OSError) else "not a text file in UTF-8"
            raise RecipeError(
                f"--classes {path}: {what}. Expected a file of one class name a line, or a dataset"
            ) from error
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeated or not names:
        what = f"names twice: {', '.join(map(repr, repeated[:5]))}" if repeated else "no class names in it"
        raise RecipeError(f"--classes {path}: {what}")
    return names


def _totals(reports: list[ShardReport], seconds: float) -> Totals:
    entries = [report.entry for report in reports if report.entry is not None]
    return Totals(
        samples=sum(entry.samples for entry in entries),
        passed_through=sum(report.passed_through for report in reports),
        transcoded=sum(report.transcoded for report in reports),
        rejected=sum(len(report.rejects) for report in reports),
        shards=len(entries),
        bytes=sum(entry.bytes for entry in entries),
        seconds=seconds,
    )


def _judge_rejects(reports: list[ShardReport], images: int, max_rate: float, out: Path) -> None:
    """Write down what was rejected; too much of it ends the conversion."""
    rejects = [reject for report in reports for reject in report.rejects]
    if not rejects:
        return
    write_rejects(out / REJECTS_NAME, rejects)
    if len(rejects) <= max_rate * images and len(rejects) < images:
        return
    lines = [f"  {key!r}: {reason}" for key, reason in rejects[:_SHOWN_REJECTS]]
    if len(rejects) > _SHOWN_REJECTS:
        lines.append(f"  ... and {len(rejects) - _SHOWN_REJECTS:,} more")
    raise DataError(
        f"{len(rejects):,} of {images:,} images ({len(rejects) / images:.2%}) cannot be stored; --max-reject-rate "
        f"{max_rate:g} allows less. No manifest was written; the full list is in {out / REJECTS_NAME}\n"
        + "\n".join(lines)
    )


def _loggable(totals: Totals) -> dict[str, object]:
    return {
        "samples": totals.samples,
        "rejected": totals.rejected,
        "ignored": dict(totals.ignored),
        "seconds": round(totals.seconds, 3),
        "images_per_s": round(totals.images_per_s, 1),
    }


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "pillow": PIL.__version__, "numpy": numpy.__version__}


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def command(
    src: Annotated[
        Path, typer.Argument(help="Folder of class folders with images, or a .tar, .tar.gz, .tar.xz of one.")
    ],
    out: Annotated[Path, typer.Argument(help="Directory of the dataset; new or empty.")],
    shard_samples: Annotated[int, typer.Option(min=1, help="Images a shard.")] = DEFAULT_CAPACITY,
    shuffle_seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the global shuffle.")] = 0,
    classes: Annotated[
        Path | None,
        typer.Option(help="Class order: a file of one name a line, or another dataset.", show_default="sorted"),
    ] = None,
    max_reject_rate: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of images that may be undecodable.")
    ] = 0.01,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes.", show_default="one a core")] = None,
) -> None:
    """Convert images into a dataset of shards that vitscale trains on and FFCV opens."""
    console, errors = Console(), Console(stderr=True)
    try:
        manifest, totals = convert(
            src,
            out,
            shard_samples=shard_samples,
            shuffle_seed=shuffle_seed,
            classes=classes,
            max_reject_rate=max_reject_rate,
            workers=workers,
            console=console,
        )
    except VitscaleError as error:
        errors.print(f"[red]error: {escape(str(error))}[/red]", soft_wrap=True, highlight=False)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        errors.print("[red]interrupted: no manifest was written[/red]")
        raise typer.Exit(_EXIT_INTERRUPTED) from None
    console.print(summary(totals, f"{escape(str(out))}: {len(manifest.class_names):,} classes"))


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
