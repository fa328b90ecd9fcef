"""Imports run one way: a room imports only from rooms below it, wherever in a file the import stands.

A room is a folder or module of vitscale, or data_tools. Imports within functions and under TYPE_CHECKING count, too:
what is imported late is known all the same.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

# From the ground up. Rooms of one layer do not know each other.
LAYERS = (
    {"safe_text"},
    {"vitscale", "block", "errors", "heartbeat", "machine", "operations", "table", "weight_formats", "wording"},
    {"extensions"},
    {"families", "interruption", "native", "ranks", "ray_cluster", "storage", "vtab"},
    {"files", "images", "recipe", "versions"},
    {"page", "runs", "shards"},
    {"data", "flops", "models"},
    {"checkpoint", "objectives", "status"},
    {"evaluation", "planning"},
    {"inspection"},
    {"launch", "training"},
    {"doctor", "pretrain", "proof", "replay", "studies"},
    {"report"},
    {"data_tools"},
    {"api"},
    {"cli"},
    {"__main__"},
)
# Rooms that know less than what lies below them.
KNOWS_ONLY = {
    "data_tools": {
        *("vitscale", "errors", "files", "images", "machine", "native", "ray_cluster", "recipe", "safe_text"),
        *("shards", "storage", "table", "vtab", "wording"),
    }
}
# Packages that only these rooms know. Whatever else has to start at once does not load them.
KNOWN_TO = {
    "torch": {
        "api",
        "checkpoint",
        "cli",
        "data",
        "doctor",
        "evaluation",
        "inspection",
        "models",
        "objectives",
        "planning",
        "proof",
        "ranks",
        "training",
    },
    "deepspeed": {"training"},
    "accelerate": {"evaluation", "training"},
}
# Modules that go against this today, with the room or package that they should not know, and why they do.
EXCEPTIONS = {
    ("vitscale", "api"): "what `import vitscale` offers, for type checkers; imported when it is first used",
    ("data_tools.convert", "cli"): "the entry point of vitscale-convert, which lies beside what it calls",
    ("vitscale.flops.command", "cli"): "the entry point of vitscale-flops, which lies beside what it calls",
}


class Import(NamedTuple):
    """One module that another one imports, as the statement names it."""

    importer: str
    imported: str
    line: int


def imports_of(root: Path) -> Iterator[Import]:
    """Every import of every module in the packages vitscale and data_tools below a folder."""
    for package in ("vitscale", "data_tools"):
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            importer = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    assert node.level == 0, f"{path}:{node.lineno}: imports here are absolute"
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                else:
                    continue
                yield from (Import(importer, name, node.lineno) for name in names)


def room_of(module: str, rooms: set[str]) -> str:
    """The room of one of our modules: `vitscale.flops.work` is in flops, `vitscale.__version__` in vitscale."""
    package, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    return name if package == "vitscale" and name in rooms else package


def rooms_below(root: Path) -> set[str]:
    """Names of all rooms, as they lie on disk."""
    inside = (root / "vitscale").iterdir()
    found = {path.stem for path in inside if path.suffix == ".py" or (path.is_dir() and any(path.rglob("*.py")))}
    return (found - {"__init__"}) | {"vitscale", "data_tools"}


def violations(root: Path) -> list[tuple[str, str, int]]:
    """(importing module, room or package that it should not know, line) of each import that goes against the above."""
    rooms = rooms_below(root)
    height = {room: layer for layer, names in enumerate(LAYERS) for room in names}
    found = []
    for importer, imported, line in imports_of(root):
        own, package = room_of(importer, rooms), imported.partition(".")[0]
        if package not in ("vitscale", "data_tools"):
            if own not in KNOWN_TO.get(package, {own}):
                found.append((importer, package, line))
            continue
        other = room_of(imported, rooms)
        if own != other and (height[other] >= height[own] or other not in KNOWS_ONLY.get(own, {other})):
            found.append((importer, other, line))
    return found


def test_every_room_has_its_place_and_no_other_does():
    places = [room for layer in LAYERS for room in layer]
    assert len(places) == len(set(places)) and set(places) == rooms_below(REPOSITORY)


def test_imports_run_one_way():
    found = violations(REPOSITORY)
    unknown = [f"{module}:{line} imports {what}" for module, what, line in found if (module, what) not in EXCEPTIONS]
    assert unknown == []
    assert {(module, what) for module, what, _ in found} == set(EXCEPTIONS), "an exception that is none any more"


@pytest.mark.parametrize(
    ("file", "statement", "expected"),
    [
        ("vitscale/flops/work.py", "from vitscale.models import build_model", "models"),
        ("vitscale/ground/files/locks.py", "import vitscale.runs.names", "runs"),
        ("vitscale/ground/files/locks.py", "from vitscale import runs", "runs"),
        (
            "vitscale/recipe/fields.py",
            "def late():\n    from vitscale.training.beginning.run_plan import plan_run",
            "training",
        ),
        (
            "vitscale/launch/rank.py",
            "if TYPE_CHECKING:\n    from vitscale.training.beginning.run_plan import RunPlan",
            "training",
        ),
        ("vitscale/runs/names.py", "try:\n    import torch.nn as nn\nexcept ImportError:\n    pass", "torch"),
        ("vitscale/evaluation/build.py", "from deepspeed import comm", "deepspeed"),
        ("vitscale/pretrain.py", "from data_tools.convert import main", "data_tools"),
        ("data_tools/classes.py", "from vitscale.models import layers", "models"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, file, statement, expected):
    for room in rooms_below(REPOSITORY) - {"vitscale", "data_tools"}:
        (tmp_path / "vitscale" / room).mkdir(parents=True)
        (tmp_path / "vitscale" / room / "__init__.py").touch()
    planted = tmp_path / file
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(
        f"import json\nfrom vitscale import __version__\nfrom vitscale.ground.errors import DataError\n{statement}\n"
    )
    ((module, what, line),) = violations(tmp_path)
    assert f"{module.replace('.', '/')}.py" == file and what == expected and line >= 4
