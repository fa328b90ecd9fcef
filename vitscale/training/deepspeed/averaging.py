"""The exponential moving average of the weights (Polyak and Juditsky), under every ZeRO stage.

Each rank averages the fp32 masters that it owns, so that nothing is gathered and no stage needs more than four bytes a
parameter, divided as the masters are.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from vitscale.recipe import Ema
from vitscale.training.deepspeed.engine import Engine

_EXCHANGED_AT_ONCE = 1 << 24  # elements copied at a time while weights and average change places


def decay(settings: Ema, updates: int) -> float:
    """The factor of the old average at the `updates`-th update, from 1."""
    return min(settings.decay, (1 + updates) / (10 + updates)) if settings.warmup else settings.decay


class WeightAverage:
    """The average of one engine's masters; it begins with their present values.

    Attributes:
        values: each of the engine's `masters` -> its average, of the same shape.
    """

    def __init__(self, engine: Engine, settings: Ema) -> None:
        self._engine, self._settings = engine, settings
        self.values: dict[Tensor, Tensor] = {flat: flat.detach().clone() for flat in engine.masters}

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Move the average towards the masters, after `updates` updates."""
        masters = [flat.detach() for flat in self.values]
        torch._foreach_lerp_(list(self.values.values()), masters, 1 - decay(self._settings, updates))

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Have the engine compute with the average inside; afterwards its weights are restored to the last bit.

        After an exception only the masters are restored: refreshing the engine's weights takes all ranks, and the
        exception may have come from one alone.
        """
        self._exchange()
        self._engine.refresh_weights()
        try:
            yield
        except BaseException:
            self._exchange()
            raise
        self._exchange()
        self._engine.refresh_weights()

    @torch.no_grad()
    def _exchange(self) -> None:
        for flat, average in self.values.items():
            pieces = flat.detach().view(-1).split(_EXCHANGED_AT_ONCE)
            for weights, averages in zip(pieces, average.view(-1).split(_EXCHANGED_AT_ONCE), strict=True):
                kept = weights.clone()
                weights.copy_(averages)
                averages.copy_(kept)
