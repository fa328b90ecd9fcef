"""The shards that a loader reads from: fetched, compared with their manifest, opened, and closed in time."""

import logging
import resource
import threading
from collections.abc import Iterable
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vitscale.data.settings import Reading
from vitscale.data.shards import Manifest, ShardFile
from vitscale.data.shards.cache import PinnedFile, ShardCache
from vitscale.data.shards.opening import open_shard_file
from vitscale.data.shards.verified import markers_in, verify_once
from vitscale.data.worker_threads import Activity, WorkerThreads
from vitscale.ground.errors import DataError
from vitscale.ground.storage import is_url

_OPEN_FILES = 4096  # one rank alone may read from more than 1,024 shards in a batch, the usual limit of open files
_OPENERS, _BRINGERS = 4, 2  # threads, which mostly wait for a disk or a network

_log = logging.getLogger(__name__)


@dataclass
class OpenedShard:
    """The shard of this index in use: open once it is `ready`, unless it has an `error`."""

    index: int
    file: ShardFile | None = None
    selected: np.ndarray | None = None  # the slots that belong to the dataset, int64 (n,); None for all
    is_damaged: bool = False  # its digest is not the manifest's, although it is used
    ready: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    users: int = 0  # batches in the making that use it
    pin: PinnedFile | None = None  # keeps the file in the cache; None for a dataset on this machine

    @property
    def num_selected(self) -> int:
        """The number of slots that belong to the dataset."""
        assert self.file is not None
        return self.file.samples if self.selected is None else len(self.selected)

    def close(self) -> None:
        """Close the file; the cache may remove it from now on."""
        if self.file is not None:
            self.file.close()
        if self.pin is not None:
            self.pin.release()


class OpenShards:
    """The open shards by index: background threads open them, and they are closed once no upcoming batch needs them."""

    def __init__(self, manifest: Manifest, reading: Reading, activity: Activity) -> None:
        self._manifest, self._reading, self._activity = manifest, reading, activity
        self._cache = ShardCache(reading.cache / "shards", reading.cache_bytes) if is_url(manifest.where) else None
        self._open: dict[int, OpenedShard] = {}
        self._sizes = np.array([shard.bytes for shard in manifest.shards], np.int64)
        self._lock = threading.Lock()
        self._ahead: set[int] = set()
        self._damaged: set[int] = set()
        self._openers, self._bringers = WorkerThreads(_OPENERS), WorkerThreads(_BRINGERS)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

    def acquire(self, indices: Iterable[int]) -> dict[int, OpenedShard]:
        """These shards by index, open until they are released. For one thread only.

        Raises `DataError` or `StorageError` for the first that cannot be read, `CancelledError` if the loader is being
        closed.
        """
        shards = {}
        for index in indices:
            shard = self._open.get(index)
            if shard is None:
                shard = self._open[index] = OpenedShard(index)
                self._openers.submit(lambda shard=shard: self._make_ready(shard))  # type: ignore[misc]
            shards[index] = shard
        for shard in shards.values():
            while not shard.ready.wait(timeout=0.1):
                if self._activity.stopping.is_set():
                    raise CancelledError
            if shard.error is not None:
                raise shard.error
        with self._lock:
            for shard in shards.values():
                shard.users += 1
        return shards

    def release(self, shards: Iterable[OpenedShard]) -> None:
        """Give back acquired shards, which the caller no longer reads. From any thread."""
        with self._lock:
            for shard in shards:
                shard.users -= 1

    def prepare(self, indices: Iterable[int]) -> None:
        """Announce which shards are needed from now on: these are fetched and compared; unused others are closed.

        Errors are raised when a shard is acquired. Only for the thread that calls `acquire`.
        """
        needed = np.array(list(indices), np.int64)
        ahead = needed if self._cache is not None or self._reading.verify_shards else needed[:0]
        if self._cache is not None:  # what does not fit is not fetched: it would be thrown out before its use
            ahead = ahead[self._sizes[ahead].cumsum() <= self._reading.cache_bytes]
        for index in ahead.tolist():
            if index not in self._ahead and index not in self._open:
                self._bringers.submit(lambda index=index: self._bring(index))  # type: ignore[misc]
        self._ahead = set(ahead.tolist())
        stay = set(needed.tolist())
        with self._lock:
            done = [index for index, shard in self._open.items() if shard.users == 0 and index not in stay]
        for index in done:
            self._open.pop(index).close()

    def stop(self) -> None:
        """Begin nothing more. From any thread; never waits."""
        self._openers.stop()
        self._bringers.stop()

    def close(self) -> None:
        """Wait for the threads to end, then close everything. Nothing may be reading any more."""
        self._openers.join()
        self._bringers.join()
        for shard in self._open.values():
            shard.close()
        self._open.clear()

    def _make_ready(self, shard: OpenedShard) -> None:
        try:
            path, shard.pin = self._local(shard.index)
            shard.is_damaged = shard.index in self._damaged
            self._activity.begin("opening", path)
            shard.selected = self._manifest.selected_slots(shard.index)
            shard.file = open_shard_file(self._manifest, shard.index, path)
        except BaseException as error:
            shard.error = error
        finally:
            self._activity.end()
            shard.ready.set()

    def _bring(self, index: int) -> None:
        try:
            with suppress(Exception):
                _, pin = self._local(index)
                if pin is not None:
                    pin.release()
        finally:
            self._activity.end()

    def _local(self, index: int) -> tuple[Path, PinnedFile | None]:
        """A shard's path on this machine, and the pin that keeps it in the cache, if it comes from there."""
        entry = self._manifest.shards[index]
        where = self._manifest.location(entry.path)

        def is_cancelled() -> bool:  # called while data arrives, so a long transfer never counts as a stall
            self._activity.begin("opening" if self._cache is None else "fetching", where)
            return self._activity.stopping.is_set()

        is_cancelled()
        if self._cache is not None:
            pin = self._cache.pin(where, entry, is_cancelled)
            return pin.path, pin
        path = Path(where)
        if self._reading.verify_shards:
            try:
                verify_once(path, entry, markers_in(self._reading.cache), is_cancelled)
            except DataError as error:
                # The images' own checksums find the damaged ones among them, but no damage elsewhere in the shard.
                if self._reading.bad_samples == "error" or not _has_size(path, entry.bytes):
                    raise
                with self._lock:
                    is_news = index not in self._damaged
                    self._damaged.add(index)
                if is_news:
                    _log.warning("%s. It is used anyway, as data.bad_samples says", error)
        return path, None


def _has_size(path: Path, size: int) -> bool:
    with suppress(OSError):
        return path.stat().st_size == size
    return False
