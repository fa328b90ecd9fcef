"""The learning rate as a function of the step, as in the authors' code, and what else changes with the step."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Decay = Literal["linear", "cosine", "stairs", "constant", "wsd", "rsqrt", "restarts"]


class Rates(NamedTuple):
    """What changes with the step, at one update."""

    updates: int  # done before
    learning_rate: float  # before a group's factor
    weight_decay_factor: float | None = None  # times every group's decay; None if no schedule changes it
    momentum: float | None = None  # of every group; None if no schedule changes it
    waiting: frozenset[int] = frozenset()  # the `optimizer.groups` that have not begun: their learning rate is 0
    averages: Mapping[str, float] = {}  # name -> the share that the average keeps
    scalars: Mapping[str, float] = {}  # of the objective, by name
    unmade: frozenset[str] = frozenset()  # the averages that are copies, of which none has been made


def learning_rate(
    step: int,
    *,
    base: float,
    total: int,
    warmup: int,
    decay: Decay,
    end: float = 1e-5,
    floor: float = 0.0,
    boundaries: Sequence[int] = (),
    factor: float = 0.1,
    cooldown: int = 0,
    cooldown_shape: Literal["linear", "1-sqrt"] = "linear",
    timescale: int = 10_000,
    cycle: int = 1,
    cycle_factor: float = 1.0,
    restart_factor: float = 1.0,
) -> float:
    """Learning rate of the update that follows `step` completed ones.

    Steps count from 0, so with warmup the first update has rate 0, as the original's has.

    Args:
        base: the rate at the end of the warmup.
        total, warmup: steps of the whole run, and of the linear rise from 0 at its beginning.
        decay: from the end of the warmup, `linear` falls to `end` (the authors' code stops at 1e-5, not at 0), `cosine`
            to `floor`, `stairs` multiplies by `factor` after each of `boundaries` (in steps; step 3,000 of a boundary
            at 3,000 still has the rate before it, as in BiT-HyperRule), `constant` and `wsd` stay at `base`, `rsqrt`
            divides by sqrt(1 + t / timescale) after t steps (big_vision; Zhai et al. 2022), and `restarts` falls to 0
            by a cosine again and again (SGDR, Loshchilov and Hutter), first in `cycle` steps; each restart multiplies
            the steps by `cycle_factor` and the rate by `restart_factor`.
        cooldown: steps at the end in which `wsd` and `rsqrt` fall to 0.
        cooldown_shape: after a part x of the cooldown, `linear` multiplies by 1 - x, `1-sqrt` by 1 - sqrt(x) (Haegele
            et al. 2024).
    """
    progress = min(max((step - warmup) / max(total - warmup, 1), 0.0), 1.0)
    if decay == "linear":
        rate = end + (base - end) * (1.0 - progress)
    elif decay == "cosine":
        rate = floor + (base - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
    elif decay == "stairs":
        rate = base * factor ** sum(step > boundary for boundary in boundaries)
    elif decay == "rsqrt":
        rate = base / math.sqrt(1.0 + max(step - warmup, 0) / timescale)
    elif decay == "restarts":
        restarts, done = _cycle_at(max(step - warmup, 0), cycle, cycle_factor)
        rate = base * restart_factor**restarts * 0.5 * (1.0 + math.cos(math.pi * done))
    else:
        rate = base
    if cooldown:
        cooled = min(max(1.0 - (total - step) / cooldown, 0.0), 1.0)
        rate *= 1.0 - (cooled if cooldown_shape == "linear" else math.sqrt(cooled))
    return rate * min(1.0, step / warmup) if warmup else rate


def _cycle_at(step: int, length: float, factor: float) -> tuple[int, float]:
    """The number of restarts before a step, and the part of the present cycle that is done."""
    if factor == 1.0:
        return int(step // length), step % length / length
    restarts, position = 0, float(step)
    while position >= length:
        restarts, position, length = restarts + 1, position - length, length * factor
    return restarts, position / length


def course(step: int, *, start: float, end: float, steps: int, shape: Literal["linear", "cosine"]) -> float:
    """A value after `step` completed updates that goes from `start` to `end` in `steps` steps and stays there.

    `cosine` leaves `start` and reaches `end` slowly (the weight decay of DINO).
    """
    progress = min(step / max(steps, 1), 1.0)
    done = progress if shape == "linear" else 0.5 * (1.0 - math.cos(math.pi * progress))
    return start + (end - start) * done
