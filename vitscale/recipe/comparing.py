"""Whether two recipes describe the same run: their differences, and the fields that are free to differ on resuming."""

import hashlib
import json
from collections.abc import Iterator, Sequence
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

# What may differ besides between a run and the one that it branches off: what it does from there. The data have to be
# the same or a view of them, whatever they are called: manifests tell.
FREE_ON_BRANCHING = (*FREE_ON_RESUME, "schedule", "init", "selection", "data.train")


def recipe_sha256(dumped: dict[str, Any]) -> str:
    """SHA-256 of all fields of a dumped recipe, defaults included, in hexadecimal: the identity of a run."""
    return hashlib.sha256(json.dumps(dumped, sort_keys=True).encode()).hexdigest()


def changes(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key, old value, new value) of all that differs between two dumped recipes, sorted; None for what is not there.

    `prefix` is put before each key.
    """
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from changes(before, after, f"{prefix}{name}.")
        elif before != after:
            yield f"{prefix}{name}", before, after


def differences(
    old: dict[str, Any], new: dict[str, Any], prefix: str = "", *, free: Sequence[str] = FREE_ON_RESUME
) -> list[str]:
    """Lines `key: old -> new` for all that differs between two dumped recipes and is not `free` to."""
    return [
        f"{key}: {before!r} -> {after!r}"
        for key, before, after in changes(old, new, prefix)
        if not any(f"{key}.".startswith(f"{each}.") for each in free)
    ]
