"""Images that training reads in a second of CPU time, against Pillow with torch's DataLoader and against stock FFCV.

    python benchmarks/loader.py IMAGES [--max-side PIXELS] [--rounds N] [--json]

IMAGES: a folder of images, a tar, a folder of tars; or the folder of real data, of which the grocery and clothing
photos (350 to 500 px) are read. With --max-side 256 they are stored at 256 px. All read the same stored bytes from the
page cache, crop as torchvision's RandomResizedCrop(224, scale=(0.05, 1)) does, flip, and hand over uint8 batches of
256; Pillow also as it is used mostly, with normalised fp32. One worker each, CPU time of the whole process.

Ours has all safety on: digests and checksums of shards and samples, and the digest of every batch. `safety_cost` is the
share of the speed that this takes, `crc_cost` that of the samples' checksums alone. `vs_pillow_scaled` is with decoding
at 1/2, 1/4 or 1/8 where the crop allows it (data.dct_scaling). The two readers of a ratio take turns, and the one that
begins changes every round; shown are the median of the rounds' ratios and its 95 % confidence interval.

Fails below 2.2 times Pillow and 1.7 times FFCV for images up to 256 px, below 1.4 times Pillow for larger ones, or if
safety takes 5 % or checksums 3 %, where the whole interval says so; or if a process whose caches are warm waits 2 s for
its first batch.
"""

import argparse
import contextlib
import io
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from paired import Interval, median_ratio
from photos import COLLECTIONS, extract
from PIL import Image

from data_tools.conversion import convert
from data_tools.machine import Machine
from data_tools.request import Request
from data_tools.sources import SourceOptions
from vitscale.data.augmentation import TrainTransform
from vitscale.data.draws import combine, mix
from vitscale.data.loader import Loader
from vitscale.data.order import TrainOrder
from vitscale.data.settings import Reading
from vitscale.data.shards import Manifest, ShardFile, StoredSample, write_shard
from vitscale.data.shards.images import ImageOptions
from vitscale.ground.errors import VitscaleError
from vitscale.recipe import ImageOperation

SIDE, BATCH, AREA, ASPECT = 224, 256, (0.05, 1.0), (3 / 4, 4 / 3)
SMALL = 256  # pixels
LIMITS = {True: {"vs_pillow": 2.2, "vs_ffcv": 1.7}, False: {"vs_pillow": 1.4}}
COST_LIMITS = {"safety_cost": 0.05, "crc_cost": 0.03}
FIRST_BATCH_LIMIT = 2.0  # seconds
RATIOS = {
    "vs_pillow": ("ours", "Pillow"),
    "vs_pillow_fp32": ("ours", "Pillow, fp32"),
    "vs_pillow_scaled": ("ours, scaled", "Pillow"),
    "vs_ffcv": ("ours", "FFCV"),
}
COSTS = {"safety_cost": ("ours", "ours, no safety"), "crc_cost": ("ours", "ours, no checksums")}
PRINT_FIRST = "--print-first-batch"


class TorchvisionCrop(TrainTransform):
    """RandomResizedCrop as the crop of our loader, so that all readers see equally large ones."""

    def boxes(self, keys: np.ndarray, heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
        boxes = np.stack([np.zeros_like(heights), np.zeros_like(heights), heights, widths], axis=1)
        open_rows = np.ones(len(keys), bool)
        for attempt in range(10):
            area = heights * widths * (AREA[0] + (AREA[1] - AREA[0]) * uniform(keys, attempt, 0))
            aspect = np.exp(np.log(ASPECT[0]) + (np.log(ASPECT[1]) - np.log(ASPECT[0])) * uniform(keys, attempt, 1))
            h, w = np.rint(np.sqrt(area / aspect)).astype(np.int64), np.rint(np.sqrt(area * aspect)).astype(np.int64)
            fits = open_rows & (h > 0) & (w > 0) & (h <= heights) & (w <= widths)
            top = (uniform(keys, attempt, 2) * (heights - h + 1)).astype(np.int64)
            left = (uniform(keys, attempt, 3) * (widths - w + 1)).astype(np.int64)
            boxes[fits] = np.stack([top, left, h, w], axis=1)[fits]
            open_rows &= ~fits
            if not open_rows.any():
                break
        return boxes.astype(np.int32)


def uniform(keys: np.ndarray, attempt: int, number: int) -> np.ndarray:
    return (mix(keys ^ combine(99, attempt, number)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def random_box(width: int, height: int) -> tuple[int, int, int, int]:
    """The same by Python alone, which is the fastest for a single picture: left, top, right, bottom."""
    for _ in range(10):
        area = width * height * random.uniform(*AREA)
        aspect = math.exp(random.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            return left, top, left + w, top + h
    return 0, 0, width, height


class Files(torch.utils.data.Dataset):
    """What torch's DataLoader takes: image files read by Pillow."""

    def __init__(
        self, paths: list[Path], normalise: bool, change: Callable[[Image.Image], Image.Image] | None = None
    ) -> None:
        self.paths, self.normalise, self.change = paths, normalise, change

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with self.paths[index].open("rb") as file:
            picture = Image.open(file).convert("RGB")
        seen = picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=random_box(picture.width, picture.height))
        if random.random() < 0.5:
            seen = seen.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.change is not None:
            seen = self.change(seen)
        pixels = torch.from_numpy(np.array(seen))
        if not self.normalise:
            return pixels, 0
        return (pixels.permute(2, 0, 1).float() / 255 - 0.5) / 0.5, 0


def with_pillow(
    paths: list[Path], normalise: bool, change: Callable[[Image.Image], Image.Image] | None = None
) -> Iterator[int]:
    for images, _ in torch.utils.data.DataLoader(Files(paths, normalise, change), BATCH, shuffle=True):
        yield len(images)


def with_ffcv(shard: Path) -> Callable[[], Iterator[int]]:
    """One Loader for all rounds, since each compiles anew."""
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader as FFCVLoader
    from ffcv.loader import OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor

    decoder = RandomResizedCropRGBImageDecoder((SIDE, SIDE), AREA, ASPECT)
    pipelines = {
        "image": [decoder, RandomHorizontalFlip(), ToTensor()],
        "label": [IntDecoder(), ToTensor()],
        "uid": None,
        "crc": None,
    }
    loader = FFCVLoader(
        str(shard), BATCH, num_workers=1, os_cache=True, order=OrderOption.RANDOM, seed=0, pipelines=pipelines
    )

    def read() -> Iterator[int]:
        for images, _ in loader:
            yield len(images)

    return read


def with_ours(
    manifest: Manifest,
    folder: Path,
    safe: bool = True,
    check: bool = True,
    scaled: bool = False,
    operations: Sequence[ImageOperation] = (),
) -> Iterator[int]:
    order = TrainOrder([shard.num_selected for shard in manifest.shards], BATCH, 0)
    reading = Reading(
        threads=1, verify_shards=safe, check_rate=float(safe and check), dct_scaling=scaled, cache=folder / "cache"
    )
    with Loader(
        *(manifest, order),
        image_size=SIDE,
        transform=TorchvisionCrop(),
        operations=operations,
        stop_step=order.steps_per_epoch,
        reading=reading,
        digest=safe,
    ) as loader:
        for batch in loader:
            yield len(batch.images)


def images_of(source: Path, folder: Path) -> Path:
    """A folder of the image files at `source`."""
    if source.is_dir() and all((source / name / "train.tar").is_file() for name in COLLECTIONS):
        folder.mkdir()
        extract(source, folder)
        return folder
    tars = [source] if source.is_file() else sorted(source.rglob("*.tar"))
    if not tars:
        return source
    folder.mkdir()
    for number, path in enumerate(tars):
        with tarfile.open(path) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.name.lower().endswith((".jpg", ".jpeg")) else None
                if content is not None:
                    (folder / f"{number}-{member.name.replace('/', '-')}").write_bytes(content.read())
    return folder


def store(images: Path, folder: Path, max_side: int | None) -> tuple[Manifest, list[Path], Path]:
    """The images as a dataset of small shards; the same stored bytes as files; the same in one shard, for FFCV."""
    options = ImageOptions() if max_side is None else ImageOptions(long_side=max_side)
    request = Request(str(images), source=SourceOptions(unlabelled=True), shard_samples=256, images=options)
    convert(request, folder / "data", Machine(workers=1))
    manifest = Manifest.load(folder / "data")
    files, samples = [], []
    (folder / "files").mkdir()
    for index in range(len(manifest.shards)):
        with ShardFile(manifest.shard_path(index)) as shard:
            for slot in range(len(shard)):
                content = shard.read(slot)
                files.append(folder / "files" / f"{int(shard.uid[slot])}.jpg")
                files[-1].write_bytes(content)
                size = int(shard.height[slot]), int(shard.width[slot])
                samples.append(StoredSample(content, *size, 0, int(shard.uid[slot])))
    write_shard(folder / "whole.beton", samples, len(samples))
    return manifest, files, folder / "whole.beton"


def stored_images(
    parser: argparse.ArgumentParser, source: Path, folder: Path, max_side: int | None
) -> tuple[Manifest, list[Path], Path]:
    """What `store` makes of the images at `source`; ends the program where they cannot be read."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            return store(images_of(source, folder / "images"), folder, max_side)
        except (VitscaleError, tarfile.TarError) as error:
            parser.error(f"{source}: {error}")


def speed(read: Callable[[], Iterator[int]]) -> float:
    """Images a CPU second, of one pass."""
    began = time.process_time()
    count = sum(read())
    return count / (time.process_time() - began)


def fresh_process(folder: Path) -> tuple[float, float]:
    """Seconds from the making of a loader to its first batch, and MB that a pass leaves beyond what imports take.

    In a process of its own, whose imports are done and whose caches are warm.
    """
    command = [sys.executable, __file__, PRINT_FIRST, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    seconds, megabytes = map(float, printed.split())
    return seconds, megabytes


def print_first_batch(folder: Path) -> None:
    manifest = Manifest.load(folder / "data")
    before, began = resident_mb(), time.perf_counter()
    batches = with_ours(manifest, folder)
    next(batches)
    seconds = time.perf_counter() - began
    sum(batches)
    print(seconds, resident_mb() - before)


def resident_mb() -> float:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def main() -> int:
    if sys.argv[1:2] == [PRINT_FIRST]:
        print_first_batch(Path(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("--max-side", type=int, help="store images at so many pixels at most; default: as they are")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.images.exists():
        parser.error(f"{options.images}: no such file or folder")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest, files, whole = stored_images(parser, options.images, folder, options.max_side)
        if len(files) < BATCH:
            parser.error(f"{options.images}: {len(files)} images; a batch takes {BATCH}")
        sides = [max(Image.open(path).size) for path in files]
        readers = {
            "ours": lambda: with_ours(manifest, folder),
            "ours, no checksums": lambda: with_ours(manifest, folder, check=False),
            "ours, no safety": lambda: with_ours(manifest, folder, safe=False),
            "ours, scaled": lambda: with_ours(manifest, folder, scaled=True),
            "Pillow": lambda: with_pillow(files, normalise=False),
            "Pillow, fp32": lambda: with_pillow(files, normalise=True),
            "FFCV": with_ffcv(whole),
        }
        for read in readers.values():  # compiled, and in the page cache
            next(read())
        speeds: dict[str, list[float]] = {name: [] for name in readers}
        compared: dict[str, Interval] = {}
        for key, pair in {**RATIOS, **COSTS}.items():
            took_turns: dict[str, list[float]] = {name: [] for name in pair}
            for turn in range(options.rounds):
                for name in sorted(pair, reverse=bool(turn % 2)):
                    took_turns[name].append(speed(readers[name]))
            ratio = median_ratio(*took_turns.values())
            compared[key] = ratio if key in RATIOS else Interval(1 - ratio.median, 1 - ratio.high, 1 - ratio.low)
            for name, rates in took_turns.items():
                speeds[name] += rates
        first_batch_s, added_mb = fresh_process(folder)
    measured = {
        "images_per_cpu_second": statistics.median(speeds["ours"]),
        "first_batch_s": first_batch_s,
        "added_mb": added_mb,
        "images": len(files),
        "mean_longer_side": statistics.mean(sides),
    }
    limits = LIMITS[max(sides) <= SMALL]
    missed = [f"{key} is below {limit}" for key, limit in limits.items() if compared[key].is_below(limit)]
    missed += [f"{key} is above {limit}" for key, limit in COST_LIMITS.items() if compared[key].is_above(limit)]
    if first_batch_s > FIRST_BATCH_LIMIT:
        missed.append(f"first_batch_s is above {FIRST_BATCH_LIMIT}")
    if options.json:
        medians = {key: found.median for key, found in compared.items()}
        intervals = {key: (found.low, found.high) for key, found in compared.items()}
        print(json.dumps({**medians, "intervals": intervals, **measured}))
    else:
        for name, rates in speeds.items():
            print(f"{name:22}{statistics.median(rates):8.0f} images/CPU-s  ({min(rates):.0f} to {max(rates):.0f})")
        for key, found in compared.items():
            print(f"{key:22}{found:8.3g}")
        for key, value in measured.items():
            print(f"{key:22}{value:8.3g}")
    for what in missed:
        print(f"FAILED: {what}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
