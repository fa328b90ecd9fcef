"""The learning rate as a function of the step, as in the authors' code."""

import math
from collections.abc import Sequence
from typing import Literal

Decay = Literal["linear", "cosine", "stairs", "constant"]


def learning_rate(
    step: int,
    *,
    base: float,
    total: int,
    warmup: int,
    decay: Decay,
    end: float = 1e-5,
    boundaries: Sequence[int] = (),
    factor: float = 0.1,
) -> float:
    """Learning rate of the update that follows `step` completed ones.

    Steps count from 0, so with warmup the first update has rate 0, as the original's has.

    Args:
        base: the rate at the end of the warmup.
        total, warmup: steps of the whole run, and of the linear rise from 0 at its beginning.
        decay: from the end of the warmup, `linear` falls to `end` (the authors' code stops at 1e-5, not at 0), `cosine`
            to 0, `stairs` multiplies by `factor` at each of `boundaries` (in steps), `constant` stays at `base`.
        end: for `linear` only.
        boundaries, factor: for `stairs` only.
    """
    progress = min(max((step - warmup) / max(total - warmup, 1), 0.0), 1.0)
    if decay == "linear":
        rate = end + (base - end) * (1.0 - progress)
    elif decay == "cosine":
        rate = base * 0.5 * (1.0 + math.cos(math.pi * progress))
    elif decay == "stairs":
        rate = base * factor ** sum(step >= boundary for boundary in boundaries)
    else:
        rate = base
    return rate * min(1.0, step / warmup) if warmup else rate
