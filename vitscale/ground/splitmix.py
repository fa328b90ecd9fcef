"""The generator SplitMix64 (Steele et al. 2014) in torch: words that are the same on every device."""

import torch
from torch import Tensor

# Its odd factors, as signed numbers.
_GOLDEN, _MIX_1, _MIX_2 = (number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def mixed(start: int, stop: int, key: int, device: torch.device) -> Tensor:
    """Pseudo-random int64 (stop - start,) for the places [start, stop), the same on every device."""
    x = torch.arange(start, stop, dtype=torch.int64, device=device).mul_(_GOLDEN).add_(key)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)  # torch's shift keeps the sign
    return x.bitwise_xor_((x >> 31).bitwise_and_((1 << 33) - 1))
