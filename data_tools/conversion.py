"""One conversion from start to finish: the order of its steps, and how it resumes after being killed.

    list the parts of the source -> order and deal into shards: the plan -> one task per shard -> manifest, written last

Every step leaves its result in the output's state or in the work folder, complete or not at all, so repeating the
command resumes where a killed one stopped. The output depends on the images and the request only: not on workers,
machines, interruptions or the kind of source.
"""

import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import PIL
from rich.markup import escape

from data_tools.conversion_plan import ConversionPlan
from data_tools.dedup.against import NamedIndex, open_matcher
from data_tools.finishing import Outcome, finish, refuse_rejects, reports_of, totals_of
from data_tools.machine import ALL_TASKS, Machine, TaskRange, alone, claimed
from data_tools.output import Output
from data_tools.planning import Begun, Probe, make_plan, make_trial
from data_tools.report import ProgressDisplay, Totals, say
from data_tools.request import Conversion, Request
from data_tools.shard_task import ShardReport, ShardTask
from data_tools.sources import Source
from vitscale.data.shards import Manifest
from vitscale.ground import storage
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.files.durable import make_folder
from vitscale.ground.table import Console
from vitscale.ground.wording import counted


def convert(
    request: Request,
    out: str | Path,
    machine: Machine | None = None,
    console: Console | None = None,
    source: Source | None = None,
) -> Outcome:
    """Start a conversion, or resume an unfinished one with the same request.

    Args:
        request: the options that decide what is written.
        out: folder or URL of the dataset.
        machine: how the conversion is run; the defaults if None.
        console: shows progress; silent if None.
        source: an open source to convert instead of opening `request.src`; `request.taken` then describes it.

    Raises:
        RecipeError: the options are impossible, or differ from those of the unfinished conversion there.
        DataError: the source is empty or damaged, too many images cannot be stored, or the disk fails.
        StorageError: a remote location does not answer.
    """
    machine, console = machine or Machine(), console or Console(quiet=True)
    output = Output.at(str(out), machine.work)
    with disk_errors(output.where):
        _refuse_nested(request.src, output.where)
        if output.is_complete(request.split_names):
            return _already(request, output)
        output.refuse_foreign(request.split_names)
        conversion = Conversion.of(request, output, machine, console, source)
        with _claimed(output, machine.tasks):
            if output.is_complete(request.split_names):  # another converter has finished since
                return _already(request, output)
            return _convert(conversion)


def merge(out: str | Path, max_reject_rate: float, work: Path | None = None) -> Outcome:
    """Write the manifest of a conversion whose task ranges are all done.

    `max_reject_rate` is the largest allowed share of images that cannot be stored, 0 to 1; `work` the local work folder
    given to `convert`, if any.

    Raises:
        RecipeError: there is no unfinished conversion, or some tasks are not done yet.
        DataError: too many images could not be stored, or an index of test sets is missing.
    """
    output = Output.at(str(out), work)
    with disk_errors(output.where):
        begun = Begun.read(output)
        if begun is None and output.is_complete([""]):
            _refuse_incomplete(output, [""])
            return Outcome({}, Totals(), was_complete=True)
        if begun is None or begun.plan is None:
            raise RecipeError(f"--merge {out}: no unfinished conversion there")
        plan = ConversionPlan.from_json(begun.plan, output.work)
        try:
            matcher = open_matcher(tuple(map(NamedIndex.from_json, begun.indexes))) if begun.indexes else None
        except DataError as error:
            raise DataError(
                f"--merge {out}: needs the index that images were compared with. {error}. Put it back, or finish with "
                "the command that began the conversion, its --dedup-against naming where the index is now"
            ) from error
        with _claimed(output, ALL_TASKS):
            output.log("merge", request=begun.request)
            reports = reports_of(output, range(plan.tasks))
            totals = totals_of(reports.values(), plan.ignored)
            return finish(output, plan, reports, max_reject_rate, matcher, totals)


def dry_run(
    request: Request, out: str | Path, machine: Machine, console: Console
) -> tuple[Conversion, ConversionPlan, Probe]:
    """The conversion that `convert` would make, its plan, and a trial of its first images; writes nothing to `out`.

    A source that can only be streamed is copied to a temporary folder, as `convert` would copy it. Raises the same
    errors as `convert`.
    """
    _refuse_nested(request.src, str(out))
    with (
        disk_errors(str(machine.work or tempfile.gettempdir())),
        tempfile.TemporaryDirectory(prefix="vitscale-convert-", dir=machine.work) as folder,
    ):
        conversion = Conversion.of(request, Output(str(out), Path(folder)), machine, console)
        return conversion, *make_trial(conversion)


def _convert(conversion: Conversion) -> Outcome:
    """Make the plan, run this machine's tasks and, if these are all the tasks, write the manifest."""
    request, output, machine = conversion.request, conversion.output, conversion.machine
    started = time.monotonic()
    output.log(
        "start",
        request=request.to_json(),
        workers=machine.processes,
        tasks=str(machine.tasks),
        host=platform.node(),
        versions={"python": platform.python_version(), "pillow": PIL.__version__, "numpy": numpy.__version__},
    )
    # Converters that share a work folder wait for the first one's plan; a converter with its own folder makes the plan.
    console, waiting = conversion.console, "waiting for another converter's plan"
    with alone(output.work / "locks", lambda: console.print(waiting, highlight=False)):
        plan = make_plan(conversion)
    mine = machine.tasks.of(plan.tasks)
    reports = reports_of(output, mine)
    _announce(conversion, plan, len(mine), len(reports))
    todo = [task for task in mine if task not in reports]
    images_now = _run(todo, reports, conversion, plan)
    again = [task for task, report in reports.items() if report.unsteady]
    if again:
        what = f"{counted(len(again), 'shard')} again: not all of their images could be read"
        console.print(what, highlight=False)
        images_now += _run(again, reports, conversion, plan)
    totals = totals_of(reports.values(), plan.ignored)
    totals.seconds, totals.images_now = time.monotonic() - started, images_now
    output.log("tasks done", tasks=str(machine.tasks), **totals.to_json())
    if machine.tasks.count > 1:
        return Outcome({}, totals)
    return finish(output, plan, reports, machine.max_reject_rate, conversion.matcher, totals)


def _run(tasks: list[int], reports: dict[int, ShardReport], conversion: Conversion, plan: ConversionPlan) -> int:
    """Run tasks of the plan and put their reports into `reports`, by number. Returns the number of their images.

    Raises DataError if too many images cannot be stored.
    """
    request, output, machine = conversion.request, conversion.output, conversion.machine
    shard_tasks = (
        ShardTask(
            index=task,
            split=split.name,
            shard=shard,
            rows=rows,
            reader=conversion.reader,
            output=output,
            options=request.images,
            several_labels=plan.several_labels,
            dedup=request.dedup,
        )
        for task, rows in plan.rows(tasks)
        for split, shard in [plan.place(task)]
    )
    count = sum(plan.images_of(task) for task in tasks)
    rejected = sum(report.rejected for report in reports.values())
    run = machine.runner(request.src, output.where)
    with ProgressDisplay(conversion.console, "converting", count) as view:
        for report in run(shard_tasks, view.update):
            before = reports.get(report.task)
            rejected += report.rejected - (before.rejected if before else 0)
            reports[report.task] = report
            counts = {"rejects": report.rejected, **({"removed": report.removed} if request.dedup else {})}
            output.log("shard", task=report.task, seconds=report.seconds, **counts)
            if rejected > machine.max_reject_rate * plan.images:  # the remaining tasks cannot change that
                refuse_rejects(output, plan, reports, machine.max_reject_rate)
    return count


def _announce(conversion: Conversion, plan: ConversionPlan, mine: int, done: int) -> None:
    """Print what there is to do, how much is already done, and which copies `--preset exact` cannot find."""
    console, tasks, stored = conversion.console, conversion.machine.tasks, conversion.request.images
    images, classes = counted(plan.images, "image"), counted(len(plan.class_names), "class")
    here = f", {mine:,} of them in --task-range {tasks}" if tasks.count > 1 else ""
    already = f", {done:,} already done" if done else ""
    say(console, f"{images} of {classes} in {counted(plan.tasks, 'shard')}{here}{already}")
    if conversion.matcher is not None and (stored.short_side or stored.long_side):
        exact = [one.name for one in conversion.matcher.test_sets if not one.settings.near]
        if exact:
            say(
                console,
                f"note: {', '.join(map(escape, exact))}: of images that are shrunk, copies are recognised by their "
                "bytes alone: --preset exact compares no hashes",
            )


def _already(request: Request, output: Output) -> Outcome:
    """The outcome of the same conversion, already finished; removes state left by a kill just before the end.

    Raises RecipeError if `output` holds any other dataset.
    """
    if output.logged_request() != request.to_json():
        raise RecipeError(
            f"OUT {output.where}: already holds a dataset. Choose another directory, or remove this one first"
        )
    _refuse_incomplete(output, request.split_names)
    output.clear_state(request.split_names)
    return Outcome({}, Totals(), was_complete=True)


def _refuse_incomplete(output: Output, splits: list[str]) -> None:
    """Raise DataError if a shard of a finished dataset is missing or truncated."""
    for split in splits:
        place, sizes = output.place(split), storage.sizes_in(output.place(split))
        damaged = [entry.path for entry in Manifest.load(place).shards if sizes.get(entry.path) != entry.bytes]
        if damaged:
            raise DataError(
                f"OUT {place}: was complete, but {len(damaged):,} of its shards are missing or cut, such as "
                f"{damaged[0]}. Remove the output and start anew"
            )


@contextmanager
def _claimed(output: Output, tasks: TaskRange) -> Iterator[None]:
    """Make the output's folders, and lock a range of tasks there."""
    try:
        if not output.is_remote:
            make_folder(Path(output.where))
        output.work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(f"OUT {output.where}: cannot be written ({error.strerror})") from error
    with claimed((output.work if output.is_remote else Path(output.state(""))) / "locks", tasks):
        yield


@contextmanager
def disk_errors(where: str) -> Iterator[None]:
    """Turns the disk's OSErrors into DataErrors."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{error.filename or where}: {error.strerror or error}") from error


def _refuse_nested(src: str, out: str) -> None:
    """Raise RecipeError if the output lies inside the source."""
    if storage.is_url(out) or storage.is_url(src):
        nested = out == src.rstrip("/") or out.startswith(src.rstrip("/") + "/")
    else:
        nested = Path(src).is_dir() and Path(out).resolve().is_relative_to(Path(src).resolve())
    if nested:
        raise RecipeError(f"OUT {out} lies inside SRC {src}: choose another folder")
