"""docs/architecture.md is true: its map is what the modules say of themselves, and all that its text names exists.

`python tests/test_architecture.py` (or `make architecture`) writes the map anew.
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from test_imports import KNOWN_TO, KNOWS_ONLY, LAYERS, REPOSITORY

PAGE = REPOSITORY / "docs" / "architecture.md"
BEGIN, END = "<!-- map: made by `make architecture` -->", "<!-- end of the map -->"
FOLDERS = ("data_tools", "vitscale")
_FILE = re.compile(r"[\w-]+(/[\w-]+)*(/|/[\w-]+\.\w+)")
_NAME = re.compile(r"_*[A-Z]\w*(\.\w+)*(\(\))?|\w+\(\)")


def the_map(root: Path) -> str:
    """All modules from the ground up with the first line of their docstrings."""
    lines = []
    for number, rooms in enumerate(LAYERS, 1):
        lines += [f"### Layer {number}", ""]
        for room in sorted(rooms):
            lines += _entries(_of_room(root, room), root, "")
        lines.append("")
    lines += [*_rules(), ""]
    return "\n".join(lines)


def _of_room(root: Path, room: str) -> Path:
    if room == "vitscale":
        return root / "vitscale" / "__init__.py"
    folder = root / room if room in FOLDERS else root / "vitscale" / room.replace(".", "/")  # runs/ may lie beside, too
    return folder if folder.is_dir() else folder.with_suffix(".py")


def _entries(path: Path, root: Path, indent: str) -> Iterator[str]:
    """A module, or a package with what lies in it; below a package names are relative to it."""
    name = path.name if indent else str(path.relative_to(root))
    if path.is_file():
        yield f"{indent}- `{name}`: {first_line(path)}"
        return
    yield f"{indent}- `{name}/`: {first_line(path / '__init__.py')}"
    rooms = {_of_room(root, room) for layer in LAYERS for room in layer}
    for below in sorted(set(path.iterdir()) - rooms):
        if (below.suffix == ".py" and below.name != "__init__.py") or (below / "__init__.py").is_file():
            yield from _entries(below, root, f"{indent}  ")


def first_line(module: Path) -> str:
    """Of a module's docstring, a whole sentence or more. Fails the test for a module that has none."""
    docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))
    assert docstring, f"{module}: no docstring"
    line, _, rest = docstring.partition("\n")
    assert line[-1] in ".?" and rest.partition("\n")[0] == "", f"{module}: its docstring begins with no single line"
    return line


def _rules() -> Iterator[str]:
    """The rules of tests/test_imports.py that the layers do not show."""
    yield "### Beside the layers"
    yield ""
    for package, rooms in KNOWN_TO.items():
        yield f"- Only these import {package}: {', '.join(sorted(rooms))}."
    for room, known in KNOWS_ONLY.items():
        yield f"- All that {room} imports of vitscale: {', '.join(sorted(known))}."


def written_anew(page: str, root: Path) -> str:
    """The page with the map of today."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{PAGE}: expected the lines {BEGIN} and {END}"
    return f"{before}{BEGIN}\n\n{the_map(root)}\n{END}{after}"


def test_the_map_is_that_of_the_modules():
    page = PAGE.read_text(encoding="utf-8")
    assert page == written_anew(page, REPOSITORY), "run `make architecture`"


def quoted(page: str) -> Iterator[tuple[int, str]]:
    """(line, text) of all that stands in backticks outside the map and outside blocks of code."""
    start, stop = (page[: page.index(mark)].count("\n") for mark in (BEGIN, END))
    for number, line in enumerate(page.splitlines()):
        if not start <= number <= stop and not line.startswith("    "):
            yield from ((number + 1, text) for text in re.findall(r"`([^`]+)`", line))


@cache
def definitions(path: Path) -> frozenset[str]:
    """Names of a module's classes, functions and values, and `Class.name` of what its classes have."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        own = set(_defined(node))
        names |= own
        if isinstance(node, ast.ClassDef):
            for part in ast.walk(node):  # what methods give to self counts as well
                names |= {f"{node.name}.{name}" for name in _defined(part)}
    return frozenset(names)


def _defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for part in ast.walk(target):
                if isinstance(part, ast.Name):
                    yield part.id
                elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                    yield part.attr


def missing(page: str, root: Path) -> list[str]:
    """Files and names of the text that do not exist.

    `path/file.py` is a file, `path/` a folder; `path/file.py:name` is something that the file defines; `Name`, `name()`
    and `Class.name` are what any module of ours defines. Other words, such as keys of recipes, are not looked at.
    """
    everywhere = frozenset().union(*(definitions(path) for top in FOLDERS for path in (root / top).rglob("*.py")))

    def exists(text: str) -> bool:
        file, colon, name = text.removesuffix("()").partition(":")
        if _FILE.fullmatch(file):
            return (root / file).exists() and (not colon or name in definitions(root / file))
        return not _NAME.fullmatch(text) or text.removesuffix("()") in everywhere

    return [f"line {line}: {text}" for line, text in quoted(page) if not exists(text)]


def test_all_files_and_names_of_the_text_exist():
    assert missing(PAGE.read_text(encoding="utf-8"), REPOSITORY) == []


if __name__ == "__main__":
    PAGE.write_text(written_anew(PAGE.read_text(encoding="utf-8"), REPOSITORY), encoding="utf-8")
    sys.exit()
