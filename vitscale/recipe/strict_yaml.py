"""Parses YAML as people expect it, with mistakes reported in one line."""

import re
from typing import Any

import yaml

from vitscale.errors import RecipeError


class _Loader(yaml.SafeLoader):
    """A YAML loader: only true and false are booleans, 1e-5 is a number, 1:30 is not, and no key may occur twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is not a word", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} appears twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":bool", ":int", ":float", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false)$"), list("tf"))
# Not 010 (octal in YAML 1.1), 1:30 (sexagesimal) or 0x10: they stay strings, which no number field accepts.
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][0-9]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?([0-9]+\.[0-9]*([eE][-+]?[0-9]+)?|\.[0-9]+([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.inf|\.nan)$"
    ),
    list("-+0123456789."),
)


def parse_yaml(text: str, where: str) -> Any:
    """Plain data from YAML; `where` opens the error message. Raises `RecipeError`."""
    try:
        return yaml.load(text, _Loader)
    except (ValueError, KeyError, OverflowError, RecursionError) as error:  # what constructors raise on odd scalars
        raise RecipeError(f"{where}: not valid YAML: {type(error).__name__}: {str(error)[:200]}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise RecipeError(f"{where}{line}: not valid YAML: {getattr(error, 'problem', error)}") from None
