"""AdamW (Loshchilov and Hutter, 2019) as torch has it; its weight decay is times the learning rate."""

from typing import Any

import torch
from torch import Tensor

from vitscale.recipe import AdamW
from vitscale.runs.checkpoint import MASTER
from vitscale.training.optimizers.rule import Rule, State, Update, adam, decoupled


class AdamWRule(Rule[AdamW]):
    """torch's on every device: one definition, no operator to compile."""

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        betas = self.settings.betas
        # Offloaded state is on the CPU, whatever the device: `fused` works on both.
        return torch.optim.AdamW(groups, lr=0.0, betas=(betas[0], betas[1]), eps=self.settings.eps, fused=True)

    def reference(self, update: Update, before: State, gradient: Tensor) -> State:
        betas = (update.momentum, self.settings.betas[1])
        direction, kept = adam(betas, self.settings.eps, update, before, gradient)
        return {MASTER: decoupled(update, before[MASTER], direction), **kept}
