"""When a run saw a sample, with which crop and exactly which pixels, by inverting the order instead of searching it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import xxhash

from vitscale.data.batch import Batch
from vitscale.data.loader import training_loader, training_order
from vitscale.data.order import ORDER_VERSION, TrainOrder
from vitscale.data.shards import Manifest
from vitscale.data.shards.opening import OpenShard, open_shard
from vitscale.data.views import draw_views, view_kinds
from vitscale.ground.errors import CheckpointError, DataError, os_errors
from vitscale.ground.images import crc32c
from vitscale.recipe import validate_recipe
from vitscale.recipe.datasets import find_dataset
from vitscale.runs.checkpoint import CheckpointIndex, checkpoint_directory
from vitscale.runs.checkpoint_index import data_root
from vitscale.runs.directory import recipe_of_run
from vitscale.training.watching.anomalies import AnomalyRecord, SkippedData


@dataclass(frozen=True)
class SampleLocation:
    """Where a sample is stored, and its size in pixels."""

    uid: int
    height: int
    width: int
    at: tuple[tuple[int, int] | None, ...]
    """For each dataset that the run has trained on, oldest first: (number of the sample's shard, the sample's position
    among the shard's selected samples), or None if that dataset leaves the sample out."""

    @property
    def is_left_out(self) -> bool:
        """Whether every dataset leaves the sample out, although its shard belongs to the data."""
        return not any(self.at)


class Content(NamedTuple):
    """The CRC-32C, size in bytes and XXH3-128 digest that identify the stored bytes of an image."""

    crc: int
    size: int
    digest: bytes

    @classmethod
    def of(cls, stored: bytes) -> Self:
        """Compute them from an image's bytes as stored in a shard."""
        return cls(crc32c(stored), len(stored), xxhash.xxh3_128_digest(stored))


@dataclass(frozen=True)
class Sighting:
    """One appearance of a sample in a batch."""

    step: int | None  # the update made with the batch, from 1; None if a policy skipped the batch
    batch: int  # the batch's position in the order, from 0
    epoch: int  # of the order, from 0
    slot: int  # in the global batch, from 0
    box: tuple[int, int, int, int]  # the crop: top, left, height and width, in pixels of the stored image
    is_flipped: bool
    partner: int | None  # the uid of the sample that it was mixed with; None if the recipe mixes none
    view: int = 0  # its number among the views of the sample in this slot


class _Stretch(NamedTuple):
    """Batches [start, stop) of the order of one dataset."""

    manifest: Manifest
    order: TrainOrder
    start: int
    stop: int

    @property
    def epochs(self) -> range:  # that the run has begun
        return range(self.start // self.order.steps_per_epoch, -(-self.stop // self.order.steps_per_epoch))


_Occurrence = tuple[_Stretch, int, np.ndarray, np.ndarray, np.ndarray]
"""Samples in one epoch of a stretch: their rows in the query, batches and first slots, each int64 (m,)."""


class History:
    """What a run has trained on, up to its newest checkpoint; its data are now below `root`, or where its recipe says.

    The manifest of the training data is preceded in a branch by those that its trunks were trained on, oldest first.
    Each is a view of the one before: `manifest`, the oldest, holds all samples; the run would continue with `newest`.
    `steps` are the updates done, `left_out` the batches of the order that a policy skipped.

    Raises `RecipeError` if there is no run, `CheckpointError` if it has no checkpoint, `DataError` if its data are
    missing or others than it had, or its order has another version, `StorageError`.
    """

    def __init__(self, run_dir: Path, root: str | None = None) -> None:
        self.index = index = _newest_index(run_dir)
        self.recipe = recipe = validate_recipe(index.recipe, f"the recipe in the checkpoint of step {index.step}")
        before = _data_before(index)
        places = [each["where"] if root is None else find_dataset(each["train"], root) for each in before]
        places.append(find_dataset(recipe.data.train, root or data_root(recipe, index)))
        manifests = [Manifest.load(place) for place in places]
        version = index.data.get("order_version")
        if version != ORDER_VERSION:
            raise DataError(f"the run's order has version {version}; this vitscale reads {ORDER_VERSION}")
        sha256 = [*(each["manifest_sha256"] for each in before), index.data.get("manifest_sha256")]
        for manifest, then in zip(manifests, sha256, strict=True):
            if manifest.sha256 != then:
                told = f"the run was trained on data of manifest_sha256 {then}; these have {manifest.sha256}"
                raise DataError(f"{manifest.where}: {told}")
        starts = [0, *(each["start"] for each in before)]
        stops = [*(each["stop"] for each in before), index.position]
        self._stretches = [
            _Stretch(manifest, training_order(recipe, manifest), start, stop)
            for manifest, start, stop in zip(manifests, starts, stops, strict=True)
        ]
        self.manifest, self.newest, self.steps = manifests[0], manifests[-1], index.step
        self.left_out = sum(stretch.stop - stretch.start for stretch in self._stretches) - index.step
        self._skipped = AnomalyRecord.of(index.anomalies).skipped
        self._kinds = view_kinds(recipe.data)
        self._number_of = [
            {each.first_uid: number for number, each in enumerate(manifest.shards)} for manifest in manifests
        ]

    @property
    def epochs(self) -> int:
        """The number of epochs begun, over all datasets."""
        return sum(len(stretch.epochs) for stretch in self._stretches)

    def find(self, uids: Sequence[int]) -> list[SampleLocation | None]:
        """Where samples are stored, one per uid; None for a uid that no shard has. Opens each shard once."""
        places: dict[int, SampleLocation] = {}
        wanted = np.unique(np.array([uid for uid in uids if uid < 2**63], np.int64))
        for shard, of_shard in shards_with(self.manifest, wanted):
            slots, is_there = _positions(shard.file.uid, of_shard)
            places |= {place.uid: place for place in self._locations(shard, slots[is_there])}
        return [places.get(uid) for uid in uids]

    def holding(self, images: Sequence[Content]) -> Iterator[tuple[int, SampleLocation]]:
        """Find the samples whose stored bytes are those of given images; reads through all shards once.

        Yields (number of the image in `images`, the sample's place).
        """
        wanted: dict[Content, list[int]] = {}
        for number, image in enumerate(images):
            wanted.setdefault(image, []).append(number)
        keys = np.unique(np.array([_key(image.crc, image.size) for image in wanted], np.uint64))
        for number in range(len(self.manifest.shards)):
            with open_shard(self.manifest, number, with_keys=False) as shard:
                alike = np.flatnonzero(np.isin(_key(shard.file.crc, shard.file.size), keys))
                pairs = [
                    (which, slot)
                    for slot in np.intersect1d(alike, shard.slots).tolist()
                    for which in wanted.get(Content.of(shard.file.read(slot)), ())
                ]
                if pairs:
                    which, slots = zip(*pairs, strict=True)
                    yield from zip(which, self._locations(shard, np.array(slots)), strict=True)

    def _locations(self, shard: OpenShard, slots: np.ndarray) -> list[SampleLocation]:
        """The places of the samples in given slots of a shard of the oldest dataset."""
        at: list[list[tuple[int, int] | None]] = []
        for number_of, stretch in zip(self._number_of, self._stretches, strict=True):
            number = number_of.get(self.manifest.shards[shard.index].first_uid)
            if number is None:
                at.append([None] * len(slots))
                continue
            selected = shard.slots if stretch.manifest is self.manifest else stretch.manifest.slots(number)
            pairs = zip(*_positions(selected, slots), strict=True)
            at.append([(number, int(position)) if is_there else None for position, is_there in pairs])
        file = shard.file
        return [
            SampleLocation(int(file.uid[slot]), int(file.height[slot]), int(file.width[slot]), tuple(places))
            for slot, *places in zip(slots, *at, strict=True)
        ]

    def updates(self, places: Sequence[SampleLocation]) -> tuple[np.ndarray, np.ndarray]:
        """The first update made with each sample, from 1 (0: none), and the number of updates; both int64 (n,)."""
        first, times = np.zeros((2, len(places)), np.int64)
        for _, _, rows, batches, _ in self._occurrences(places):
            steps = steps_of(batches, self._skipped)
            rows, steps = rows[steps > 0], steps[steps > 0]
            times[rows] += 1
            is_first = first[rows] == 0  # epochs come in order
            first[rows[is_first]] = steps[is_first]
        return first, times

    def sightings(self, places: Sequence[SampleLocation]) -> list[list[Sighting]]:
        """Every appearance of each sample in a batch of the run, in order: one per epoch, repeat and view."""
        seen: list[list[Sighting]] = [[] for _ in places]
        for stretch, epoch, rows, batches, first_slots in self._occurrences(places):
            views = [stretch.order.views(slot) for slot in first_slots.tolist()]
            each = np.repeat(np.arange(len(views)), [len(slots) for slots in views])
            slots = np.array([slot for slots in views for slot in slots], np.int64)
            repeats = np.array([number for slots in views for number in range(len(slots))], np.int64)
            rows, batches = rows[each], batches[each]
            samples = [places[row] for row in rows.tolist()]
            uids, *sizes = (np.array([getattr(place, key) for place in samples]) for key in ("uid", "height", "width"))
            drawn = draw_views(self._kinds, self.recipe.seed, epoch, uids, repeats, *sizes)
            boxes = np.concatenate([kind.boxes for kind in drawn], axis=1).tolist()
            flips = np.concatenate([kind.flips for kind in drawn], axis=1).tolist()
            steps, partners = steps_of(batches, self._skipped).tolist(), self._partners(stretch, batches, slots)
            columns = (rows.tolist(), steps, batches.tolist(), slots.tolist(), boxes, flips, partners)
            for row, step, batch, slot, of_views, are_flipped, partner in zip(*columns, strict=True):
                for view, (box, is_flipped) in enumerate(zip(of_views, are_flipped, strict=True)):
                    seen[row].append(Sighting(step or None, batch, epoch, slot, tuple(box), is_flipped, partner, view))
        return seen

    def _occurrences(self, places: Sequence[SampleLocation]) -> Iterator[_Occurrence]:
        """Epoch after epoch, the samples in its batches."""
        for number, stretch in enumerate(self._stretches):
            lying = [(row, *at) for row, place in enumerate(places) if (at := place.at[number]) is not None]
            if not lying:
                continue
            rows, shard, position = np.array(lying, np.int64).T
            for epoch in stretch.epochs:
                batches, slots = stretch.order.find(shard, position, epoch)
                seen = (batches >= stretch.start) & (batches < stretch.stop)
                if seen.any():
                    yield stretch, epoch, rows[seen], batches[seen], slots[seen]

    def _partners(self, stretch: _Stretch, batches: np.ndarray, slots: np.ndarray) -> list[int | None]:
        """The uids of the samples that those in given slots of batches are mixed with; opens each shard once."""
        partners = [self.recipe.objective.partner(slot) for slot in slots.tolist()]
        if not partners or partners[0] is None:
            return partners
        pairs = zip(batches.tolist(), partners, strict=True)
        mixed_in = [stretch.order.batch(batch, slot, slot + 1) for batch, slot in pairs if slot is not None]
        shards = np.array([int(each.shard[0]) for each in mixed_in])
        positions = np.array([int(each.position[0]) for each in mixed_in])
        uids = np.empty(len(mixed_in), np.int64)
        for number in np.unique(shards).tolist():
            with open_shard(stretch.manifest, number, with_keys=False) as shard:
                of_shard = shards == number
                uids[of_shard] = shard.file.uid[shard.slots[positions[of_shard]]]
        return list(uids.tolist())

    def pixels(self, sighting: Sighting) -> Batch:
        """The pixels that the loader made of the sample: a batch of one, with all its views. Raises as `Loader`."""
        stretch = next(each for each in self._stretches if each.start <= sighting.batch < each.stop)
        with training_loader(
            self.recipe,
            stretch.manifest,
            stretch.order,
            rank=sighting.slot,  # one rank per slot
            world=stretch.order.global_batch,
            start=sighting.batch,
            stop=sighting.batch + 1,
            digest=True,
        ) as loader:
            return next(loader)


def shards_with(manifest: Manifest, uids: np.ndarray) -> Iterator[tuple[OpenShard, np.ndarray]]:
    """Each shard that, by its first uid, may have some of `uids`, which are sorted; opened, and with these."""
    numbers = np.searchsorted([each.first_uid for each in manifest.shards], uids, side="right") - 1
    for number in np.unique(numbers[numbers >= 0]).tolist():
        with open_shard(manifest, number, with_keys=False) as shard:
            yield shard, uids[numbers == number]


def _positions(among: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each value is among sorted ones, and whether it is there at all."""
    positions = np.searchsorted(among, values)
    is_there = positions < len(among)
    is_there[is_there] = among[positions[is_there]] == values[is_there]
    return positions, is_there


def _newest_index(run_dir: Path) -> CheckpointIndex:
    """The index of a run's newest checkpoint. Its own checksum is verified, its files are not.

    Raises `CheckpointError` if there is no checkpoint or it cannot be read.
    """
    place = checkpoint_directory(recipe_of_run(run_dir), run_dir)
    with os_errors(f"the checkpoints of {run_dir} cannot be reached", CheckpointError):
        steps = place.steps()
    if not steps:
        raise CheckpointError(f"{run_dir} has no checkpoint yet, so what it has seen is not known")
    return place.read_index(steps[-1])


def _data_before(index: CheckpointIndex) -> list[Mapping[str, Any]]:
    """The index's entries on the data that the trunks of branches onto views were trained on, oldest first."""
    data: list[Mapping[str, Any]] = []
    init = index.data.get("init")
    while init is not None and "continues" in init:
        data += [init["data_before"]] if "data_before" in init else []
        init = init.get("init")
    return data[::-1]


def _key(crc: Any, size: Any) -> Any:
    """The checksum and size of a stored image, or of an array of them, as one uint64 each."""
    return np.asarray(crc, np.uint64) << np.uint64(32) | np.asarray(size, np.uint64) & np.uint64(2**32 - 1)


def steps_of(batches: np.ndarray, skipped: SkippedData) -> np.ndarray:
    """The updates, from 1, made with the batches at given positions in the order, int64 (n,); 0 for a skipped batch."""
    before, is_left_out = np.zeros(len(batches), np.int64), np.zeros(len(batches), bool)
    for start, stop in skipped.ranges:
        is_left_out |= (batches >= start) & (batches < stop)
        before += np.clip(batches, start, stop) - start
    return np.where(is_left_out, 0, batches - before + 1)
