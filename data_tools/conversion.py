"""One conversion from start to finish: the order of its steps, and how it resumes after being killed.

    list the parts of the source -> order and deal into shards: the plan -> one task per shard -> manifest, written last

Every step leaves its result in the output's state or in the work folder, complete or not at all, so repeating the
command resumes where a killed one stopped. The output depends on the images and the request only: not on workers,
machines, interruptions or the kind of source.
"""

import itertools
import json
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import numpy
import PIL
import pyarrow as pa
from rich.markup import escape
from rich.table import Table

from data_tools.dedup.against import NamedIndex, open_matcher
from data_tools.dedup.matches import Findings
from data_tools.dedup.matching import Matcher
from data_tools.dedup.report import tables, write_report
from data_tools.machine import ALL_TASKS, Machine, TaskRange, alone, claimed
from data_tools.output import LOG_NAME, REPORT_FOLDER, Output
from data_tools.plan import ConversionPlan
from data_tools.planning import Begun, Probe, make_plan, make_trial
from data_tools.report import ProgressDisplay, Totals, say
from data_tools.request import Conversion, Request
from data_tools.shard_task import ShardReport, ShardTask
from data_tools.sources import Source
from vitscale.data.shards import MANIFEST_NAME, Manifest, field_names
from vitscale.data.shards.opening import local_copy
from vitscale.data.shards.provenance import DECISIONS, DECISIONS_NAME, REJECTS, REJECTS_NAME, read_table, write_tables
from vitscale.ground import storage
from vitscale.ground.errors import DataError, RecipeError, os_errors
from vitscale.ground.files.durable import make_folder
from vitscale.ground.table import Console
from vitscale.ground.wording import counted, ranges

_SHOWN_REJECTS = 20
_REQUESTS_AT_ONCE = 32


class Outcome(NamedTuple):
    """The result of a conversion."""

    manifests: dict[str, Manifest]  # the datasets, by split; empty while other machines still have tasks
    totals: Totals  # counts over the reports
    was_complete: bool = False  # whether the conversion had been finished before, so nothing was done
    tables: Sequence[Table] = ()  # what was removed as a copy of a test image, for people
    notes: Sequence[str] = ()  # likely mistakes in the classes, one line each


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
        output.refuse_foreign([split.name for split in plan.splits])
        with output.reading_state():
            indexes = tuple(map(NamedIndex.from_json, begun.indexes))
        try:
            matcher = open_matcher(indexes) if indexes else None
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
    images_now = _run([task for task in mine if task not in reports], reports, conversion, plan)
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
    with os_errors(f"OUT {output.where}: cannot be written", RecipeError):
        if not output.is_remote:
            make_folder(Path(output.where))
        output.work.mkdir(parents=True, exist_ok=True)
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
    if storage.is_url(out) or storage.is_url(src):
        nested = out == src.rstrip("/") or out.startswith(src.rstrip("/") + "/")
    else:
        nested = Path(src).is_dir() and Path(out).resolve().is_relative_to(Path(src).resolve())
    if nested:
        raise RecipeError(f"OUT {out} lies inside SRC {src}: choose another folder")


def reports_of(output: Output, tasks: Iterable[int]) -> dict[int, ShardReport]:
    """Reports of the tasks that are done: their shard exists at full size."""
    marked = storage.sizes_in(output.state("done"))
    done = {n: file for n in tasks if storage.base_name(file := output.of_task(n, "json")) in marked}
    with output.reading_state():
        reports = [ShardReport.from_json(text) for text in _read_all(output, done.values())]
        if [report.task for report in reports] != list(done):
            raise ValueError("a report of another task")
    sizes = {split: storage.sizes_in(output.place(split)) for split in {report.split for report in reports}}
    return {
        report.task: report
        for report in reports
        if report.entry is None or sizes[report.split].get(report.entry.path) == report.entry.bytes
    }


def _read_all(output: Output, files: Iterable[str]) -> Iterator[bytes]:
    """The contents of state files, at most `_REQUESTS_AT_ONCE` of them in memory."""
    remaining = iter(files)
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE if output.is_remote else 1) as pool:
        while some := list(itertools.islice(remaining, _REQUESTS_AT_ONCE)):
            yield from pool.map(storage.read_bytes, some)


def finish(
    output: Output,
    plan: ConversionPlan,
    reports: dict[int, ShardReport],
    max_reject_rate: float,
    matcher: Matcher | None,
    totals: Totals,
) -> Outcome:
    """Write the manifests, and remove the state of the unfinished conversion.

    `reports` are those of all tasks, by task number; `max_reject_rate` is the largest allowed share of rejected images,
    0 to 1; `matcher` is what images were compared by, None if they were not; `totals` go into the outcome.

    Raises:
        RecipeError: some tasks are not done.
        DataError: too many images were rejected, or a dataset has no image left.
    """
    missing = [task for task in range(plan.tasks) if task not in reports]
    if missing:
        raise RecipeError(
            f"OUT {output.where}: {len(missing):,} of {plan.tasks:,} shards are not done yet: {ranges(missing)}. Run "
            "the task ranges that they belong to"
        )
    rejected = sum(report.rejected for report in reports.values())
    if rejected > max_reject_rate * plan.images or rejected == plan.images:
        refuse_rejects(output, plan, reports, max_reject_rate)
    by_split = {
        split.name: [reports[task] for task in range(plan.tasks) if plan.place(task)[0] is split]
        for split in plan.splits
    }
    removals: Sequence[Table] = ()
    if matcher is not None:
        _refuse_all_removed(output, by_split)
        findings = Findings(matcher.names)
        for name, of_split in by_split.items():
            findings.add(_write_findings(output, name, of_split, matcher))
        removals = tables(matcher, findings)
    if output.is_remote:
        storage.put(output.log_path, output.place(name=LOG_NAME))
    manifests = {}
    for split in plan.splits:
        of_split = by_split[split.name]
        num_rejected, rejects = sum(report.rejected for report in of_split), output.place(split.name, REJECTS_NAME)
        if num_rejected:
            with output.staged(rejects) as (path,):
                write_tables(path, _tables(output, of_split, "rejects.parquet", REJECTS), REJECTS)
        else:
            storage.remove(rejects)  # left by an attempt to finish before the images were repaired
        entries = tuple(report.entry for report in of_split if report.entry is not None)
        manifest = Manifest(
            fields=field_names(with_labels=plan.several_labels),
            num_samples=sum(entry.samples for entry in entries),
            class_names=plan.class_names,
            shuffle_seed=plan.shuffle_seed,
            options=split.options,
            num_rejected=num_rejected,
            num_removed=sum(report.removed for report in of_split),
            shards=entries,
        )
        with output.staged(output.place(split.name, MANIFEST_NAME)) as (path,):
            manifests[split.name] = manifest.save(path.parent)
    output.clear_state([split.name for split in plan.splits])
    return Outcome(manifests, totals, tables=removals, notes=plan.notes)


def _refuse_all_removed(output: Output, by_split: dict[str, list[ShardReport]]) -> None:
    for split, reports in by_split.items():
        if not any(report.entry for report in reports):
            removed, rejected = sum(report.removed for report in reports), sum(report.rejected for report in reports)
            raise DataError(
                f"OUT {output.place(split)}: no image is left: {removed:,} are copies of test images, {rejected:,} "
                "cannot be stored. No manifest was written. Is SRC the test set itself? Remove the output and choose "
                "another SRC or another --dedup-against"
            )


def _write_findings(output: Output, split: str, reports: list[ShardReport], matcher: Matcher) -> Findings:
    """Write a split's decisions and the report on them; returns its findings."""
    with output.staged(output.place(split, DECISIONS_NAME)) as (path,):
        write_tables(path, _tables(output, reports, "dedup.parquet", DECISIONS), DECISIONS)
    findings = Findings(matcher.names)
    for content in _read_all(output, (output.of_task(report.task, "dedup.json") for report in reports)):
        with output.reading_state():
            findings.add(Findings.from_json(json.loads(content)))
    with tempfile.TemporaryDirectory(prefix="report-", dir=output.work) as folder:
        output.fill_folder(split, REPORT_FOLDER, Path(folder), write_report(Path(folder), matcher, findings))
    return findings


def _tables(
    output: Output, reports: Iterable[ShardReport], kind: Literal["rejects.parquet", "dedup.parquet"], schema: pa.Schema
) -> Iterator[pa.Table]:
    """The tasks' tables of rejects or decisions, one in memory at a time."""
    for report in reports:
        if report.rejected if kind == "rejects.parquet" else report.decisions:
            with local_copy(output.of_task(report.task, kind)) as path:
                yield read_table(path, schema)


def refuse_rejects(output: Output, plan: ConversionPlan, reports: dict[int, ShardReport], max_rate: float) -> None:
    """Raise DataError because more images than allowed cannot be stored.

    Tasks with images that could not even be read are no longer marked as done: a disk may have been unavailable.
    """
    rejected = sum(report.rejected for report in reports.values())
    rejects = _tables(output, reports.values(), "rejects.parquet", REJECTS)
    examples = itertools.chain.from_iterable(table.to_pylist() for table in rejects)
    lines = [f"  {row['key']!r}: {row['reason']}" for row in itertools.islice(examples, _SHOWN_REJECTS)]
    if rejected > len(lines):
        lines.append(f"  ... and {rejected - len(lines):,} more")
    for report in reports.values():
        if report.unread:
            storage.remove(output.of_task(report.task, "json"))
    raise DataError(
        f"{rejected:,} of {counted(plan.images, 'image')} ({rejected / plan.images:.2%}) cannot be stored; "
        f"--max-reject-rate {max_rate:g} allows less. No manifest was written. Repeat the command with a higher rate: "
        "what is done is kept, and images that could not even be read are tried again; or repair the source and start "
        "anew\n" + "\n".join(lines)
    )


def totals_of(reports: Iterable[ShardReport], ignored: dict[str, int]) -> Totals:
    """Sums over reports."""
    totals = Totals(ignored=Counter(ignored))
    for report in reports:
        for name in ("passed_through", "transcoded", "unlabelled", "rejected", "removed"):
            vars(totals)[name] += getattr(report, name)
        if report.entry is not None:
            totals.samples += report.entry.samples
            totals.shards += 1
            totals.bytes += report.entry.bytes
    return totals
