"""When a run has seen a sample, with which crop, and the very pixels: the order inverted, not searched."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from vitscale.checkpoint import Index, checkpoint_place
from vitscale.data import Batch, train_transform, training_loader, training_order
from vitscale.data.augmentation import sample_keys
from vitscale.data.order import ORDER_VERSION
from vitscale.errors import CheckpointError, DataError
from vitscale.recipe import Recipe, validate_recipe
from vitscale.recipe.datasets import find_dataset
from vitscale.runs.directory import recipe_of_run
from vitscale.runs.index import data_root
from vitscale.shards import Manifest
from vitscale.shards.opening import OpenShard, open_shard
from vitscale.training.anomalies import AnomalyRecord, SkippedData


@dataclass(frozen=True)
class Place:
    """Where a sample lies: its shard, its place among the selected samples of that shard, its size in pixels."""

    uid: int
    shard: int
    position: int
    height: int
    width: int


@dataclass(frozen=True)
class Sighting:
    """That a sample stood in a batch.

    Attributes:
        step: the update that was made with it, from 1; None where a policy has left the batch out.
        batch: its place in the order, from 0.
        epoch: of the order, from 0.
        slot: of the global batch.
        box: what was seen: top, left, height and width in pixels of the stored picture.
        is_flipped: whether it was mirrored.
        partner: uid of the sample that it was mixed with; None where the recipe mixes none.
    """

    step: int | None
    batch: int
    epoch: int
    slot: int
    box: tuple[int, int, int, int]
    is_flipped: bool
    partner: int | None


class History:
    """What a run has trained on, up to its newest checkpoint.

    Args:
        recipe: the run's.
        index: of the checkpoint.
        manifest: of the training data.

    Attributes:
        steps: updates done.
        batches: of the order that were consumed: `steps`, and those that were left out.

    Raises `DataError` for other data than the run's, or a checkpoint of another order.
    """

    def __init__(self, recipe: Recipe, index: Index, manifest: Manifest) -> None:
        for what, then, now in (
            ("manifest_sha256", index.data.get("manifest_sha256"), manifest.sha256),
            ("order_version", index.data.get("order_version"), ORDER_VERSION),
        ):
            if then != now:
                raise DataError(
                    f"{manifest.where}: the run's data have {what} {then}, these have {now}: they are not what the "
                    f"run was trained on"
                )
        self.recipe, self.manifest = recipe, manifest
        self.steps, self.batches = index.step, index.position
        self._skipped = AnomalyRecord.of(index.anomalies).skipped
        self._order = training_order(recipe, manifest)
        self._transform = train_transform(recipe.data.crop, recipe.data.flip)
        self._first_uids = [each.first_uid for each in manifest.shards]

    @classmethod
    def of(cls, run_dir: Path, root: str | None = None) -> Self:
        """That of a run.

        Args:
            run_dir: of the run.
            root: where its data are now; by default where its recipe says.

        Raises `RecipeError` where there is no run, `CheckpointError` where it has no checkpoint, `DataError` where its
        data are not there or have changed, `StorageError`.
        """
        index = newest_index(recipe_of_run(run_dir), run_dir)
        recipe = validate_recipe(index.recipe, f"the recipe in the checkpoint of step {index.step}")
        dataset = find_dataset(recipe.data.train, root or data_root(recipe, index))
        return cls(recipe, index, Manifest.load(dataset))

    @property
    def epochs(self) -> int:
        """That have begun."""
        return -(-self.batches // self._order.steps_per_epoch)

    def find(self, uid: int) -> Place:
        """Where a sample of the dataset lies. Raises `DataError` where the dataset does not have it."""
        at = bisect_right(self._first_uids, uid) - 1
        if at >= 0:
            with open_shard(self.manifest, at, with_keys=False) as shard:
                slot = int(np.searchsorted(shard.file.uid, uid))
                if slot < shard.file.samples and int(shard.file.uid[slot]) == uid:
                    return self._place(shard, slot)
        raise DataError(f"{self.manifest.where}: it has no sample with uid {uid}")

    def holding(self, image: bytes, crc: int) -> Iterator[Place]:
        """The samples that are stored as these very bytes, whose crc32c is given, and selected; shard by shard."""
        for number in range(len(self.manifest.shards)):
            with open_shard(self.manifest, number, with_keys=False) as shard:
                alike = np.flatnonzero((shard.file.crc == crc) & (shard.file.size == len(image)))
                for slot in np.intersect1d(alike, shard.slots).tolist():
                    if shard.file.read(slot) == image:
                        yield self._place(shard, slot)

    def _place(self, shard: OpenShard, slot: int) -> Place:
        position = int(np.searchsorted(shard.slots, slot))
        uid = int(shard.file.uid[slot])
        if position == len(shard.slots) or int(shard.slots[position]) != slot:
            raise DataError(
                f"{self.manifest.where}: uid {uid} lies in {shard.file.path.name}, and this dataset leaves it out"
            )
        return Place(uid, shard.index, position, int(shard.file.height[slot]), int(shard.file.width[slot]))

    def sightings(self, place: Place) -> Iterator[Sighting]:
        """Every time that a sample stood in a batch of the run, in order; once an epoch and view, or not at all."""
        for epoch in range(self.epochs):
            found = self._order.find(place.shard, place.position, epoch)
            if found is None or found[0] >= self.batches:
                continue
            for view, slot in enumerate(found[1]):
                yield self._sighting(place, epoch, found[0], slot, view)

    def _sighting(self, place: Place, epoch: int, batch: int, slot: int, view: int) -> Sighting:
        heights, widths = np.array([place.height], np.int64), np.array([place.width], np.int64)
        keys = sample_keys(self.recipe.seed, epoch, np.array([place.uid]), np.array([view]))
        top, left, height, width = self._transform.boxes(keys, heights, widths)[0].tolist()
        partner = self._uid_in(batch, slot ^ 1) if self.recipe.objective.together == 2 else None
        step, is_flipped = step_of(batch, self._skipped), bool(self._transform.flips(keys)[0])
        return Sighting(step, batch, epoch, slot, (top, left, height, width), is_flipped, partner)

    def _uid_in(self, batch: int, slot: int) -> int:
        """The sample in a slot of a batch."""
        found = self._order.batch(batch, slot, slot + 1)
        with open_shard(self.manifest, int(found.shard[0]), with_keys=False) as shard:
            return int(shard.file.uid[shard.slots[int(found.position[0])]])

    def pixels(self, sighting: Sighting) -> Batch:
        """What the loader made of the sample: a batch of one, its digest that of these pixels.

        Raises as `Loader`.
        """
        with training_loader(
            self.recipe,
            self.manifest,
            self._order,
            rank=sighting.slot,  # one rank a slot
            world=self._order.global_batch,
            start=sighting.batch,
            stop=sighting.batch + 1,
            digest=True,
        ) as loader:
            return next(loader)


def newest_index(recipe: Recipe, run_dir: Path) -> Index:
    """The index of a run's newest checkpoint, its own checksum compared, its files not. Raises `CheckpointError`."""
    place = checkpoint_place(recipe, run_dir)
    try:
        steps = place.steps()
    except OSError as error:
        raise CheckpointError(f"the checkpoints of {run_dir} cannot be reached: {error.strerror or error}") from None
    if not steps:
        raise CheckpointError(f"{run_dir} has no checkpoint yet, from which to tell what it has done")
    return place.read_index(steps[-1])


def step_of(batch: int, skipped: SkippedData) -> int | None:
    """The update, from 1, that was made with the batch at this place of the order; None where it was left out."""
    before = 0
    for start, stop in skipped.ranges:
        if start <= batch < stop:
            return None
        before += max(min(stop, batch) - start, 0)
    return batch - before + 1
