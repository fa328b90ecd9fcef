"""Updates of one rank from gradients that are known beforehand, some of them missing or not finite."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parameter_group_ranks import PARAMETERS, LinearLoss, initial, numbers, rate
from ranks import join, make_recipe
from torch import Tensor

STEPS, INFINITE = 5, 2  # the update that gets an infinite gradient
UNUSED = "blocks.1.bias"  # by every second update


def coefficients(step: int, micro_step: int) -> dict[str, np.ndarray]:
    """The gradient of a micro-batch, by parameter."""
    found = {name: numbers(step, micro_step, name) for name in PARAMETERS if name != UNUSED or step % 2}
    if step == INFINITE and micro_step == 0:
        found["head.weight"][3] = np.inf
    return found


class _LossOfSome(LinearLoss):
    def forward(self, coefficients: dict[str, Tensor]) -> Tensor:
        return sum((self.get_parameter(name) * value).sum() for name, value in coefficients.items())


def update_all(rank: int, world_size: int, port: int, root: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Entry point of a rank: each case's norms, skipped steps and, after every update, masters go to `<case>.npz`.

    A case's key `inside` has the optimizer clip, as on CUDA; the others are blocks of its recipe.
    """
    from vitscale.models import weight_dtype
    from vitscale.training.beginning.run_plan import schedule_in_steps
    from vitscale.training.deepspeed.config import derive_config
    from vitscale.training.deepspeed.engine import Engine

    join(rank, world_size, port)
    for case, blocks in cases.items():
        inside = blocks.pop("inside")
        recipe = make_recipe(root, **blocks)
        dtype = weight_dtype(recipe)
        ours = Engine(recipe, _LossOfSome().to(dtype), derive_config(recipe, world_size))
        engine, ours.zero_update.clips_inside = ours.deepspeed, inside
        source = {name: torch.from_numpy(initial(name)) for name in PARAMETERS}
        ours.load(lambda kind, name, start, length, s=source: s[name][start : start + length], optimizer_steps=0)
        _, rates = schedule_in_steps(recipe, 1000)
        results: dict[str, Any] = {"norms": []}
        for step in range(STEPS):
            ours.set_rates(rates(step)._replace(learning_rate=rate(step)))
            for micro_step in range(engine.gradient_accumulation_steps()):
                values = coefficients(step, micro_step)
                engine.backward(engine({name: torch.from_numpy(value).to(dtype) for name, value in values.items()}))
                if engine.gradient_accumulation_steps() > 1:
                    assert all(parameter.grad is None for parameter in engine.module.parameters()), "kept"
                engine.step()
                assert all(parameter.grad is None for parameter in engine.module.parameters()), "kept"
            results["norms"].append(float(engine.get_global_grad_norm()))
            for piece in ours.pieces:
                master = piece.view(piece.flat)
                results[f"{step}.{piece.name}"] = master.numpy().copy()
                assert torch.equal(engine.module.get_parameter(piece.name), master.to(dtype)), piece.name
        np.savez(root / f"{case}.npz", skipped=engine.skipped_steps, **results)
        engine.destroy()
    sys.stdout.flush()
    os._exit(0)
