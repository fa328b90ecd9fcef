"""The command `vitscale-convert`: an image collection in, a dataset of shards out."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from rich.markup import escape
from rich.table import Table
from typer import Argument, Context, Exit, Option, Typer

from data_tools.classes import read_classes
from data_tools.conversion import Outcome, convert, dry_run, merge
from data_tools.dedup.against import name_indexes
from data_tools.dedup.report import tables
from data_tools.machine import ALL_TASKS, Machine, TaskRange
from data_tools.plan import MAX_SHARD_SAMPLES, ConversionPlan
from data_tools.planning import Probe
from data_tools.report import say, summary
from data_tools.request import Request, parse_count, parse_splits
from data_tools.sources import Kind, SourceOptions
from data_tools.views import write_subset
from vitscale.cli.command_line import HELP, Version
from vitscale.cli.options import Embedding, ImageField, ImageSize, ModelName, Workers, given_options, opened_embedder
from vitscale.data.shards import DEFAULT_CAPACITY
from vitscale.data.shards.beton import expected_bytes
from vitscale.data.shards.images import JPEG_QUALITY, ImageOptions
from vitscale.ground.errors import EXIT_INTERRUPTED, RecipeError, VitscaleError
from vitscale.ground.table import Console
from vitscale.ground.wording import counted

app = Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(no_args_is_help=True, context_settings=HELP)
def command(
    context: Context,
    src: Annotated[
        str | None,
        Argument(
            help="Folder of class folders, tar(s), also WebDataset's, list (csv, jsonl), parquet, TFRecord, CIFAR, or "
            "another dataset; a path, URL or quoted pattern such as 's3://bucket/train-{000..127}.tar'.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[str | None, Argument(help="Folder or URL of the dataset; new or empty.", show_default=False)] = None,
    kind: Annotated[Kind | None, Option("--format", help="Format of SRC.", show_default="detected")] = None,
    labels: Annotated[
        str | None, Option(help="A list of labels for a folder or tar without class folders.", metavar="FILE")
    ] = None,
    classes: Annotated[
        Path | None, Option(help="Class order: a file with one name per line, or a dataset.", show_default="sorted")
    ] = None,
    unlabelled: Annotated[bool, Option("--unlabelled", help="Give no image a label.")] = False,
    image_field: ImageField = None,
    label_field: Annotated[
        str | None, Option(help="Column, feature or key of the label.", show_default="detected")
    ] = None,
    short_side: Annotated[int | None, Option(min=1, help="Shrink to a short side of at most N pixels.")] = None,
    long_side: Annotated[int | None, Option(min=1, help="Shrink to a long side of at most N pixels.")] = None,
    quality: Annotated[int, Option(min=1, max=100, help="Quality of re-encoded JPEGs.")] = JPEG_QUALITY,
    pass_through: Annotated[
        bool, Option("--pass-through/--no-pass-through", help="Store sound JPEGs byte for byte.")
    ] = True,
    shard_samples: Annotated[
        int | None, Option(min=1, max=MAX_SHARD_SAMPLES, help="Images per shard.", show_default=f"{DEFAULT_CAPACITY:,}")
    ] = None,
    shuffle_seed: Annotated[int, Option(min=0, max=2**63 - 1, help="Seed of the global shuffle.")] = 0,
    split: Annotated[
        list[str] | None,
        Option(
            help="Several datasets OUT/NAME: val=10000, val=2%, test=@keys.txt, 'train=a*/*', train=rest.",
            metavar="NAME=WHAT",
        ),
    ] = None,
    limit: Annotated[
        str | None, Option(help="Take only this many images (10k), chosen at random.", metavar="COUNT")
    ] = None,
    subset: Annotated[
        str | None,
        Option(help="OUT becomes the first COUNT samples (9M) of the dataset SRC; nothing is copied.", metavar="COUNT"),
    ] = None,
    dedup_against: Annotated[
        list[str] | None,
        Option(help="Leave out copies of the test images in INDEX, made by `vitscale dedup index`.", metavar="INDEX"),
    ] = None,
    embedding: Embedding = None,
    embedding_model: ModelName = None,
    embedding_size: ImageSize = None,
    is_dry_run: Annotated[bool, Option("--dry-run", help="Show what would be written: counts, bytes, time.")] = False,
    max_reject_rate: Annotated[
        float, Option(min=0.0, max=1.0, help="Largest share of images that may be rejected, as they cannot be stored.")
    ] = 0.01,
    allow_unlabelled: Annotated[
        bool, Option("--allow-unlabelled", help="Allow any share of images without a label, not just 1 %.")
    ] = False,
    workers: Workers = None,
    task_range: Annotated[
        str | None, Option(help="Only piece i of n of the shards, i from 0, for job arrays.", metavar="i/n")
    ] = None,
    merge_out: Annotated[
        str | None, Option("--merge", help="Finish OUT, whose task ranges are all done.", metavar="OUT")
    ] = None,
    work: Annotated[
        Path | None, Option(help="Local folder for lists and spools.", show_default="in OUT, or the cache")
    ] = None,
    version: Version = False,
) -> None:
    """Convert images into a dataset of shards that vitscale trains on and FFCV opens. Repeat it to continue."""
    console, errors = Console(), Console(stderr=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # how schedulers end a job
    try:
        if merge_out is not None:
            _refuse(context, "--merge", all_but=("merge_out", "max_reject_rate", "work"))
            _tell(console, merge_out, merge(merge_out, max_reject_rate, work))
            return
        if not src or not out:
            raise RecipeError("expected SRC and OUT; see vitscale-convert --help")
        if subset is not None:
            _refuse(context, "--subset", all_but=("src", "out", "subset"))
            manifest = write_subset(src, out, parse_count(subset))
            say(console, f"{escape(out)}: {counted(manifest.num_samples, 'sample')} of {escape(src)}")
            return
        if unlabelled:
            _refuse(context, "--unlabelled", "classes", "labels", "label_field")
        request = Request(
            src=src,
            kind=kind,
            source=SourceOptions(labels, image_field, label_field, unlabelled),
            classes=None if classes is None else read_classes(classes),
            shuffle_seed=shuffle_seed,
            shard_samples=shard_samples or DEFAULT_CAPACITY,
            images=ImageOptions(short_side, long_side, quality, pass_through),
            splits=parse_splits(split or []),
            limit=None if limit is None else parse_count(limit),
            dedup=name_indexes(
                dedup_against or [], embedder=opened_embedder(embedding, embedding_model, embedding_size)
            ),
        )
        tasks = ALL_TASKS if task_range is None else TaskRange.parse(task_range)
        machine = Machine(workers, tasks, work, max_reject_rate, allow_unlabelled)
        if is_dry_run:
            _refuse(context, "--dry-run", "max_reject_rate", "allow_unlabelled", "task_range")
            starting = time.process_time()  # nearly all of it imports
            conversion, plan, probed = dry_run(request, out, machine, console)
            console.print(_forecast(plan, probed, machine.processes, starting))
            _note(console, plan.notes)
            if conversion.matcher is not None and probed.findings is not None:
                for table in tables(conversion.matcher, probed.findings):
                    console.print(table)
            return
        _tell(console, out, convert(request, out, machine, console), tasks)
    except VitscaleError as error:
        say(errors, f"[red]error: {escape(str(error))}[/red]")
        raise Exit(error.exit_code) from None
    except KeyboardInterrupt:
        errors.print("[red]interrupted: no manifest was written; repeat the command to continue[/red]")
        raise Exit(EXIT_INTERRUPTED) from None


def _refuse(context: Context, main: str, *useless: str, all_but: tuple[str, ...] = ()) -> None:
    """Raise RecipeError if options were given that have no effect together with `main`."""
    given = given_options(context)
    refused = [flag for name, flag in given.items() if (name in useless if useless else name not in all_but)]
    if refused:
        raise RecipeError(f"{', '.join(refused)} cannot be used with {main}")


def _tell(console: Console, out: str, outcome: Outcome, tasks: TaskRange | None = None) -> None:
    if outcome.was_complete:
        say(console, f"{escape(out)}: already complete; nothing was done")
        return
    if not outcome.manifests:
        say(console, f"{escape(out)}: task range {tasks} is done")
        console.print(summary(outcome.totals))
        say(console, f"When all ranges are done: vitscale-convert --merge {escape(out)}")
        return
    first = next(iter(outcome.manifests.values()))
    title = f"{escape(out)}: {counted(len(first.class_names), 'class')}"
    if len(outcome.manifests) > 1 or "" not in outcome.manifests:
        title += "".join(f", {name} {manifest.num_samples:,}" for name, manifest in outcome.manifests.items())
    say(console, title)
    console.print(summary(outcome.totals))
    for table in outcome.tables:
        console.print(table)
    _note(console, outcome.notes)


def _note(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        say(console, f"note: {escape(note)}")


def _forecast(plan: ConversionPlan, probed: Probe, workers: int, starting: float) -> Table:
    """The dry run's table. `starting`: CPU seconds that this process took to start; its workers take as long."""
    table = Table(title="a dry run: nothing was written", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    images = plan.images
    removed = 0 if probed.findings is None else probed.findings.removed
    losses = (probed.rejected + removed) / max(probed.images, 1)
    for split in plan.splits:
        table.add_row(f"images{f' of {split.name}' if split.name else ''}", f"{split.images:,}")
    ignored = ", ".join(f"{count:,} {reason}" for reason, count in sorted(plan.ignored.items())) or "0"
    seconds = 2 * starting + probed.seconds / max(probed.images, 1) * images / workers
    size = sum(
        expected_bytes(round(plan.images_of(task) * (1 - losses)), probed.bytes_per_image) for task in range(plan.tasks)
    )
    for name, value in (
        ("files ignored", ignored),
        ("classes", f"{len(plan.class_names):,}"),
        ("unlabelled", f"{plan.unlabelled:,}"),
        ("shards", f"{plan.tasks:,} of {counted(plan.shard_samples, 'image')}"),
        ("images probed", f"{probed.images:,}, of which {probed.rejected:,} cannot be stored"),
        ("bytes, about", f"{size:,}"),
        (f"seconds with {counted(workers, 'worker')}, about", f"{seconds:,.0f}"),
    ):
        table.add_row(name, value)
    if probed.findings is not None:
        about = round(removed / max(probed.images, 1) * images)
        table.add_row("copies of test images", f"{removed:,} of the probed images, so about {about:,} would be removed")
    return table
