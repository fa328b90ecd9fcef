"""DINO's ten views of a picture: our loader's, against torchvision's transforms over Pillow, in CPU-seconds a picture.

    python benchmarks/views.py [--pictures 64] [--rounds 5] [--json]

Both cut two views of 224 and eight of 96 pixels from JPEGs of 500 x 375, with DINO's areas, flips, jitter with hue,
gray, and its rates of blur and solarization: ours from one decoding of each picture in one thread, theirs as their
users write it, the picture opened once. They take turns in one process, and time is the CPU's, of all threads.

Fails where ours takes more than a third: where the whole interval of the median says so. `parts` says where our time
goes: decoding and resizing, operations, drawing.
"""

import argparse
import io
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from paired import median_ratio
from PIL import Image, ImageFilter, ImageOps
from torchvision import transforms

from vitscale.data.loader import Loader
from vitscale.data.order import TrainOrder
from vitscale.data.settings import Reading
from vitscale.data.shards import Manifest, ShardEntry, StoredSample, field_names, write_shard
from vitscale.data.views import ViewKind, view_kinds
from vitscale.recipe import Data

LIMIT = 1 / 3
HEIGHT, WIDTH = 375, 500
JITTER = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}


def photo(number: int) -> bytes:
    """A JPEG with the spectrum of a photo: noise whose amplitude falls with the frequency."""
    draws = np.random.default_rng(number)
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(HEIGHT), np.fft.fftfreq(WIDTH), indexing="ij")) + 1 / WIDTH
    spectrum = np.fft.fft2(draws.standard_normal((3, HEIGHT, WIDTH))) / frequency
    pixels = np.fft.ifft2(spectrum).real.transpose(1, 2, 0)
    pixels = np.clip(128 + 50 * pixels / pixels.std(), 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=90)
    return out.getvalue()


def our_kinds(with_operations: bool = True) -> tuple[ViewKind, ...]:
    """DINO's views (arXiv:2104.14294): two large ones, of which the first is always blurred, and eight small ones."""

    def view(name: str, count: int, size: int, area: list[float], blur: float, solarize: float) -> dict[str, object]:
        operations = [
            {"kind": "color_jitter", "probability": 0.8, **JITTER},
            {"kind": "gray", "probability": 0.2},
            {"kind": "gaussian_blur", "probability": blur},
            {"kind": "solarize", "probability": solarize},
        ]
        crop = {"kind": "resized", "area": area}
        chosen = operations if with_operations else []
        return {"name": name, "count": count, "size": size, "crop": crop, "operations": chosen}

    views = [
        view("first", 1, 224, [0.4, 1.0], 1.0, 0.0),
        view("second", 1, 224, [0.4, 1.0], 0.1, 0.2),
        view("local", 8, 96, [0.05, 0.4], 0.5, 0.0),
    ]
    return view_kinds(Data.model_validate({"train": "train", "views": views}))


def their_views() -> list[transforms.Compose]:
    """The same by torchvision and Pillow, one transform a view."""

    def view(size: int, area: tuple[float, float], blur: float, solarize: float) -> transforms.Compose:
        def blurred(image: Image.Image) -> Image.Image:
            return image.filter(ImageFilter.GaussianBlur(float(torch.empty(()).uniform_(0.1, 2.0))))

        return transforms.Compose(
            [
                transforms.RandomResizedCrop(size, area, interpolation=transforms.InterpolationMode.BICUBIC),
                transforms.RandomHorizontalFlip(),
                transforms.RandomApply([transforms.ColorJitter(**JITTER)], 0.8),
                transforms.RandomGrayscale(0.2),
                transforms.RandomApply([transforms.Lambda(blurred)], blur),
                transforms.RandomApply([transforms.Lambda(ImageOps.solarize)], solarize),
                transforms.PILToTensor(),
            ]
        )

    large = [view(224, (0.4, 1.0), 1.0, 0.0), view(224, (0.4, 1.0), 0.1, 0.2)]
    return large + [view(96, (0.05, 0.4), 0.5, 0.0)] * 8


def write(folder: Path, contents: list[bytes]) -> Manifest:
    """A dataset of one shard."""
    path = folder / "shard-00000.beton"
    samples = (StoredSample(content, HEIGHT, WIDTH, 0, uid) for uid, content in enumerate(contents))
    write_shard(path, samples, len(contents))
    entry = ShardEntry.of_file(path, samples=len(contents), first_uid=0)
    fields = field_names(with_labels=False)
    return Manifest(fields=fields, num_samples=len(contents), class_names=("a",), shuffle_seed=0, shards=(entry,)).save(
        folder
    )


def ours(manifest: Manifest, kinds: tuple[ViewKind, ...], count: int, epoch: int) -> float:
    """CPU-seconds of one epoch."""
    began = time.process_time()
    order, reading = TrainOrder([count], 16, 0), Reading(threads=1)
    start, stop = epoch * count // 16, (epoch + 1) * count // 16
    with Loader(manifest, order, views=kinds, reading=reading, start_step=start, stop_step=stop) as loader:
        for _ in loader:
            pass
    return time.process_time() - began


def theirs(contents: list[bytes], views: list[transforms.Compose]) -> float:
    """CPU-seconds of one epoch."""
    began = time.process_time()
    for content in contents:
        image = Image.open(io.BytesIO(content)).convert("RGB")
        for view in views:
            view(image)
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    count = options.pictures // 16 * 16
    contents, views = [photo(number) for number in range(count)], their_views()
    kinds, plain = our_kinds(), our_kinds(with_operations=False)
    with TemporaryDirectory() as folder:
        manifest = write(Path(folder), contents)
        ours(manifest, kinds, count, 0)
        times: dict[str, list[float]] = {"ours": [], "torchvision": [], "without_operations": []}
        for epoch in range(1, options.rounds + 1):
            times["ours"].append(ours(manifest, kinds, count, epoch) / count)
            times["torchvision"].append(theirs(contents, views) / count)
            times["without_operations"].append(ours(manifest, plain, count, epoch) / count)
    found = median_ratio(times["ours"], times["torchvision"])
    ratio, low, high = found.median, found.low, found.high
    result = {
        "ratio": ratio,
        "interval": [low, high],
        **{f"{who}_ms": 1e3 * float(np.median(each)) for who, each in times.items()},
    }
    if options.json:
        print(json.dumps(result))
    else:
        print(f"ours by torchvision: {ratio:.3f} ({low:.3f} to {high:.3f})")
        for who in times:
            print(f"  {who:20} {result[f'{who}_ms']:.2f} ms of CPU a picture")
    if low > LIMIT:
        raise SystemExit(f"views take more than {LIMIT:.2f} of torchvision's time")


if __name__ == "__main__":
    main()
