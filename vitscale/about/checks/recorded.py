"""Compares values that a run has recorded with known or computed ones, and tells how they differ."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

# Columns of the metrics that say how fast and where, not what was computed.
_OF_THE_MACHINE = {
    *("time", "images_per_s", "data_wait", "data_wait_s", "step_time_s", "world_size", "peak_memory_bytes", "mfu"),
    *("slowest_rank", "slowest_rank_s", "median_rank_s", "checkpoint_stall_s", "bad_samples"),
}


def keys_apart(recorded: Mapping[str, Any], computed: Mapping[str, Any]) -> list[str]:
    """The keys of recorded values that are others than the computed ones, but for those of the machine."""
    return [key for key in recorded if key not in _OF_THE_MACHINE and recorded[key] != computed.get(key)]


def mistakes_in(told: Mapping[str, Any], known: Mapping[str, Any], how: str = "by the run") -> list[str]:
    """How figures differ from those that are known; metrics that are not known are wrong, too."""
    metrics = dict.fromkeys(key for key in told if "/" in key)
    return [
        tell(told, known, [key], how) for key, value in {**metrics, **known}.items() if told.get(key, value) != value
    ]


def is_far(key: str, value: object, computed: object, limit: float) -> bool:
    """Whether two values that are not equal differ by more than a share; any do if that is 0."""
    if limit and isinstance(value, float) and isinstance(computed, float) and key != "epoch":
        return not math.isclose(value, computed, rel_tol=limit, abs_tol=1e-6)
    return True


def tell(recorded: Mapping[str, Any], other: Mapping[str, Any], keys: Sequence[str], how: str = "computed") -> str:
    """`loss 2.3020, computed 2.3030`, with as many digits as it takes."""
    told = []
    for key in keys:
        pair = [recorded.get(key), other.get(key)]
        short = [f"{value:.4f}" if isinstance(value, float) else repr(value) for value in pair]
        was, now = short if short[0] != short[1] else map(repr, pair)
        told.append("other images (batch_digest)" if key == "batch_digest" else f"{key} {was}, {how} {now}")
    return ", ".join(told)
