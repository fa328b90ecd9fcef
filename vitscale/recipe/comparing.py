"""Whether two recipes are one run."""

from typing import Any

# What may differ when a run is resumed: it changes where and how fast the run computes, not what it computes.
FREE_ON_RESUME = (
    "parallelism",
    "batch.micro_max",
    "data.root",
    "data.threads",
    "data.prefetch",
    "data.cache",
    "data.verify_shards",
    "data.check_rate",
    "data.bad_samples",  # when images turn out to be damaged, a run has to be able to go on
    "data.stall_s",
    "evaluation",
    "checkpoint",
    "anomalies",  # a run that a bad batch has stopped has to be able to go on
    "check",
    "logging",
    "profile",
    "deepspeed",
)


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Lines `key: old -> new` for all that differs between two dumped recipes and matters to what is computed."""
    lines = []
    for key in sorted({*old, *new}):
        path = f"{prefix}{key}"
        if path in FREE_ON_RESUME:
            continue
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            lines += differences(before, after, f"{path}.")
        elif before != after:
            lines.append(f"{path}: {before!r} -> {after!r}")
    return lines
