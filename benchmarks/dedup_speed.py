"""What comparing with test sets costs a conversion, and how many images a core decides in a second.

    python benchmarks/dedup_speed.py [--data FOLDER] [--tests N] [--levels 2] [--rounds N] [--json]

N test images are cut out of the grocery photos; the clothing photos are converted, passing through and transcoding,
with and without comparing with them. The comparison's own time, and the fingerprints' (which every conversion takes),
are measured in the same run, round by round. Fails at the default level if a core decides fewer than 600 images a
second from JPEG bytes, if transcoding takes 45 % longer than without both, or passing through 2.5 times as long:
where the whole confidence interval of the median says so.
"""

import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from dedup_recall import Photo, photos
from one_shard import convert_one_shard
from paired import Interval, median_interval, median_ratio
from photos import parsed, photos_parser

from data_tools.dedup.against import name_indexes
from data_tools.dedup.building import TestSource, build_index
from data_tools.dedup.fingerprint import fingerprint
from data_tools.dedup.index import FingerprintIndex
from data_tools.dedup.matching import Matcher, near_pairs, words
from data_tools.dedup.queries import Candidate
from data_tools.dedup.variants import DEFAULT_LEVEL, LEVELS
from data_tools.sources.folder import FolderSource
from vitscale.data.shards.images import ImageOptions, StoredImage, store_image

BATCH = 64
TILE = 200, 160  # width and height in pixels
RATE_TARGET, TRANSCODING_LIMIT, PASS_THROUGH_LIMIT = 600, 1.45, 2.5
HOUR = 3600


def write_tiles(grocery: list[Photo], count: int, folder: Path) -> None:
    """Test images: parts of grocery photos, at random places."""
    random = np.random.default_rng(0)
    for number in range(count):
        image = grocery[number % len(grocery)].image
        left, top = (int(random.integers(0, side - part)) for side, part in zip(image.size, TILE, strict=True))
        file = io.BytesIO()
        image.crop((left, top, left + TILE[0], top + TILE[1])).save(file, "JPEG", quality=90)
        (folder / f"{number:06d}.jpg").write_bytes(file.getvalue())


def decide(contents: list[bytes], matcher: Matcher) -> None:
    """From JPEG bytes to a decision, as a worker does it."""
    batch = []
    for content in contents:
        stored = store_image(content)
        assert isinstance(stored, StoredImage)
        batch.append(Candidate.of(stored, content))
        if len(batch) == BATCH:
            matcher.match(batch)
            batch = []
    matcher.match(batch)


def fingerprints(pictures: list[np.ndarray]) -> None:
    """What every conversion does, whether it compares or not."""
    for picture in pictures:
        fingerprint(picture)


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time of this process."""
    began = time.process_time()
    work()
    return time.process_time() - began


def measure(folder: Path, out: Path, index_path: Path, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each way to treat the photos of a folder, by round; the first, which compiles, is left out."""
    against = name_indexes([str(index_path)])
    contents = [path.read_bytes() for path in sorted(folder.iterdir())]
    pictures = [stored.pixels for stored in map(store_image, contents) if isinstance(stored, StoredImage)]
    recode = ImageOptions(pass_through=False)
    index = FingerprintIndex(index_path)
    ways: dict[str, Callable[[], object]] = {
        "passing through": lambda: convert_one_shard(folder, out, ImageOptions()),
        "passing through, compared": lambda: convert_one_shard(folder, out, ImageOptions(), against),
        "transcoding": lambda: convert_one_shard(folder, out, recode),
        "transcoding, compared": lambda: convert_one_shard(folder, out, recode, against),
        "fingerprints": lambda: fingerprints(pictures),
        "bytes to decision": lambda: decide(contents, Matcher([index])),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for counted in [False] + [True] * rounds:
        for name, way in ways.items():
            taken = cpu_seconds(way)
            if counted:
                seconds[name].append(taken)
    return seconds


def pairs_per_second(hashes: int) -> float:
    """Of the bare search, among so many random hashes: what grows with the test sets."""
    random = np.random.default_rng(0)
    index = words(random.integers(0, 256, (hashes, 32), dtype=np.uint8))
    queries = words(random.integers(0, 256, (BATCH, 32), dtype=np.uint8))
    near_pairs(queries, index, 60)
    began = time.process_time()
    near_pairs(queries, index, 60)
    return BATCH * hashes / (time.process_time() - began)


def main() -> None:
    """Measure, print, and fail beyond the limits."""
    parser = photos_parser(__doc__)
    parser.add_argument("--tests", type=int, default=25_000)
    parser.add_argument("--levels", type=int, nargs="+", default=[DEFAULT_LEVEL])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parsed(parser)
    results, failed = {}, False
    with tempfile.TemporaryDirectory() as temporary:
        tests, train = Path(temporary) / "tests", Path(temporary) / "train"
        tests.mkdir()
        train.mkdir()
        write_tiles(list(photos(options.data, "grocery")), options.tests, tests)
        clothing = photos(options.data, "clothing")
        for number, photo in enumerate(clothing):
            (train / f"{number:05d}.jpg").write_bytes(photo.content)
        for level in options.levels:
            index_path = Path(temporary) / f"index-{level}"
            source = TestSource("tiles", str(tests), FolderSource((str(tests),)), "photo", level)
            build_index([source], index_path, workers=len(os.sched_getaffinity(0)))
            hashes = FingerprintIndex(index_path).hashes.shape[1]
            taken = measure(train, Path(temporary) / "out", index_path, options.rounds)
            found = {"images_per_s": median_interval(len(clothing) / one for one in taken["bytes to decision"])}
            for key, name in (("pass_through_ratio", "passing through"), ("transcoding_ratio", "transcoding")):
                bare = [a - b for a, b in zip(taken[name], taken["fingerprints"], strict=True)]
                found[key] = median_ratio(taken[f"{name}, compared"], bare)
            pairs = pairs_per_second(hashes)
            results[level] = {
                "hashes": hashes,
                **{key: interval.median for key, interval in found.items()},
                "intervals": {key: (interval.low, interval.high) for key, interval in found.items()},
                "pairs_per_s": pairs,
                "cpu_ms": {name: 1000 * statistics.median(value) / len(clothing) for name, value in taken.items()},
            }
            if level == DEFAULT_LEVEL:
                failed = found["images_per_s"].is_below(RATE_TARGET)
                failed |= found["transcoding_ratio"].is_above(TRANSCODING_LIMIT)
                failed |= found["pass_through_ratio"].is_above(PASS_THROUGH_LIMIT)
            if not options.json:
                show(level, results[level], found)
    if options.json:
        print(json.dumps(results))
    sys.exit(failed)


def show(level: int, result: dict, found: dict[str, Interval]) -> None:
    """One level, and what it comes to for 300 million images."""
    print(f"level {level}, {2 * LEVELS[level]} variants: {result['hashes']:,} hashes")
    for name, value in result["cpu_ms"].items():
        print(f"  {name:28s} {value:7.3f} CPU ms an image")
    print(f"  {found['images_per_s']:,.0f} images/s a core from JPEG bytes to decision")
    print(
        f"  conversion with comparison to one without fingerprints: {found['pass_through_ratio']:.2f} x passing "
        f"through, {found['transcoding_ratio']:.2f} x transcoding"
    )
    print(f"  search: {result['pairs_per_s'] / 1e9:.1f} * 10^9 pairs/s a core")
    for test_images in (50_000, 500_000):
        pairs = 300e6 * test_images * 2 * LEVELS[level]
        print(
            f"  300M images x {test_images:,} test images x {2 * LEVELS[level]} variants = {pairs:.1e} pairs = "
            f"{pairs / result['pairs_per_s'] / HOUR:,.0f} core-hours of search; fingerprints "
            f"{300e6 * result['cpu_ms']['fingerprints'] / 1000 / HOUR:,.0f}"
        )


if __name__ == "__main__":
    main()
