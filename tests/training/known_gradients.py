"""A model whose gradients are known without any computing, updated by the engines of real DeepSpeed ranks.

The loss is linear: the gradient of a weight is the mean of the numbers that ranks and micro-batches have for it,
whatever the weights are. All numbers are multiples of 1/8, so that bf16 loses nothing of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks import make_recipe
from torch import Tensor, nn


@dataclass(frozen=True)
class Parameters:
    """The parameters of a model, by name: their shapes, initial values and gradients."""

    shapes: dict[str, tuple[int, ...]]

    def initial(self, name: str) -> np.ndarray:
        """In fp32, with digits that bf16 does not have."""
        generator = np.random.default_rng([99, list(self.shapes).index(name)])
        return generator.normal(size=self.shapes[name]).astype(np.float32)

    def numbers(self, name: str, *key: int) -> np.ndarray:
        """The coefficients of a parameter in a loss: of a step, and of a rank or a micro-batch of it."""
        generator = np.random.default_rng([*key, list(self.shapes).index(name)])
        return generator.integers(-8, 9, self.shapes[name]).astype(np.float32) / 8


# Both have the names of a Transformer of two blocks, the second the shapes of the toy recipe's model where they matter.
SIZES = {"embedding": 7, "blocks.0": 30, "blocks.1": 12, "norm": 1, "head": 9}
VECTORS = Parameters({f"{layer}.{kind}": (size,) for layer, size in SIZES.items() for kind in ("weight", "bias")})
TENSORS = Parameters(
    {
        **{"embedding.weight": (32, 192), "embedding.bias": (32,), "blocks.0.attention.qkv.weight": (96, 32)},
        **{"blocks.0.attention.qkv.bias": (96,), "blocks.0.attention.out.weight": (32, 32)},
        **{"blocks.1.fc.weight": (20, 51), "blocks.1.conv.weight": (18, 3, 2, 17), "blocks.1.norm.weight": (1,)},
        **{"blocks.1.norm.bias": (3,), "head.weight": (5, 40), "head.bias": (5,)},
    }
)


class LinearLoss(nn.Module):
    """The sum of all products of parameters with what it is given for them by name."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__()
        self._names = list(parameters.shapes)
        for name, shape in parameters.shapes.items():
            module: nn.Module = self
            *path, last = name.split(".")
            for word in path:
                if not hasattr(module, word):
                    module.add_module(word, nn.Module())
                module = getattr(module, word)
            module.register_parameter(last, nn.Parameter(torch.empty(shape)))

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As of an objective, whose part the engine's optimizer and fragments need."""
        return ((name, self.get_parameter(name)) for name in self._names)

    def forward(self, coefficients: dict[str, Tensor]) -> Tensor:
        return sum((self.get_parameter(name) * values).sum() for name, values in coefficients.items())


class Updates:
    """The engine of a recipe around such a model, with its initial values."""

    def __init__(self, world: Any, root: Path, parameters: Parameters, blocks: dict[str, Any]) -> None:
        import deepspeed

        from vitscale.models import weight_dtype
        from vitscale.training.beginning.run_plan import schedule_in_steps
        from vitscale.training.deepspeed.config import derive_config
        from vitscale.training.deepspeed.engine import Engine

        self.recipe = make_recipe(root, **blocks)
        config, self.dtype = derive_config(self.recipe, world.size), weight_dtype(self.recipe)
        if self.recipe.parallelism.zero_stage == 3:
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = LinearLoss(parameters)
        else:
            model = LinearLoss(parameters).to(self.dtype)
        self.engine, self._world = Engine(self.recipe, model, config), world
        self.deepspeed = self.engine.deepspeed
        start = {name: torch.from_numpy(parameters.initial(name)).view(-1) for name in parameters.shapes}
        self.engine.load(lambda kind, name, first, length: start[name][first : first + length], optimizer_steps=0)
        _, self._rates = schedule_in_steps(self.recipe, 1000)

    def begin(self, step: int, learning_rate: float) -> None:
        """Rates of an update: this one, and what the recipe's schedule says of weight decay and momentum."""
        self.engine.set_rates(self._rates(step)._replace(learning_rate=learning_rate))

    def backward(self, coefficients: dict[str, np.ndarray]) -> None:
        """The backward pass of a micro-batch with these gradients."""
        values = {name: torch.from_numpy(each).to(self.dtype) for name, each in coefficients.items()}
        self.deepspeed.backward(self.deepspeed(values))

    def end(self, file: Path) -> None:
        """Leave what this rank owns in `<file>-<rank>.npz`, by the keys of fragments in a checkpoint."""
        from vitscale.runs.checkpoint.format import fragment_key

        owned = {
            fragment_key(kind, fragment.name, fragment.start): tensor.float().numpy()
            for fragment in self.engine.owned(self._world.rank, self._world.size)
            for kind, tensor in fragment.tensors.items()
        }
        np.savez(file.with_name(f"{file.name}-{self._world.rank}.npz"), **owned)
        self.deepspeed.destroy()


GROUP_UPDATES = 5


def rate(step: int) -> float:
    """Of the vectors' updates."""
    return 0.01 * (step + 1)


def update_groups(world: Any, root: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Some updates of each case's recipe. `<case>.frozen.npz` has the weights that have no gradient."""
    import deepspeed

    for case, blocks in cases.items():
        updates = Updates(world, root, VECTORS, blocks)
        for step in range(GROUP_UPDATES):
            updates.begin(step, rate(step))
            updates.backward({name: VECTORS.numbers(name, step, world.rank) for name in VECTORS.shapes})
            updates.deepspeed.step()
        with deepspeed.zero.GatheredParameters(list(updates.engine.module.parameters())):
            weights = {
                name: parameter.detach().float().numpy()
                for name, parameter in updates.engine.module.named_parameters()
                if not parameter.requires_grad
            }
        if world.is_main:
            np.savez(root / f"{case}.frozen.npz", **weights)
        updates.end(root / case)


TENSOR_UPDATES, TENSOR_RATE = 10, 0.01


def update_tensors(world: Any, root: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Ten updates of each case's recipe."""
    for case, blocks in cases.items():
        updates = Updates(world, root, TENSORS, blocks)
        _, accumulation = updates.recipe.batch.split(world.size)
        for step in range(TENSOR_UPDATES):
            updates.begin(step, TENSOR_RATE)
            for _ in range(accumulation):
                updates.backward({name: TENSORS.numbers(name, step) for name in TENSORS.shapes})
                updates.deepspeed.step()
        updates.end(root / f"{case}-world{world.size}")


ALONE_UPDATES, INFINITE = 5, 2  # the update that gets an infinite gradient
UNUSED = "blocks.1.bias"  # by every second update


def coefficients(step: int, micro_step: int) -> dict[str, np.ndarray]:
    """The gradient of a micro-batch, by parameter."""
    found = {name: VECTORS.numbers(name, step, micro_step) for name in VECTORS.shapes if name != UNUSED or step % 2}
    if step == INFINITE and micro_step == 0:
        found["head.weight"][3] = np.inf
    return found


def update_alone(world: Any, root: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Each case's norms, skipped steps and, after every update, masters go to `<case>.npz`.

    A case's key `inside` has the optimizer clip, as on CUDA; the others are blocks of its recipe.
    """
    for case, blocks in cases.items():
        inside = blocks.pop("inside")
        updates = Updates(world, root, VECTORS, blocks)
        ours, deepspeed = updates.engine, updates.deepspeed
        ours.zero_update.clips_inside = inside
        accumulation = deepspeed.gradient_accumulation_steps()
        results: dict[str, Any] = {"norms": []}
        for step in range(ALONE_UPDATES):
            updates.begin(step, rate(step))
            for micro_step in range(accumulation):
                updates.backward(coefficients(step, micro_step))
                if accumulation > 1:
                    assert all(parameter.grad is None for parameter in ours.module.parameters()), "kept"
                deepspeed.step()
                assert all(parameter.grad is None for parameter in ours.module.parameters()), "kept"
            results["norms"].append(float(deepspeed.get_global_grad_norm()))
            for piece in ours.pieces:
                master = piece.view(piece.flat)
                results[f"{step}.{piece.name}"] = master.numpy().copy()
                assert torch.equal(ours.module.get_parameter(piece.name), master.to(updates.dtype)), piece.name
        np.savez(root / f"{case}.npz", skipped=deepspeed.skipped_steps, **results)
        deepspeed.destroy()
