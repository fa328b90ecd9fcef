"""Random projections of gradients: one number that distinguishes two long vectors, wherever their parts lie.

The mean square of a vector's dot product with random signs is its squared length, so that a difference between vectors
shows as one between numbers, and rounding errors shrink as they do in a sum of independent ones. The signs are a
function of a key and an element's place in its parameter: the projections of pieces on several ranks add up to that of
the whole.
"""

import torch
import xxhash
from torch import Tensor

_AT_ONCE, _AT_ONCE_IN_CACHE = 1 << 22, 1 << 16  # elements at a time, with a few copies of 8 bytes each; on CPUs
_BITS = 64
# Odd factors of the mixer SplitMix64 (Steele et al. 2014), as signed numbers.
_GOLDEN, _MIX_1, _MIX_2 = (number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def key_of(*parts: object) -> int:
    """A key of 64 bits, as a signed number."""
    return int(xxhash.xxh64_intdigest(":".join(map(str, parts)).encode())) - 2**63


def mixed(start: int, stop: int, key: int, device: torch.device) -> Tensor:
    """Pseudo-random int64 (stop - start,) for the places [start, stop), the same on every device."""
    x = torch.arange(start, stop, dtype=torch.int64, device=device).mul_(_GOLDEN).add_(key)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)  # torch's shift keeps the sign
    return x.bitwise_xor_((x >> 31).bitwise_and_((1 << 33) - 1))


def signs(start: int, stop: int, key: int, device: torch.device) -> Tensor:
    """Random signs, float64 (stop - start,), of elements of a parameter: each word of `mixed` gives those of 64."""
    first = start // _BITS
    words = mixed(first, -(-stop // _BITS), key, device)
    bits = (words[:, None] >> torch.arange(_BITS, device=device)).bitwise_and_(1).view(-1)
    return bits[start - first * _BITS : stop - first * _BITS].double().mul_(2).sub_(1)


def project(values: Tensor, start: int, key: int, lengths: Tensor) -> Tensor:
    """Dot products with random signs, and sums of squares, of consecutive pieces of a parameter; float64 (pieces, 2).

    Args:
        values: (n,), elements [start, start + n) of the parameter.
        lengths: int64 (pieces,), which sum to n.
    """
    result = torch.zeros(len(lengths), 2, dtype=torch.float64, device=values.device)
    ends = lengths.cumsum(0)
    begins = ends - lengths
    at_once = _AT_ONCE_IN_CACHE if values.device.type == "cpu" else _AT_ONCE
    for low in range(0, values.numel(), at_once):
        part = values[low : low + at_once].to(torch.float64, copy=True)
        high = low + part.numel()
        here = (ends.clamp(max=high) - begins.clamp(min=low)).clamp_(min=0).to(values.device)
        signed = signs(start + low, start + high, key, values.device).mul_(part)
        for column, products in enumerate((signed, part.square_())):
            result[:, column] += torch.segment_reduce(products, "sum", lengths=here, unsafe=True)
    return result


def sample(length: int, count: int, key: int) -> Tensor:
    """Places to sample in a piece of `length` elements, int64 (at most `count`,): all if it is short, else random."""
    if length <= count:
        return torch.arange(length)
    return mixed(0, count, key, torch.device("cpu")) % length
