"""Finishes a conversion: gathers the tasks' reports, lists what was rejected or removed, writes the manifests."""

import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pyarrow as pa
from rich.table import Table

from data_tools.conversion_plan import ConversionPlan
from data_tools.dedup.matches import Findings
from data_tools.dedup.matching import Matcher
from data_tools.dedup.report import tables, write_report
from data_tools.output import LOG_NAME, REPORT_FOLDER, Output
from data_tools.report import Totals
from data_tools.shard_task import ShardReport
from vitscale.data.shards import MANIFEST_NAME, Manifest, field_names
from vitscale.data.shards.opening import local_copy
from vitscale.data.shards.provenance import DECISIONS, DECISIONS_NAME, REJECTS, REJECTS_NAME, read_table, write_tables
from vitscale.ground import storage
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.wording import counted, ranges

_SHOWN_REJECTS = 20
_REQUESTS_AT_ONCE = 32


@dataclass(frozen=True)
class Outcome:
    """The result of a conversion."""

    manifests: dict[str, Manifest]  # the datasets, by split; empty while other machines still have tasks
    totals: Totals  # counts over the reports
    was_complete: bool = False  # whether the conversion had been finished before, so nothing was done
    tables: Sequence[Table] = ()  # what was removed as a copy of a test image, for people
    notes: Sequence[str] = ()  # likely mistakes in the classes, one line each


def reports_of(output: Output, tasks: Iterable[int]) -> dict[int, ShardReport]:
    """Reports of the tasks that are done: their shard exists at full size and they are not marked for repetition."""
    marked = storage.sizes_in(output.state("done"))
    markers = [output.of_task(task, "json") for task in tasks]
    done = [marker for marker in markers if storage.base_name(marker) in marked]
    reports = [ShardReport.from_json(text) for text in _read_all(output, done)]
    sizes = {split: storage.sizes_in(output.place(split)) for split in {report.split for report in reports}}
    return {
        report.task: report
        for report in reports
        if not report.is_to_be_repeated
        and (report.entry is None or sizes[report.split].get(report.entry.path) == report.entry.bytes)
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
    """Raise DataError if a dataset has no image left."""
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
        findings.add(Findings.from_json(json.loads(content)))
    with tempfile.TemporaryDirectory(prefix="report-", dir=output.work) as folder:
        names = write_report(Path(folder), matcher, findings)
        output.fill_folder(split, REPORT_FOLDER, Path(folder), names)
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

    Tasks with images that could not even be read are marked for repetition: a disk may have been unavailable.
    """
    rejected = sum(report.rejected for report in reports.values())
    rejects = _tables(output, reports.values(), "rejects.parquet", REJECTS)
    examples = itertools.chain.from_iterable(table.to_pylist() for table in rejects)
    lines = [f"  {row['key']!r}: {row['reason']}" for row in itertools.islice(examples, _SHOWN_REJECTS)]
    if rejected > len(lines):
        lines.append(f"  ... and {rejected - len(lines):,} more")
    for report in reports.values():
        if report.unread:
            output.write(output.of_task(report.task, "json"), replace(report, is_to_be_repeated=True).to_json())
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
