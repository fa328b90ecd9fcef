"""How fast models are on this device: images/s and the largest batch by image size (appendix D.4, Figure 11).

    $ python benchmarks/inference_speed.py ViT-B/16 ResNet50x1 --out speed
    $ python benchmarks/inference_speed.py ViT-L/16 --out speed --sizes 224,384 --precision bf16 --seconds 30

The new folder `--out` gets index.html, the figure as PNG and SVG, and its CSV. In bf16 with CUDA, in fp32 elsewhere,
unless `--precision` says otherwise.

What is timed is a forward pass without gradients, with random weights and all of a batch's pixels on the device. The
batch size is doubled: with CUDA until memory runs out, and then the largest batch that fits is found between the last
two; on CPUs, where memory has no such limit, until the time is up.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from vitscale.evaluation.inspection.figures import INSPECTION_PAGE, InspectionFigure, write_page
from vitscale.evaluation.placing import join
from vitscale.ground.files.durable import new_folder
from vitscale.ground.page import SERIES
from vitscale.models import Model, initialise
from vitscale.models.build import build_of_block
from vitscale.models.layers import CHANNELS
from vitscale.recipe import families
from vitscale.recipe.families import model_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Precision = Literal["bf16", "fp32"]
_NUM_CLASSES = 1000
_LARGEST = 2**17
_FINENESS = 16
"""The largest batch is found to within one part in this many."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", metavar="NAME", help="models, such as ViT-B/16 and ResNet50x1")
    parser.add_argument("--out", type=Path, required=True, help="the folder; it does not exist, or is empty")
    parser.add_argument("--sizes", default="64,128,224,384,512", metavar="PIXELS,...", help="sides of the images")
    parser.add_argument("--precision", choices=["bf16", "fp32"])
    parser.add_argument("--seconds", type=float, default=10.0, help="a model and size; with CUDA a batch size")
    given = parser.parse_args()
    try:
        blocks = {name: model_of(name=name, head="linear") for name in given.names}
        sizes = list(dict.fromkeys(int(size) for size in given.sizes.split(",")))
    except ValueError as error:
        parser.error(str(error))
    device = join().device
    precision: Precision = given.precision or ("bf16" if device.type == "cuda" else "fp32")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{where}, {precision}")
    with new_folder(given.out, "--out") as folder:
        found = []
        for each in throughputs(blocks, sizes, device, precision, given.seconds):
            found.append(each)
            print(each, flush=True)
        figure = speed_figure(found, where, precision)
        write_page(folder, [figure], figure.title, where, [("device", where), ("precision", precision)])
    print(f"wrote {given.out / INSPECTION_PAGE}")


@dataclass(frozen=True)
class Throughput:
    """The speed of one model at one image size.

    Attributes:
        model: the model's name.
        image_size: side of the image in pixels.
        images_per_s: the best speed of all batch sizes.
        batch: the batch size with that speed.
        largest_batch: the largest batch that fits into memory; None on CPUs, where that is not tried.
        problem: why there is no result; empty if there is one.
    """

    model: str
    image_size: int
    images_per_s: float | None = None
    batch: int | None = None
    largest_batch: int | None = None
    problem: str = ""

    def __str__(self) -> str:
        row = f"{self.model:<16} {self.image_size:>5}"
        if self.images_per_s is None:
            return f"{row}  {self.problem}"
        largest = "" if self.largest_batch is None else f"  largest batch {self.largest_batch:,}"
        return f"{row} {self.images_per_s:>10,.4g} images/s at batch {self.batch:,}{largest}"


def throughputs(
    blocks: Mapping[str, families.Model],
    sizes: Sequence[int],
    device: torch.device,
    precision: Precision,
    seconds: float,
) -> Iterator[Throughput]:
    """Measure every model, by name, at every size; `seconds` for each, with CUDA for each batch size."""
    for name, block in blocks.items():
        for size in sizes:
            yield _throughput(name, block, size, device, precision, seconds)
            _release(device)


def _throughput(
    name: str, block: families.Model, size: int, device: torch.device, precision: Precision, seconds: float
) -> Throughput:
    try:
        block.check_image_size(size)
    except ValueError as error:
        return Throughput(name, size, problem=str(error))
    try:
        model = _built(block, size, device, precision)
    except torch.OutOfMemoryError:
        return Throughput(name, size, problem="the weights do not fit into memory")
    best, largest = _measured(model, size, device, seconds)
    if best is None:
        return Throughput(name, size, largest_batch=0, problem="not one image fits into memory")
    return Throughput(name, size, *best, largest if device.type == "cuda" else None)


def _built(block: families.Model, size: int, device: torch.device, precision: Precision) -> Model:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with torch.device("meta"):
        model = build_of_block(block, image_size=size, num_classes=_NUM_CLASSES)
    model = model.to(dtype).to_empty(device=device).eval()
    initialise(model, 0)
    return model


@torch.no_grad()
def _measured(model: Model, size: int, device: torch.device, seconds: float) -> tuple[tuple[float, int] | None, int]:
    """The best (images/s, batch), None if not even one image fits; and the largest batch that was computed."""
    best: tuple[float, int] | None = None
    largest, batch, until = 0, 1, time.monotonic() + seconds
    while batch <= _LARGEST:
        speed = _speed(model, _images(batch, size, model, device), device, seconds, until)
        if speed is None:
            break
        largest = batch
        best = max(best or (0.0, 0), (speed, batch))
        if device.type != "cuda" and time.monotonic() + 2 * batch / speed > until:
            return best, largest
        batch *= 2
    return best, largest_between(largest, batch, lambda count: _fits(model, size, count, device))


def largest_between(fits: int, too_large: int, try_it: Callable[[int], bool]) -> int:
    """The largest batch that fits, to within one part in `_FINENESS`, by bisection.

    Args:
        fits: a batch that fits.
        too_large: a batch that does not.
        try_it: tells whether a batch fits.
    """
    while too_large - fits > max(1, fits // _FINENESS):
        middle = (fits + too_large) // 2
        fits, too_large = (middle, too_large) if try_it(middle) else (fits, middle)
    return fits


def _images(batch: int, size: int, model: Model, device: torch.device) -> Callable[[], Tensor]:
    dtype = next(model.parameters()).dtype
    # Of all values: products of zeros take less power, and ran up to 13 % faster on an H200.
    return lambda: torch.rand(batch, size, size, CHANNELS, dtype=dtype, device=device).mul_(2).sub_(1)


def _speed(
    model: Model, make: Callable[[], Tensor], device: torch.device, seconds: float, until: float
) -> float | None:
    """Images/s: the median of several passes, after one that does not count; None if memory is too small."""
    try:
        images = make()
        _timed(model, images, device)
        taken = sorted(_passes(model, images, device, seconds, until))
        return len(images) / taken[len(taken) // 2]
    except torch.OutOfMemoryError:
        images = torch.empty(0)  # frees the batch
        _release(device)
        return None


def _passes(model: Model, images: Tensor, device: torch.device, seconds: float, until: float) -> Iterator[float]:
    end = time.monotonic() + seconds / 4 if device.type == "cuda" else until
    for _ in range(9):
        yield _timed(model, images, device)
        if time.monotonic() > end:
            return


def _timed(model: Model, images: Tensor, device: torch.device) -> float:
    start = time.monotonic()
    model(images)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic() - start


def _fits(model: Model, size: int, batch: int, device: torch.device) -> bool:
    try:
        _timed(model, _images(batch, size, model, device)(), device)
    except torch.OutOfMemoryError:
        _release(device)
        return False
    return True


def _release(device: torch.device) -> None:
    """Free memory: collect what an exception kept alive, and empty torch's cache, which may be fragmented."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def speed_figure(found: Sequence[Throughput], device: str, precision: str) -> InspectionFigure:
    """The figure of images/s by image size, with the largest batch beside it if it was measured (Figure 11)."""
    has_largest = any(each.largest_batch for each in found)
    names = list(dict.fromkeys(each.model for each in found))

    def put(figure: "Figure") -> None:
        from matplotlib.ticker import NullFormatter

        panels = figure.subplots(1, 1 + has_largest, squeeze=False)[0]
        kinds = [("images_per_s", "images/s"), ("largest_batch", "largest batch")]
        for axes, (key, label) in zip(panels, kinds, strict=False):
            for index, name in enumerate(names):
                points = [
                    (each.image_size, value) for each in found if each.model == name and (value := getattr(each, key))
                ]
                colour = SERIES[index % len(SERIES)]
                style = "-" if index < len(SERIES) else "--"
                axes.plot(*zip(*points, strict=True), f"o{style}", color=colour, label=name) if points else None
            axes.set_xscale("log")
            axes.set_yscale("log")
            sizes = sorted({each.image_size for each in found})
            axes.set_xticks(sizes, map(str, sizes))
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.yaxis.set_major_formatter("{x:g}")
            axes.set_xlabel("side of the image (pixels)")
            axes.set_ylabel(label)
        if any(each.images_per_s for each in found):
            panels[0].legend()

    rows = [
        ["" if value is None else value for value in (each.model, each.image_size, each.images_per_s, each.batch)]
        + ["" if each.largest_batch is None else each.largest_batch, device, precision, each.problem]
        for each in found
    ]
    columns = ["model", "image_size", "images_per_s", "batch", "largest_batch", "device", "precision", "problem"]
    caption = (
        f"A forward pass on {device} in {precision}: the best of all batch sizes"
        f"{', and the largest batch that fits into memory' if has_largest else ''} (appendix D.4)."
    )
    title = "Speed by image size"
    return InspectionFigure("speed", title, caption, put, 820 if has_largest else 520, 340, columns, rows)


if __name__ == "__main__":
    main()
