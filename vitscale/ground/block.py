"""The base of every block of a recipe, and the error for blocks that contradict themselves."""

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice, pairwise
from typing import Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)


class Block(BaseModel):
    """A typed, strict and frozen block: an unknown key, a wrong type or a number that is not finite is an error.

    What a field means is its `description`, or the docstring below it: the words that are printed after its name.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    _reports_all: ClassVar[bool] = False
    """Whether every contradiction is reported, or only the first, from which the others may follow."""

    _later_keys: ClassVar[tuple[str, ...]] = ()
    """Keys that came after others: a dump leaves them out while they have their defaults, so that older resolved
    recipes stay as they were."""

    @model_serializer(mode="wrap")
    def _without_later_defaults(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        left_out = {key for key in self._later_keys if has_default(self, key)}
        return {key: value for key, value in dump(self).items() if key not in left_out}

    def _contradictions(self) -> Iterator[str]:
        """Yield a line for each contradiction between the block's fields."""
        return iter(())

    @model_validator(mode="after")
    def _without_contradictions(self) -> Self:
        if lines := list(islice(self._contradictions(), None if self._reports_all else 1)):
            raise Contradictions(lines)
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Add the docstrings of fields. Pydantic's `use_attribute_docstrings` reads the source at every import."""
        schema = handler(core_schema)
        fields = handler.resolve_ref_schema(schema)["properties"]
        for base in cls.__mro__[: cls.__mro__.index(Block)]:
            for name, docstring in _field_docstrings(base.__module__).get(base.__qualname__, {}).items():
                if name in cls.model_fields:
                    fields[cls.model_fields[name].alias or name].setdefault("description", docstring)
        return schema


def gone(value: Any, instead: str) -> Callable[[Any], Any]:
    """A validator for a key of earlier recipes that has only one `value` left; `instead` tells what to write."""

    def check(given: Any) -> Any:
        if given is value:
            return given
        raise ValueError(f"{given!r}: an option of earlier versions, which is gone: {instead}")

    return check


def has_default(block: Block, key: str) -> bool:
    """Whether a field has its default value, chosen or not: a dumped recipe sets every field."""
    return bool(getattr(block, key) == type(block).model_fields[key].default)


@cache
def _field_docstrings(module: str) -> dict[str, dict[str, str]]:
    """Class of a module -> field -> the docstring below it, in one line; empty for a module without source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return {}
    return {
        node.name: {
            field.target.id: " ".join(str(below.value.value).split())
            for field, below in pairwise(node.body)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        }
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


class Contradictions(ValueError):
    """Values in one or more blocks that do not go together; `lines` has a line for each contradiction."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = tuple(lines)
