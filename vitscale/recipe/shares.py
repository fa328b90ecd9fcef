"""Whole numbers near to shares of a total."""

import math
from collections.abc import Sequence


def by_largest_remainder(total: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers near to the shares of `total`, to which they sum; of equal remainders the first is rounded up."""
    exact = [total * share for share in shares]
    whole = [math.floor(value + 1e-9) for value in exact]  # 0.1 is not a tenth
    remainders = sorted(range(len(shares)), key=lambda index: whole[index] - exact[index])
    for index in remainders[: total - sum(whole)]:
        whole[index] += 1
    return whole
