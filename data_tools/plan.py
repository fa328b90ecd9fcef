"""The plan: which images each shard holds; dealing them to shards, and the files that keep it.

plan-00.arrow    the first split: batch i holds the images of shard i (uid, key, labels, part, content)
plan.json        splits, classes, counts and a digest of everything; written last, so it marks a complete plan
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, TypeAdapter

from data_tools.classes import class_notes
from data_tools.listing import ORDERED, Ordered
from data_tools.output import SplitName
from data_tools.request import Request, SplitRule, choosers
from vitscale.ground.errors import DataError, RecipeError, turned
from vitscale.ground.files.durable import durable_file, write_text
from vitscale.ground.storage import read_bytes
from vitscale.ground.wording import counted, quoted

MAX_SHARD_SAMPLES = 1 << 24
_MAX_SHARDS = 10**7
PLAN = pa.schema([pa.field("uid", pa.int64(), nullable=False), *ORDERED])
_LEFT_OUT = "in none of the splits"
_MAX_UNLABELLED = 0.01  # share of the images
_EXAMPLES = 5


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
            ordered.ignored[_LEFT_OUT] += int(np.count_nonzero(choice < 0))
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
