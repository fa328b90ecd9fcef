"""A conversion from beginning to end.

    list the parts of the source -> order and deal into shards: the plan -> one task a shard -> manifest, written last

Every step leaves its result in the output's state or in the work folder, complete or not at all, so that the same
command goes on where a killed one stopped. The output depends on the images and the request alone: not on workers,
machines, interruptions or the kind of source.
"""

import itertools
import json
import os
import platform
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy
import PIL
import pyarrow as pa
from rich.console import Console
from rich.markup import escape

from data_tools.engines.inline import run_inline
from data_tools.engines.local import run_in_processes
from data_tools.engines.task import Task, Tick
from data_tools.listing import ListingTask, PartSummary, Spool
from data_tools.locks import ALL_TASKS, TaskRange, alone, claimed
from data_tools.output import Output
from data_tools.plan import Ordered, Plan, order_images, write_plan
from data_tools.probe import PROBED, Probe, probe
from data_tools.report import ProgressView, Totals
from data_tools.request import Request, refuse_changed
from data_tools.shard_task import Reader, ShardReport, ShardTask
from data_tools.sources import Source, open_source
from vitscale import storage
from vitscale.errors import DataError, RecipeError
from vitscale.shards import MANIFEST_NAME, Manifest, field_names
from vitscale.shards.provenance import REJECTS_NAME, read_rejects, write_rejects

Engine = Literal["local", "ray"]
Run = Callable[[Iterable[Task], Tick], Iterator[Any]]

_SHOWN_REJECTS = 20
_STATE_FILE = "conversion.json"
_REQUEST_FILE = "request.json"


@dataclass(frozen=True)
class Machine:
    """How a conversion is run; nothing of it changes what is written.

    Attributes:
        workers: processes; None for one a core.
        engine: where tasks run: processes of this machine, or a Ray cluster.
        tasks: the share of the tasks that is done here; the others are someone else's.
        work: local folder for what only this machine needs; None for the output's own.
        max_reject_rate: share of images that may be impossible to store.
    """

    workers: int | None = None
    engine: Engine = "local"
    tasks: TaskRange = ALL_TASKS
    work: Path | None = None
    max_reject_rate: float = 0.01

    @property
    def processes(self) -> int:
        return self.workers or len(os.sched_getaffinity(0))

    def runner(self, *places: str) -> Run:
        """What runs tasks that reach `places`."""
        if any(place.startswith("memory://") for place in places):  # no other process sees this memory
            return run_inline
        if self.engine == "ray":
            from data_tools.engines.ray import run_on_ray

            return lambda tasks, tick: run_on_ray(tasks, self.workers, tick)
        return lambda tasks, tick: run_in_processes(tasks, self.processes, tick)


@dataclass(frozen=True)
class Outcome:
    """What a conversion has come to: the data sets by split, or none while other machines still have tasks."""

    manifests: dict[str, Manifest]
    totals: Totals
    was_complete: bool = False


def convert(
    request: Request, out: str | Path, machine: Machine | None = None, console: Console | None = None
) -> Outcome:
    """Convert what is asked for into a data set at the folder or URL `out`, or go on with doing so.

    Raises:
        RecipeError: options that cannot be followed, or that differ from those of the unfinished conversion there.
        DataError: a source that is empty, damaged or has too many images that cannot be stored; a disk that refuses.
        StorageError: a remote place that does not answer.
    """
    machine, console = machine or Machine(), console or Console(quiet=True)
    output = Output.at(str(out), machine.work)
    _refuse_nested(request.src, output.where)
    # Before anything long starts: FFCV is loaded (or missed) here, not first in a worker.
    import data_tools.images  # noqa: F401

    try:
        if output.is_complete(request.split_names):
            return _already(request, output)
        output.refuse_foreign(request.split_names)
        _create(output)
        with claimed(_locks(output), machine.tasks):
            if output.is_complete(request.split_names):  # another converter has finished since
                return _already(request, output)
            return _convert(request, output, machine, console)
    except OSError as error:
        raise DataError(f"{error.filename or output.where}: {error.strerror or error}") from error


def _convert(request: Request, output: Output, machine: Machine, console: Console) -> Outcome:
    started = time.monotonic()
    run = machine.runner(request.src, output.where)
    output.log("start", request=request.to_json(), **_described(machine))
    source = open_source(request.src, request.kind, request.source, has_splits=bool(request.splits))
    with alone(_locks(output)):
        plan = _planned(request, source, output, run, console)
    mine = machine.tasks.of(plan.tasks)
    reports = _done(output, mine)
    todo = [task for task in mine if task not in reports]
    console.print(
        f"{plan.images:,} images of {len(plan.class_names):,} classes in {plan.tasks:,} shards"
        + (f", {len(mine):,} of them in --task-range {machine.tasks}" if machine.tasks.count > 1 else "")
        + (f", {len(reports):,} done before" if reports else ""),
        highlight=False,
        soft_wrap=True,
    )
    reader: Reader = Spool(output.work / "listing") if source.streams else source
    tasks = (
        ShardTask(
            index=task,
            split=split.name,
            shard=shard,
            rows=rows,
            reader=reader,
            output=output,
            options=request.images,
            capacity=plan.shard_samples,
            several_labels=plan.several_labels,
        )
        for task, rows in plan.rows(todo)
        for split, shard in [plan.place(task)]
    )
    images = sum(plan.images_of(task) for task in todo)
    with ProgressView(console, "converting", images) as view:
        for report in run(tasks, view.update):
            reports[report.task] = report
            output.log("shard", task=report.task, seconds=report.seconds, rejects=report.rejected)
            rejected = sum(done.rejected for done in reports.values())
            if rejected > machine.max_reject_rate * plan.images:  # the rest cannot mend it
                _judge_rejects(output, reports, plan.images, machine.max_reject_rate)
    seconds = time.monotonic() - started
    if machine.tasks.count > 1:
        output.log("tasks done", tasks=str(machine.tasks), seconds=round(seconds, 3))
        return Outcome({}, _totals(list(reports.values()), seconds, plan.ignored))
    return _finish(output, plan, machine.max_reject_rate, seconds)


def merge(out: str | Path, max_reject_rate: float, work: Path | None = None) -> Outcome:
    """Write the manifest of a conversion whose task ranges have all been done.

    Raises:
        RecipeError: no unfinished conversion there, or tasks that are not done yet.
        DataError: too many images that could not be stored.
    """
    output = Output.at(str(out), work)
    begun = output.read_state(_STATE_FILE)
    if begun is None:
        raise RecipeError(f"--merge {out}: no unfinished conversion there")
    with claimed(_locks(output), ALL_TASKS):
        return _finish(output, Plan.from_json(json.loads(begun)["plan"], output.work), max_reject_rate, 0.0)


def dry_run(request: Request, out: str | Path, machine: Machine, console: Console) -> tuple[Plan, Probe]:
    """What `convert` would write, without writing anything to `out`; and what the first images came to.

    A source that can only be streamed is copied to a temporary folder, as `convert` would copy it.
    """
    run = machine.runner(request.src)
    source = open_source(request.src, request.kind, request.source, has_splits=bool(request.splits))
    with tempfile.TemporaryDirectory(prefix="vitscale-convert-", dir=machine.work) as folder:
        work = Output(str(out), Path(folder))
        try:
            ordered = _listed(request, source, work, run, console)
            first, rest = _peek(ordered.batches)
            probed = probe(first, _reader(source, work), request.images)
            return _write_plan(request, ordered, rest, probed, work), probed
        except OSError as error:
            raise DataError(f"{error.filename or folder}: {error.strerror or error}") from error


# ------------------------------------------------------------------------------------------------------------ planning


def _planned(request: Request, source: Source, output: Output, run: Run, console: Console) -> Plan:
    """The plan: the one that the output was begun with, or a new one."""
    asked = request.to_json()
    begun = output.read_state(_STATE_FILE)
    if begun is not None:
        refuse_changed(json.loads(begun)["request"], asked, output.where)
    plan = Plan.load(output.work) if _is_ours(output.work, asked) else None
    if plan is None:
        plan = _new_plan(request, source, output, run, console)
    if begun is None:
        output.mark(_STATE_FILE, json.dumps({"request": asked, "plan": plan.described()}))
    elif json.loads(begun)["plan"]["sha256"] != plan.sha256:
        raise RecipeError(
            f"OUT {output.where}: was begun with another plan for the same request: the source has changed since. "
            "Remove the output and start anew"
        )
    return plan


def _new_plan(request: Request, source: Source, output: Output, run: Run, console: Console) -> Plan:
    work = output.work
    work.mkdir(parents=True, exist_ok=True)
    if not _is_ours(work, request.to_json()):
        shutil.rmtree(work / "listing", ignore_errors=True)
        (work / _REQUEST_FILE).write_text(json.dumps(request.to_json()))
    try:
        ordered = _listed(request, source, output, run, console)
        batches, probed = ordered.batches, None
        if request.shard_bytes is not None:
            first, batches = _peek(ordered.batches)
            probed = probe(first, _reader(source, output), request.images)
        plan = _write_plan(request, ordered, batches, probed, output)
    except (DataError, RecipeError):
        shutil.rmtree(work / "listing", ignore_errors=True)  # what was listed is to be mended
        raise
    if not source.streams:
        shutil.rmtree(work / "listing", ignore_errors=True)
    return plan


def _is_ours(work: Path, asked: dict[str, Any]) -> bool:
    try:
        return json.loads((work / _REQUEST_FILE).read_text("utf-8")) == asked
    except (FileNotFoundError, ValueError):
        return False


def _listed(request: Request, source: Source, output: Output, run: Run, console: Console) -> Ordered:
    """The images of the source in order; lists the parts that are not listed yet."""
    folder = output.work / "listing"
    folder.mkdir(parents=True, exist_ok=True)
    todo = [part for part in range(len(source.parts)) if PartSummary.load(folder, part) is None]
    console.print(f"listing {escape(request.src)}", highlight=False, soft_wrap=True)
    tasks = [ListingTask(source, part, folder, request.shuffle_seed) for part in todo]
    if len(source.parts) == 1 and not source.streams:
        run = run_inline  # a process would take longer to start
    with ProgressView(console, "listing", None) as view:
        for _ in run(tasks, view.update):
            pass
    return order_images(source, folder, request.shuffle_seed, request.classes, unlabelled=request.unlabelled)


def _write_plan(
    request: Request, ordered: Ordered, batches: Iterator[Any], probed: Probe | None, output: Output
) -> Plan:
    shard_samples = request.shard_samples
    if request.shard_bytes is not None:
        assert probed is not None
        shard_samples = probed.samples_in(request.shard_bytes)
    return write_plan(
        ordered,
        batches,
        output.work,
        request.splits,
        shard_samples=shard_samples,
        limit=request.limit,
        seed=request.shuffle_seed,
        options={name: request.manifest_options(name, shard_samples) for name in request.split_names},
    )


def _peek(batches: Iterator[Any]) -> tuple[list[Any], Iterator[Any]]:
    """The first images, and all of them."""
    first: list[Any] = []
    while sum(batch.num_rows for batch in first) < PROBED and (batch := next(batches, None)) is not None:
        first.append(batch)
    return first, itertools.chain(first, batches)


def _reader(source: Source, output: Output) -> Reader:
    return Spool(output.work / "listing") if source.streams else source


# ----------------------------------------------------------------------------------------------------------- finishing


def _done(output: Output, tasks: Iterable[int]) -> dict[int, ShardReport]:
    """Reports of those tasks that are done, whose shard is there, and that nothing is gained by repeating."""
    marked = set(storage.names_in(output.state("done")))
    reports = {}
    for task in tasks:
        if _marker(task) not in marked:
            continue
        content = output.read_state(f"done/{_marker(task)}")
        assert content is not None
        report = ShardReport.from_json(content)
        if not report.unread and _is_there(output, report):
            reports[task] = report
    return reports


def _marker(task: int) -> str:
    return f"{task:06d}.json"


def _is_there(output: Output, report: ShardReport) -> bool:
    if report.entry is None:
        return True
    return storage.size_of(storage.join(output.place(report.split), report.entry.path)) == report.entry.bytes


def _finish(output: Output, plan: Plan, max_reject_rate: float, seconds: float) -> Outcome:
    """Write the manifests, and remove what only an unfinished conversion needs.

    Raises:
        RecipeError: tasks that are not done.
        DataError: too many rejects.
    """
    markers = [output.read_state(f"done/{_marker(task)}") for task in range(plan.tasks)]
    missing = [task for task, marker in enumerate(markers) if marker is None]
    reports = {task: ShardReport.from_json(marker) for task, marker in enumerate(markers) if marker is not None}
    missing += [task for task, report in reports.items() if not _is_there(output, report)]
    if missing:
        raise RecipeError(
            f"OUT {output.where}: {len(missing):,} of {plan.tasks:,} shards are not done yet: "
            f"{_ranges(sorted(missing))}. Run the task ranges that they belong to"
        )
    _judge_rejects(output, reports, plan.images, max_reject_rate)
    totals = _totals(list(reports.values()), seconds, plan.ignored)
    output.log("converted", **_loggable(totals))
    manifests = {}
    for split in plan.splits:
        of_split = [reports[task] for task in range(plan.tasks) if plan.place(task)[0] is split]
        if any(report.rejected for report in of_split):
            with output.staged(split.name, [REJECTS_NAME]) as (path,):
                write_rejects(path, _rejects(output, of_split))
        entries = tuple(report.entry for report in of_split if report.entry is not None)
        manifest = Manifest(
            fields=field_names(with_labels=plan.several_labels),
            num_samples=sum(entry.samples for entry in entries),
            class_names=plan.class_names,
            shuffle_seed=plan.shuffle_seed,
            options=split.options,
            num_rejected=sum(report.rejected for report in of_split),
            shards=entries,
        )
        with output.staged(split.name, [MANIFEST_NAME]) as (path,):
            manifests[split.name] = manifest.save(path.parent)
    output.put_log()
    output.clear_state()
    return Outcome(manifests, totals)


def _ranges(numbers: list[int]) -> str:
    """`0-3, 7, 9-12`, of the first few."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    shown = ", ".join(f"{a:,}" if a == b else f"{a:,}-{b:,}" for a, b in spans[:10])
    return shown + (" ..." if len(spans) > 10 else "")


def _rejects(output: Output, reports: Iterable[ShardReport]) -> Iterator[pa.Table]:
    """The tables of rejects that tasks have left, one in memory at a time."""
    for report in reports:
        if report.rejected:
            yield read_rejects(output.state(f"done/{report.task:06d}.rejects.parquet"))


def _judge_rejects(output: Output, reports: dict[int, ShardReport], images: int, max_rate: float) -> None:
    """Raise DataError if more images than allowed cannot be stored, or none can."""
    rejected = sum(report.rejected for report in reports.values())
    if not rejected or (rejected <= max_rate * images and rejected < images):
        return
    examples = itertools.chain.from_iterable(table.to_pylist() for table in _rejects(output, reports.values()))
    lines = [f"  {row['key']!r}: {row['reason']}" for row in itertools.islice(examples, _SHOWN_REJECTS)]
    if rejected > len(lines):
        lines.append(f"  ... and {rejected - len(lines):,} more")
    raise DataError(
        f"{rejected:,} of {images:,} images ({rejected / images:.2%}) cannot be stored; --max-reject-rate {max_rate:g} "
        "allows less. No manifest was written. Mend them, or repeat the command with a higher rate: what is done is "
        "kept, and images that could not even be read are tried again\n" + "\n".join(lines)
    )


def _totals(reports: list[ShardReport], seconds: float, ignored: dict[str, int]) -> Totals:
    entries = [report.entry for report in reports if report.entry is not None]
    return Totals(
        samples=sum(entry.samples for entry in entries),
        passed_through=sum(report.passed_through for report in reports),
        transcoded=sum(report.transcoded for report in reports),
        rejected=sum(report.rejected for report in reports),
        shards=len(entries),
        bytes=sum(entry.bytes for entry in entries),
        seconds=seconds,
        ignored=Counter(ignored),
    )


def _already(request: Request, output: Output) -> Outcome:
    """The same conversion, finished before; what a kill in its last moments has left is removed.

    Raises RecipeError for any other data set.
    """
    if output.logged_request() != request.to_json():
        raise RecipeError(
            f"OUT {output.where}: already holds a dataset. Choose another directory, or remove this one first"
        )
    output.clear_state()
    return Outcome({}, Totals(), was_complete=True)


def _create(output: Output) -> None:
    try:
        if not output.is_remote:
            Path(output.where).mkdir(parents=True, exist_ok=True)
        output.work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(f"OUT {output.where}: cannot be written ({error.strerror})") from error


def _locks(output: Output) -> Path:
    return (output.work if output.is_remote else Path(output.state(""))) / "locks"


def _refuse_nested(src: str, out: str) -> None:
    if not storage.is_url(out) and not storage.is_url(src):
        # A pattern has no `resolve`, but then it is the folder before it that counts.
        base = Path(src) if os.path.lexists(src) else Path(src.split("*")[0]).parent
        if base.is_dir() and Path(out).resolve().is_relative_to(base.resolve()):
            raise RecipeError(f"OUT {out} lies inside of SRC {src}: choose a directory elsewhere")
    elif out == src.rstrip("/") or out.startswith(src.rstrip("/") + "/"):
        raise RecipeError(f"OUT {out} lies inside of SRC {src}: choose another place")


def _loggable(totals: Totals) -> dict[str, object]:
    return {
        "samples": totals.samples,
        "rejected": totals.rejected,
        "ignored": dict(totals.ignored),
        "seconds": round(totals.seconds, 3),
    }


def _described(machine: Machine) -> dict[str, Any]:
    return {
        "workers": machine.processes,
        "engine": machine.engine,
        "tasks": str(machine.tasks),
        "host": platform.node(),
        "versions": {"python": platform.python_version(), "pillow": PIL.__version__, "numpy": numpy.__version__},
    }
