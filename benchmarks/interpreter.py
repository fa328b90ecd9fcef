"""What a pure-Python thread still gets done while other threads of its process decode: do they hold the interpreter?

    python benchmarks/interpreter.py [--processes 8] [--threads 4] [--rounds 9] [--seconds 1] [--json]

Each process has one thread that counts, as a trainer's own Python does its work, and threads that decode slices of 16
photo-sized JPEGs. They share the machine's cores, so the count is compared with that beside as many threads that decode
in a process of their own (`free`): 1 is a decoder that never holds the interpreter. For contrast, `held` is the same
with the interpreter held for the length of a call. All processes work at once; the ways take turns. Fails below 0.8,
where the whole confidence interval of the median says so.
"""

import argparse
import ctypes
import io
import json
import multiprocessing
import sys
import threading
import time
from multiprocessing.synchronize import Barrier

import numpy as np
from paired import median_ratio
from PIL import Image

from vitscale.ground import native
from vitscale.ground.images import Resize, crc32c, decode_slice

SIDE, SLICE, LIMIT = 224, 16, 0.8
WAYS = ("apart", "free", "held")  # decoding in another process; in this one; in this one, holding the interpreter


def photo() -> bytes:
    coarse = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(coarse).resize((500, 400), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
    return out.getvalue()


def decode_until(stop: threading.Event) -> None:
    jpeg = np.frombuffer(photo(), np.uint8)
    out, status = np.empty((SLICE, SIDE, SIDE, 3), np.uint8), np.zeros(SLICE, np.int32)
    zeros, ones = np.zeros(SLICE, np.int64), np.ones(SLICE, bool)
    box = np.tile(np.array([0, 0, 400, 500], np.int32), (SLICE, 1))
    while not stop.is_set():
        sizes, crcs = np.full(SLICE, jpeg.size), np.full(SLICE, crc32c(jpeg), np.uint32)
        stored = (jpeg, zeros, sizes, crcs, ones, ~ones, np.full(SLICE, 400), np.full(SLICE, 500))
        decode_slice(*stored, box[:, None], ~ones[:, None], False, [out[:, None]], [Resize.AREA], status)
    assert not status.any()


def hold_the_interpreter() -> None:
    """From now on the library of this process is called as ctypes calls Python's own functions."""
    loaded = native.load()
    held = ctypes.PyDLL(loaded._name).vitscale_decode_slice
    held.argtypes, held.restype = loaded.vitscale_decode_slice.argtypes, None
    setattr(loaded, "vitscale_decode_slice", held)  # noqa: B010 (a CDLL has no such field to a type checker)


def work(way: str, counts: bool, threads: int, seconds: float, begin: Barrier, results: multiprocessing.Queue) -> None:
    """One process: threads that decode, one that counts, or both."""
    if way == "held":
        hold_the_interpreter()
    stop, total = threading.Event(), 0
    decoders = [threading.Thread(target=decode_until, args=(stop,)) for _ in range(threads)]
    begin.wait()
    for thread in decoders:
        thread.start()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        if counts:
            total += 1
        else:
            time.sleep(0.01)
    stop.set()
    for thread in decoders:
        thread.join()
    results.put(total if counts else None)


def counted(way: str, processes: int, threads: int, seconds: float) -> float:
    """What the counting threads of all processes got done."""
    context = multiprocessing.get_context("spawn")
    roles = [(True, threads)] * processes if way != "apart" else [(True, 0), (False, threads)] * processes
    begin, results = context.Barrier(len(roles)), context.Queue()
    workers = [context.Process(target=work, args=(way, *role, seconds, begin, results)) for role in roles]
    for worker in workers:
        worker.start()
    found = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    return float(sum(count for count in found if count is not None))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    counts: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(options.rounds):
        for way in WAYS if turn % 2 else reversed(WAYS):
            counts[way].append(counted(way, options.processes, options.threads, options.seconds))
    ratios = {way: median_ratio(counts[way], counts["apart"]) for way in ("free", "held")}
    if options.json:
        print(json.dumps({way: (ratio.median, ratio.low, ratio.high) for way, ratio in ratios.items()}))
    else:
        for way, ratio in ratios.items():
            print(f"{way:6} {ratio:.3g} of what is counted beside decoding in another process")
    return int(ratios["free"].is_below(LIMIT))


if __name__ == "__main__":
    sys.exit(main())
