"""The gradients that the optimizer is given, after DeepSpeed has summed over micro-batches and ranks and clipped.

Read where every ZeRO stage, precision and offload meet: in the torch optimizer, at the moment of its step.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitscale.training.deepspeed import fragments


class GradientPiece(NamedTuple):
    """Elements [start, start + len(values)) of one parameter's gradient, fp32 and 1-D, a copy."""

    name: str
    start: int
    values: Tensor


class AppliedGradients:
    """Keeps copies of this rank's pieces of the gradients that an engine's optimizer is given, until they are taken."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._pieces: list[GradientPiece] = []
        engine.client_optimizer.register_step_pre_hook(self._keep)

    def take(self) -> list[GradientPiece]:
        """The pieces since the last call; none if DeepSpeed dropped the update."""
        taken, self._pieces = self._pieces, []
        return taken

    def _keep(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for piece in fragments.stepped(fragments.pieces_of(self._engine), optimizer):
            values = fragments.given_gradient(piece, optimizer).float().cpu().clone()
            self._pieces.append(GradientPiece(piece.name, piece.start, values))
