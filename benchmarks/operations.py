"""What the recipe's operations on pixels cost the loader, and how much faster they are than timm's on Pillow.

    python benchmarks/operations.py IMAGES [--max-side 256] [--rounds N] [--json]

IMAGES and --max-side: as in `loader.py`, whose readers these are, at 224 px; CPU time of the whole process, with all
safety on. RandAugment(2, 9) is timm's rand-m9-mstd0.5-inc1 (each of the two operations with probability 1/2), the same
with both always done, and big_vision's. `cost_*`: images a CPU second without operations by those with them.
`timm_loader`: our loader's speed by that of torch's DataLoader with Pillow and timm's own transform, decoding included
in both. `timm_transform`: the transform alone, on the same 224 px pixels in memory. Contenders take turns; medians of
the rounds' ratios, and 95 % intervals. After that the microseconds an image of each operation, beside Pillow's.

Fails where a cost of RandAugment is above 1.6 or a transform's ratio below 3, and the whole interval says so.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from loader import SIDE, speed, stored_images, with_ours, with_pillow
from paired import Interval, median_ratio
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from timm.data.auto_augment import rand_augment_transform

from vitscale.data.draws import hashes
from vitscale.data.pixel_programs import PixelPrograms
from vitscale.ground.images import INSTRUCTION, OK, Code, Interpolation, operate
from vitscale.recipe import ImageOperation, RandAugment, ThreeAugment

COST_LIMIT, TIMM_LIMIT = 1.6, 3.0
RANDAUGMENT = {
    "timm": RandAugment(kind="randaugment", set="timm_increasing", n=2, m=9, std=0.5),
    "timm_always": RandAugment(kind="randaugment", set="timm_increasing", n=2, m=9, std=0.5, probability=1.0),
    "big_vision": RandAugment(kind="randaugment", set="big_vision", n=2, m=9),
}
OTHERS = {"three_augment": ThreeAugment(kind="three_augment")}
IN_MEMORY = 256  # images
GRAY = (128, 128, 128)

Change = Callable[[Image.Image], Image.Image]


def timms_transform(probability: float) -> Change:
    """The same as RANDAUGMENT's, by timm: it draws whether it interpolates bilinearly or by bicubic splines.

    At 10 it asks Pillow to leave 0 bits to an image, which newer ones refuse: its magnitudes end just below.
    """
    options = {"img_mean": GRAY, "magnitude_max": 9.99}
    return rand_augment_transform(f"rand-n2-m9-mstd0.5-inc1-p{probability}", options)


def by_ours(block: ImageOperation, pixels: np.ndarray) -> Iterator[int]:
    programs = PixelPrograms([block], SIDE)(hashes(len(pixels), time.perf_counter_ns()))
    operate(pixels.copy(), programs, np.full(len(pixels), OK, np.int32))
    yield len(pixels)


def by_timm(change: Change, pictures: list[Image.Image]) -> Iterator[int]:
    for picture in pictures:
        change(picture)
        yield 1


def crops(paths: list[Path]) -> np.ndarray:
    """uint8 (IN_MEMORY, SIDE, SIDE, 3)."""
    found = []
    for index in range(IN_MEMORY):
        with Image.open(paths[index % len(paths)]) as picture:
            found.append(np.asarray(ImageOps.fit(picture.convert("RGB"), (SIDE, SIDE))))
    return np.stack(found)


def each_operation(pixels: np.ndarray) -> dict[str, tuple[float, float]]:
    """Microseconds of CPU time an image: ours, and Pillow's."""
    matrices = {
        "shear_x": (1.0, 0.27, 0.0, 0.0, 1.0, 0.0),
        "shear_y": (1.0, 0.0, 0.0, 0.27, 1.0, 0.0),
        "translate_x": (1.0, 0.0, 90.7, 0.0, 1.0, 0.0),
        "translate_y": (1.0, 0.0, 0.0, 0.0, 1.0, 90.7),
        "rotate": (0.891, -0.454, 63.1, 0.454, 0.891, -38.6),
    }
    cases: dict[str, tuple[Code, tuple[float, ...], Interpolation, Change]] = {
        "invert": (Code.INVERT, (), Interpolation.NEAREST, ImageOps.invert),
        "solarize": (Code.SOLARIZE, (128,), Interpolation.NEAREST, ImageOps.solarize),
        "posterize": (Code.POSTERIZE, (3,), Interpolation.NEAREST, lambda picture: ImageOps.posterize(picture, 3)),
        "autocontrast": (Code.AUTOCONTRAST, (), Interpolation.NEAREST, ImageOps.autocontrast),
        "equalize": (Code.EQUALIZE, (), Interpolation.NEAREST, ImageOps.equalize),
        "blur 0.1": (Code.BLUR, (0.1,), Interpolation.NEAREST, lambda p: p.filter(ImageFilter.GaussianBlur(0.1))),
        "blur 2": (Code.BLUR, (2.0,), Interpolation.NEAREST, lambda p: p.filter(ImageFilter.GaussianBlur(2))),
    }
    for code in (Code.COLOR, Code.CONTRAST, Code.BRIGHTNESS, Code.SHARPNESS):
        enhance = getattr(ImageEnhance, code.name.capitalize())

        def change(picture: Image.Image, enhance: Any = enhance) -> Image.Image:
            return enhance(picture).enhance(1.81)

        cases[code.name.lower()] = (code, (1.81,), Interpolation.NEAREST, change)
    for interpolation in Interpolation:
        resampling = Image.Resampling[interpolation.name]
        for name, matrix in matrices.items():

            def move(picture: Image.Image, matrix: Any = matrix, resampling: Any = resampling) -> Image.Image:
                return picture.transform(picture.size, Image.Transform.AFFINE, matrix, resampling, fillcolor=GRAY)

            cases[f"{name}, {interpolation.name.lower()}"] = (Code.AFFINE, matrix, interpolation, move)
    pictures = [Image.fromarray(each) for each in pixels[:64]]
    found = {}
    for name, (code, values, interpolation, as_pillow) in cases.items():
        programs = np.zeros((64, 1), INSTRUCTION)
        programs["code"], programs["interpolation"], programs["fill"] = code, interpolation, 128
        programs["values"][..., : len(values)] = values
        ours, theirs = [], []
        for _ in range(3):
            changed = pixels[:64].copy()
            began = time.process_time()
            operate(changed, programs, np.full(64, OK, np.int32))
            ours.append(time.process_time() - began)
            began = time.process_time()
            for picture in pictures:
                as_pillow(picture)
            theirs.append(time.process_time() - began)
        found[name] = (min(ours) / 64 * 1e6, min(theirs) / 64 * 1e6)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("--max-side", type=int, default=256, help="store images at so many pixels at most")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.images.exists():
        parser.error(f"{options.images}: no such file or folder")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest, files, _ = stored_images(parser, options.images, folder, options.max_side)
        pixels = crops(files)
        pictures = [Image.fromarray(each) for each in pixels]
        transforms = {"timm": timms_transform(0.5), "timm_always": timms_transform(1.0)}
        readers: dict[str, Callable[[], Iterator[int]]] = {"without": lambda: with_ours(manifest, folder)}
        pairs = {}
        for key, block in {**RANDAUGMENT, **OTHERS}.items():
            readers[key] = partial(with_ours, manifest, folder, operations=(block,))
            pairs[f"cost_{key}"] = ("without", key)
        for key, change in transforms.items():
            readers[f"Pillow, {key}"] = partial(with_pillow, files, False, change)
            readers[f"{key} alone"] = partial(by_ours, RANDAUGMENT[key], pixels)
            readers[f"Pillow, {key} alone"] = partial(by_timm, change, pictures)
            pairs[f"{key}_loader"] = (key, f"Pillow, {key}")
            pairs[f"{key}_transform"] = (f"{key} alone", f"Pillow, {key} alone")
        speeds: dict[str, list[float]] = {name: [] for name in readers}
        compared: dict[str, Interval] = {}
        for read in readers.values():  # in the page cache
            next(read())
        for key, pair in pairs.items():
            took_turns: dict[str, list[float]] = {name: [] for name in pair}
            for turn in range(options.rounds):
                for name in sorted(pair, reverse=bool(turn % 2)):
                    took_turns[name].append(speed(readers[name]))
            compared[key] = median_ratio(*took_turns.values())
            for name, rates in took_turns.items():
                speeds[name] += rates
        operations = each_operation(pixels)
    costs = {key: compared[key] for key in (f"cost_{name}" for name in RANDAUGMENT)}
    ratios = {key: compared[key] for key in (f"{name}_transform" for name in transforms)}
    missed = [f"{key} is above {COST_LIMIT}" for key, found in costs.items() if found.is_above(COST_LIMIT)]
    missed += [f"{key} is below {TIMM_LIMIT}" for key, found in ratios.items() if found.is_below(TIMM_LIMIT)]
    if options.json:
        medians = {key: found.median for key, found in compared.items()}
        intervals = {key: (found.low, found.high) for key, found in compared.items()}
        print(json.dumps({**medians, "intervals": intervals, "microseconds": operations}))
    else:
        for name, rates in speeds.items():
            print(f"{name:28}{statistics.median(rates):8.0f} images/CPU-s  ({min(rates):.0f} to {max(rates):.0f})")
        for key, found in compared.items():
            print(f"{key:28}{found:8.3g}")
        print(f"{'microseconds an image':28}{'ours':>8}{'Pillow':>8}")
        for name, (ours, theirs) in operations.items():
            print(f"{name:28}{ours:8.0f}{theirs:8.0f}")
    for what in missed:
        print(f"FAILED: {what}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
