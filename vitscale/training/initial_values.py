"""Where a run begins: every weight a function of (seed, parameter name), in pieces as ranks own them."""

import torch

from vitscale.models import initial_value
from vitscale.objectives import Objective


class InitialValues:
    """The initial weights as a source of fragments; the last parameter drawn is kept, as its pieces come together."""

    def __init__(self, objective: Objective, shapes: dict[str, list[int]], seed: int) -> None:
        self._objective, self._shapes, self._seed = objective, shapes, seed
        self._name: str | None = None
        self._value = torch.empty(0)

    def __call__(self, kind: str, name: str, start: int, length: int) -> torch.Tensor:
        if name != self._name:
            self._name = name
            self._value = initial_value(self._objective, name, torch.Size(self._shapes[name]), self._seed).view(-1)
        return self._value[start : start + length]
