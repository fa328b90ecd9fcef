"""A labelled toy split, a loader that shares it among ranks with fillers, a linear model of pixels; a plain loop."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from vitscale.models import Outputs

SIDE, CHANNELS, WIDTH = 4, 3, 16


@dataclass
class Batch:
    step: int
    epoch: int
    images: torch.Tensor
    labels: torch.Tensor
    uids: torch.Tensor
    mask: torch.Tensor


@dataclass
class Split:
    images: torch.Tensor
    labels: torch.Tensor
    uids: torch.Tensor

    def loader(self, batch_size, rank=0, world=1):
        """A function that begins a pass: samples dealt out to ranks, then fillers with poisonous labels."""

        def make():
            n = len(self.labels)
            batches = -(-n // (batch_size * world))
            for step in range(batches):
                rows = torch.arange(batch_size) + (step * world + rank) * batch_size
                mask, rows = rows < n, rows.clamp(max=n - 1)
                labels = torch.where(mask, self.labels[rows], 10**6)
                yield Batch(step, 0, self.images[rows], labels, self.uids[rows], mask)

        return make


def split(samples, num_classes, seed):
    """Images whose mean brightness by channel depends on the class, so that there is something to find."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, num_classes, (samples,), generator=generator)
    labels[:num_classes] = torch.arange(num_classes)
    centres = torch.randint(0, 200, (num_classes, 1, 1, CHANNELS), generator=torch.Generator().manual_seed(99))
    noise = torch.randint(0, 56, (samples, SIDE, SIDE, CHANNELS), generator=generator)
    uids = torch.randperm(10 * samples, generator=generator)[:samples]
    return Split((centres[labels] + noise).to(torch.uint8), labels, uids)


def model(num_classes):
    """Images -> outputs, from fixed random weights, in float64: batch shapes must not show in the last digits."""
    generator = torch.Generator().manual_seed(5)
    embed = torch.randn(SIDE * SIDE * CHANNELS, WIDTH, generator=generator, dtype=torch.float64)
    head = torch.randn(WIDTH, num_classes, generator=generator, dtype=torch.float64)

    def predict(images):
        assert images.dtype == torch.uint8
        pre_logits = (images.double().flatten(1) / 127.5 - 1) @ embed
        return Outputs(pre_logits[:, None], pre_logits, torch.tanh(pre_logits) @ head)

    return predict


def train_plainly(module, optimizer, x, y, steps, seed):
    """Train a classifier as anybody would: batches of 256 from one permutation after another, a cosine schedule."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = torch.Generator().manual_seed(seed)
    rows = torch.cat([torch.randperm(len(x), generator=order) for _ in range(steps)])
    for step in range(steps):
        batch = rows[step * 256 : (step + 1) * 256]
        optimizer.zero_grad()
        F.cross_entropy(module(x[batch]), y[batch]).backward()
        optimizer.step()
        schedule.step()
