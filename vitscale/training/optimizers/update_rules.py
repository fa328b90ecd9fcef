"""Recomputes the update of single elements by the formulas of the optimizers' papers, plainly, in double precision.

The optimizers themselves work on long vectors in fp32, divided among ranks. Here a few elements of one parameter are
computed for comparison. What depends on a whole tensor is not: the length of LAMB's step is taken from the step made,
of Muon's direction only the size is bounded, and the momentum of a tensor that Adafactor factors is taken as it is.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from vitscale.recipe import SGD, Adafactor, AdamW, Lamb, Muon, Optimizer
from vitscale.runs.checkpoint import MASTER

# Tolerances relative to the terms of a sum, and to the change: fp32 rounds by 2^-24; 1 - 0.999 in fp32 is off by 2^-14.
_OF_TERMS, _OF_CHANGE, _LEAST = 2.0**-21, 2.0**-12, 1e-36
_BF16 = 2.0**-7  # relative to what is kept in bf16, and computed there

State = dict[str, Tensor]
"""Kind, as in checkpoints -> float64 (elements,)."""
Expected = dict[str, tuple[Tensor, Tensor]]
"""Kind -> the value that it should have, and by how much it may differ."""


@dataclass(frozen=True)
class Settings:
    """How one parameter is updated this time.

    Attributes:
        optimizer: the recipe's optimizer.
        update: the number of this update, from 1.
        rate, decay: the learning rate and weight decay of this parameter now.
        momentum: the present momentum.
    """

    optimizer: Optimizer
    shape: tuple[int, ...]
    update: int
    rate: float
    decay: float
    momentum: float


def expected(settings: Settings, before: State, gradient: Tensor, after: State) -> Expected:
    """The state that should follow from the one before; `after` provides what a few elements cannot tell."""
    match settings.optimizer:
        case AdamW(betas=betas, eps=eps):
            direction, state = _adam(settings, settings.momentum, betas[1], eps, before, gradient)
            return state | _decoupled(settings, before, direction)
        case SGD():
            return _sgd(settings, before, gradient)
        case Lamb(betas=betas, eps=eps):
            direction, state = _adam(settings, settings.momentum, betas[1], eps, before, gradient)
            return state | _lamb(settings, before, direction, after)
        case Muon() if "momentum_buffer" in before:
            return _muon(settings, before, gradient)
        case Muon(betas=betas, eps=eps):
            direction, state = _adam(settings, betas[0], betas[1], eps, before, gradient)
            return state | _decoupled(settings, before, direction)
        case Adafactor():
            return _adafactor(settings, settings.optimizer, before, gradient, after)


def _close(value: Tensor, *terms: Tensor, change: Tensor, relative: float = _OF_TERMS) -> tuple[Tensor, Tensor]:
    size = sum((term.abs() for term in terms), start=change.abs() * 0)
    return value, relative * size + _OF_CHANGE * change.abs() + _LEAST


def _mean(old: Tensor, new: Tensor, kept: float, relative: float = _OF_TERMS) -> tuple[Tensor, Tensor]:
    """A running mean: `kept` of the old value plus 1 - `kept` of the new one."""
    change = (1 - kept) * new
    return _close(kept * old + change, old, change, change=change, relative=relative)


def _adam(
    settings: Settings, beta1: float, beta2: float, eps: float, before: State, gradient: Tensor
) -> tuple[Tensor, Expected]:
    mean = _mean(before["exp_avg"], gradient, beta1)
    square = _mean(before["exp_avg_sq"], gradient.square(), beta2)
    root = (square[0] / (1 - beta2**settings.update)).sqrt()
    direction = mean[0] / (1 - beta1**settings.update) / (root + eps)
    return direction, {"exp_avg": mean, "exp_avg_sq": square}


def _decoupled(settings: Settings, before: State, direction: Tensor) -> Expected:
    """AdamW's way: the weight decay, times the learning rate, is subtracted from the weight itself."""
    weights = before[MASTER]
    change = -settings.rate * (direction + settings.decay * weights)
    return {MASTER: _close(weights + change, weights, change=change)}


def _sgd(settings: Settings, before: State, gradient: Tensor) -> Expected:
    weights, found = before[MASTER], Expected()
    momentum = gradient + settings.decay * weights
    terms = [gradient, settings.decay * weights]
    if "momentum_buffer" in before:
        old = settings.momentum * before["momentum_buffer"]
        momentum, terms = momentum + old, [*terms, old]
        in_bf16 = "momentum_buffer" in settings.optimizer.kept_in_bf16
        relative = _BF16 if in_bf16 else _OF_TERMS
        found["momentum_buffer"] = _close(momentum, *terms, change=gradient, relative=relative)
    size = sum((term.abs() for term in terms), start=gradient.abs())
    found[MASTER] = _close(weights - settings.rate * momentum, weights, change=settings.rate * size)
    return found


def _lamb(settings: Settings, before: State, direction: Tensor, after: State) -> Expected:
    weights, moved = before[MASTER], before[MASTER] - after[MASTER]
    direction = direction + settings.decay * weights
    length = direction.square().sum()
    ratio = (moved * direction).sum() / (settings.rate * length) if settings.decay and settings.rate and length else 1.0
    change = -settings.rate * ratio * direction
    return {MASTER: _close(weights + change, weights, change=change.abs() + change.abs().max())}


def _muon(settings: Settings, before: State, gradient: Tensor) -> Expected:
    kept = before[MASTER] * (1 - settings.rate * settings.decay)
    longest = max(settings.shape[0], math.prod(settings.shape[1:]))
    most = 0.3 * math.sqrt(longest) * settings.rate  # an orthogonal matrix has no element above 1, these reach 1.2
    return {
        "momentum_buffer": _mean(before["momentum_buffer"], gradient, settings.momentum),
        MASTER: (kept, _OF_TERMS * kept.abs() + most),
    }


def _adafactor(settings: Settings, own: Adafactor, before: State, gradient: Tensor, after: State) -> Expected:
    found = _decoupled(settings, before, after["exp_avg"])
    if own.factored_dims(settings.shape) is None:
        kept = min(own.beta2_cap, 1 - settings.update**-0.8)
        found["exp_avg_sq"] = _mean(before["exp_avg_sq"], gradient.square() + 1e-30, kept)
        direction = gradient / found["exp_avg_sq"][0].sqrt()
        found["exp_avg"] = _mean(before["exp_avg"], direction, settings.momentum, relative=_BF16)
    return found
