"""Images a second of a whole conversion, by the number of worker processes: real photos, transcoded.

    python benchmarks/convert_workers.py [--data FOLDER] [--copies N] [--rounds N]

Every photo of grocery/train.tar and clothing/train.tar is converted N times under different names, with 1, 2, ...
worker processes up to the cores. Prints the wall-clock seconds of writing the shards, listing and start-up left
out, and the speed-up over one worker, which is the number of workers if nothing is in the way.
"""

import json
import os
import shutil
import statistics
import tempfile
from datetime import datetime
from pathlib import Path

from paired import median_ratio
from photos import extract, parsed, photos_parser

from data_tools.conversion import convert
from data_tools.machine import Machine
from data_tools.request import Request
from vitscale.data.shards.images import ImageOptions


def seconds_of_shards(source: Path, out: Path, workers: int) -> tuple[float, int]:
    """From the first shard begun to the last one done, and the number of images."""
    request = Request(str(source), images=ImageOptions(pass_through=False), shard_samples=256)
    samples = convert(request, out, Machine(workers=workers)).totals.samples
    events = [json.loads(line) for line in (out / "convert.log.jsonl").read_text().splitlines()]
    ends = [(datetime.fromisoformat(e["time"]).timestamp(), e["seconds"]) for e in events if e["event"] == "shard"]
    return max(end for end, _ in ends) - min(end - seconds for end, seconds in ends), samples


def main() -> None:
    parser = photos_parser(__doc__)
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parsed(parser)
    cores = len(os.sched_getaffinity(0))
    seconds: dict[int, list[float]] = {workers: [] for workers in range(1, cores + 1)}
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder) / "photos"
        photos.mkdir()
        extract(options.data, photos)
        source = Path(folder) / "source"
        for copy in range(options.copies):
            (source / f"copy{copy}").mkdir(parents=True)
            for photo in photos.iterdir():
                (source / f"copy{copy}" / photo.name).hardlink_to(photo)
        for _ in range(options.rounds):
            for workers, found in seconds.items():
                out = Path(folder) / "out"
                took, images = seconds_of_shards(source, out, workers)
                shutil.rmtree(out)
                found.append(took)
    for workers, found in seconds.items():
        speedup = median_ratio(seconds[1], found)
        print(f"{workers} workers: {images:,} images in {statistics.median(found):5.1f} s, {speedup:.2f} x one worker")


if __name__ == "__main__":
    main()
