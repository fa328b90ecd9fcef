"""One rank's part of a step: planned in one piece, then read and decoded in slices, by any threads in any order."""

import errno
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash
from torch import Tensor

from vitscale.data.batch import Batch
from vitscale.data.draws import Purpose, uniform
from vitscale.data.open_shards import OpenedShard, OpenShards
from vitscale.data.order import EvalOrder, TrainOrder
from vitscale.data.settings import Reading
from vitscale.data.views import DrawnViews, ViewKind, draw_views, numbers_of
from vitscale.data.worker_threads import Activity
from vitscale.ground.errors import DataError, StorageError
from vitscale.ground.images import CRC_MISMATCH, NO_MEMORY, OK, WRONG_SIZE, decode_slice, operate

_SLICE_SAMPLES = 16  # at 224 px the decoded pixels are still in the core's cache when their digest is taken
_WORD = 2**64
# Errors of a server or a network, not of the file.
_MAY_PASS = {errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH}
_PROBLEMS = {
    CRC_MISMATCH: "its bytes do not match their checksum",
    WRONG_SIZE: "its picture is not of the height and width that the shard states",
}

_log = logging.getLogger(__name__)


class Buffers:
    """A pool of uint8 tensors. A tensor's memory returns to it when the last tensor or array that views it is gone.

    `pinned` memory is page-locked, so that a CUDA device can copy from it while the host does other work. Then torch
    does the reuse, as it knows which copies are still under way.
    """

    def __init__(self, shape: tuple[int, ...], pinned: bool) -> None:
        self._shape, self._pinned = shape, pinned
        self._free: deque[np.ndarray] = deque()  # its methods are safe wherever the garbage collector runs

    def take(self) -> Tensor:
        """A tensor with undefined content."""
        if self._pinned:
            return torch.empty(self._shape, dtype=torch.uint8, pin_memory=True)
        try:
            array = self._free.pop()
        except IndexError:
            array = np.empty(self._shape, np.uint8)
        handed = array.view()
        # A tensor made from this view keeps it alive, and so does every tensor or array made from that tensor. (An
        # array made from the view itself would not: it would keep the underlying array alive instead.)
        weakref.finalize(handed, self._free.append, array).atexit = False
        return torch.from_numpy(handed)


@dataclass
class Samples:
    """Per-sample metadata of one batch, as its shards state it, and where each sample lies; arrays are (b,)."""

    shards: list[OpenedShard]  # that the batch reads from
    shard_of: np.ndarray  # each sample's index into `shards`, int64
    slots: np.ndarray  # its slot in its shard, int64
    sizes: np.ndarray  # bytes of the stored image, int64
    heights: np.ndarray  # pixels of the stored image, int64
    widths: np.ndarray
    uids: np.ndarray  # int64
    labels: np.ndarray
    crcs: np.ndarray  # crc32c of the stored image's bytes, uint32
    raw: np.ndarray  # whether the stored image is raw pixels instead of a JPEG, bool

    @classmethod
    def of(cls, shards: list[OpenedShard], shard_of: np.ndarray, positions: np.ndarray) -> "Samples":
        """The samples at `positions` among the selected samples of `shards[shard_of]`; both int64 (b,)."""
        columns = [np.empty(len(positions), kind) for kind in (*[np.int64] * 6, np.uint32, bool)]
        samples = cls(shards, shard_of, *columns)
        for number, shard in enumerate(shards):
            rows = np.flatnonzero(shard_of == number)
            samples.fill(rows, shard, positions[rows])
        return samples

    def fill(self, rows: np.ndarray, shard: OpenedShard, positions: np.ndarray) -> None:
        """Fill in these rows from the shard's metadata of the samples at these positions."""
        file = shard.file
        assert file is not None
        slots = positions if shard.selected is None else shard.selected[positions]
        self.slots[rows] = slots
        self.sizes[rows] = file.size[slots]
        self.heights[rows], self.widths[rows] = file.height[slots], file.width[slots]
        self.uids[rows], self.labels[rows] = file.uid[slots], file.label[slots]
        self.crcs[rows], self.raw[rows] = file.crc[slots], file.raw[slots]


@dataclass
class Work:
    """A batch in the making. Each slice writes to its own rows; `lock` guards `remaining` and `error`."""

    order_position: int
    epoch: int
    samples: Samples
    positions: np.ndarray
    repeats: np.ndarray  # how often the sample is in the batch before, int64 (b,)
    drawn: list[DrawnViews]  # by kind
    checked: np.ndarray
    mask: np.ndarray
    bad: np.ndarray
    views: tuple[Tensor, ...]
    pixels: list[np.ndarray]  # their memory, uint8 (b, n, S, S, 3)
    digests: np.ndarray
    slices: list[slice]
    remaining: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    done: threading.Event = field(default_factory=threading.Event)
    error: tuple[int, BaseException] | None = None


class BatchReader:
    """Plans and reads batches, as `Loader` says; `slots` is this rank's range [first, last) in every global batch."""

    def __init__(
        self,
        shards: OpenShards,
        order: TrainOrder | EvalOrder,
        kinds: Sequence[ViewKind],
        slots: tuple[int, int],
        seed: int,
        reading: Reading,
        digest: bool,
        activity: Activity,
    ) -> None:
        self._shards, self._order, self._slots = shards, order, slots
        self._kinds, self._numbers = kinds, numbers_of(kinds)
        self._seed, self._reading, self._digest, self._activity = seed, reading, digest, activity
        count = slots[1] - slots[0]
        self._buffers = [Buffers((count, kind.count, kind.side, kind.side, 3), reading.pinned) for kind in kinds]
        self._memory = threading.local()

    def plan(self, position: int) -> Work:
        """Find a batch's samples and open their shards. For one thread only. Raises as `OpenShards.acquire`."""
        slots = self._order.batch(position, *self._slots)
        indices, shard_of = np.unique(slots.shard, return_inverse=True)
        shards = list(self._shards.acquire(indices.tolist()).values())
        self._shards.prepare(self._order.upcoming(position, *self._slots))
        count = len(slots.shard)
        samples = Samples.of(shards, shard_of, slots.position)
        drawn = self._draw(slots.epoch, samples, slots.view)
        checked = uniform(drawn[0].keys[:, 0], self._seed, Purpose.CHECK) < self._reading.check_rate
        # A rank's part may be small: at least two slices for each thread, so that none is idle.
        length = max(1, min(_SLICE_SAMPLES, count // (2 * self._reading.threads)))
        slices = [slice(start, min(start + length, count)) for start in range(0, count, length)]
        views = tuple(buffers.take() for buffers in self._buffers)
        return Work(
            order_position=position,
            epoch=slots.epoch,
            samples=samples,
            positions=slots.position,
            repeats=slots.view,
            drawn=drawn,
            checked=checked | np.array([shard.is_damaged for shard in shards], bool)[shard_of],
            mask=slots.mask,
            bad=np.zeros(count, bool),
            views=views,
            pixels=[each.numpy() for each in views],
            digests=np.zeros(len(slices), np.uint64),
            slices=slices,
            remaining=len(slices),
        )

    def finish(self, work: Work) -> Batch:
        """The finished batch, once all its slices are done."""
        return Batch(
            position=work.order_position,
            epoch=work.epoch,
            views=work.views,
            labels=torch.from_numpy(work.samples.labels),
            uids=torch.from_numpy(work.samples.uids),
            view_keys=tuple(torch.from_numpy(drawn.keys.view(np.int64)) for drawn in work.drawn),
            mask=torch.from_numpy(work.mask),
            bad_samples=int(work.bad.sum()),
            digest=int(work.digests.sum(dtype=np.uint64)) if self._digest else None,
        )

    def read(self, work: Work, number: int) -> None:
        """Make one slice of a batch. Never raises: an error is kept in `work.error`."""
        rows = work.slices[number]
        try:
            self._read_rows(work, rows)
            if self._digest:
                work.digests[number] = self._digest_of(work, rows)
        except BaseException as error:  # whatever it is, the consumer must hear of it instead of waiting
            with work.lock:
                if work.error is None or rows.start < work.error[0]:
                    work.error = (rows.start, error)
        finally:
            with work.lock:
                work.remaining -= 1
                is_last = work.remaining == 0
            if is_last:
                self._shards.release(work.samples.shards)
                work.done.set()

    def _draw(self, epoch: int, samples: Samples, repeats: np.ndarray, rows: slice = slice(None)) -> list[DrawnViews]:
        columns = (samples.uids[rows], repeats[rows], samples.heights[rows], samples.widths[rows])
        return draw_views(self._kinds, self._seed, epoch, *columns)

    def _read_rows(self, work: Work, rows: slice) -> None:
        samples = work.samples
        sizes = samples.sizes[rows]
        starts = np.cumsum(sizes) - sizes
        stored = self._buffer(int(sizes.sum()))
        status = np.zeros(len(sizes), np.int32)
        unreadable: dict[int, DataError] = {}
        for i, row in enumerate(range(rows.start, rows.stop)):
            try:
                self._read_into(stored, int(starts[i]), samples, row)
            except DataError as error:
                status[i] = CRC_MISMATCH
                unreadable[row] = error
        self._decode(work, rows, stored, starts, work.checked[rows], status)
        for i in np.flatnonzero(status != OK).tolist():
            row = rows.start + i
            what = _PROBLEMS.get(int(status[i]), "the decoder refused it")
            self._handle(work, row, unreadable.get(row) or self._damaged(samples, row, what))

    def _read_into(self, stored: np.ndarray, start: int, samples: Samples, row: int) -> None:
        """Read a row's stored bytes into the buffer. Raises DataError if the file no longer has them."""
        file = samples.shards[samples.shard_of[row]].file
        assert file is not None
        slot, size = int(samples.slots[row]), int(samples.sizes[row])
        target, offset, done = memoryview(stored)[start : start + size], int(file.offset[slot]), 0  # type: ignore[arg-type]
        self._activity.begin("reading", file.path, "slot", slot)
        try:
            while done < size:  # on some network file systems one call reads less than was asked for
                count = os.preadv(file.fd, [target[done:]], offset + done)
                if count == 0:
                    raise self._damaged(samples, row, f"the file ends after {done:,} of its {size:,} bytes")
                done += count
        except OSError as error:
            if error.errno in _MAY_PASS:
                what = f"{file.path}: cannot be read ({error.strerror}). Repeat the command to continue"
                raise StorageError(what) from error
            raise self._damaged(samples, row, f"its bytes cannot be read ({error.strerror})") from error
        finally:
            self._activity.end()

    def _decode(
        self, work: Work, rows: slice, stored: np.ndarray, starts: np.ndarray, checked: np.ndarray, status: np.ndarray
    ) -> None:
        """Fill these rows of the images from stored bytes; sets `status` as `decode_slice` does."""
        samples = work.samples
        decode_slice(
            stored,
            starts,
            samples.sizes[rows],
            samples.crcs[rows],
            checked,
            samples.raw[rows],
            samples.heights[rows],
            samples.widths[rows],
            np.concatenate([drawn.boxes[rows] for drawn in work.drawn], axis=1),
            np.concatenate([drawn.flips[rows] for drawn in work.drawn], axis=1),
            self._reading.dct_scaling,
            [pixels[rows] for pixels in work.pixels],
            [kind.transform.resize for kind in self._kinds],
            status,
        )
        if np.any(status == NO_MEMORY):
            raise MemoryError("no memory to decode an image")
        for kind, drawn, pixels in zip(self._kinds, work.drawn, work.pixels, strict=True):
            if drawn.programs.size:
                programs = drawn.programs[rows].reshape(-1, drawn.programs.shape[2])
                operate(pixels[rows].reshape(-1, *pixels.shape[2:]), programs, np.repeat(status, kind.count))

    def _handle(self, work: Work, row: int, problem: DataError) -> None:
        if self._reading.bad_samples == "error":
            raise problem
        if not work.mask[row]:  # a filler: it is not used, and the sample that it repeats is reported in its own slot
            return
        work.bad[row] = True
        if self._reading.bad_samples == "mask":
            work.mask[row] = False
            _log.warning("batch %d: %s. It is left out", work.order_position, problem)
            return
        self._substitute(work, row, problem)
        _log.warning("batch %d: %s. uid %d replaces it", work.order_position, problem, work.samples.uids[row])

    def _substitute(self, work: Work, row: int, problem: DataError) -> None:
        """Put the next sound sample of the shard into the row: the same one on every rank, world and run."""
        samples = work.samples
        shard = samples.shards[samples.shard_of[row]]
        one = slice(row, row + 1)
        for step in range(1, shard.num_selected):
            position = (int(work.positions[row]) + step) % shard.num_selected
            samples.fill(np.array([row]), shard, np.array([position]))
            for drawn, new in zip(work.drawn, self._draw(work.epoch, samples, work.repeats, one), strict=True):
                drawn.keys[one], drawn.boxes[one], drawn.flips[one] = new.keys, new.boxes, new.flips
                drawn.programs[one] = new.programs
            stored, status = self._buffer(int(samples.sizes[row])), np.zeros(1, np.int32)
            try:
                self._read_into(stored, 0, samples, row)
            except DataError:
                continue
            self._decode(work, one, stored, np.zeros(1, np.int64), np.ones(1, bool), status)
            if status[0] == OK:
                return
        raise DataError(f"{problem}. No other sample of the shard could replace it: all are damaged")

    def _damaged(self, samples: Samples, row: int, what: str) -> DataError:
        shard = samples.shards[samples.shard_of[row]]
        file = shard.file
        assert file is not None
        mend = "The shard is damaged: restore it, or convert it again"
        if shard.pin is not None:
            mend = "This copy of the shard is damaged: remove it, and it is fetched again"
        return DataError(f"{file.path}: slot {int(samples.slots[row])}, uid {int(samples.uids[row])}: {what}. {mend}")

    def _digest_of(self, work: Work, rows: slice) -> int:
        uids, total = work.samples.uids[rows].tolist(), 0
        for numbers, pixels in zip(self._numbers, work.pixels, strict=True):
            for number, of_views in zip(numbers.tolist(), pixels[rows].swapaxes(0, 1), strict=True):
                seeds = ((uid + number) % _WORD for uid in uids)
                pairs = zip(of_views, seeds, strict=True)
                total += sum(xxhash.xxh3_64_intdigest(view, seed=seed) for view, seed in pairs)
        return total % _WORD

    def _buffer(self, size: int) -> np.ndarray:
        """This thread's buffer of at least `size` bytes; its content is never handed out."""
        buffer: np.ndarray | None = getattr(self._memory, "stored", None)
        if buffer is None or len(buffer) < size:
            buffer = np.empty(max(size, 2 * len(buffer) if buffer is not None else size), np.uint8)
            self._memory.stored = buffer
        return buffer
