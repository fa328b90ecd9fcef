"""Extensions: typed blocks from other packages, which a recipe names by a dotted path such as `my_package.Mixer`.

A path names a class: a subclass, without torch, of the base that `vitscale` has for blocks at that place of a recipe.
The class's `implementation`, `module:class`, names the class that does the computing.

A recipe with dotted paths is a program, so only the packages that the user has allowed are imported.
"""

import importlib
import os
import re
import sys
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard, TypeVar

from pydantic import ValidatorFunctionWrapHandler, WrapValidator

from vitscale.ground.block import Block
from vitscale.ground.errors import RecipeError

ENTRY_POINTS = "vitscale.extensions"
VARIABLE = "VITSCALE_EXTENSIONS"
_LIST = ".config/vitscale/extensions.txt"  # in the user's home

_Block = TypeVar("_Block", bound=Block)
_Class = TypeVar("_Class")

named: dict[str, dict[str, type[Block]]] = {}
"""Dotted key of a place in a recipe, N for an index -> path -> block class: those that recipes have named so far."""


def is_path(name: object) -> TypeGuard[str]:
    """Whether a name in a recipe is a dotted path, and not one of our own names."""
    return isinstance(name, str) and "." in name


def block_class(path: object, base: type[_Block], place: str) -> type[_Block]:
    """The block class that a recipe names by a path.

    Args:
        path: the recipe's value.
        base: the base class of all blocks at this place.
        place: the block's dotted key in the recipe, N for an index of a list.

    Raises `ValueError` if this is not a path, or does not lead to a complete subclass of the base.
    """
    if not is_path(path) or not all(part.isidentifier() for part in path.split(".")):
        raise ValueError(f"{path!r}: expected a dotted path to a class, such as my_package.{base.__name__}")
    module, _, name = path.rpartition(".")
    _check_allowed(module, path)
    found = getattr(_imported(module, path), name, None)
    expected = f"a subclass of {base.__module__}.{base.__name__}"
    if found is None:
        raise ValueError(f"{path}: there is no {name!r} in {module}; expected {expected}")
    if not isinstance(found, type) or not issubclass(found, base):
        raise ValueError(f"{path}: expected {expected}, not {found!r}")
    missing = sorted({*found.__abstractmethods__, *(key for key in base.__class_vars__ if not hasattr(found, key))})
    if missing:
        raise ValueError(f"{path}: lacks {', '.join(missing)}, which {base.__module__}.{base.__name__} asks for")
    named.setdefault(place, {})[path] = found
    return found


def outside_class(path: str) -> type:
    """The class that `module:class` names in a package that the user has allowed. Raises `ValueError`."""
    module, _, name = path.partition(":")
    _check_allowed(module, path)
    try:
        found = getattr(_imported(module, path), name, None)
    except ValueError:
        raise
    except Exception as error:  # of a package that imports a class when it is asked for
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    if not isinstance(found, type):
        raise ValueError(f"{path}: there is no class {name!r} in {module}")
    return found


def _check_allowed(module: str, path: str) -> None:
    parents = {module[: dot.start()] for dot in re.finditer(r"\.|$", module)}
    if "__main__" in module.split(".") or not parents & _allowed(module.partition(".")[0]):
        top = module.partition(".")[0]
        raise ValueError(
            f"{path}: a recipe with dotted paths is a program, and you have not allowed {top}. If you trust it, set "
            f"{VARIABLE}={top}, or add the line {top} to ~/{_LIST}; its authors can declare an entry point "
            f"{ENTRY_POINTS}"
        )


def _allowed(package: str) -> set[str]:
    """The modules that the user allows: of an installed package that declares the entry point, or by name."""
    # Not of the current folder: it may be a stranger's, with metadata of its own.
    places = [place for place in sys.path if Path(place).resolve() != Path.cwd()]
    points = (point for one in distributions(path=places) for point in one.entry_points if point.group == ENTRY_POINTS)
    named = os.environ.get(VARIABLE, "")
    with suppress(OSError, RuntimeError, UnicodeDecodeError):  # no such list, or no home
        named += f" {(Path.home() / _LIST).read_text(encoding='utf-8')}"
    found = {re.split(r"[.:]", point.value)[0] for point in points} | set(re.split(r"[\s,]+", named))
    return {name for name in found if name.partition(".")[0] == package} - {"vitscale", "data_tools"}


def _imported(module: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{path}: there is no module {error.name!r}; install the package that has it beside vitscale"
        ) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # importing another package may raise anything, and exit
        raise ValueError(f"{path}: importing {module} fails: {type(error).__name__}: {error}") from error


def by_kind(base: type[Block], place: str, key: str = "kind") -> WrapValidator:
    """A validator that reads a block as the class its `key` names if that is a dotted path, otherwise as usual."""

    def validate(content: Any, otherwise: ValidatorFunctionWrapHandler) -> Any:
        kind = content.get(key) if isinstance(content, dict) else None
        if isinstance(content, base):
            return content
        if not is_path(kind):
            block = otherwise(content)
            if type(block) is not base:
                return block
        return block_class(kind, base, place).model_validate(content)

    return WrapValidator(validate)


def implementation(path: str, base: type[_Class]) -> type[_Class]:
    """The class that a block's `implementation`, `module:class`, names. Raises `RecipeError` unless it is a `base`."""
    module, _, name = path.partition(":")
    try:
        found = getattr(_imported(module, path), name, None)
    except ValueError as error:
        raise RecipeError(f"the implementation {error}") from error
    if not isinstance(found, type) or not issubclass(found, base):
        raise RecipeError(
            f"the implementation {path}: expected a subclass of {base.__module__}.{base.__name__}, not {found!r}"
        )
    return found
