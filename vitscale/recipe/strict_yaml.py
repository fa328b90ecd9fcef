"""Parses YAML as people expect it, with mistakes reported in one line."""

import re
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from vitscale.ground.errors import RecipeError
from vitscale.ground.storage import read_text
from vitscale.ground.wording import shortened

_MOST_CHARACTERS = 1 << 20


class _Loader(yaml.SafeLoader):
    """A YAML loader: only true and false are booleans, 1e-5 is a number, 1:30 is not, no key occurs twice, no tags."""

    def fetch_tag(self) -> None:
        problem = "a tag such as !!int; write the value alone, or quote text that begins with !"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.get_mark())

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            problem = "" if isinstance(key, str) else f"a key is {type(key).__name__}, not a word"
            if problem or key in seen:
                problem = problem or f"the key {shortened(key)!r} appears twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
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


class _Dumper(yaml.SafeDumper):
    """Quotes text that either loader, this one or YAML 1.1's, would take for something else."""


_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, []), *_Loader.yaml_implicit_resolvers.get(first, [])]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
}


def dump_yaml(content: Any) -> str:
    """Plain data as YAML that `parse_yaml` reads back as it is."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False)


def read_yaml(path: Path) -> Any:
    """Plain data from a file of YAML. Raises `RecipeError`."""
    try:
        text = read_text(path)
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: cannot be read: it is no text in UTF-8") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror or error}") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, where: str) -> Any:
    """Plain data from YAML; `where` opens the error message. Raises `RecipeError`."""
    too_large = RecipeError(f"{where}: more than {_MOST_CHARACTERS:,} characters, with all aliases (*) written out")
    if len(text) > _MOST_CHARACTERS:
        raise too_large
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _length(node, {}) > _MOST_CHARACTERS:
            raise too_large
        return loader.construct_document(node)
    except (ValueError, KeyError, OverflowError, RecursionError) as error:  # what constructors raise on odd scalars
        raise RecipeError(f"{where}: not valid YAML: {type(error).__name__}: {str(error)[:200]}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = shortened(str(getattr(error, "problem", error)))
        raise RecipeError(f"{where}{line}: not valid YAML: {problem}") from None


def _length(node: yaml.Node, known: dict[int, int]) -> int:
    """Characters of a node with its aliases written out; too many for one that contains itself."""
    if isinstance(node, yaml.ScalarNode):
        return len(node.value.encode()) + 1  # fails for half a character
    if id(node) not in known:
        known[id(node)] = _MOST_CHARACTERS
        inner = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_length(each, known) for each in inner)
    return known[id(node)]
