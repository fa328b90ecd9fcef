"""Makes the plan: lists the source, orders its images, deals them into shards; or reads a plan made earlier.

In the output's state, `conversion.json` holds the request and, once made, the plan: this is how several machines work
on one output. In the work folder, `request.json` says which conversion the plan beside it belongs to. In the listing's
folder it says what was listed: a listing stays valid when only what is planned with it changes.
"""

import itertools
import json
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.markup import escape

from data_tools.conversion_plan import ConversionPlan, write_plan
from data_tools.dedup.matching import Matcher
from data_tools.engines.inline import run_inline
from data_tools.listing import ListingTask, PartSummary, Spool, fingerprint
from data_tools.output import CONVERSION_NAME, Output
from data_tools.probe import PROBED, Probe, probe
from data_tools.report import ProgressDisplay, say
from data_tools.request import Conversion, refuse_changed
from data_tools.shard_task import Reader
from data_tools.shuffle import order_images
from vitscale.ground.errors import RecipeError
from vitscale.ground.files.durable import write_text
from vitscale.ground.storage import read_bytes

_VERSION = 2
_REQUEST_FILE = "request.json"
_REQUESTS_AT_ONCE = 32


@dataclass(frozen=True)
class Begun:
    """The state of an unfinished conversion.

    Attributes:
        identity: random, new for every conversion, so that files left in a work folder by an older one are not used.
        request: what was asked for, from `Request.to_json`.
        indexes: indexes of test sets, from `NamedIndex.to_json`; apart from the request because they may be moved.
        plan: the plan, from `ConversionPlan.described`; None if it is not made yet.
    """

    identity: str
    request: dict[str, Any]
    indexes: list[dict[str, Any]]
    plan: dict[str, Any] | None

    @classmethod
    def read(cls, output: Output) -> "Begun | None":
        """The state in an output, or None. Raises RecipeError if it is damaged or from another version of vitscale."""
        content = output.read_state(CONVERSION_NAME)
        if content is None:
            return None
        try:
            state = json.loads(content)
            if state.pop("version", None) == _VERSION:
                return cls(**state)
            what = "was started by another version of vitscale. Finish it with that one, or remove"
        except (ValueError, TypeError, AttributeError, RecursionError):
            what = f"its state, {output.state(CONVERSION_NAME)}, is damaged. Remove"
        raise RecipeError(f"OUT {output.where}: {what} the output and start anew")

    def write(self, output: Output) -> None:
        output.mark(CONVERSION_NAME, json.dumps({"version": _VERSION, **self.__dict__}))


@dataclass(frozen=True)
class Planner:
    """Makes the plan of a conversion, or reads the one made earlier."""

    conversion: Conversion

    @property
    def reader(self) -> Reader:
        """What listed images are read from."""
        source = self.conversion.source
        return Spool(self._listing) if source.streams else source

    def plan(self) -> ConversionPlan:
        """The plan that the output was started with, or a new one.

        Raises:
            RecipeError: the output was started with another request, or the source has changed since.
            DataError, StorageError: listing failed.
        """
        self._claim_work_folder(self._begin())
        output, streams = self.conversion.output, self.conversion.source.streams
        plan = ConversionPlan.load(output.work)
        if plan is None:
            probes = self.conversion.request.shard_bytes is not None
            plan, _ = self._make(probes=probes, allow_unlabelled=self.conversion.machine.allow_unlabelled)
            if not streams:
                shutil.rmtree(self._listing, ignore_errors=True)
        elif not streams:
            _refuse_other_parts(plan.parts, self._parts(), output.where)
        self._agree(plan)
        return plan

    def trial(self) -> tuple[ConversionPlan, Probe]:
        """A plan in the work folder only, and a trial of its first images. Raises the same errors as `plan`."""
        plan, probed = self._make(probes=True, matcher=self.conversion.matcher, allow_unlabelled=True)
        assert probed is not None
        return plan, probed

    # ---- State of the output and of the work folder ------------------------------------------------------------------

    def _begin(self) -> Begun:
        """The output's state: as an earlier call left it, or new. Raises RecipeError if it is for another request."""
        asked, output = self.conversion.request.to_json(), self.conversion.output
        begun = Begun.read(output)
        if begun is not None and begun.plan is not None:
            refuse_changed(begun.request, asked, output.where)
        elif begun is None or begun.request != asked:
            begun = Begun(secrets.token_hex(8), asked, self._indexes, None)
            begun.write(output)
        return begun

    def _claim_work_folder(self, begun: Begun) -> None:
        """Remove the plan of any other conversion from the work folder."""
        work = self.conversion.output.work
        work.mkdir(parents=True, exist_ok=True)
        mine = json.dumps({"identity": begun.identity, "request": self.conversion.request.to_json()})
        if not _says(work / _REQUEST_FILE, mine):
            (work / "plan.json").unlink(missing_ok=True)
            write_text(work / _REQUEST_FILE, mine)

    def _agree(self, plan: ConversionPlan) -> None:
        """Write the plan into the output's state. Raises RecipeError if a different one is there by now."""
        output = self.conversion.output
        begun = Begun.read(output)
        assert begun is not None
        if begun.plan is None:
            refuse_changed(begun.request, self.conversion.request.to_json(), output.where)
            replace(begun, plan=plan.described()).write(output)
        elif begun.plan["sha256"] != plan.sha256 or _sizes(begun.plan["parts"]) != _sizes(plan.parts):
            raise RecipeError(
                f"OUT {output.where}: was started with another plan for the same request: the source has changed "
                "since. Remove the output and start anew"
            )
        elif begun.indexes != self._indexes:  # they were moved, or are elsewhere on this machine
            replace(begun, indexes=self._indexes).write(output)

    @property
    def _indexes(self) -> list[dict[str, Any]]:
        return [index.to_json() for index in self.conversion.request.dedup]

    # ---- A new plan: list, order, probe, deal ------------------------------------------------------------------------

    def _make(
        self, *, probes: bool, allow_unlabelled: bool, matcher: Matcher | None = None
    ) -> tuple[ConversionPlan, Probe | None]:
        """A new plan and, if `probes`, a trial of its first images, which are compared by the matcher."""
        request, source, parts = self.conversion.request, self.conversion.source, self._list()
        ordered = order_images(
            source, self._listing, request.shuffle_seed, request.classes, unlabelled=request.source.unlabelled
        )
        batches, probed, shard_samples = ordered.batches, None, request.shard_samples
        if probes:
            first = _first(batches)
            probed = probe(first, self.reader, request.images, matcher)
            batches = itertools.chain(first, batches)
            if request.shard_bytes is not None:
                shard_samples = probed.samples_in(request.shard_bytes)
        plan = write_plan(
            ordered,
            batches,
            self.conversion.output.work,
            request.splits,
            shard_samples=shard_samples,
            limit=request.limit,
            seed=request.shuffle_seed,
            options={name: request.manifest_options(name, shard_samples) for name in request.split_names},
            parts=parts,
            allow_unlabelled=allow_unlabelled,
        )
        return plan, probed

    @property
    def _listing(self) -> Path:
        return self.conversion.output.work / "listing"

    def _list(self) -> list[list[str]]:
        """List the parts of the source that are not listed yet or have changed; returns the same as `_parts`."""
        conversion, source, folder = self.conversion, self.conversion.source, self._listing
        listed = json.dumps(conversion.request.listed())
        if not _says(folder / _REQUEST_FILE, listed):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            write_text(folder / _REQUEST_FILE, listed)
        say(conversion.console, f"listing {escape(conversion.request.src)}")
        parts = self._parts()
        tasks = []
        for number, (name, state) in enumerate(parts[: len(source.parts)]):
            summary = PartSummary.load(folder, number)
            if summary is None or not state or summary.fingerprint != f"{name} {state}":
                tasks.append(ListingTask(source, number, folder, conversion.request.shuffle_seed, f"{name} {state}"))
        # Starting a process would take longer than listing one part.
        places = conversion.request.src, conversion.output.where
        engine = run_inline if len(parts) == 1 and not source.streams else conversion.machine.runner(*places)
        with ProgressDisplay(conversion.console, "listing", None) as view:
            for _ in engine(tasks, view.update):
                pass
        return parts

    def _parts(self) -> list[list[str]]:
        """[name, fingerprint] of every part of the source, and of the list of labels."""
        labels = self.conversion.request.source.labels
        names = [*self.conversion.source.parts, *([labels] if labels else [])]
        with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
            return [[name, state] for name, state in zip(names, pool.map(fingerprint, names), strict=True)]


def _sizes(parts: list[list[str]]) -> list[tuple[str, str]]:
    """Name and size of each part, without its time, which may differ between copies on several machines."""
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
        f"OUT {where}: the source has changed since the conversion was started: {', '.join(sorted(changed)[:5])}. "
        "Put it back, or remove the output and start anew"
    )


def _first(batches: Iterator[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Takes enough batches off `batches` to have the images to probe."""
    first: list[pa.RecordBatch] = []
    while sum(batch.num_rows for batch in first) < PROBED and (batch := next(batches, None)) is not None:
        first.append(batch)
    return first


def _says(path: Path, text: str) -> bool:
    try:
        return read_bytes(path) == text.encode()
    except FileNotFoundError:
        return False
