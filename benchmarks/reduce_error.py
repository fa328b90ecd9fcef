"""What is lost when gradients are summed over ranks in bf16 (`parallelism.reduce_dtype`), by the number of ranks.

    $ python benchmarks/reduce_error.py IMAGES

IMAGES holds a folder for each class. Each rank, simulated in one process, computes the gradient of a micro-batch of its
own in bf16. Their sum is taken in fp32, then in bf16 with a rounding at every hop: around a ring, as NCCL's does for
large messages, and up a tree. `error` is the distance from the sum in fp32 by that sum's length; `noise` is how far the
mean gradient of so many micro-batches is from that of all images, estimated from their spread: what the step has
anyway. Goal: the error of a ring at most a tenth of the noise, for all numbers of ranks.
"""

import argparse
import json
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from vitscale.models import initialise
from vitscale.models.build import build_of_block
from vitscale.recipe.families import model_of

GOAL = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", type=Path)
    parser.add_argument("--model", default="ViT-Ti/16")
    parser.add_argument("--image-size", type=int, default=112)
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=64, help="the most")
    parser.add_argument(
        "--warmup", type=int, default=100, help="steps of training before, so that it is no fresh model"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    drawn = random.Random(0)
    torch.manual_seed(0)
    classes = sorted(path.name for path in given.images.iterdir() if path.is_dir())
    files = sorted(path for name in classes for path in (given.images / name).rglob("*") if path.is_file())

    def micro_batch() -> tuple[Tensor, Tensor]:
        chosen = [drawn.choice(files) for _ in range(given.micro)]
        size = (given.image_size, given.image_size)
        pictures = [np.asarray(Image.open(path).convert("RGB").resize(size)) for path in chosen]
        labels = [classes.index(path.relative_to(given.images).parts[0]) for path in chosen]
        return torch.tensor(np.stack(pictures)).float() / 127.5 - 1, torch.tensor(labels)

    model = build_of_block(
        model_of(name=given.model, head="linear"), image_size=given.image_size, num_classes=len(classes)
    ).train()
    initialise(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(given.warmup):
        images, labels = micro_batch()
        F.cross_entropy(model(images).logits, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16)
    gradients = []
    for _ in range(given.ranks):
        images, labels = micro_batch()
        model.zero_grad()
        F.cross_entropy(model(images.bfloat16()).logits.float(), labels).backward()
        found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        gradients.append(torch.cat([gradient.reshape(-1) for gradient in found]))
    rows = []
    ranks = 2
    while ranks <= given.ranks:
        rows.append(compare(gradients[:ranks]))
        ranks *= 2
    missed = [row["ranks"] for row in rows if row["ring"] > GOAL * row["noise"]]
    if given.json:
        print(json.dumps(rows))
    else:
        print("ranks  error: ring     tree    noise  ring / noise")
        for row in rows:
            print(
                f"{row['ranks']:5}     {row['ring']:8.4%} {row['tree']:8.4%} {row['noise']:8.2%}"
                f"{row['ring'] / row['noise']:14.4f}"
            )
        print(f"missed: {missed}" if missed else "met")


def compare(gradients: list[Tensor]) -> dict[str, float]:
    """Errors of the sum of bf16 vectors (n,) in bf16, and the noise of their mean, relative to its length."""
    stacked = torch.stack(gradients).float()
    exact = stacked.sum(0)
    ranks = len(gradients)
    mean = exact / ranks
    spread = (stacked - mean).square().sum() / (ranks - 1) / ranks
    signal = mean.norm()
    return {
        "ranks": ranks,
        "ring": float((around_a_ring(gradients).float() - exact).norm() / exact.norm()),
        "tree": float((up_a_tree(gradients).float() - exact).norm() / exact.norm()),
        "noise": float(spread.sqrt() / signal),
    }


def around_a_ring(gradients: list[Tensor]) -> Tensor:
    """Each rank's part of the vector begins at the rank after it, and is rounded wherever it passes."""
    ranks = len(gradients)
    parts = [gradient.chunk(ranks) for gradient in gradients]
    total = []
    for part in range(len(parts[0])):
        held = parts[(part + 1) % ranks][part]
        for hop in range(2, ranks + 1):
            held = held + parts[(part + hop) % ranks][part]
        total.append(held)
    return torch.cat(total)


def up_a_tree(gradients: list[Tensor]) -> Tensor:
    """Pairs, pairs of pairs, and so on."""
    while len(gradients) > 1:
        gradients = [one + other for one, other in zip(gradients[::2], gradients[1::2], strict=True)]
    return gradients[0]


if __name__ == "__main__":
    main()
