"""What a rank needs until it knows the samples of its first batch, far into a training on hundreds of millions.

    python benchmarks/order_scale.py [--samples 300000000] [--shards 36000] [--step 500000] [--rounds 3] [--json]

A manifest of that size is written, of shards that do not exist. For one rank of 1, of 8 and of 64, each time in a
process of its own, it is loaded and the rank's part of one global batch of 4,096 is planned; no shard is opened.
Printed are medians of the seconds, and the largest peak of resident memory: of the whole process, and what it grew by
after the imports. Fails if a rank takes 1 s from the manifest on disk to its samples, or 500 MB in all.
"""

import argparse
import hashlib
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from vitscale.data.order import TrainOrder
from vitscale.data.shards import Manifest
from vitscale.data.shards.manifest import ShardEntry

GLOBAL_BATCH = 4096
WORLDS = 1, 8, 64
SECONDS_LIMIT, MEGABYTES_LIMIT = 1.0, 500.0


def write_manifest(folder: str, samples: int, shards: int, _: Any) -> None:
    """The manifest of a conversion of that many images, 20 kB each."""
    entries, first_uid = [], 0
    for index in range(shards):
        count = samples // shards + (index < samples % shards)
        digest = hashlib.sha256(str(index).encode()).hexdigest()
        entries.append(
            ShardEntry(
                path=f"shard-{index:06d}.beton",
                samples=count,
                bytes=count * 20_000,
                sha256=digest,
                xxh3_128=digest[:32],
                first_uid=first_uid,
            )
        )
        first_uid += count
    fields = ("image", "label", "uid", "crc")
    Manifest(fields=fields, num_samples=samples, class_names=(), shuffle_seed=0, shards=tuple(entries)).save(folder)


def plan_first_batch(folder: str, step: int, world: int, results: Any) -> None:
    """Plan in this process; sends seconds of the manifest, of the order, of the shards ahead, and peak megabytes."""
    before = peak_megabytes()
    started = time.perf_counter()
    manifest = Manifest.load(folder)
    loaded = time.perf_counter()
    order = TrainOrder([shard.num_selected for shard in manifest.shards], GLOBAL_BATCH, seed=0)
    share = GLOBAL_BATCH // world
    mine = world // 2 * share, (world // 2 + 1) * share
    slots = order.batch(step, *mine)
    planned = time.perf_counter()
    ahead = order.upcoming(step, *mine)
    done = time.perf_counter()
    assert len(slots.shard) == share and set(slots.shard.tolist()) <= set(ahead)
    peak = peak_megabytes()
    results.put(
        {
            "manifest_s": loaded - started,
            "order_s": planned - loaded,
            "total_s": planned - started,
            "ahead_s": done - planned,
            "shards_ahead": len(ahead),
            "grown_mb": peak - before,
            "peak_mb": peak,
        }
    )


def peak_megabytes() -> float:
    """Of this process; Linux counts what the parent had as well, hence the parent does none of the work."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def in_a_process(work: Callable[..., None], *arguments: Any) -> Any:
    """The arguments' last is a queue; returns what was sent, or None."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=work, args=(*arguments, results))
    process.start()
    process.join()
    if process.exitcode != 0:
        sys.exit(f"{work.__name__} failed")
    return None if results.empty() else results.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=300_000_000)
    parser.add_argument("--shards", type=int, default=36_000)
    parser.add_argument("--step", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        in_a_process(write_manifest, folder, options.samples, options.shards)
        for world in WORLDS:
            rounds = [in_a_process(plan_first_batch, folder, options.step, world) for _ in range(options.rounds)]
            table[world] = {
                key: (max if key.endswith("_mb") else statistics.median)(found[key] for found in rounds)
                for key in rounds[0]
            }
    if options.json:
        print(json.dumps({f"rank_of_{world}": row for world, row in table.items()}))
    else:
        print(f"{'rank of':>8}", *(f"{key:>12}" for key in table[WORLDS[0]]))
        for world, row in table.items():
            print(f"{world:>8}", *(f"{value:>12.{3 if key.endswith('_s') else 0}f}" for key, value in row.items()))
    if any(row["total_s"] >= SECONDS_LIMIT or row["peak_mb"] >= MEGABYTES_LIMIT for row in table.values()):
        sys.exit(f"over the limit of {SECONDS_LIMIT:g} s and {MEGABYTES_LIMIT:g} MB")


if __name__ == "__main__":
    main()
