"""Generated batches: pictures, labels and keys that are a function of the step, the same on every rank."""

from dataclasses import replace

import torch

from vitscale.data.batch import Batch
from vitscale.recipe import Recipe

_CELLS = 4  # along each side of a picture, each of one colour


def make_batch(recipe: Recipe, num_classes: int, step: int) -> Batch:
    """The whole global batch of a step: noise around patches of colour, so that each picture has its own gradient.

    If the recipe leaves damaged samples out, one sample does not count.
    """
    generator = torch.Generator().manual_seed(recipe.seed + step)
    rows, side = recipe.batch.global_size, recipe.data.image_size
    cells = torch.randint(0, 200, (rows, 3, _CELLS, _CELLS), generator=generator).float()
    pictures = torch.nn.functional.interpolate(cells, size=side).permute(0, 2, 3, 1).to(torch.uint8)
    noise = torch.randint(0, 56, pictures.shape, generator=generator, dtype=torch.uint8)
    mask = torch.ones(rows, dtype=torch.bool)
    if recipe.data.bad_samples == "mask":
        mask[step % rows] = False
    return Batch(
        position=step,
        epoch=0,
        images=pictures + noise,
        labels=torch.randint(0, max(num_classes, 1), (rows,), generator=generator),
        uids=torch.arange(rows) + step * rows,
        keys=torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
        mask=mask,
        bad_samples=0,
        digest=None,
    )


def part_of(batch: Batch, rank: int, ranks: int) -> Batch:
    """One rank's part of a global batch."""
    rows = len(batch.labels) // ranks
    part = slice(rank * rows, (rank + 1) * rows)
    return replace(
        batch,
        images=batch.images[part],
        labels=batch.labels[part],
        uids=batch.uids[part],
        keys=batch.keys[part],
        mask=batch.mask[part],
    )
