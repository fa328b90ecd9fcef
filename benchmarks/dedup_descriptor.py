"""A descriptor of near-duplicates, learned from CIFAR-10's training pictures alone: what `--embedding` may be given.

    python benchmarks/dedup_descriptor.py OUT.safetensors [--steps 940] [--data FOLDER]
    python benchmarks/dedup_judged.py OUT --embedding OUT.safetensors

Instance discrimination as of SimCLR (Chen et al., 2020): two random crops of one picture, in other colours, are to be
nearer than any two pictures of a batch are. The model is a ViT whose one patch is the whole picture, because
near-duplicates lie over each other but for a small shift: some minutes of one core.
"""

import argparse
import math
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from photos import photos_parser
from torch import Tensor, nn
from torch.nn import functional as F

from vitscale.data.shards.images import StoredImage, store_image
from vitscale.models.initialise import initialise
from vitscale.models.weights import Description, write_weights
from vitscale.models.weights.preprocessing import WHOLE_PICTURE
from vitscale.recipe import Normalise

SIDE, WIDTH = 32, 256
MODEL = {"patch_size": SIDE, "width": WIDTH, "depth": 2, "mlp_dim": 1024, "num_heads": 1, "pool": "mean"}
BATCH = 256
RATE = 1e-3
TEMPERATURE = 0.1
AREA, ASPECT = (0.5, 1.0), (math.exp(-0.5), math.exp(0.5))


def training_pictures(archive: Path) -> Tensor:
    """uint8 (N, 32, 32, 3), in order of their names."""
    found = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.name.endswith(".jpg") else None
            if file is not None:
                stored = store_image(file.read())
                assert isinstance(stored, StoredImage), member.name
                found[member.name] = stored.pixels
    return torch.from_numpy(np.stack([found[name] for name in sorted(found)]))


def views(pictures: Tensor) -> Tensor:
    """One random view of each picture: uint8 (B, 32, 32, 3) -> float (B, 32, 32, 3), in [-1, 1] or a little beyond."""
    count = len(pictures)
    x = pictures.permute(0, 3, 1, 2).float() / 127.5 - 1
    area, ratio = torch.empty(count).uniform_(*AREA), torch.empty(count).uniform_(*map(math.log, ASPECT)).exp()
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    boxes = torch.zeros(count, 2, 3)
    boxes[:, 0, 0] = width * torch.where(torch.rand(count) < 0.5, -1.0, 1.0)  # mirrored or not
    boxes[:, 1, 1] = height
    boxes[:, 0, 2], boxes[:, 1, 2] = ((torch.rand(count) * 2 - 1) * (1 - side) for side in (width, height))
    grid = F.affine_grid(boxes, list(x.shape), align_corners=False)
    x = F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)
    contrast, colours = (torch.empty(count, 1, 1, 1).uniform_(1 - part, 1 + part) for part in (0.4, 0.5))
    changed = x * contrast + torch.empty(count, 1, 1, 1).uniform_(-0.4, 0.4)
    gray = (changed * torch.tensor([0.3, 0.59, 0.11]).view(1, 3, 1, 1)).sum(1, keepdim=True)
    changed = (gray + (changed - gray) * colours) * torch.empty(count, 3, 1, 1).uniform_(0.85, 1.15)
    x = torch.where(torch.rand(count, 1, 1, 1) < 0.8, changed, x)
    x = torch.where(torch.rand(count, 1, 1, 1) < 0.15, gray.expand_as(x), x)
    return x.clamp(-1.2, 1.2).permute(0, 2, 3, 1).contiguous()


def train(pictures: Tensor, description: Description, steps: int) -> nn.Module:
    """The model after so many steps, cosine rate after a warmup of 50."""
    model = description.build(with_head=False).to_empty(device="cpu")
    initialise(model, seed=0)
    projection = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 128))
    parameters = [*model.parameters(), *projection.parameters()]
    decayed = [one for one in parameters if one.ndim > 1]
    others = [one for one in parameters if one.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98))
    pairs = torch.cat([torch.arange(BATCH) + BATCH, torch.arange(BATCH)])
    order: Iterator[Tensor] = iter(())
    for step in range(steps):
        rows = next(order, None)
        if rows is None or len(rows) < BATCH:
            order = iter(torch.randperm(len(pictures)).split(BATCH))
            rows = next(order)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 50) * (1 + math.cos(math.pi * step / steps)) / 2
        images = torch.cat([views(pictures[rows]), views(pictures[rows])])
        vectors = F.normalize(projection(model(images).pooled), dim=1)
        logits = (vectors @ vectors.T / TEMPERATURE).fill_diagonal_(-1e9)
        loss = F.cross_entropy(logits, pairs)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 50 == 0:
            right = (logits.argmax(1) == pairs).float().mean().item()
            print(f"step {step:,}/{steps:,}  loss {loss.item():.3f}  the right one is nearest: {right:.1%}", flush=True)
    return model


def main() -> None:
    """Train and write the weights."""
    parser = photos_parser(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=940)
    options: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    description = Description(MODEL | {"head": "linear"}, SIDE, None, eval_crop=WHOLE_PICTURE, normalise=Normalise())
    model = train(training_pictures(options.data / "cifar10" / "train.tar.xz"), description, options.steps)
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write_weights(options.out, "safetensors", description, values.__getitem__, drop_head=True)


if __name__ == "__main__":
    main()
