"""The versions that a result depends on, for `--version` and bug reports. Imports no torch."""

import platform
from importlib.metadata import PackageNotFoundError, version

import vitscale
from vitscale.ground.errors import RecipeError
from vitscale.ground.native import libjpeg_turbo_version


def versions() -> dict[str, str]:
    """Name -> version: vitscale, torch, deepspeed, ffcv, libjpeg_turbo (the decoder), python; shown in this order.

    The names are those in a checkpoint's index. What is absent is "not installed" or "cannot be loaded" instead of an
    error, since versions are asked for when something is wrong.
    """
    return {
        "vitscale": vitscale.__version__,
        **{package: installed_version(package) for package in ("torch", "deepspeed", "ffcv")},
        "libjpeg_turbo": _decoder(),
        "python": platform.python_version(),
    }


def installed_version(package: str) -> str:
    """A package's version, or "not installed". Imports nothing of it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _decoder() -> str:
    try:
        return libjpeg_turbo_version()
    except RecipeError:
        return "cannot be loaded"
