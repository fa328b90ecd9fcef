"""Updates of a model whose gradients are known without any computing, on real DeepSpeed ranks.

The loss is linear: the gradient of a weight is the mean of the ranks' numbers for it, whatever the weights are. All
numbers are multiples of 1/8, so that bf16 loses nothing of them.
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

SIZES = {"embedding": 7, "blocks.0": 30, "blocks.1": 12, "norm": 1, "head": 9}
PARAMETERS = [f"{layer}.{kind}" for layer in SIZES for kind in ("weight", "bias")]
UPDATES = 5
RANKS = 2


def numbers(step: int, rank: int, name: str) -> np.ndarray:
    """The coefficients of a parameter in one rank's loss."""
    size = SIZES[name.rpartition(".")[0]]
    generator = np.random.default_rng([step, rank, PARAMETERS.index(name)])
    return generator.integers(-8, 9, size).astype(np.float32) / 8


def initial(name: str) -> np.ndarray:
    """In fp32, with digits that bf16 does not have."""
    size = SIZES[name.rpartition(".")[0]]
    return np.random.default_rng([99, PARAMETERS.index(name)]).normal(size=size).astype(np.float32)


def rate(step: int) -> float:
    return 0.01 * (step + 1)


class _Linear(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.empty(size)) for _ in range(2))

    def forward(self, weight: Tensor, bias: Tensor) -> Tensor:
        return (self.weight * weight).sum() + (self.bias * bias).sum()


class LinearLoss(nn.Module):
    """With the names of a Transformer of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = _Linear(SIZES["embedding"])
        self.blocks = nn.ModuleList(_Linear(SIZES[f"blocks.{index}"]) for index in range(2))
        self.norm, self.head = _Linear(SIZES["norm"]), _Linear(SIZES["head"])

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As of an objective, whose part the engine's optimizer and fragments need."""
        return self.named_parameters()

    def forward(self, coefficients: dict[str, Tensor]) -> Tensor:
        layers = [self.get_submodule(layer) for layer in SIZES]
        return sum(
            layer(coefficients[f"{name}.weight"], coefficients[f"{name}.bias"])
            for name, layer in zip(SIZES, layers, strict=True)
        )


def update_all(rank: int, world_size: int, port: int, root: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Entry point of a rank: some updates of each case's recipe; what it owns then goes to `<case>-<rank>.npz`.

    The keys are those of fragments in a checkpoint. `<case>.frozen.npz` has the weights that have no gradient.
    """
    import deepspeed

    from vitscale.models import weight_dtype
    from vitscale.runs.checkpoint.format import fragment_key
    from vitscale.training.beginning.run_plan import schedule_in_steps
    from vitscale.training.deepspeed.config import derive_config
    from vitscale.training.deepspeed.engine import Engine

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
        source = {name: torch.from_numpy(initial(name)) for name in PARAMETERS}
        ours.load(lambda kind, name, start, length, s=source: s[name][start : start + length], optimizer_steps=0)
        _, rates = schedule_in_steps(recipe, 1000)
        for step in range(UPDATES):
            ours.set_rates(rates(step)._replace(learning_rate=rate(step)))
            inputs = {name: torch.from_numpy(numbers(step, rank, name)).to(dtype) for name in PARAMETERS}
            engine.backward(engine(inputs))
            engine.step()
        owned = {
            fragment_key(kind, fragment.name, fragment.start): tensor.float().numpy()
            for fragment in ours.owned(rank, world_size)
            for kind, tensor in fragment.tensors.items()
        }
        np.savez(root / f"{case}-{rank}.npz", **owned)
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            weights = {
                name: parameter.detach().float().numpy()
                for name, parameter in engine.module.named_parameters()
                if not parameter.requires_grad
            }
        if rank == 0:
            np.savez(root / f"{case}.frozen.npz", **weights)
        engine.destroy()
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)
