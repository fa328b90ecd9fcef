"""The recipe of ViT-S/16 on ImageNet beside a plain loop: timm's model, dense targets, torch's AdamW, same pixels."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from outcomes import column
from ranks import initial_weights, job, launch, make_data, make_recipe
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from vitscale.objectives import build_objective
from vitscale.recipe import load_recipe
from vitscale.training.beginning.run_plan import open_loader, plan_run
from vitscale.training.deepspeed import distributed

pytestmark = pytest.mark.slow

STEPS, BATCH, SIDE, K, WARMUP = 20, 8, 48, 7, 5


def blocks() -> dict[str, Any]:
    """The recipe as it is, on few small images, in fp32, with a warmup that ends within the steps."""
    content = load_recipe("s16_i1k_90ep").dump()
    return {
        "model": content["model"] | {"num_classes": None},
        "data": {"image_size": SIDE, "operations": content["data"]["operations"]},
        "batch": {"global": BATCH, "micro_max": 4},
        "objective": content["objective"],
        "optimizer": content["optimizer"],
        "schedule": {"duration": {"steps": STEPS}, "warmup": {"steps": WARMUP}, "decay": "cosine"},
        "precision": "fp32",
        "evaluation": {"validation": None},
    }


def sincos() -> Tensor:
    """As big_vision's `posemb_sincos_2d`: sines and cosines by column, then by row."""
    side, quarter = SIDE // 16, 384 // 4
    omega = 10_000.0 ** (-torch.arange(quarter, dtype=torch.float64) / (quarter - 1))
    grid = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    rows, columns = (each.flatten()[:, None] * omega for each in grid)
    return torch.cat([columns.sin(), columns.cos(), rows.sin(), rows.cos()], dim=1).float()[None]


def plain_model(values: dict[str, Tensor]) -> nn.Module:
    model = VisionTransformer(
        **{"img_size": SIDE, "patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6, "num_classes": K},
        **{"class_token": False, "global_pool": "avg", "fc_norm": False},
        act_layer=lambda: nn.GELU(approximate="tanh"),
    )
    model.head = nn.Sequential(nn.Linear(384, 384), nn.Tanh(), nn.Linear(384, K))
    names = {"attention.qkv": "attn.qkv", "attention.out": "attn.proj", "pre_logits": "head.0", "head": "head.2"}
    state = {"pos_embed": sincos()}
    for name, value in values.items():
        layer, _, kind = name.rpartition(".")
        if layer == "embedding":
            layer = "patch_embed.proj"
            value = value.view(384, 16, 16, 3).permute(0, 3, 1, 2) if kind == "weight" else value
        prefix, part = layer.rpartition(".attention.")[0], layer.rpartition(".attention.")[2]
        renamed = f"{prefix}.{names[f'attention.{part}']}" if prefix else names.get(layer, layer)
        state[f"{renamed}.{kind}"] = value
    model.load_state_dict(state)
    model.pos_embed.requires_grad_(False)
    return model.train()


def dense_targets(labels: Tensor, part: float) -> Tensor:
    one_hot = F.one_hot(labels, K).float()
    return part * one_hot + (1 - part) * one_hot.view(-1, 2, K).flip(1).view(-1, K)


def plain_losses(root: Path) -> list[float]:
    recipe = make_recipe(root, **blocks())
    plan = plan_run(recipe, 0, 1)
    objective = build_objective(recipe, K)
    model = plain_model(initial_weights(recipe, K))
    matrices = [each for each in model.parameters() if each.requires_grad and each.ndim > 1]
    others = [each for each in model.parameters() if each.requires_grad and each.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    world = distributed.World(0, 1, torch.device("cpu"))
    losses = []
    with open_loader(plan, world, 0, STEPS) as loader:
        for step, batch in enumerate(loader):
            part = objective.plan(batch.keys.numpy(), batch.position)[0][0].item()  # one weight a batch
            images = batch.images.float() / 127.5 - 1
            mixed = part * images + (1 - part) * images.view(-1, 2, SIDE, SIDE, 3).flip(1).view_as(images)
            logits = model(mixed.permute(0, 3, 1, 2))
            loss = -(dense_targets(batch.labels, part) * logits.log_softmax(-1)).sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_([*matrices, *others], 1.0)
            rate = step / WARMUP if step < WARMUP else (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * rate
            optimizer.step()
            losses.append(loss.item())
    return losses


def test_the_first_20_losses_equal_those_of_a_plain_loop(tmp_path):
    make_data(tmp_path)
    launch(tmp_path, [job("s16", blocks())], 1)
    found, expected = column(tmp_path, "s16", "loss"), plain_losses(tmp_path)
    assert len(found) == STEPS and max(found) - min(found) > 0.1  # something happens
    assert found == pytest.approx(expected, rel=1e-4)
