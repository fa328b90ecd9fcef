"""Products in float8, for devices that compute them at twice the rate of bf16 (Ada, Hopper and later).

torchao multiplies: e4m3 forward, e5m2 for gradients, one scale a tensor, from the tensor's own largest value. Nothing
is remembered from step to step, so that a run resumes as exactly as without float8.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitscale.ground.errors import RecipeError


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Silences torchao, which reports at import every kernel that was not built for this torch; none is used here."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(disabled)


with _quietly():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

_MULTIPLE = 16  # both widths must be multiples of it, for the product on CUDA


class _TrainedInFloat8(Float8Linear):
    """A dense layer whose three products are in float8 while it trains; predictions are computed without."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.training else F.linear(input, self.weight, self.bias)


def train_in_float8(blocks: nn.ModuleList, device: torch.device) -> int:
    """Have the dense layers of Transformer blocks compute in float8 while they train; parameters and names stay.

    On a CPU the same rounded numbers are multiplied in the weights' dtype. Returns the number of such layers.

    Raises `RecipeError` if no layer has widths that float8 takes.
    """
    # The weights' gradients sum over the tokens of a micro-batch, whose number may be any: it is padded.
    config = Float8LinearConfig(pad_inner_dim=True, emulate=device.type == "cpu")

    def fits(layer: nn.Module, name: str) -> bool:
        return isinstance(layer, nn.Linear) and layer.in_features % _MULTIPLE == layer.out_features % _MULTIPLE == 0

    convert_to_float8_training(blocks, module_filter_fn=fits, config=config)
    layers = [module for module in blocks.modules() if isinstance(module, Float8Linear)]
    if not layers:
        raise RecipeError(
            f"precision: fp8: no dense layer of the blocks has widths that are multiples of {_MULTIPLE}; use bf16"
        )
    for layer in layers:
        layer.__class__ = _TrainedInFloat8
    return len(layers)
