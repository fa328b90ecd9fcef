"""Divides a total into whole numbers by shares."""

import math
from collections.abc import Sequence


def by_largest_remainder(total: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers close to the shares of `total`, which they sum to; of equal remainders the first is rounded up."""
    exact = [total * share for share in shares]
    whole = [math.floor(value + 1e-9) for value in exact]  # 0.1 is not exactly a tenth
    remainders = sorted(range(len(shares)), key=lambda index: whole[index] - exact[index])
    for index in remainders[: total - sum(whole)]:
        whole[index] += 1
    return whole
