"""Images that a conversion stores in a second of CPU time, against FFCV's own writer, in one run on real photos.

    python benchmarks/convert_speed.py [--data FOLDER] [--rounds N] [--json]

FOLDER holds grocery/train.tar and clothing/train.tar (2,096 JPEGs); VITSCALE_TEST_DATA names it, too. FFCV decodes with
Pillow, as its users do, and encodes at quality 90. Ours is the task of one shard: read, check or transcode, digest,
write the shard and its table. Fails below 2.5 times FFCV's speed passing through, below its speed transcoding at the
same quality, or if checksums take 10 % of passing through: where the whole confidence interval of the median says so.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ffcv.fields import IntField, RGBImageField
from ffcv.writer import DatasetWriter
from one_shard import convert_one_shard
from paired import median_ratio
from photos import extract, parsed, photos_parser
from PIL import Image

from data_tools.shard_task import shard_name
from vitscale.data.shards.images import ImageOptions
from vitscale.ground.files.digests import file_digests
from vitscale.ground.images import crc32c

OTHERS = ("FFCV", "checksums")
PASS_THROUGH_TARGET, TRANSCODING_TARGET, CHECKSUMS_LIMIT = 2.5, 1.0, 0.1


class Photos:
    """What FFCV's writer takes: an indexed dataset of pictures and labels."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        with self.paths[index].open("rb") as file:
            return Image.open(file).convert("RGB"), 0


def write_with_ffcv(paths: list[Path], out: Path) -> None:
    """One worker process of FFCV's writer."""
    fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=90), "label": IntField()}
    with Path(os.devnull).open("w") as null, contextlib.redirect_stderr(null):
        DatasetWriter(str(out), fields, num_workers=1).from_indexed_dataset(Photos(paths))
    for worker in multiprocessing.active_children():  # only then its time is counted
        worker.join()


def write_with_ours(paths: list[Path], out: Path, options: ImageOptions) -> None:
    """One shard, by the task that a conversion gives to a worker."""
    report = convert_one_shard(paths[0].parent, out, options)
    assert (report.passed_through if options.pass_through else report.transcoded) == len(paths), report


def checksums(paths: list[Path], shard: Path) -> float:
    """CPU seconds of every digest that passing these photos through into this shard takes, reading it back included."""
    began = time.process_time()
    file_digests(shard)
    seconds = time.process_time() - began
    for path in paths:
        data = path.read_bytes()
        began = time.process_time()
        hashlib.sha256(data).digest()
        crc32c(data)
        seconds += time.process_time() - began
    return seconds


def cpu_seconds(work: Callable[[], None]) -> float:
    """User and system time of this process and of its children that have ended."""

    def used() -> float:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    began = used()
    work()
    return used() - began


def measure(paths: list[Path], folder: Path, rounds: int) -> dict[str, list[float]]:
    """CPU seconds by way of writing, round by round; a first round, which compiles, is not counted."""
    ours = {
        "pass-through": ImageOptions(),
        "transcoding, quality 90": ImageOptions(quality=90, pass_through=False),
        f"transcoding, quality {ImageOptions().quality}": ImageOptions(pass_through=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ("FFCV", *ours, "checksums")}
    for counted in [False] + [True] * rounds:
        found = {"FFCV": cpu_seconds(lambda: write_with_ffcv(paths, folder / "FFCV"))}
        for name, options in ours.items():
            found[name] = cpu_seconds(partial(write_with_ours, paths, folder / name, options))
        found["checksums"] = checksums(paths, folder / "pass-through" / shard_name(0))
        for name, value in found.items() if counted else ():
            seconds[name].append(value)
    return seconds


def main() -> None:
    """Measure, print, and fail below the targets."""
    parser = photos_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parsed(parser)
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder) / "photos"
        photos.mkdir()
        paths = extract(options.data, photos)
        seconds = measure(paths, Path(folder), options.rounds)
        sizes = {name: (Path(folder) / name / shard_name(0)).stat().st_size for name in seconds if name not in OTHERS}
        sizes["FFCV"] = (Path(folder) / "FFCV").stat().st_size

    speeds = {name: median_ratio(seconds["FFCV"], seconds[name]) for name in sizes}
    share = median_ratio(seconds["checksums"], seconds["pass-through"])
    if options.json:
        medians = {name: speed.median for name, speed in speeds.items()}
        result = {"images": len(paths), "speed_to_ffcv": medians, "checksums_share": share.median, "bytes": sizes}
        result["intervals"] = {name: (found.low, found.high) for name, found in {**speeds, "checksums": share}.items()}
        print(json.dumps(result))
    else:
        for name, speed in speeds.items():
            rate = len(paths) / statistics.median(seconds[name])
            print(f"{name:26s} {rate:6.0f} images/CPU-s  {speed:.2f} x FFCV  {sizes[name] / 1e6:6.1f} MB")
        print(
            f"checksums take {share:.1%} of passing through; {len(paths):,} images, medians of {options.rounds} rounds"
        )
    slow = speeds["pass-through"].is_below(PASS_THROUGH_TARGET)
    slow |= speeds["transcoding, quality 90"].is_below(TRANSCODING_TARGET)
    sys.exit(slow or share.is_above(CHECKSUMS_LIMIT))


if __name__ == "__main__":
    main()
