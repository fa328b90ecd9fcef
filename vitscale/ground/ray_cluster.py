"""Joins a Ray cluster: the one that RAY_ADDRESS names, or one started on this machine."""

import os
import socket
from typing import Any

from vitscale.ground.errors import RecipeError

_ANSWER_SECONDS = 10.0
_OBJECT_STORE_BYTES = 512 << 20  # tasks and their results are small; Ray would take a third of the memory


def import_ray() -> Any:
    """Ray's module. Raises `RecipeError` if Ray is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # otherwise Ray reports usage to its makers
    try:
        import ray
    except ImportError as error:
        raise RecipeError("--engine ray needs Ray, which is not installed: pip install ray") from error
    return ray


def connect(ray: Any, cpus: int | None) -> None:
    """Join the cluster that RAY_ADDRESS names, or start one with `cpus` CPUs. Raises `RecipeError`."""
    address = os.environ.get("RAY_ADDRESS")
    start: dict[str, Any] = {}
    if address in (None, "", "local"):
        start = {"num_cpus": cpus, "object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False}
    elif address != "auto":
        _refuse_silent(address)
    try:
        ray.init(address=address or None, log_to_driver=False, logging_level="ERROR", **start)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise RecipeError(f"RAY_ADDRESS={address or ''}: no Ray cluster that can be joined ({reason})") from error


def _refuse_silent(address: str) -> None:
    """Raise RecipeError unless something listens at host:port; Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS):
            pass
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"RAY_ADDRESS={address}: nothing answers there ({error}). Expected host:port of a Ray cluster (`ray start "
            "--head` prints it); leave it unset to start a cluster on this machine"
        ) from error
