"""Few-shot's ridge regressions at the size of ImageNet's classes: seconds and memory.

    $ python benchmarks/ridge_scale.py

Normal clusters of features stand for those of ViT-H/14. One fit, then 10,000 test samples under each of the paper's
30 strengths of the regularisation. Goals, on two cores: 60 s and 4 GB, features included.
"""

import argparse
import json
import resource
import time

import torch

from vitscale.evaluation.fewshot import PAPER_L2S
from vitscale.evaluation.ridge import RidgePath

GOAL_S, GOAL_GB = 60.0, 4.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--tested", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=1_280)
    parser.add_argument("--classes", type=int, default=1_000)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    centres = torch.randn(given.classes, given.width)
    y = torch.arange(given.samples + given.tested) % given.classes
    x = torch.randn(len(y), given.width).mul_(3)
    for rows, labels in zip(x.split(1000), y.split(1000), strict=True):  # in place: the features are there once
        rows += centres[labels]
    began = time.perf_counter()
    path = RidgePath(x[: given.samples], y[: given.samples], given.classes)
    fitted = time.perf_counter()
    found = path.accuracies(x[given.samples :], y[given.samples :], PAPER_L2S)
    ended = time.perf_counter()
    seconds, memory_gb = ended - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    if given.json:
        print(json.dumps({"fit_s": fitted - began, "all_s": seconds, "memory_gb": memory_gb, "top1": found}))
        return
    print(
        f"{given.samples:,} x {given.width:,}, {given.classes:,} classes, {len(found)} strengths: "
        f"fitted in {fitted - began:.1f} s, all in {seconds:.1f} s, {memory_gb:.2f} GB; "
        f"top-1 {min(found):.3f} to {max(found):.3f}"
    )
    missed = [f"{GOAL_S:g} s"] if seconds > GOAL_S else []
    missed += [f"{GOAL_GB:g} GB"] if memory_gb > GOAL_GB else []
    print(f"missed: {', '.join(missed)}" if missed else "met")


if __name__ == "__main__":
    main()
