"""The compiled part of vitscale, `vitscale/data/view.c`: found, loaded and checked, without torch or numba."""

import ctypes
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from vitscale.errors import RecipeError

_VERSION = 2  # of view.c: a checkout may be newer than what was compiled in it
_BUILD = "sudo apt-get install -y gcc libjpeg-dev && pip install --editable ."
_FOLDER = Path(__file__).parent / "data"


def load() -> ctypes.CDLL:
    """The library, loaded once a process. Raises RecipeError where it was not compiled, or from another view.c."""
    found = [library for suffix in EXTENSION_SUFFIXES if (library := _FOLDER / f"_view{suffix}").is_file()]
    if not found:
        raise RecipeError(f"the part of vitscale that decodes images is not compiled. Build it with: {_BUILD}")
    try:
        loaded = ctypes.CDLL(str(found[0]))
        version = loaded.vitscale_view_version()
    except (OSError, AttributeError) as error:
        raise RecipeError(f"{found[0]} cannot be loaded ({error}). Build it anew with: {_BUILD}") from error
    if version != _VERSION:
        raise RecipeError(f"{found[0]} was compiled from another version of view.c. Build it anew with: {_BUILD}")
    return loaded


def libjpeg_turbo_version() -> str:
    """The version of libjpeg-turbo that images are decoded with, as "2.1.5". Raises RecipeError as `load` does."""
    number = load().vitscale_libjpeg_turbo_version()
    return f"{number // 1_000_000}.{number // 1_000 % 1_000}.{number % 1_000}"
