"""The loader: an order and a manifest -> batches of pixels, prefetched by threads.

Files are read by pread into buffers of ours and never mapped, so that a truncated or vanished file is an error and not
a signal. Every sample's checksum and the decoder's status are checked. A batch belongs to whoever receives it: its
memory is not used again.
"""

import queue
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from vitscale.data.augmentation import Transform, sample_keys
from vitscale.data.kernel import CRC_MISMATCH, OK, SIZE_MISMATCH, decode_slice
from vitscale.data.order import EvalOrder, Slots, TrainOrder
from vitscale.errors import DataError
from vitscale.shards import Manifest, ShardFile

_SLICE_SAMPLES = 32
_OPEN_SHARDS = 256
_OPEN_FILES = 4096  # one rank alone may read from more than 1,024 shards in a batch, the usual limit of open files
_POLL_SECONDS = 0.1
_THREADS = "vitscale-data"
_WORD = 2**64


@dataclass(frozen=True)
class Batch:
    """One rank's part of one global batch.

    Attributes:
        step: updates done before this batch, from 0.
        epoch: of the order.
        images: uint8 (b, S, S, 3).
        labels: int64 (b,), -1 for none.
        uids: int64 (b,).
        mask: bool (b,), False for fillers.
        digest: sum over the samples of xxh3_64(pixels, seed = uid) modulo 2^64, where it was asked for.
    """

    step: int
    epoch: int
    images: Tensor
    labels: Tensor
    uids: Tensor
    mask: Tensor
    digest: int | None


class Loader:
    """Iterates over the batches of steps [start_step, stop_step); one pass a loader. A context manager.

    Args:
        manifest: of the dataset.
        order: which samples stand in which slot.
        image_size: side S of the output in pixels.
        transform: what of each picture is seen.
        rank, world: slots [rank G / world, (rank + 1) G / world) of every global batch of G are ours.
        seed: of the augmentation.
        threads: that read and decode.
        prefetch: batches that wait at most; one more is being made.
        start_step, stop_step: a stop of None means the end of the order, or never; no order is read beyond its end.
        digest: whether batches carry a checksum of their pixels.

    Raises:
        DataError: while iterating, for a file or sample that is missing or damaged.
    """

    def __init__(
        self,
        manifest: Manifest,
        order: TrainOrder | EvalOrder,
        *,
        image_size: int,
        transform: Transform,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        threads: int = 2,
        prefetch: int = 2,
        start_step: int = 0,
        stop_step: int | None = None,
        digest: bool = False,
    ) -> None:
        assert order.global_batch % world == 0, f"{world} ranks do not divide a batch of {order.global_batch}"
        assert 0 <= rank < world and threads >= 1 and prefetch >= 1, (rank, world, threads, prefetch)
        reader = _BatchReader(manifest, order, image_size, transform, rank, world, seed, threads, digest)
        stops = [stop for stop in (order.steps, stop_step) if stop is not None]
        # The thread must not hold the loader, or an abandoned loader would never be collected.
        self._producer = _Producer(reader, start_step, min(stops, default=None), prefetch)
        self._producer.start()
        self._finalizer = weakref.finalize(self, self._producer.stop)
        self._ended = False

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._ended:
            raise StopIteration
        item = self._producer.take()
        if isinstance(item, Batch):
            return item
        self.close()
        if isinstance(item, BaseException):
            raise item
        raise StopIteration

    def close(self) -> None:
        """Stop the threads and close the files. Whatever was handed out stays valid."""
        self._ended = True
        self._finalizer()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Producer(threading.Thread):
    """Makes batches ahead of their use, hands over an exception in place of a batch, None at the end."""

    def __init__(self, reader: "_BatchReader", first: int, last: int | None, prefetch: int) -> None:
        super().__init__(name=_THREADS, daemon=True)
        self._reader, self._first, self._last = reader, first, last
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue(prefetch)
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            step = self._first
            while (self._last is None or step < self._last) and not self._stopping.is_set():
                self._put(self._reader.read(step))
                step += 1
            self._put(None)
        except BaseException as error:  # whatever it is, the consumer must hear of it instead of waiting
            self._put(error)
        finally:
            self._reader.close()

    def _put(self, item: Batch | BaseException | None) -> None:
        while not self._stopping.is_set():
            try:
                return self._ready.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue

    def take(self) -> Batch | BaseException | None:
        """The next item; None also where another thread closes the loader meanwhile."""
        while self.is_alive() or not self._ready.empty():
            try:
                return self._ready.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
        return None

    def stop(self) -> None:
        self._stopping.set()
        # The garbage collector may call us in any thread, also in one of ours: that must neither wait for itself nor
        # touch the pool, whose lock it may hold. The producer sees the flag and ends.
        if not threading.current_thread().name.startswith(_THREADS):
            self._reader.cancel()
            self.join()


class _BatchReader:
    """Reads one step's slots: planned here, read and decoded in slices by a pool of threads."""

    def __init__(
        self,
        manifest: Manifest,
        order: TrainOrder | EvalOrder,
        image_size: int,
        transform: Transform,
        rank: int,
        world: int,
        seed: int,
        threads: int,
        digest: bool,
    ) -> None:
        self._order, self._image_size, self._transform = order, image_size, transform
        share = order.global_batch // world
        self._first_slot, self._last_slot = rank * share, (rank + 1) * share
        self._seed, self._digest, self._threads = seed, digest, threads
        self._shards = _OpenShards(manifest)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=_THREADS)
        self._buffers = threading.local()

    def cancel(self) -> None:
        """From any thread: make `read` fail soon, with an exception of no interest."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._shards.close()

    def read(self, step: int) -> Batch:
        slots = self._order.batch(step, self._first_slot, self._last_slot)
        count = len(slots.shard)
        samples = _Samples.look_up(slots, self._shards)
        keys = sample_keys(self._seed, slots.epoch, samples.uids)
        boxes = self._transform.boxes(keys, samples.heights, samples.widths)
        flips = self._transform.flips(keys)
        images = np.empty((count, self._image_size, self._image_size, 3), np.uint8)

        # A rank's part may be small: at least two slices for every thread, so that none idles.
        length = max(1, min(_SLICE_SAMPLES, count // (2 * self._threads)))

        def work(start: int) -> int:
            rows = slice(start, min(start + length, count))
            return self._read_slice(samples, rows, boxes[rows], flips[rows], images[rows])

        digests = list(self._pool.map(work, range(0, count, length)))
        self._shards.trim(keep=len(np.unique(slots.shard)))
        return Batch(
            step=step,
            epoch=slots.epoch,
            images=torch.from_numpy(images),
            labels=torch.from_numpy(samples.labels),
            uids=torch.from_numpy(samples.uids),
            mask=torch.from_numpy(slots.mask),
            digest=sum(digests) % _WORD if self._digest else None,
        )

    def _read_slice(
        self, samples: "_Samples", rows: slice, boxes: np.ndarray, flips: np.ndarray, images: np.ndarray
    ) -> int:
        """Read and decode some rows of a batch; the sum of their digests."""
        sizes, heights, widths = samples.sizes[rows], samples.heights[rows], samples.widths[rows]
        starts = np.cumsum(sizes) - sizes
        stored = self._buffer("stored", int(sizes.sum()))
        view = memoryview(stored)  # type: ignore[arg-type]
        for i, row in enumerate(range(rows.start, rows.stop)):
            start, size = int(starts[i]), int(sizes[i])
            view[start : start + size] = samples.files[row].read(samples.slots[row])
        scratch = self._buffer("scratch", int((heights * widths).max()) * 3)
        status = np.empty(len(sizes), np.int32)
        decode_slice(stored, starts, sizes, samples.crcs[rows], heights, widths, boxes, flips, scratch, images, status)
        for bad in np.flatnonzero(status != OK):
            samples.refuse(rows.start + int(bad), int(status[bad]))
        if not self._digest:
            return 0
        uids = samples.uids[rows].tolist()
        return sum(xxhash.xxh3_64_intdigest(pixels, seed=uid % _WORD) for pixels, uid in zip(images, uids, strict=True))

    def _buffer(self, name: str, size: int) -> np.ndarray:
        """This thread's buffer of at least `size` bytes; what it holds is never handed out."""
        buffer = getattr(self._buffers, name, None)
        if buffer is None or len(buffer) < size:
            buffer = np.empty(max(size, 2 * len(buffer) if buffer is not None else size), np.uint8)
            setattr(self._buffers, name, buffer)
        return buffer


@dataclass(frozen=True)
class _Samples:
    """Where the samples of a batch lie and what their shards say of them, row by row."""

    files: list[ShardFile]
    slots: list[int]
    sizes: np.ndarray
    heights: np.ndarray
    widths: np.ndarray
    crcs: np.ndarray
    uids: np.ndarray
    labels: np.ndarray

    @classmethod
    def look_up(cls, order: Slots, shards: "_OpenShards") -> "_Samples":
        count = len(order.shard)
        columns = {name: np.empty(count, np.int64) for name in ("size", "height", "width", "uid", "label")}
        crcs = np.empty(count, np.uint32)
        slots = np.empty(count, np.int64)
        files: list[ShardFile | None] = [None] * count
        for index in np.unique(order.shard):
            rows = np.flatnonzero(order.shard == index)
            file, selected = shards.get(int(index))
            at = order.position[rows]
            slots[rows] = at = at if selected is None else selected[at]
            for name, column in columns.items():
                column[rows] = getattr(file, name)[at]
            crcs[rows] = file.crc[at]
            for row in rows:
                files[row] = file
        return cls(
            files=[file for file in files if file is not None],
            slots=slots.tolist(),
            sizes=columns["size"],
            heights=columns["height"],
            widths=columns["width"],
            crcs=crcs,
            uids=columns["uid"],
            labels=columns["label"],
        )

    def refuse(self, row: int, status: int) -> None:
        """Raise the `DataError` of a sample that is damaged."""
        what = {
            CRC_MISMATCH: "its bytes do not match their checksum",
            SIZE_MISMATCH: "its picture is not of the height and width that the shard states",
        }.get(status, "the decoder refused it, although its bytes match their checksum")
        raise DataError(
            f"{self.files[row].path}: slot {self.slots[row]}, uid {int(self.uids[row])}: {what}. "
            f"The shard is damaged: restore it, or convert it again"
        )


class _OpenShards:
    """Shard files that are open, the least recently used closed first, between batches only."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._open: OrderedDict[int, tuple[ShardFile, np.ndarray | None]] = OrderedDict()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

    def get(self, index: int) -> tuple[ShardFile, np.ndarray | None]:
        """The file of a shard, and its selected slots (None: all)."""
        if index not in self._open:
            entry = self._manifest.shards[index]
            selected = self._manifest.selected_slots(index)
            file = ShardFile(self._manifest.shard_path(index), expected_bytes=entry.bytes)
            self._open[index] = (file, selected)
            found = (file.samples, int(file.uid[0]))
            if found != (entry.samples, entry.first_uid):
                raise DataError(
                    f"{file.path}: {found[0]} samples from uid {found[1]}; the manifest says {entry.samples} from "
                    f"{entry.first_uid}: this is another shard"
                )
        self._open.move_to_end(index)
        return self._open[index]

    def trim(self, keep: int) -> None:
        """Close the least recently used, but none of the last `keep`: the next batch reads from much the same."""
        while len(self._open) > max(_OPEN_SHARDS, keep):
            _, (file, _) = self._open.popitem(last=False)
            file.close()

    def close(self) -> None:
        for file, _ in self._open.values():
            file.close()
        self._open.clear()
