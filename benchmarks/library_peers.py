"""What of ours stands where a library could: the sort of conversions, the worker pool, PDQ, .npz.

    python benchmarks/library_peers.py [sort] [pool] [pdq] [npz] [--rows 5000000]

Every contender has a process of its own: seconds, peak of its resident memory, and what it came to. DuckDB, Pebble,
loky and pdqhash take part where they are installed; nothing of ours needs them.
"""

import argparse
import multiprocessing
import os
import resource
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from data_tools import listing
from data_tools.dedup.fingerprint import pdq_hashes
from data_tools.tasks import Progress, Task
from data_tools.worker_processes import run_in_processes

BATCH = 100_000
CLASSES = 21_843
TASKS, DEADLY = 10, 3


def rows(count: int) -> Iterator[pa.RecordBatch]:
    """Images as a listing has them, with the hashes of their keys."""
    for first in range(0, count, BATCH):
        numbers = range(first, min(first + BATCH, count))
        keys = [f"n{i * 7919 % CLASSES:08d}/n{i * 7919 % CLASSES:08d}_{i}.JPEG" for i in numbers]
        columns = [
            pa.array([xxhash.xxh3_64_intdigest(key.encode()) for key in keys], pa.uint64()),
            pa.array(numbers),
            pa.array(keys),
            pa.array([[i % CLASSES] for i in numbers], pa.list_(pa.int32())),
            pa.array(np.zeros(len(keys), np.int32)),
            pa.array([key.encode() for key in keys], pa.binary()),
        ]
        yield pa.record_batch(columns, names=["hash", "number", "key", "labels", "part", "content"])


# ---- The order of a conversion ---------------------------------------------------------------------------------------


class _OnePart:
    parts = ("list.csv",)


def sort_ours(folder: Path, count: int) -> int:
    """As `data_tools.listing` does it: dealt into buckets by the hash, one bucket after the other sorted in memory."""
    buckets = min(512, -(-count // (1 << 14)))
    (folder / "buckets").mkdir()
    paths = [folder / "buckets" / f"{i:03d}" for i in range(buckets)]
    with ExitStack() as files:
        writers: list[Any] = []
        for batch in _read(folder):
            if not writers:
                opened = (files.enter_context(pa.OSFile(str(path), "wb")) for path in paths)
                writers = [files.enter_context(pa.ipc.new_stream(file, batch.schema)) for file in opened]
            hashes = batch.column("hash").to_numpy()
            bucket = ((hashes >> np.uint64(32)) * np.uint64(buckets) >> np.uint64(32)).astype(np.int64)
            dealt = batch.take(pa.array(np.argsort(bucket, kind="stable")))
            ends = np.cumsum(np.bincount(bucket, minlength=buckets)).tolist()
            for writer, start, end in zip(writers, [0, *ends], ends, strict=False):
                writer.write_batch(dealt.slice(start, end - start))
    label_of = np.arange(CLASSES, dtype=np.int32)
    source: Any = _OnePart()
    return _written(folder, listing._sorted(paths, label_of, source, True, Counter()))


def sort_duckdb(folder: Path, count: int) -> int:
    """One statement, one thread, told to take 200 MB."""
    database = import_module("duckdb").connect(str(folder / "duckdb"))
    database.execute("SET memory_limit = '200MB'; SET threads = 1")
    database.register("listing", pa.ipc.open_stream(pa.OSFile(str(folder / "rows"))))
    query = "SELECT key, labels, part, content FROM listing ORDER BY hash, key, number"
    return _written(folder, database.sql(query).to_arrow_reader(1 << 14))


def sort_pyarrow(folder: Path, count: int) -> int:
    """All in memory."""
    table = pa.Table.from_batches(list(_read(folder)))
    keys = [(name, "ascending") for name in ("hash", "key", "number")]
    return _written(folder, table.sort_by(keys).to_batches(1 << 14))


def _read(folder: Path) -> Iterator[pa.RecordBatch]:
    with pa.OSFile(str(folder / "rows")) as file, pa.ipc.open_stream(file) as reader:
        yield from reader


def _written(folder: Path, batches: Any) -> int:
    with pa.OSFile(str(folder / "sorted"), "wb") as file, ExitStack() as stack:
        writer, total = None, 0
        for batch in batches:
            writer = writer or stack.enter_context(pa.ipc.new_stream(file, batch.schema))
            writer.write_batch(batch)
            total += batch.num_rows
    return total


# ---- Ten tasks, one of which kills its worker ------------------------------------------------------------------------


def perform(number: int) -> int:
    """A fifth of a second; the process of the fourth task is killed."""
    time.sleep(0.2)
    if number == DEADLY:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


class Images(Task):
    """A task of ours of five images, at the third of which the worker dies."""

    def __init__(self, number: int, left_out: int = -1) -> None:
        self._number, self._left_out = number, left_out

    @property
    def name(self) -> str:
        return f"task {self._number}"

    def without(self, position: int, reason: str) -> "Images":
        return Images(self._number, position)

    def run(self, progress: Progress) -> int:
        for position in range(5):
            time.sleep(0.04)
            if self._number == DEADLY and position == 2 != self._left_out:
                os.kill(os.getpid(), signal.SIGKILL)
            progress.advance()
        return self._number


def pool_ours(folder: Path, count: int) -> str:
    """All done, without the image that two workers died on."""
    return f"{len(list(run_in_processes(map(Images, range(TASKS)), 2, lambda done, rejected: None)))} of {TASKS} done"


def pool_pebble(folder: Path, count: int) -> str:
    """Loses the task."""
    with import_module("pebble").ProcessPool(2, context=multiprocessing.get_context("spawn")) as pool:
        return _outcomes([pool.schedule(perform, args=(number,)) for number in range(TASKS)])


def pool_loky(folder: Path, count: int) -> str:
    """Loses all that was not done."""
    with import_module("loky").ProcessPoolExecutor(2, context=multiprocessing.get_context("spawn")) as pool:
        return _outcomes([pool.submit(perform, number) for number in range(TASKS)])


def _outcomes(futures: list[Any]) -> str:
    failed = Counter(type(error).__name__ for future in futures if (error := future.exception()) is not None)
    return f"{TASKS - failed.total()} of {TASKS} done, {dict(failed)}"


# ---- PDQ, one picture at a time --------------------------------------------------------------------------------------


def pdq_ours(folder: Path, count: int) -> int:
    """The C library's."""
    return len({pdq_hashes(luma[None])[0].tobytes() for luma in _lumas()})


def pdq_library(folder: Path, count: int) -> int:
    """Meta's code, by pdqhash, which wants three channels and gives a byte a bit."""
    compute = import_module("pdqhash").compute
    return len(
        {np.packbits(compute(np.repeat(luma[:, :, None], 3, 2))[0].astype(np.uint8)).tobytes() for luma in _lumas()}
    )


def _lumas() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (20_000, 64, 64), np.uint8)


# ---- Weights of 2.6 GB as .npz ---------------------------------------------------------------------------------------


def npz_ours(folder: Path, count: int) -> str:
    """One array in memory at a time."""
    import torch

    from vitscale.models.weights.npz import write_npz

    with (folder / "weights.npz").open("wb") as file:
        write_npz(file, ((name, torch.from_numpy(value)) for name, value in _weights()))
    return f"{(folder / 'weights.npz').stat().st_size:,} bytes"


def npz_numpy(folder: Path, count: int) -> str:
    """`numpy.savez`, which is given all arrays."""
    arrays: dict[str, Any] = dict(_weights())
    np.savez(folder / "weights.npz", **arrays)
    return f"{(folder / 'weights.npz').stat().st_size:,} bytes"


def _weights() -> Iterator[tuple[str, np.ndarray]]:
    for layer in range(100):
        yield f"layer{layer}", np.full((1280, 5120), layer, np.float32)


CONTENDERS: dict[str, tuple[Callable[[Path, int], Any], ...]] = {
    "sort": (sort_ours, sort_duckdb, sort_pyarrow),
    "pool": (pool_ours, pool_pebble, pool_loky),
    "pdq": (pdq_ours, pdq_library),
    "npz": (npz_ours, npz_numpy),
}


def measure(contender: Callable[[Path, int], Any], folder: Path, count: int, results: Any) -> None:
    """Sends (seconds, MiB, what it came to) of this process."""
    if contender in CONTENDERS["pdq"]:
        pdq_hashes(np.zeros((1, 64, 64), np.uint8))  # compiled before the clock starts
    began = time.perf_counter()
    try:
        outcome = str(contender(folder, count))
    except Exception as error:
        outcome = repr(error)
    seconds = time.perf_counter() - began
    results.put((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, outcome))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--rows", type=int, default=5_000_000)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for subject in given.subjects:
        for contender in CONTENDERS[subject]:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                if subject == "sort":
                    with pa.OSFile(str(folder / "rows"), "wb") as file, ExitStack() as stack:
                        writer: Any = None
                        for batch in rows(given.rows):
                            writer = writer or stack.enter_context(pa.ipc.new_stream(file, batch.schema))
                            writer.write_batch(batch)
                results = context.Queue()
                process = context.Process(target=measure, args=(contender, folder, given.rows, results))
                process.start()
                seconds, peak, outcome = results.get()
                process.join()
            print(f"{contender.__name__:>14} {seconds:8.1f} s {peak:8,.0f} MiB  {outcome}", flush=True)


if __name__ == "__main__":
    main()
