"""How long a device waits for data: the loader behind a consumer that takes batches as fast as a GPU would.

    python benchmarks/feeding.py IMAGES [--max-side 256] [--hardware h200] [--mfu 0.6] [--cores 16] [--seconds 20]
                                  [--json]

No GPU is needed: for as long as a device would take for each batch of 64, at `--mfu` of the datasheet's peak, the
consumer runs Python for a half and sleeps for the other, as a trainer launches kernels and waits; then it asks for the
next one. What it may take from the loader is scaled by the cores: a device of a node has `--cores` of them, of which
one keeps it at work, and the loader here has a thread for each core but one. How far many threads of one process get
in each other's way is not seen by few cores. IMAGES and --max-side: as in `loader.py`. All safety is on.

`wait`: the share of its time that the consumer waits, as the trainer measures it (`data_wait_s`), the first batches
left out. `load`: how much of these cores' time the loader took. `cores needed`: of one device, by that.

Fails where the wait is 2 % or more.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from loader import SIDE, TorchvisionCrop, stored_images
from step_recipe import make_recipe

from vitscale.data.batch import Batch
from vitscale.data.loader import Loader
from vitscale.data.order import TrainOrder
from vitscale.data.settings import Reading
from vitscale.data.shards import Manifest
from vitscale.flops.accounting import training_flops_per_image
from vitscale.flops.hardware import find_device
from vitscale.flops.work import recipe_work
from vitscale.training.deepspeed.profile import StepTimer

MODELS = ("ViT-H/14", "ViT-L/16", "ViT-B/16")
BATCH, CLASSES = 64, 1000
LIMIT = 0.02
FILLED = 8  # batches, before which nothing is ahead


def images_per_s(model: str, peak: float, mfu: float) -> float:
    """Of a device that trains `model`."""
    macs = recipe_work(make_recipe(model, BATCH, num_classes=CLASSES), CLASSES).macs
    return mfu * peak / training_flops_per_image(macs)


def consume(manifest: Manifest, rate: float, seconds: float, threads: int, cache: Path) -> dict[str, float]:
    """Take `rate` images a second for so many seconds."""
    order = TrainOrder([shard.num_selected for shard in manifest.shards], BATCH, 0)
    last = FILLED + max(4, round(rate * seconds / BATCH))
    reading = Reading(threads=threads, cache=cache)
    with Loader(
        *(manifest, order),
        image_size=SIDE,
        transform=TorchvisionCrop(),
        stop_step=last,
        reading=reading,
        digest=True,
    ) as loader:
        pace, busy = StepTimer(0), 0
        batches: Iterator[Batch] = pace.timed(loader)
        for step, _ in enumerate(batches):
            if step == FILLED:
                pace.per_step(step)
                began, began_cpu, began_own = time.perf_counter(), time.process_time(), time.thread_time()
            stop = time.perf_counter() + BATCH / rate
            while time.perf_counter() < stop - BATCH / rate / 2:
                busy += 1
            time.sleep(max(0.0, stop - time.perf_counter()))
        passed = time.perf_counter() - began
        used = time.process_time() - began_cpu - (time.thread_time() - began_own)
        step_s, waited_s = pace.per_step(last)
    return {
        "wait": waited_s / step_s,
        "load": used / (passed * threads),
        "images_per_cpu_s": BATCH / step_s * passed / used,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("--max-side", type=int, default=256, help="store images at so many pixels at most")
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--mfu", type=float, default=0.6)
    parser.add_argument("--cores", type=int, default=16, help="that each device of a node has")
    parser.add_argument("--seconds", type=float, default=20, help="of consuming, for each model")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.images.exists():
        parser.error(f"{options.images}: no such file or folder")
    peak, _ = find_device(options.hardware).training_peak
    threads, results = max(1, len(os.sched_getaffinity(0)) - 1), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest, _, _ = stored_images(parser, options.images, folder, options.max_side)
        for model in MODELS:
            needed = images_per_s(model, peak, options.mfu)
            taken = needed * threads / (options.cores - 1)
            found = consume(manifest, taken, options.seconds, threads, folder / "cache")
            cores = needed / found.pop("images_per_cpu_s")
            results.append({"model": model, "device": needed, "here": taken, **found, "cores_needed": cores})
    if options.json:
        print(json.dumps({"hardware": options.hardware, "mfu": options.mfu, "threads": threads, "results": results}))
    else:
        print(f"{'model':<10}{'images/s of a device':>22}{'of it here':>12}{'wait':>9}{'load':>9}{'cores needed':>14}")
        for one in results:
            print(
                f"{one['model']:<10}{one['device']:>22,.0f}{one['here']:>12,.0f}{one['wait']:>9.2%}{one['load']:>9.1%}"
                f"{one['cores_needed']:>14.1f}"
            )
    if any(one["wait"] >= LIMIT for one in results):
        raise SystemExit(f"missed: the wait is to be below {LIMIT:.0%}")


if __name__ == "__main__":
    main()
