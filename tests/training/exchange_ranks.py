"""Many small steps in which ranks send while they compute, and are late by chance."""

import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from rank_engines import build
from ranks import make_recipe

from vitscale.training.watching.replicas import checksum

SIDE, CLASSES, ACCUMULATION = 16, 10, 2


def recipe_of(stage: int, world_size: int, overlap: bool) -> Any:
    """Several buckets to a block."""
    return make_recipe(
        Path("none"),
        data={"image_size": SIDE},
        batch={"global": ACCUMULATION * world_size, "micro_max": 1},
        schedule={"duration": {"steps": 100_000}},
        parallelism={"zero_stage": stage, "overlap": overlap},
        deepspeed={"zero_optimization": {"reduce_bucket_size": 3000}},
    )


def make_late(engine: Any, chance: random.Random) -> None:
    """Have this rank take its time here and there, before modules and between gradients."""

    def wait(*_: Any) -> None:
        if chance.random() < 0.1:
            time.sleep(chance.random() * 0.002)

    for module in engine.module.modules():
        module.register_forward_pre_hook(wait)
    for parameter in engine.module.parameters():
        parameter.register_hook(wait)


def run_late(world: Any, folder: Path, stages: list[int], steps: int) -> None:
    """For every stage, so many steps, punctually and with delays; ZeRO 3 also without overlap.

    Rank 0 leaves stage -> checksums of every rank's weights and masters after each of these.
    """
    results: dict[int, list[Any]] = {}
    for stage in stages:
        without = [(None, False)] if stage == 3 else []
        for delays, overlap in [(None, True), (1, True), (2, True), *without]:
            ours = build(recipe_of(stage, world.size, overlap=overlap), CLASSES, world.size)
            engine = ours.deepspeed
            if delays is not None:
                make_late(engine, random.Random(100 * delays + world.rank))
            generator = torch.Generator().manual_seed(world.rank)
            for group in engine.optimizer.param_groups:
                group["lr"] = 1e-3
            for _ in range(steps * ACCUMULATION):
                images = torch.randn(1, SIDE, SIDE, 3, generator=generator).bfloat16()
                labels = torch.randint(0, CLASSES, (1,), generator=generator)
                engine.backward(engine(images, labels).per_sample.sum())
                engine.step()
            ours.settle_weights()
            own = {
                "weights": [checksum(weight) for weight in engine.module.parameters()],
                # Piece by piece: between them is padding, in ZeRO 3 with whatever was in memory.
                "masters": [checksum(piece.view(piece.flat)) for piece in ours.pieces],
            }
            by_rank: list[Any] = [None] * world.size
            torch.distributed.all_gather_object(by_rank, own)
            results.setdefault(stage, []).append(by_rank)
            engine.destroy()
    if world.is_main:
        (folder / "late.json").write_text(json.dumps(results))
