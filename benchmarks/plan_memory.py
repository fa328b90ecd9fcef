"""Time and memory of planning a conversion, by the number of images: a list of that many entries, none of them read.

    python benchmarks/plan_memory.py [--entries 10000000]

Prints, for a hundredth, a tenth and all of the entries, the seconds and the peak of resident memory of a process of its
own, from the list on disk to the plan on disk; and the ratios to the smallest.
"""

import argparse
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from data_tools.listing import ListingTask, order_images
from data_tools.plan import write_plan
from data_tools.request import Request
from data_tools.sources.image_list import open_image_list
from data_tools.sources.source import SourceOptions
from data_tools.tasks import run_inline

_CLASSES = 18_291


def write_list(path: Path, entries: int) -> None:
    """A CSV of paths and labels such as a crawl of the web leaves behind."""
    with path.open("w") as file:
        file.write("path,label\n")
        for i in range(entries):
            file.write(f"crawl/{i % 4096:04d}/{(i * 2654435761) % 2**40:010x}-{i}.jpg,{i * 7919 % _CLASSES}\n")


def measure(path: str, folder: str, results: Any) -> None:
    """Plan in this process; sends (seconds of the list, of the order, peak MiB, images)."""
    work = Path(folder)
    (work / "listing").mkdir()
    started = time.perf_counter()
    source = open_image_list(path, [path], SourceOptions())
    for _ in run_inline([ListingTask(source, 0, work / "listing", 0, "")], lambda done, rejected: None):
        pass
    listed = time.perf_counter()
    ordered = order_images(source, work / "listing", 0, None)
    plan = write_plan(Request(path), ordered, ordered.batches, work, [], allow_unlabelled=False)
    done = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    results.put((listed - started, done - listed, peak, plan.images))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=10_000_000)
    entries = parser.parse_args().entries
    context = multiprocessing.get_context("spawn")
    smallest: tuple[float, float] | None = None
    print(f"{'entries':>12} {'list s':>8} {'order s':>8} {'peak MiB':>9} {'s ratio':>8} {'MiB ratio':>9}")
    for count in (entries // 100, entries // 10, entries):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "images.csv"
            write_list(path, count)
            results = context.Queue()
            process = context.Process(target=measure, args=(str(path), folder, results))
            process.start()
            listing, ordering, peak, planned = results.get()
            process.join()
            assert planned == count
        seconds = listing + ordering
        smallest = smallest or (seconds, peak)
        print(
            f"{count:>12,} {listing:>8.1f} {ordering:>8.1f} {peak:>9,.0f} {seconds / smallest[0]:>8.1f} "
            f"{peak / smallest[1]:>9.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
