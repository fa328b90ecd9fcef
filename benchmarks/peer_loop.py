"""The accuracy of a recipe in a plain PyTorch loop around transformers' ViT: what ours has to match.

    python benchmarks/peer_loop.py recipes/vit4_cifar10.yaml --set data.root=DATA [--json]

The same batches, initial weights, schedule and global batch, in one process: transformers' model, torch's AdamW on fp32
weights under bf16 autocast, torch's clipping and cross-entropy. Recipes with a linear head and softmax only.
"""

import argparse
import json
import time

import torch
from peers import transformers_vit
from torch.nn import functional as F

from vitscale.data.augmentation import EvalTransform, train_transform
from vitscale.data.image_operations import to_model_input
from vitscale.data.loader import Loader
from vitscale.data.order import EvalOrder, TrainOrder
from vitscale.data.shards import Manifest
from vitscale.models import build_model, initialise
from vitscale.models.vit import ViT
from vitscale.recipe import AdamW, Classification, Recipe, load_recipe
from vitscale.training.optimizers.schedule import learning_rate

CPU = torch.device("cpu")


def train_peer(recipe: Recipe) -> torch.nn.Module:
    """transformers' ViT after the recipe's whole training."""
    manifest = Manifest.load(recipe.dataset_path(recipe.data.train))
    ours = build_model(recipe, len(manifest.class_names))
    assert isinstance(ours, ViT) and isinstance(recipe.objective, Classification)
    initialise(ours, recipe.seed)
    model = transformers_vit(ours).train()
    settings, schedule, batch_size = recipe.optimizer, recipe.schedule, recipe.batch.global_size
    assert isinstance(settings, AdamW) and recipe.objective.loss == "softmax" and recipe.model.head == "linear"
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(settings.betas[0], settings.betas[1]), weight_decay=settings.weight_decay
    )
    total, warmup = (part.to_steps(manifest.num_samples, batch_size) for part in (schedule.duration, schedule.warmup))
    order = TrainOrder([shard.num_selected for shard in manifest.shards], batch_size, recipe.seed)
    transform = train_transform(recipe.data.crop, recipe.data.flip)
    loader = Loader(manifest, order, image_size=recipe.data.image_size, transform=transform, stop_step=total)
    began = time.perf_counter()
    with loader:
        for step, batch in enumerate(loader):
            rate = learning_rate(
                step, base=settings.lr, total=total, warmup=warmup, decay=schedule.decay, end=schedule.end_lr
            )
            for group in optimizer.param_groups:
                group["lr"] = rate
            images = to_model_input(batch.images, CPU, torch.float32).permute(0, 3, 1, 2)
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(images).logits
            loss = F.cross_entropy(logits.float(), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            if settings.clip_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
            optimizer.step()
            if (step + 1) % 100 == 0:
                speed = (step + 1) * batch_size / (time.perf_counter() - began)
                print(f"step {step + 1}/{total}  loss {loss.item():.4f}  {speed:.0f} images/s", flush=True)
    return model.eval()


@torch.no_grad()
def accuracy(model: torch.nn.Module, recipe: Recipe) -> float:
    """Top-1 over the recipe's validation set."""
    assert recipe.evaluation.validation is not None
    manifest = Manifest.load(recipe.dataset_path(recipe.evaluation.validation))
    order = EvalOrder([shard.num_selected for shard in manifest.shards], 250)
    crop = EvalTransform(recipe.data.eval_crop.kind, recipe.data.eval_crop.fraction)
    correct = 0
    with Loader(manifest, order, image_size=recipe.data.image_size, transform=crop) as loader:
        for batch in loader:
            images = to_model_input(batch.images, CPU, torch.float32).permute(0, 3, 1, 2)
            with torch.autocast("cpu", torch.bfloat16):
                answers = model(images).logits.argmax(dim=1)
            correct += int(((answers == batch.labels) & batch.mask).sum())
    return correct / manifest.num_samples


def main() -> None:
    """Train, evaluate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    recipe = load_recipe(options.recipe, options.settings)
    began = time.perf_counter()
    top1 = accuracy(train_peer(recipe), recipe)
    result = {"recipe": options.recipe, "top1": top1, "seconds": round(time.perf_counter() - began)}
    print(json.dumps(result) if options.json else f"top-1 {top1:.4f} after {result['seconds']} s")


if __name__ == "__main__":
    main()
