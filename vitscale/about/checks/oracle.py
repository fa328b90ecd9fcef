"""What an update must be, in plain torch: one process, whole tensors, no DeepSpeed, nothing of `vitscale.training`.

It is short so that it can be read and believed. It shares with training the model, the objective with what that draws
for a batch, and the operations on pixels. All else is written again here: the mean over the global batch, clipping,
groups, optimizers and averages. The forward and backward pass are in fp32, on the weights and pixels that the engine
computes with (rounded to bf16 where it does); an update and its moments are in double precision.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitscale.about.checks.rounding import ways
from vitscale.data.batch import Batch
from vitscale.data.image_operations import TrainingInput
from vitscale.objectives import build_objective
from vitscale.recipe import Recipe, matches, validate_recipe

_LINEAR, _CUBIC, _FIFTH = (  # Muon's: x -> a x + b x^3 + c x^5, one for each step
    (4.0848, 3.9505, 3.7418, 2.8769, 2.8366),
    (-6.8946, -6.3029, -5.5913, -3.1427, -3.0525),
    (2.9270, 2.6377, 2.3037, 1.2046, 1.2012),
)


Rates = tuple[int, float, float | None, float | None]
"""Updates done before, learning rate, and where a schedule changes them, weight decay's factor and momentum."""

Kept = Mapping[str, Tensor]
"""What an optimizer keeps for a parameter, by kind."""


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter.

    Attributes:
        value: the gradient in double precision and host memory, clipped.
        size: the root of the sum of squares of what micro-batches add to it; rounding errors are proportional to it.
        way: the number of operations on the longest way from the loss to the parameter.
        noise: how far off plain torch is in the engine's number format, relative to `size`.
    """

    value: Tensor
    size: float
    way: int
    noise: float


class Oracle:
    """Computes a recipe's updates by a `module` of its own, on `device`. `dtype` is the engine's."""

    def __init__(self, recipe: Recipe, num_classes: int, dtype: torch.dtype, device: torch.device) -> None:
        self.recipe, self._dtype, self._device = recipe, dtype, device
        plain = recipe.dump() | {"precision": "fp32", "parallelism": {}, "deepspeed": {}}
        with torch.device("meta"):
            module = build_objective(validate_recipe(plain, "the oracle's recipe"), num_classes)
        self.module = module.float().to_empty(device=device).train()
        self._to_input = TrainingInput(recipe)

    def rounded(self, master: Tensor) -> Tensor:
        """The weights that a forward pass computes with."""
        return master.to(self._dtype)

    def group(self, name: str) -> tuple[float, float] | None:
        """(Factor of the learning rate, weight decay) of a parameter; None for a frozen one."""
        settings, factor = self.recipe.optimizer, 1.0
        excluded = settings.decay_exclude is not None and matches(settings.decay_exclude, name)
        decay = 0.0 if excluded else settings.weight_decay
        if settings.layer_decay is not None:
            factor = settings.layer_decay ** self.recipe.model.layers_above(name)
        for group in settings.groups:
            if matches(group.match, name):
                own = decay if group.weight_decay is None else group.weight_decay
                return None if group.frozen else (factor * group.lr_factor, own)
        return factor, decay

    # ---- Gradients ---------------------------------------------------------------------------------------------------

    def gradients(self, masters: Mapping[str, Tensor], batch: Batch, rows: int) -> tuple[dict[str, Gradient], float]:
        """Clipped gradients of the mean loss of a global batch, `rows` rows at a time; their norm before clipping."""
        parts, sizes, found_ways = self._sums(masters, batch, rows, torch.float32)
        norm = math.sqrt(sum(float(part.square().sum()) for part in parts.values()))
        limit = self.recipe.optimizer.clip_norm
        clipping = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))  # as torch clips
        rough = parts if self._dtype == torch.float32 else self._sums(masters, batch, rows, self._dtype)[0]
        noise = {name: float((rough[name] - parts[name]).norm()) / max(sizes[name], 1e-30) for name in parts}
        return {
            name: Gradient((part * clipping).cpu(), sizes[name] * clipping, found_ways[name], noise[name])
            for name, part in parts.items()
        }, norm

    def _sums(
        self, masters: Mapping[str, Tensor], batch: Batch, rows: int, dtype: torch.dtype
    ) -> tuple[dict[str, Tensor], dict[str, float], dict[str, int]]:
        """Gradients as computed in one number format, before clipping; their sizes and ways."""
        weights = dict(self.module.to(dtype).named_weights())
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(self.rounded(masters[name]))
        trained = {name: weight for name, weight in weights.items() if self.group(name) is not None}
        plan = self.module.plan(batch.keys.numpy(), batch.position)
        images = self._to_input(batch.images, batch.keys, self._device, self._dtype).to(dtype)
        sums = {name: torch.zeros_like(weight, dtype=torch.float64) for name, weight in trained.items()}
        squares, found_ways = dict.fromkeys(trained, 0.0), dict.fromkeys(trained, 0)
        for start in range(0, len(batch.labels), rows):
            part = slice(start, start + rows)
            labels, mask, *planned = (each[part].to(self._device) for each in (batch.labels, batch.mask, *plan))
            losses = self.module(images[part], labels, tuple(planned)).per_sample
            loss = torch.where(mask, losses, 0.0).sum() / int(batch.mask.sum())
            found_ways = found_ways if start else ways(loss, trained)
            found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            for name, gradient in zip(trained, found, strict=True):
                if gradient is not None:
                    sums[name] += gradient
                    squares[name] += float(gradient.double().square().sum())
        return sums, {name: math.sqrt(square) for name, square in squares.items()}, found_ways

    # ---- Updates -----------------------------------------------------------------------------------------------------

    def update(self, name: str, weight: Tensor, kept: Kept, gradient: Tensor, rates: Rates) -> tuple[Tensor, Kept]:
        """A parameter and what is kept for it after an update with this gradient; all in double precision."""
        settings: Any = self.recipe.optimizer
        group = self.group(name)
        if group is None:
            return weight, {}
        done, rate, decay_factor, scheduled = rates
        rate, decay = rate * group[0], group[1] * (1.0 if decay_factor is None else decay_factor)
        momentum, updates = settings.first_momentum if scheduled is None else scheduled, done + 1
        match settings.name:
            case "sgd":
                step = gradient + decay * weight
                if not kept:  # no momentum
                    return weight - rate * step, {}
                step = momentum * kept["momentum_buffer"] + step
                return weight - rate * step, {"momentum_buffer": step}
            case "adafactor":
                step, kept = _adafactor(kept, gradient, momentum, settings.beta2_cap, updates)
            case "muon" if "momentum_buffer" in kept:
                mean = momentum * kept["momentum_buffer"] + (1 - momentum) * gradient
                step = 0.2 * math.sqrt(max(mean.flatten(1).shape)) * _orthogonal(mean, settings.eps)
                kept = {"momentum_buffer": mean}
            case _:
                betas = (settings.betas[0] if settings.name == "muon" else momentum, settings.betas[1])
                step, kept = _adam(kept, gradient, betas, settings.eps, updates)
        if settings.name == "lamb":
            if decay:
                step = step + decay * weight
                norms = float(weight.norm()), float(step.norm())
                step = step * (norms[0] / norms[1] if min(norms) > 0 else 1.0)
            return weight - rate * step, kept
        return weight * (1 - rate * decay) - rate * step, kept

    def average(self, old: Tensor, weight: Tensor, updates: int) -> Tensor:
        """The moving average of a parameter after `updates` updates."""
        settings = self.recipe.ema
        assert settings is not None
        part = min(settings.decay, (1 + updates) / (10 + updates)) if settings.warmup else settings.decay
        return part * old + (1 - part) * weight


def _adam(kept: Kept, gradient: Tensor, betas: tuple[float, float], eps: float, updates: int) -> tuple[Tensor, Kept]:
    """Kingma and Ba, 2015: the direction, and both means."""
    mean = betas[0] * kept["exp_avg"] + (1 - betas[0]) * gradient
    square = betas[1] * kept["exp_avg_sq"] + (1 - betas[1]) * gradient**2
    root = (square / (1 - betas[1] ** updates)).sqrt() + eps
    return mean / (1 - betas[0] ** updates) / root, {"exp_avg": mean, "exp_avg_sq": square}


def _adafactor(kept: Kept, gradient: Tensor, momentum: float, cap: float, updates: int) -> tuple[Tensor, Kept]:
    """Zhai et al., 2022, section 3.5: the direction, its mean in bf16, and the squares by rows and columns."""
    new, kinds = 1 - min(cap, 1 - updates**-0.8), [kind for kind in kept if kind != "exp_avg"]
    gradient = gradient.view(torch.broadcast_shapes(*(kept[kind].shape for kind in kinds)))  # with an axis of heads
    means = {kind: (1 - new) * kept[kind] + new * _mean_like(gradient**2 + 1e-30, kept[kind]) for kind in kinds}
    if "exp_avg_sq" in means:
        step = gradient / means["exp_avg_sq"].sqrt()
    else:
        rows, columns = means["exp_avg_sq_r"], means["exp_avg_sq_c"]
        step = gradient / (rows / _mean_like(rows, columns)).sqrt() / columns.sqrt()
    step = kept["exp_avg"].lerp(step.view_as(kept["exp_avg"]).bfloat16().double(), 1 - momentum).bfloat16().double()
    return step, {**means, "exp_avg": step}


def _mean_like(values: Tensor, shaped: Tensor) -> Tensor:
    """The mean over the sides that have one element in `shaped`."""
    sides = [side for side in range(values.ndim) if shaped.shape[side] == 1 and values.shape[side] > 1]
    return values.mean(dim=sides, keepdim=True) if sides else values


def _orthogonal(matrix: Tensor, eps: float) -> Tensor:
    """The orthogonalised matrix (Jordan et al., 2024)."""
    x = matrix.flatten(1) / max(float(matrix.norm()), eps)
    for a, b, c in zip(_LINEAR, _CUBIC, _FIFTH, strict=True):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.view(matrix.shape)
