"""Makes the plan: lists the source, orders its images, deals them into shards; or reads a plan that was made before.

In the output's state, `conversion.json` says what was asked for and, once it is made, the plan: several machines work
on one output by it. In the work folder, `request.json` says which conversion the plan beside it belongs to, and in the
listing, which outlives a change of what is planned with it, what was listed.
"""

import itertools
import json
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.markup import escape

from data_tools.engines.inline import run_inline
from data_tools.engines.task import Task, Tick
from data_tools.listing import ListingTask, PartSummary, Spool, fingerprint
from data_tools.order import Ordered, order_images
from data_tools.output import CONVERSION_NAME, Output
from data_tools.plan import Plan, write_plan
from data_tools.probe import PROBED, Probe, probe
from data_tools.report import ProgressView
from data_tools.request import Request, refuse_changed
from data_tools.shard_task import Reader
from data_tools.sources import Source
from vitscale import storage
from vitscale.errors import RecipeError
from vitscale.files.durable import write_text

Run = Callable[[Iterable[Task], Tick], Iterator[Any]]

_VERSION = 2
_REQUEST_FILE = "request.json"
_REQUESTS_AT_ONCE = 32


@dataclass(frozen=True)
class Begun:
    """A conversion that is not finished: what was asked for, and the plan, if it is made, as `Plan.described` gives it.

    `indexes` are those of test sets, as `NamedIndex.to_json` gives them: where they lie is no part of what was asked.
    `identity` is new for every conversion: what an older one has left in a work folder is not taken for this one's.
    """

    identity: str
    request: dict[str, Any]
    indexes: list[dict[str, Any]]
    plan: dict[str, Any] | None

    @classmethod
    def read(cls, output: Output) -> "Begun | None":
        """What stands in an output's state. Raises RecipeError for that of another version of vitscale."""
        content = output.read_state(CONVERSION_NAME)
        if content is None:
            return None
        try:
            state = json.loads(content)
            if state.pop("version", None) == _VERSION:
                return cls(**state)
            what = "was begun by another version of vitscale. Finish it with that one, or remove"
        except (ValueError, TypeError, AttributeError):
            what = f"its state, {output.state(CONVERSION_NAME)}, is damaged. Remove"
        raise RecipeError(f"OUT {output.where}: {what} the output and start anew")

    def write(self, output: Output) -> None:
        output.mark(CONVERSION_NAME, json.dumps({"version": _VERSION, **self.__dict__}))


def planned(
    request: Request, source: Source, output: Output, run: Run, console: Console, *, allow_unlabelled: bool = False
) -> Plan:
    """The plan that the output was begun with, or a new one.

    `allow_unlabelled`: whether any share of the images may be without a label where others have one.

    Raises:
        RecipeError: another request than the output was begun with, or a source that has changed since.
        DataError, StorageError: what listing raises.
    """
    asked, indexes = request.to_json(), [index.to_json() for index in request.dedup]
    begun = Begun.read(output)
    if begun is not None and begun.plan is not None:
        refuse_changed(begun.request, asked, output.where)
    elif begun is None or begun.request != asked:
        begun = Begun(secrets.token_hex(8), asked, indexes, None)
        begun.write(output)
    work = output.work
    work.mkdir(parents=True, exist_ok=True)
    mine = json.dumps({"identity": begun.identity, "request": asked})
    if not _says(work / _REQUEST_FILE, mine):
        (work / "plan.json").unlink(missing_ok=True)
        write_text(work / _REQUEST_FILE, mine)
    plan = Plan.load(work)
    if plan is None:
        plan = _new_plan(request, source, output, run, console, allow_unlabelled)
    elif not source.streams:
        _refuse_other_parts(plan.parts, _parts(request, source), output.where)
    begun = Begun.read(output)
    assert begun is not None
    if begun.plan is None:
        refuse_changed(begun.request, asked, output.where)
        replace(begun, plan=plan.described()).write(output)
    elif begun.plan["sha256"] != plan.sha256 or _sizes(begun.plan["parts"]) != _sizes(plan.parts):
        raise RecipeError(
            f"OUT {output.where}: was begun with another plan for the same request: the source has changed since. "
            "Remove the output and start anew"
        )
    elif begun.indexes != indexes:  # they were moved, or this machine has them elsewhere
        replace(begun, indexes=indexes).write(output)
    return plan


def trial_plan(request: Request, source: Source, output: Output, run: Run, console: Console) -> tuple[Plan, Probe]:
    """A plan in the work folder alone, and what its first images come to. Raises as `planned`."""
    ordered, parts = _listed(request, source, output, run, console)
    first, batches = _peek(ordered.batches)
    probed = probe(first, reader(source, output), request.images, request.dedup)
    return _write_plan(request, ordered, batches, probed, output, parts, allow_unlabelled=True), probed


def reader(source: Source, output: Output) -> Reader:
    """What images are read from once they are listed."""
    return Spool(output.work / "listing") if source.streams else source


def _new_plan(
    request: Request, source: Source, output: Output, run: Run, console: Console, allow_unlabelled: bool
) -> Plan:
    ordered, parts = _listed(request, source, output, run, console)
    batches, probed = ordered.batches, None
    if request.shard_bytes is not None:
        first, batches = _peek(ordered.batches)
        probed = probe(first, reader(source, output), request.images)
    plan = _write_plan(request, ordered, batches, probed, output, parts, allow_unlabelled)
    if not source.streams:
        shutil.rmtree(output.work / "listing", ignore_errors=True)
    return plan


def _listed(
    request: Request, source: Source, output: Output, run: Run, console: Console
) -> tuple[Ordered, list[list[str]]]:
    """The images of the source in order, and its parts; lists those that are not listed yet or have changed since."""
    folder = output.work / "listing"
    listed = json.dumps(request.listed())
    if not _says(folder / _REQUEST_FILE, listed):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_text(folder / _REQUEST_FILE, listed)
    console.print(f"listing {escape(storage.without_secrets(request.src))}", highlight=False, soft_wrap=True)
    parts = _parts(request, source)
    tasks = []
    for number, (name, state) in enumerate(parts[: len(source.parts)]):
        summary = PartSummary.load(folder, number)
        if summary is None or not state or summary.fingerprint != f"{name} {state}":
            tasks.append(ListingTask(source, number, folder, request.shuffle_seed, f"{name} {state}"))
    if len(parts) == 1 and not source.streams:
        run = run_inline  # a process would take longer to start
    with ProgressView(console, "listing", None) as view:
        for _ in run(tasks, view.update):
            pass
    ordered = order_images(source, folder, request.shuffle_seed, request.classes, unlabelled=request.source.unlabelled)
    return ordered, parts


def _parts(request: Request, source: Source) -> list[list[str]]:
    """Name and fingerprint of every part of the source, and of the list of labels."""
    names = [*source.parts, *([request.source.labels] if request.source.labels else [])]
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
        return [[name, state] for name, state in zip(names, pool.map(fingerprint, names), strict=True)]


def _sizes(parts: list[list[str]]) -> list[tuple[str, str]]:
    """Name and size of parts, without the time, which may differ between copies on several machines."""
    return [(name, state.partition("-")[0]) for name, state in parts]


def _refuse_other_parts(before: list[list[str]], now: list[list[str]], where: str) -> None:
    if before == now:
        return
    known, found = ({part[0]: part[1] for part in parts} for parts in (before, now))
    changed = [
        *(f"{name} is new" for name in found.keys() - known.keys()),
        *(f"{name} is gone" for name in known.keys() - found.keys()),
        *(f"{name} has changed" for name in known.keys() & found.keys() if known[name] != found[name]),
    ]
    raise RecipeError(
        f"OUT {where}: the source is not what it was when the conversion was begun: {', '.join(sorted(changed)[:5])}. "
        "Put it back, or remove the output and start anew"
    )


def _write_plan(
    request: Request,
    ordered: Ordered,
    batches: Iterator[pa.RecordBatch],
    probed: Probe | None,
    output: Output,
    parts: list[list[str]],
    allow_unlabelled: bool,
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
        parts=parts,
        allow_unlabelled=allow_unlabelled,
    )


def _peek(batches: Iterator[pa.RecordBatch]) -> tuple[list[pa.RecordBatch], Iterator[pa.RecordBatch]]:
    """The first images, and all of them."""
    first: list[pa.RecordBatch] = []
    while sum(batch.num_rows for batch in first) < PROBED and (batch := next(batches, None)) is not None:
        first.append(batch)
    return first, itertools.chain(first, batches)


def _says(path: Path, text: str) -> bool:
    try:
        return path.read_text("utf-8") == text
    except FileNotFoundError:
        return False
