"""Makes the plan: lists the source, orders its images, deals them into shards; or reads a plan made earlier.

    plan-00.arrow    the first split: batch i holds the images of shard i (uid, key, labels, part, content)
    plan.json        splits, classes, counts and a digest of everything; written last, so it marks a complete plan

In the output's state, `conversion.json` holds the request and, once made, the plan: this is how several machines work
on one output. In the work folder, `request.json` says which conversion the plan beside it belongs to. In the listing's
folder it says what was listed: a listing stays valid when only what is planned with it changes.

A probe, for a dry run, converts the first images of the shuffled order in memory: what a conversion would come to.
"""

import hashlib
import itertools
import json
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, TypeAdapter
from rich.markup import escape

from data_tools.classes import class_notes
from data_tools.dedup.against import Comparison
from data_tools.dedup.matches import Findings
from data_tools.dedup.queries import Candidate
from data_tools.listing import ORDERED, ListingTask, Ordered, PartSummary, fingerprint, order_images
from data_tools.output import CONVERSION_NAME, Output, SplitName
from data_tools.report import ProgressDisplay, say
from data_tools.request import Conversion, Request, SplitRule, choosers, refuse_changed
from data_tools.tasks import run_inline
from vitscale.data.shards.images import Reject, store_image
from vitscale.ground.errors import DataError, RecipeError, turned
from vitscale.ground.files.durable import durable_file, write_text
from vitscale.ground.storage import read_bytes
from vitscale.ground.wording import counted, quoted

_VERSION = 3
_REQUEST_FILE = "request.json"
_REQUESTS_AT_ONCE = 32
_PROBED = 1000
MAX_SHARD_SAMPLES = 1 << 24
_MAX_SHARDS = 10**7
PLAN = pa.schema([pa.field("uid", pa.int64(), nullable=False), *ORDERED])
LEFT_OUT = "in none of the splits"
_MAX_UNLABELLED = 0.01  # share of the images
_EXAMPLES = 5


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


@dataclass(frozen=True)
class PlannedSplit:
    """One dataset of the plan: its name (empty if there are no splits), images, shards, and its manifest's options."""

    name: SplitName
    images: Annotated[int, Field(ge=0, le=1 << 40)]
    shards: Annotated[int, Field(ge=0, le=_MAX_SHARDS)]
    options: dict[str, Any]


@dataclass(frozen=True)
class ConversionPlan:
    """The plan, without its rows: these stay on disk."""

    folder: Path
    splits: tuple[PlannedSplit, ...]  # the datasets, in order
    class_names: tuple[str, ...]  # names by label
    several_labels: bool  # whether any image has more than one label
    shard_samples: Annotated[int, Field(ge=1, le=MAX_SHARD_SAMPLES)]  # number of images per shard
    shuffle_seed: int
    ignored: dict[str, int]  # number of files that are not images, by reason
    parts: list[list[str]]  # [name, fingerprint] of every part of the source that the plan refers to
    sha256: str  # digest of the order, keys and labels of all images, and the class names
    unlabelled: int = 0  # number of images without a label; plans of earlier versions lack this field and the next
    notes: list[str] = field(default_factory=list)  # likely mistakes in the classes, one line each

    def __post_init__(self) -> None:
        if any(split.shards != -(-split.images // self.shard_samples) for split in self.splits):
            raise ValueError("another number of shards than the images need")

    @property
    def images(self) -> int:
        return sum(split.images for split in self.splits)

    @property
    def tasks(self) -> int:
        """Number of tasks, one per shard; task numbers run through the shards of all splits in order."""
        return sum(split.shards for split in self.splits)

    def place(self, task: int) -> tuple[PlannedSplit, int]:
        """The split of a task, and the number of its shard within the split."""
        for split in self.splits:
            if task < split.shards:
                return split, task
            task -= split.shards
        raise IndexError(task)

    def images_of(self, task: int) -> int:
        """Number of images in a task."""
        split, shard = self.place(task)
        return min(self.shard_samples, split.images - shard * self.shard_samples)

    def rows(self, tasks: Iterable[int]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The images of each task, one task in memory at a time."""
        damaged = partial(turned, f"{self.folder}: the plan is damaged. Remove the output and start anew", RecipeError)
        with ExitStack() as files:
            readers = {}
            for i, split in enumerate(self.splits):
                if split.shards:
                    with damaged(ValueError):
                        file = files.enter_context(pa.OSFile(str(_plan_file(self.folder, i))))
                        readers[split.name] = pa.ipc.open_file(file)
            for task in tasks:
                split, shard = self.place(task)
                with damaged(ValueError):
                    batch = readers[split.name].get_batch(shard)
                    batch.validate(full=True)
                    if batch.schema != PLAN:
                        raise ValueError(f"its columns are {batch.schema.names}")
                yield task, batch

    @classmethod
    def load(cls, folder: Path) -> "ConversionPlan | None":
        """The plan in a folder, or None if there is none or it is incomplete."""
        with suppress(FileNotFoundError):
            return cls.from_json(json.loads(read_bytes(folder / "plan.json")), folder)
        return None

    @classmethod
    def from_json(cls, content: dict[str, Any], folder: Path) -> "ConversionPlan":
        """The plan that `described` gave `content` for."""
        return _PLAN.validate_python(content | {"folder": folder})

    def described(self) -> dict[str, Any]:
        """The plan without its images, as plain values."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}


_PLAN = TypeAdapter(ConversionPlan)


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


def write_plan(
    request: Request,
    ordered: Ordered,
    batches: Iterator[pa.RecordBatch],
    folder: Path,
    parts: list[list[str]],
    *,
    allow_unlabelled: bool,
) -> ConversionPlan:
    """Deal the images to the request's splits and shards, and write the plan into a folder.

    `batches` are the images in order, read once; `ordered` has their classes and counts; `parts` is [name, fingerprint]
    of every part of the source. With `allow_unlabelled`, more than 1 % of the images may lack a label although others
    have one.

    Raises:
        DataError: a split has no images or fewer than its rule says, or too many images lack a label.
        OSError: the disk failed.
    """
    splits, limit, shard_samples = choosers(request.splits, request.shuffle_seed), request.limit, request.shard_samples
    rules = request.splits or (SplitRule("", "rest"),)
    digest = hashlib.sha256(json.dumps(ordered.class_names).encode())
    taken = 0
    with ExitStack() as files:
        sinks = [
            _ShardWriter(files.enter_context(durable_file(_plan_file(folder, i))), shard_samples, digest, i)
            for i in range(len(rules))
        ]
        for batch in batches:
            if limit is not None:
                batch = batch.slice(0, limit - taken)
            if not batch.num_rows:
                break
            taken += batch.num_rows
            if not splits:
                sinks[0].add(batch)
                continue
            keys = batch.column("key").to_pylist()
            # The number of the first split that takes each image, -1 if none does.
            choice = np.array([next((i for i, split in enumerate(splits) if split.takes(key)), -1) for key in keys])
            ordered.ignored[LEFT_OUT] += int(np.count_nonzero(choice < 0))
            for i, sink in enumerate(sinks):
                rows = np.flatnonzero(choice == i)
                if len(rows):
                    sink.add(batch.take(pa.array(rows)))
        for sink in sinks:
            sink.close()
    for sink, rule in zip(sinks, rules, strict=True):
        if not sink.images:
            raise DataError(f"--split {rule}: no image belongs to it")
    for sink, rule, split in zip(sinks, rules, splits, strict=False):
        if split.expected is not None and sink.images < split.expected and limit is None:
            raise DataError(
                f"--split {rule}: asks for {split.expected:,} images, of which only {sink.images:,} are in the source "
                "and in no split before it"
            )
    images, unlabelled = sum(sink.images for sink in sinks), sum(sink.unlabelled for sink in sinks)
    # More than a few, but not all: perhaps a mistake in the labels, which has to be confirmed.
    if not allow_unlabelled and _MAX_UNLABELLED * images < unlabelled < images:
        shown = quoted(itertools.chain.from_iterable(sink.examples for sink in sinks), _EXAMPLES, unlabelled)
        raise DataError(
            f"{unlabelled:,} of {counted(images, 'image')} ({unlabelled / images:.2%}) have no label (empty, null or "
            f"-1): {shown}. Give them one; or, if this is intended, repeat the command with --allow-unlabelled"
        )
    empty = set(range(len(ordered.class_names))).difference(*(sink.classes for sink in sinks))
    plan = ConversionPlan(
        folder=folder,
        splits=tuple(
            PlannedSplit(rule.name, sink.images, sink.shards, request.manifest_options(rule.name))
            for rule, sink in zip(rules, sinks, strict=True)
        ),
        class_names=ordered.class_names,
        several_labels=ordered.several_labels,
        shard_samples=shard_samples,
        shuffle_seed=request.shuffle_seed,
        ignored=dict(+ordered.ignored),
        parts=parts,
        sha256=digest.hexdigest(),
        unlabelled=unlabelled,
        notes=class_notes(ordered.class_names, sorted(empty)),
    )
    write_text(folder / "plan.json", json.dumps(plan.described(), indent=1))
    return plan


class _ShardWriter:
    """Regroups batches of any size into one batch per shard, and writes those. Counts what it has written."""

    def __init__(self, file: object, shard_samples: int, digest: "hashlib._Hash", number: int) -> None:
        self.images = self.shards = self.unlabelled = 0  # numbers of images, of shards, of images without a label
        self.examples: list[str] = []  # keys of the first few images without a label
        self.classes: set[int] = set()  # labels that occur
        self._writer = pa.ipc.new_file(file, PLAN)
        self._size, self._digest, self._number = shard_samples, digest, number
        self._pending: list[pa.RecordBatch] = []
        self._rows = 0

    def add(self, batch: pa.RecordBatch) -> None:
        while batch.num_rows:
            piece = batch.slice(0, self._size - self._rows)
            batch = batch.slice(piece.num_rows)
            self._pending.append(piece)
            self._rows += piece.num_rows
            if self._rows == self._size:
                self._flush()

    def close(self) -> None:
        if self._rows:
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        shard = pa.Table.from_batches(self._pending).combine_chunks().to_batches()[0]
        uid = pa.array(np.arange(self.images, self.images + shard.num_rows))
        shard = pa.record_batch([uid, *shard.columns], schema=PLAN)
        self._writer.write_batch(shard)
        keys = shard.column("key").to_pylist()
        counts = pc.list_value_length(shard.column("labels")).to_numpy()
        labels = shard.column("labels").flatten().to_numpy(zero_copy_only=False)
        self._digest.update(f"{self._number} {shard.num_rows}\n".encode())
        self._digest.update("\0".join(keys).encode())
        self._digest.update(counts.astype("<i4").tobytes())
        self._digest.update(labels.astype("<i4").tobytes())
        without = np.flatnonzero(counts == 0)
        self.examples += [keys[row] for row in without[: _EXAMPLES - len(self.examples)].tolist()]
        self.unlabelled += len(without)
        self.classes.update(np.unique(labels).tolist())
        self.images += shard.num_rows
        self.shards += 1
        self._pending, self._rows = [], 0


def _plan_file(folder: Path, split: int) -> Path:
    return folder / f"plan-{split:02d}.arrow"
