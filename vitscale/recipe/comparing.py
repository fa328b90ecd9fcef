"""Compares recipes: whether two describe the same run, and which fields may differ when a run is resumed."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

# Fields that may differ when a run is resumed: they change where and how fast the run computes, not what it computes.
FREE_ON_RESUME = (
    "parallelism",
    "batch.micro_max",
    "data.root",
    "data.threads",
    "data.prefetch",
    "data.cache",
    "data.verify_shards",
    "data.check_rate",
    "data.bad_samples",  # so that a run can continue after images turned out to be damaged
    "data.stall_s",
    "evaluation",
    "checkpoint",
    "anomalies",  # so that a run can continue after a bad batch has stopped it
    "check",
    "logging",
    "profile",
    "deepspeed",
)

# Fields that may also differ between a branch and its trunk: they say what the branch does from there. Its data have to
# be the trunk's or a view of them, under any name: the manifests show that.
FREE_ON_BRANCHING = (*FREE_ON_RESUME, "schedule", "init", "selection", "data.train")


def recipe_sha256(dumped: dict[str, Any]) -> str:
    """The SHA-256 of all fields of a dumped recipe, including defaults, in hexadecimal: the identity of a run."""
    return hashlib.sha256(json.dumps(dumped, sort_keys=True).encode()).hexdigest()


def changes(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(`prefix` + key, old, new) for each difference of two dumped recipes, sorted; None for a missing value."""
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from changes(before, after, f"{prefix}{name}.")
        elif before != after:
            yield f"{prefix}{name}", before, after


def differences(
    old: dict[str, Any], new: dict[str, Any], prefix: str = "", *, free: Sequence[str] = FREE_ON_RESUME
) -> list[str]:
    """Lines `key: old -> new` for each difference between two dumped recipes in a field that is not `free`."""
    return [
        f"{key}: {before!r} -> {after!r}"
        for key, before, after in changes(old, new, prefix)
        if not any(f"{key}.".startswith(f"{each}.") for each in free)
    ]
