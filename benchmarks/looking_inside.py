"""What looking at attention costs: time by that of a plain forward pass, and the memory of a large model.

    $ python benchmarks/looking_inside.py
    $ python benchmarks/looking_inside.py --model ViT-H/14 --image-size 518 --images 16 --rounds 0

Both see the same pictures in the same batches, in turns. Goals: all that `vitscale inspect` measures within three times
the time of a plain pass (ViT-B/16, 128 pictures), and the process within 6 GB (ViT-H/14 at 518 pixels).
"""

import argparse
import json
import resource
import time

import torch
from paired import Interval, median_ratio

from vitscale.evaluation.inspection.looking import BATCH, look, parts_of
from vitscale.models import initialise
from vitscale.models.build import build_of_block
from vitscale.recipe.families import model_of

GOAL_RATIO, GOAL_GB = 3.0, 6.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ViT-B/16")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3, help="0: look once, for the memory alone")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    block, size = model_of(name=given.model, head="linear"), given.image_size
    with torch.device("meta"):
        model = build_of_block(block, image_size=size, num_classes=1000)
    model = model.to_empty(device="cpu").eval()
    initialise(model, 0)
    drawn = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (given.images, size, size, 3), dtype=torch.uint8, generator=drawn)

    @torch.no_grad()
    def predict(part: torch.Tensor):
        return model(part.float() / 127.5 - 1)

    def plain() -> None:
        for first in range(0, len(images), BATCH):
            predict(images[first : first + BATCH])

    def looking() -> None:
        look(model, predict, images, given.model, parts_of(model, given.model, None))

    if given.rounds == 0:
        looking()
        judge(f"{given.model} at {size}:", None, given.json)
        return
    predict(images[:BATCH])
    seconds: dict[str, list[float]] = {"plain": [], "looking": []}
    for _ in range(given.rounds):
        for name, work in (("plain", plain), ("looking", looking)):
            start = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - start)
    judge(f"{given.model} at {size}:", median_ratio(seconds["looking"], seconds["plain"]), given.json)


def judge(of: str, ratio: Interval | None, as_json: bool) -> None:
    """Print time and memory, and whether they meet the goals."""
    memory_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    if as_json:
        print(json.dumps({"ratio": None if ratio is None else vars(ratio), "memory_gb": memory_gb}))
        return
    print(of, "" if ratio is None else f"time {ratio:.2f} ", f"memory {memory_gb:.2f} GB")
    missed = [f"time at most {GOAL_RATIO:g}"] if ratio is not None and ratio.is_above(GOAL_RATIO) else []
    missed += [f"memory at most {GOAL_GB:g} GB"] if memory_gb > GOAL_GB else []
    print(f"missed: {', '.join(missed)}" if missed else "met")


if __name__ == "__main__":
    main()
