"""Plans a conversion: lists the source, orders its images and deals them into shards; or takes the plan made earlier.

In the output's state, `conversion.json` holds the request and, once made, the plan: this is how several machines work
on one output. In the work folder, `request.json` says which conversion the plan beside it belongs to. In the listing's
folder it says what was listed: a listing stays valid when only what is planned with it changes.

A probe, for a dry run, converts the first images of the shuffled order in memory: what a conversion would come to.
"""

import itertools
import json
import secrets
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import TypeAdapter
from rich.markup import escape

from data_tools.dedup.against import Comparison
from data_tools.dedup.matches import Findings
from data_tools.dedup.queries import Candidate
from data_tools.listing import ListingTask, PartSummary, fingerprint, order_images
from data_tools.output import CONVERSION_NAME, Output
from data_tools.plan import ConversionPlan, write_plan
from data_tools.report import ProgressDisplay, say
from data_tools.request import Conversion, refuse_changed
from data_tools.tasks import run_inline
from vitscale.data.shards.images import Reject, store_image
from vitscale.ground.errors import RecipeError
from vitscale.ground.files.durable import write_text
from vitscale.ground.storage import read_bytes

_VERSION = 3
_REQUEST_FILE = "request.json"
_REQUESTS_AT_ONCE = 32
_PROBED = 1000


@dataclass(frozen=True)
class Begun:
    """The state of an unfinished conversion."""

    identity: str  # random, new for every conversion, so that files left in a work folder by an older one are not used
    request: dict[str, Any]  # what was asked for, from `Request.to_json`
    indexes: list[dict[str, Any]]  # from `NamedIndex.to_json`; apart from the request because they may be moved
    plan: dict[str, Any] | None  # the plan, from `ConversionPlan.described`; None if it is not made yet

    @classmethod
    def read(cls, output: Output) -> "Begun | None":
        """The state in an output, or None. Raises RecipeError if it is damaged or from another version of vitscale."""
        content = output.read_conversion()
        if content is None:
            return None
        with output.reading_state():
            state = json.loads(content)
            if state.pop("version", None) == _VERSION:
                begun = _BEGUN.validate_python(state)
                if begun.plan is not None:
                    ConversionPlan.from_json(begun.plan, output.work)
                return begun
        raise RecipeError(
            f"OUT {output.where}: was started by another version of vitscale. Finish it with that one, or remove the "
            "output and start anew"
        )

    def write(self, output: Output) -> None:
        output.write(output.state(CONVERSION_NAME), json.dumps({"version": _VERSION, **vars(self)}))


_BEGUN = TypeAdapter(Begun)


@dataclass(frozen=True)
class Probe:
    """The result of a probe."""

    images: int  # number of images tried
    rejected: int  # number of these that cannot be stored
    bytes: int  # total size of those that can
    seconds: float
    findings: Findings | None  # copies of test images; None if none were looked for

    @property
    def bytes_per_image(self) -> float:
        """Mean over the images that can be stored; 0 if none can."""
        return self.bytes / max(self.images - self.rejected, 1)


def make_plan(conversion: Conversion) -> ConversionPlan:
    """The plan that the output was started with, or a new one.

    Raises:
        RecipeError: the output was started with another request, or the source has changed since.
        DataError, StorageError: listing failed.
    """
    output, streams = conversion.output, conversion.source.streams
    begun = _begin(conversion)
    output.work.mkdir(parents=True, exist_ok=True)
    mine = json.dumps({"identity": begun.identity, "request": conversion.request.to_json()})
    if not _says(output.work / _REQUEST_FILE, mine):  # the plan there is another conversion's
        (output.work / "plan.json").unlink(missing_ok=True)
        write_text(output.work / _REQUEST_FILE, mine)
    with output.reading_state():
        plan = ConversionPlan.load(output.work)
    if plan is None:
        plan = _make(conversion, allow_unlabelled=conversion.machine.allow_unlabelled)
        if not streams:
            shutil.rmtree(conversion.listing, ignore_errors=True)
    elif not streams and (parts := _parts(conversion)) != plan.parts:
        _refuse_other_parts(plan.parts, parts, output.where)
    _agree(conversion, plan)
    return plan


def make_trial(conversion: Conversion) -> tuple[ConversionPlan, Probe]:
    """A plan in the work folder only, and a trial of its first images. Raises the same errors as `make_plan`."""
    first: list[pa.RecordBatch] = []
    plan = _make(conversion, allow_unlabelled=True, first=first)
    return plan, _probe(first, conversion)


def _begin(conversion: Conversion) -> Begun:
    """The output's state: as an earlier call left it, or new. Raises RecipeError if it is for another request."""
    request, output = conversion.request.to_json(), conversion.output
    begun = Begun.read(output)
    if begun is not None and begun.plan is not None:
        refuse_changed(begun.request, request, output.where)
    elif begun is None or begun.request != request:
        begun = Begun(secrets.token_hex(8), request, _indexes(conversion), None)
        begun.write(output)
    return begun


def _agree(conversion: Conversion, plan: ConversionPlan) -> None:
    """Write the plan into the output's state. Raises RecipeError if a different one is there by now."""
    output, indexes = conversion.output, _indexes(conversion)
    begun = Begun.read(output)
    assert begun is not None
    if begun.plan is None:
        refuse_changed(begun.request, conversion.request.to_json(), output.where)
        replace(begun, plan=plan.described()).write(output)
    elif begun.plan["sha256"] != plan.sha256 or _sizes(begun.plan["parts"]) != _sizes(plan.parts):
        raise RecipeError(
            f"OUT {output.where}: was started with another plan for the same request: the source has changed since. "
            "Remove the output and start anew"
        )
    elif begun.indexes != indexes:  # they were moved, or are elsewhere on this machine
        replace(begun, indexes=indexes).write(output)


def _indexes(conversion: Conversion) -> list[dict[str, Any]]:
    return [index.to_json() for index in conversion.request.dedup]


def _make(
    conversion: Conversion, *, allow_unlabelled: bool, first: list[pa.RecordBatch] | None = None
) -> ConversionPlan:
    """A new plan; `first`, if given, gets the first images in order, at least `_PROBED` of them."""
    request, parts = conversion.request, _list(conversion)
    ordered = order_images(
        conversion.source,
        conversion.listing,
        request.shuffle_seed,
        request.classes,
        unlabelled=request.source.unlabelled,
    )
    batches = ordered.batches
    if first is not None:
        while sum(batch.num_rows for batch in first) < _PROBED and (batch := next(batches, None)) is not None:
            first.append(batch)
        batches = itertools.chain(first, batches)
    return write_plan(request, ordered, batches, conversion.output.work, parts, allow_unlabelled=allow_unlabelled)


def _list(conversion: Conversion) -> list[list[str]]:
    """List the parts of the source that are not listed yet or have changed; returns the same as `_parts`."""
    request, source, folder = conversion.request, conversion.source, conversion.listing
    listed = json.dumps(request.listed())
    if not _says(folder / _REQUEST_FILE, listed):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_text(folder / _REQUEST_FILE, listed)
    say(conversion.console, f"listing {escape(request.src)}")
    parts = _parts(conversion)
    tasks = []
    for number, (name, state) in enumerate(parts[: len(source.parts)]):
        summary = PartSummary.load(folder, number)
        if summary is None or not state or summary.fingerprint != f"{name} {state}":
            tasks.append(ListingTask(source, number, folder, request.shuffle_seed, f"{name} {state}"))
    # Starting a process would take longer than listing one part.
    here = len(parts) == 1 and not source.streams
    run = run_inline if here else conversion.machine.runner(request.src, conversion.output.where)
    with ProgressDisplay(conversion.console, "listing", None) as view:
        for _ in run(tasks, view.update):
            pass
    return parts


def _parts(conversion: Conversion) -> list[list[str]]:
    """[name, fingerprint] of every part of the source, and of the list of labels."""
    labels = conversion.request.source.labels
    names = [*conversion.source.parts, *([labels] if labels else [])]
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
        return [[name, state] for name, state in zip(names, pool.map(fingerprint, names), strict=True)]


def _sizes(parts: list[list[str]]) -> list[tuple[str, str]]:
    """Name and size of each part, without its time, which may differ between copies on several machines."""
    return [(name, state.partition("-")[0]) for name, state in parts]


def _refuse_other_parts(before: list[list[str]], now: list[list[str]], where: str) -> None:
    known, current = ({part[0]: part[1] for part in parts} for parts in (before, now))
    changed = [
        *(f"{name} is new" for name in current.keys() - known.keys()),
        *(f"{name} is gone" for name in known.keys() - current.keys()),
        *(f"{name} has changed" for name in known.keys() & current.keys() if known[name] != current[name]),
    ]
    raise RecipeError(
        f"OUT {where}: the source has changed since the conversion was started: {', '.join(sorted(changed)[:5])}. "
        "Put it back, or remove the output and start anew"
    )


def _probe(batches: list[pa.RecordBatch], conversion: Conversion) -> Probe:
    """Convert the first `_PROBED` images of some batches in memory, and look for copies of test images."""
    images = rejected = size = 0
    reader = conversion.reader

    def stored_images() -> Iterator[Candidate]:
        nonlocal images, rejected, size
        for batch in batches:
            batch = batch.slice(0, _PROBED - images)
            places = zip(batch.column("part").to_pylist(), batch.column("content").to_pylist(), strict=True)
            for part, content in places:
                images += 1
                try:
                    data = reader.read(part, content)
                except OSError:
                    rejected += 1
                    continue
                stored = store_image(data, conversion.request.images)
                if isinstance(stored, Reject):
                    rejected += 1
                    continue
                size += len(stored.jpeg)
                yield Candidate.of(stored, data, uid=images)

    comparison = Comparison(conversion.matcher) if conversion.matcher is not None else None
    started = time.perf_counter()
    for _ in stored_images() if comparison is None else comparison.kept(stored_images()):
        pass
    seconds = time.perf_counter() - started
    return Probe(images, rejected, size, seconds, None if comparison is None else comparison.findings)


def _says(path: Path, text: str) -> bool:
    with suppress(FileNotFoundError):
        return read_bytes(path) == text.encode()
    return False
