"""Imports run one way: a room imports only from rooms below it, wherever in a file the import stands.

A room is a folder or module of vitscale, or data_tools; some rooms have others inside (`data.shards`). Imports within
functions and under TYPE_CHECKING count, too:
what is imported late is known all the same.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent

# From the ground up. Rooms of one layer do not know each other.
LAYERS = (
    {"ground", "ground.safe_text"},
    {"vitscale", "ground.block", "ground.errors", "ground.heartbeat", "ground.machine", "ground.operations"}
    | {"ground.table", "ground.weight_formats", "ground.wording"},
    {"ground.extensions", "ground.interruption", "ground.native", "ground.ranks"} | {"ground.storage", "ground.vtab"},
    {"ground.files", "ground.images", "ground.page", "ground.versions", "recipe.families"},
    {"data.shards", "recipe"},
    {"runs"},
    {"data", "flops", "models"},
    {"launch", "objectives", "runs.checkpoint"},
    {"evaluation"},
    {"evaluation.inspection", "training", "training.optimizers"},
    {"training.deepspeed"},
    {"training.beginning"},
    {"training.watching"},
    {"training.loop"},
    {"pretrain"},
    {"about", "about.doctor", "about.planning", "about.status"},
    {"about.checks", "about.studies"},
    {"about.report"},
    {"data_tools"},
    {"api"},
    {"cli"},
    {"__main__"},
)
# Rooms of which every part is a room of its own.
SPLIT = ("ground", "training", "about")
# Rooms that know less than what lies below them.
KNOWS_ONLY = {
    "data_tools": {
        *("vitscale", "data.shards", "recipe", "ground.errors", "ground.files", "ground.images", "ground.machine"),
        *("ground.native", "ground.safe_text", "ground.storage", "ground.table", "ground.vtab"),
        "ground.wording",
    }
}
# Packages that only these rooms know. Whatever else has to start at once does not load them.
KNOWN_TO = {
    "torch": {
        *("api", "cli", "data", "evaluation", "evaluation.inspection", "ground.ranks", "models", "objectives"),
        *("runs.checkpoint", "training.beginning", "training.deepspeed", "training.loop", "training.optimizers"),
        *("training.watching", "about.doctor", "about.checks"),
    },
    "deepspeed": {"training.beginning", "training.deepspeed", "training.loop", "training.watching"},
    "accelerate": {"evaluation", "training.watching"},
    "ffcv": {"api", "data.shards"},
}


FACE = {("vitscale", "api"), ("vitscale", "ground.errors")}
"""What `import vitscale` offers is imported when it is first used, and named for type checkers."""


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
    """The room of one of our modules: `vitscale.data.batch` is in data, `vitscale.data.shards.beton` in data.shards."""
    package, _, name = module.partition(".")
    while package == "vitscale" and name:
        if name in rooms:
            return name
        name = name.rpartition(".")[0]
    return package


def rooms_below(root: Path) -> set[str]:
    """Names of all rooms, as they lie on disk: with those within another room that have a layer of their own."""
    inside = [path for folder in (".", *SPLIT) for path in (root / "vitscale" / folder).iterdir()]
    inside += [root / "vitscale" / room.replace(".", "/") for layer in LAYERS for room in layer if "." in room]
    found = {path for path in inside if path.suffix == ".py" or (path.is_dir() and any(path.rglob("*.py")))}
    names = {".".join(path.relative_to(root / "vitscale").with_suffix("").parts) for path in found}
    return {name for name in names if not name.endswith("__init__")} | {"vitscale", "data_tools"}


def violations(root: Path) -> list[tuple[str, str, int]]:
    """(importing module, room or package that it should not know, line) of each import that goes against the above."""
    rooms = rooms_below(root)
    height = {room: layer for layer, names in enumerate(LAYERS) for room in names}
    found = []
    for importer, imported, line in imports_of(root):
        if (importer, room_of(imported, rooms)) in FACE:
            continue
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
    assert [f"{module}:{line} imports {what}" for module, what, line in violations(REPOSITORY)] == []
