"""The loader: an order and a manifest -> batches of pixels, prefetched by threads.

Files are read by pread into our own buffers and never mapped, so that a truncated or vanished file is an error and not
a signal. Every sample's checksum and the decoder's status are checked. A batch belongs to its consumer: its memory is
not reused while any tensor or array refers to it.

One thread plans: it finds the samples of a step and has their shards opened. Others read and decode slices of batches.
Batches are handed over in order, and so are the exceptions that take their place.
"""

import os
import queue
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from vitscale.data.augmentation import Transform
from vitscale.data.batch import Batch
from vitscale.data.batch_reader import BatchReader, Work
from vitscale.data.open_shards import OpenShards
from vitscale.data.order import EvalOrder, TrainOrder
from vitscale.data.pixel_programs import PixelPrograms
from vitscale.data.settings import Reading
from vitscale.data.shards import Manifest
from vitscale.data.views import ViewKind, view_kinds
from vitscale.data.worker_threads import THREADS, Activity, WorkerThreads
from vitscale.ground.errors import StorageError
from vitscale.recipe import ImageOperation, Recipe

_POLL_SECONDS = 0.1
_CLOSE_SECONDS = 10.0  # how long closing waits for a read to return; the planner waits longer, to close the files


class Loader(AbstractContextManager["Loader"]):
    """Iterates once over the batches of steps [start_step, stop_step). A context manager.

    Args:
        manifest: the dataset's manifest, on this machine or at a URL.
        order: the order of the samples: which sample is in which slot.
        image_size: side S of the output in pixels.
        transform: crop and flip of each picture.
        operations: the recipe's operations; the loader applies those that are its own and ignores the others.
        views: kinds of several views of each sample, in place of the single one that these three describe.
        rank, world: this rank and the number of ranks; it yields slots [rank G / world, (rank + 1) G / world) of every
            global batch of G samples.
        seed: the seed of the augmentation.
        reading: threads, checks, cache, and the policy for damaged samples.
        start_step, stop_step: the range of steps; a stop of None means the end of the order, if it has one. A stop
            beyond the order's end is cut to it.
        digest: whether batches carry a checksum of their pixels.

    Raises RecipeError if the cache cannot be used. While iterating, raises DataError if a file or sample is missing or
    damaged, StorageError if a URL does not answer or a read does not return.
    """

    def __init__(
        self,
        manifest: Manifest,
        order: TrainOrder | EvalOrder,
        *,
        image_size: int = 224,
        transform: Transform | None = None,
        operations: Sequence[ImageOperation] = (),
        views: Sequence[ViewKind] = (),
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        reading: Reading | None = None,
        start_step: int = 0,
        stop_step: int | None = None,
        digest: bool = False,
    ) -> None:
        reading = Reading() if reading is None else reading
        assert order.global_batch % world == 0, f"{world} ranks do not divide a batch of {order.global_batch}"
        assert 0 <= rank < world and reading.threads >= 1 and reading.prefetch >= 1, (rank, world, reading)
        share = order.global_batch // world
        activity = Activity()
        shards = OpenShards(manifest, reading, activity)
        slots = (rank * share, (rank + 1) * share)
        if not views:
            assert transform is not None, "a transform, or kinds of views"
            views = [ViewKind(1, image_size, transform, PixelPrograms(operations, image_size))]
        reader = BatchReader(shards, order, views, slots, seed, reading, digest, activity)
        stops = [stop for stop in (order.steps, stop_step) if stop is not None]
        last = min(stops, default=None)
        # The threads must not hold the loader, or an abandoned loader would never be collected.
        self._engine = _Engine(shards, reader, start_step, last, reading, activity)
        self._engine.start()
        self._finalizer = weakref.finalize(self, self._engine.stop)
        self._ended = False

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = None if self._ended else self._take(wait=True)
        if batch is None:
            self.close()
            raise StopIteration
        return batch

    def next_if_ready(self) -> Batch | None:
        """The next batch if it is ready; None if it is not, if there is none, or if an exception takes its place."""
        return None if self._ended else self._take(wait=False)

    def close(self) -> None:
        """Stop the threads and close the files. Batches that were handed out stay valid."""
        self._ended = True
        self._finalizer()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, wait: bool) -> Batch | None:
        try:
            return self._engine.next_batch(wait)
        except BaseException:
            self.close()
            raise


def training_order(recipe: Recipe, manifest: Manifest) -> TrainOrder:
    """A recipe's order of a dataset. Raises `RecipeError` if it has fewer samples than one global batch."""
    samples = [shard.num_selected for shard in manifest.shards]
    return TrainOrder(samples, recipe.batch.global_size, recipe.seed, recipe.data.repeats)


def training_loader(
    recipe: Recipe,
    manifest: Manifest,
    order: TrainOrder,
    *,
    rank: int,
    world: int,
    start: int,
    stop: int,
    pinned: bool = False,
    digest: bool,
) -> Loader:
    """A rank's batches of steps [start, stop) of a recipe's `training_order` of its training set.

    `pinned` is as in `Reading`, the rest as in `Loader`. Raises as `Loader` and `Reading.of` do.
    """
    data = recipe.data
    return Loader(
        manifest,
        order,
        views=view_kinds(data),
        rank=rank,
        world=world,
        seed=recipe.seed,
        reading=Reading.of(data, pinned=pinned),
        start_step=start,
        stop_step=stop,
        digest=digest,
    )


def on_device(loader: Loader, device: torch.device) -> Iterator[Batch]:
    """The loader's batches with their images on the device; the rest stays in host memory.

    On CUDA a separate stream copies the next batch, if it is ready, while the device works on this one; with the one
    that the consumer still holds, up to three batches are on the device. Batches must be in pinned memory
    (`Reading.pinned`).
    """
    if device.type != "cuda":
        yield from loader
        return
    copying = torch.cuda.Stream(device)
    ahead: tuple[Batch, torch.cuda.Event] | None = None
    while True:
        if ahead is None:
            batch = next(loader, None)
            if batch is None:
                return
            ahead = _copied(batch, device, copying)
        moved, arrived = ahead
        batch = loader.next_if_ready()
        ahead = None if batch is None else _copied(batch, device, copying)
        current = torch.cuda.current_stream(device)
        current.wait_event(arrived)
        for views in moved.views:
            views.record_stream(current)  # they were allocated on another stream
        yield moved


def _copied(batch: Batch, device: torch.device, stream: torch.cuda.Stream) -> tuple[Batch, torch.cuda.Event]:
    with torch.cuda.stream(stream):
        moved = replace(batch, views=tuple(views.to(device, non_blocking=True) for views in batch.views))
        arrived = torch.cuda.Event()
        arrived.record(stream)
    return moved, arrived


class _Engine(threading.Thread):
    """Plans batches ahead of their use and has them made; this thread is the planner."""

    def __init__(
        self,
        shards: OpenShards,
        reader: BatchReader,
        first: int,
        last: int | None,
        reading: Reading,
        activity: Activity,
    ) -> None:
        super().__init__(name=THREADS, daemon=True)
        self._shards, self._reader, self._activity, self._stopping = shards, reader, activity, activity.stopping
        self._first, self._last = first, last
        self._stall_s = reading.stall_s
        self._workers = WorkerThreads(reading.threads)
        # In step order; an exception takes the place of a batch that failed, StopIteration comes at the end.
        self._ready: queue.Queue[Work | BaseException] = queue.Queue(reading.prefetch)
        self._next: Work | BaseException | None = None  # taken from the queue, not yet done
        self._taking = threading.Lock()
        self._process = os.getpid()
        # `stop` puts into this, and the garbage collector may call `stop` at any moment: a SimpleQueue allows that, as
        # it needs no lock of Python's.
        self._closed: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self) -> None:
        try:
            step = self._first
            while (self._last is None or step < self._last) and not self._stopping.is_set():
                work = self._reader.plan(step)
                for number in range(len(work.slices)):
                    self._workers.submit(lambda work=work, number=number: self._reader.read(work, number))  # type: ignore[misc]
                self._put(work)
                del work
                step += 1
            self._put(StopIteration())
        except BaseException as error:  # whatever it is, the consumer must hear of it instead of waiting
            self._put(error)
        # The only place where things are closed, since a loader may be abandoned in any thread.
        self._closed.get()
        self._workers.join()
        self._shards.close()

    def _put(self, item: Work | BaseException) -> None:
        while not self._stopping.is_set():
            try:
                return self._ready.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue

    def next_batch(self, wait: bool) -> Batch | None:
        """The next batch; None if another thread closes the loader, or, without `wait`, if no batch is ready.

        With `wait`, raises the error that took the batch's place, and StopIteration at the end.
        """
        if os.getpid() != self._process:  # a fork has none of its threads and would wait forever
            raise RuntimeError("a Loader works in the process that made it; make another one in this process")
        with self._taking:
            return self._take(wait)

    def _take(self, wait: bool) -> Batch | None:
        if self._next is None:
            self._next = self._take_item(wait)
        item = self._next
        if isinstance(item, Work):
            while not item.done.wait(_POLL_SECONDS if wait else 0):
                if not wait or self._stopping.is_set():
                    return None
                self._check_stall()
            if item.error is not None:
                item = item.error[1]
        if item is None:
            return None
        if isinstance(item, BaseException):
            if wait:
                raise item
            return None
        self._next = None
        return self._reader.finish(item)

    def _take_item(self, wait: bool) -> Work | BaseException | None:
        while not self._stopping.is_set():
            try:
                return self._ready.get(timeout=_POLL_SECONDS) if wait else self._ready.get_nowait()
            except queue.Empty:
                if not wait:
                    return None
                self._check_stall()
        return None

    def _check_stall(self) -> None:
        seconds, what = self._activity.longest()
        if seconds > self._stall_s:
            raise StorageError(
                f"reading data is stuck: {what} has not returned for {seconds:,.0f} s (data.stall_s is "
                f"{self._stall_s:g}). Look at that disk or network, then repeat the command to continue"
            )

    def stop(self) -> None:
        if os.getpid() != self._process:  # a thread that did not come along may have held any of these locks
            return
        self._stopping.set()
        self._workers.stop()
        self._shards.stop()
        self._closed.put(None)
        # The garbage collector may call this in any thread, including our own, which must not wait for itself.
        if not threading.current_thread().name.startswith(THREADS):
            self.join(_CLOSE_SECONDS)
