"""Ten updates of tensors of many shapes, whose gradients are known without any computing, on real DeepSpeed ranks.

The loss is linear, and the gradients are multiples of 1/8, the same on every rank: bf16 loses nothing of them, and sums
of their squares are exact in any order.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks import join, make_recipe
from torch import Tensor, nn

SHAPES = {
    "embedding.weight": (32, 192),
    "embedding.bias": (32,),
    "blocks.0.attention.qkv.weight": (96, 32),
    "blocks.0.attention.qkv.bias": (96,),
    "blocks.0.attention.out.weight": (32, 32),
    "blocks.1.fc.weight": (20, 51),
    "blocks.1.conv.weight": (18, 3, 2, 17),
    "blocks.1.norm.weight": (1,),
    "blocks.1.norm.bias": (3,),
    "head.weight": (5, 40),
    "head.bias": (5,),
}
UPDATES = 10
RATE = 0.01


def gradient(step: int, name: str) -> np.ndarray:
    generator = np.random.default_rng([step, list(SHAPES).index(name)])
    return generator.integers(-8, 9, SHAPES[name]).astype(np.float32) / 8


def initial(name: str) -> np.ndarray:
    """In fp32, with digits that bf16 does not have."""
    return np.random.default_rng([99, list(SHAPES).index(name)]).normal(size=SHAPES[name]).astype(np.float32)


class LinearLoss(nn.Module):
    """With the names of a Transformer of two blocks, and the shapes of the toy recipe's model where they matter."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            module: nn.Module = self
            *path, last = name.split(".")
            for word in path:
                if not hasattr(module, word):
                    module.add_module(word, nn.Module())
                module = getattr(module, word)
            module.register_parameter(last, nn.Parameter(torch.empty(shape)))

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As of an objective, whose part the engine's optimizer and fragments need."""
        found = dict(self.named_parameters())
        return ((name, found[name]) for name in SHAPES)

    def forward(self, coefficients: dict[str, Tensor]) -> Tensor:
        return sum((parameter * coefficients[name]).sum() for name, parameter in self.named_weights())


def update_tensors(rank: int, world_size: int, port: int, root: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Entry point of a rank: ten updates of each case's recipe; what it owns then goes to `<case>-<rank>.npz`."""
    import deepspeed

    from vitscale.models import weight_dtype
    from vitscale.runs.checkpoint.format import fragment_key
    from vitscale.training.deepspeed.config import derive_config
    from vitscale.training.deepspeed.engine import Engine
    from vitscale.training.optimizers.schedule import Rates

    join(rank, world_size, port)
    for case, blocks in cases.items():
        recipe = make_recipe(root, **blocks)
        config, dtype = derive_config(recipe, world_size), weight_dtype(recipe)
        if recipe.parallelism.zero_stage == 3:
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = LinearLoss()
        else:
            model = LinearLoss().to(dtype)
        ours = Engine(recipe, model, config)
        engine = ours.deepspeed
        start = {name: torch.from_numpy(initial(name)).view(-1) for name in SHAPES}
        ours.load(lambda kind, name, first, length, s=start: s[name][first : first + length], optimizer_steps=0)
        _, accumulation = recipe.batch.split(world_size)
        for step in range(UPDATES):
            ours.set_rates(Rates(step, RATE))
            inputs = {name: torch.from_numpy(gradient(step, name)).to(dtype) for name in SHAPES}
            for _ in range(accumulation):
                engine.backward(engine(inputs))
                engine.step()
        owned = {
            fragment_key(kind, fragment.name, fragment.start): tensor.float().numpy()
            for fragment in ours.owned(rank, world_size)
            for kind, tensor in fragment.tensors.items()
        }
        np.savez(root / f"{case}-world{world_size}-{rank}.npz", **owned)
        engine.destroy()
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)
