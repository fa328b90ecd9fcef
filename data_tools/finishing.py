"""From tasks that are done to data sets: their reports, what could not be stored, and the manifests."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pyarrow as pa

from data_tools.output import Output
from data_tools.plan import Plan
from data_tools.report import Totals
from data_tools.shard_task import ShardReport
from vitscale.errors import DataError, RecipeError
from vitscale.shards import MANIFEST_NAME, Manifest, field_names
from vitscale.shards.provenance import REJECTS_NAME, read_rejects, write_rejects

_SHOWN_REJECTS = 20
_REQUESTS_AT_ONCE = 32


@dataclass(frozen=True)
class Outcome:
    """What a conversion has come to: the data sets by split, or none while other machines still have tasks."""

    manifests: dict[str, Manifest]
    totals: Totals
    was_complete: bool = False


def reports_of(output: Output, tasks: Iterable[int]) -> dict[int, ShardReport]:
    """Reports of those tasks that are done, whose shard is there, and that are not to be repeated."""
    marked = output.sizes_of_state("done")
    todo = [task for task in tasks if Output.marker_name(task) in marked]
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE if output.is_remote else 1) as pool:
        reports = [ShardReport.from_json(marker) for marker in pool.map(output.read_marker, todo)]
    sizes = {split: output.sizes_in(split) for split in {report.split for report in reports}}
    return {
        report.task: report
        for report in reports
        if not report.is_to_be_repeated
        and (report.entry is None or sizes[report.split].get(report.entry.path) == report.entry.bytes)
    }


def finish(output: Output, plan: Plan, reports: dict[int, ShardReport], max_reject_rate: float) -> dict[str, Manifest]:
    """Write the manifests, and remove what only an unfinished conversion needs.

    Raises:
        RecipeError: tasks that are not done.
        DataError: too many rejects.
    """
    missing = [task for task in range(plan.tasks) if task not in reports]
    if missing:
        raise RecipeError(
            f"OUT {output.where}: {len(missing):,} of {plan.tasks:,} shards are not done yet: {_ranges(missing)}. Run "
            "the task ranges that they belong to"
        )
    rejected = sum(report.rejected for report in reports.values())
    if rejected > max_reject_rate * plan.images or rejected == plan.images:
        refuse_rejects(output, plan, reports, max_reject_rate)
    output.put_log()
    manifests = {}
    for split in plan.splits:
        of_split = [reports[task] for task in range(plan.tasks) if plan.place(task)[0] is split]
        if any(report.rejected for report in of_split):
            with output.staged(split.name, [REJECTS_NAME]) as (path,):
                write_rejects(path, _rejects(output, of_split))
        else:
            output.remove(split.name, REJECTS_NAME)  # of an attempt to finish before rejected images were mended
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
    output.clear_state([split.name for split in plan.splits])
    return manifests


def refuse_rejects(output: Output, plan: Plan, reports: dict[int, ShardReport], max_rate: float) -> None:
    """Raise DataError: more images than allowed cannot be stored.

    Tasks with images that could not even be read are marked to be repeated: a disk may have been away.
    """
    rejected = sum(report.rejected for report in reports.values())
    examples = itertools.chain.from_iterable(table.to_pylist() for table in _rejects(output, reports.values()))
    lines = [f"  {row['key']!r}: {row['reason']}" for row in itertools.islice(examples, _SHOWN_REJECTS)]
    if rejected > len(lines):
        lines.append(f"  ... and {rejected - len(lines):,} more")
    for report in reports.values():
        if report.unread:
            output.mark_done(replace(report, is_to_be_repeated=True).to_json(), report.task)
    raise DataError(
        f"{rejected:,} of {plan.images:,} images ({rejected / plan.images:.2%}) cannot be stored; --max-reject-rate "
        f"{max_rate:g} allows less. No manifest was written. Repeat the command with a higher rate: what is done is "
        "kept, and images that could not even be read are tried again; or mend the source and start anew\n"
        + "\n".join(lines)
    )


def totals_of(reports: Iterable[ShardReport], ignored: dict[str, int]) -> Totals:
    """Sums over reports."""
    totals = Totals(ignored=Counter(ignored))
    for report in reports:
        totals.passed_through += report.passed_through
        totals.transcoded += report.transcoded
        totals.rejected += report.rejected
        if report.entry is not None:
            totals.samples += report.entry.samples
            totals.shards += 1
            totals.bytes += report.entry.bytes
    return totals


def _rejects(output: Output, reports: Iterable[ShardReport]) -> Iterator[pa.Table]:
    """The tables of rejects that tasks have left, one in memory at a time."""
    for report in reports:
        if report.rejected:
            yield read_rejects(output.state(Output.rejects_name(report.task)))


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
