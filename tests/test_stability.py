"""What docs/stability.md promises, frozen: docs/stable_names.txt lists every command, key, code, file and Python name.

`make stable-names` writes the list anew. A line that goes or changes breaks somebody's script, recipe or
reader: that takes a new version and a line in CHANGELOG.md. A line that comes is a new promise.
"""

import contextlib
import importlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
import typer

import vitscale
from vitscale import pretrain
from vitscale.about.checks.verifying import Asked, verify_run
from vitscale.about.studies.reading import study_schema
from vitscale.cli.convert import app as convert_app
from vitscale.cli.flops import app as flops_app
from vitscale.cli.main import LaterCommand
from vitscale.cli.main import app as vitscale_app
from vitscale.data.order import ORDER_VERSION
from vitscale.data.shards.provenance import DECISIONS, PROVENANCE, REJECTS
from vitscale.ground import errors
from vitscale.recipe.fields import blocks

LIST = Path(__file__).resolve().parent.parent / "docs" / "stable_names.txt"
COMMANDS = {"vitscale": vitscale_app, "vitscale-convert": convert_app, "vitscale-flops": flops_app}
SAME_AS_OTHERS = ("convert", "flops", "train")  # of `vitscale`: as vitscale-convert, vitscale-flops and launch
# What the pages tell people to import, and what a package with a part of its own uses (docs/architecture.md).
NAMES = {
    "vitscale": vitscale.__all__,
    "vitscale.data.augmentation": ["TrainTransform"],
    "vitscale.data.draws": ["between", "between_ratios", "normal", "stratum", "uniform"],
    "vitscale.data.image_operations": ["ImageOperation"],
    "vitscale.data.loader": ["Loader"],
    "vitscale.data.order": ["TrainOrder"],
    "vitscale.data.settings": ["Reading"],
    "vitscale.ground.errors": [name for name, value in vars(errors).items() if inspect.isclass(value)],
    "vitscale.evaluation": ["Evaluator", "Loaders", "MakeLoader", "Predict"],
    "vitscale.recipe.families": ["Model"],
    "vitscale.launch": ["Launch", "RankCommand", "Supervisor"],
    "vitscale.models": ["Initialiser", "Model", "Outputs", "build_model", "constant", "normal"],
    "vitscale.objectives": ["Agreed", "Losses", "Objective", "Plan", "Rows"],
    "vitscale.ground.operations": ["Operation", "block_of", "dense", "parameters"],
    "vitscale.ground.ranks": ["Sums", "reduce_sum"],
    "vitscale.recipe": [
        *("Context", "Evaluator", "ImageOperation", "Objective"),
        *("Ramp", "Recipe", "load_recipe", "read_recipe"),
    ],
    "vitscale.data.shards": ["Manifest"],
    "vitscale.about.status": ["RunReader"],
}
# Of these, what a subclass in another package overrides or calls, and what a person holds.
CONTRACTS = {
    *("vitscale.Dataset", "vitscale.Model", "vitscale.Run", "vitscale.Training"),
    *("vitscale.data.image_operations.ImageOperation", "vitscale.evaluation.Evaluator"),
    *("vitscale.recipe.families.Model", "vitscale.models.Model", "vitscale.objectives.Objective"),
    *("vitscale.recipe.Evaluator", "vitscale.recipe.ImageOperation", "vitscale.recipe.Objective"),
}


def commands() -> Iterator[str]:
    """Commands with their arguments and options, and options with their choices."""
    for name, app in COMMANDS.items():
        yield from _of_command(typer.main.get_command(app), name)
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as helped:
        pretrain.parse_arguments(["--help"])
    yield from (f"vitscale/pretrain.py {option}" for option in sorted(set(re.findall(r"--[a-z-]+", helped.getvalue()))))


def _of_command(command: Any, name: str) -> Iterator[str]:
    command = command.load() if isinstance(command, LaterCommand) else command
    yield name
    of_callback = inspect.signature(command.callback, eval_str=True).parameters if command.callback else {}
    hints = {key: each.annotation for key, each in of_callback.items()}
    for parameter in command.params:
        called = "|".join(sorted([*parameter.opts, *parameter.secondary_opts]))
        shown = called if parameter.param_type_name == "option" else parameter.name.upper()
        choices = [str(choice) for choice in _choices(hints.get(parameter.name))]
        yield f"{name} {shown}" + (f" {{{','.join(choices)}}}" if choices else "")
    for below, inner in getattr(command, "commands", {}).items():
        if name == "vitscale" and below in SAME_AS_OTHERS:
            yield f"{name} {below}"
        else:
            yield from _of_command(inner, f"{name} {below}")


def _choices(hint: Any) -> Iterator[Any]:
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        yield from inner
    else:
        for each in inner:
            yield from _choices(each)


def recipe_keys() -> Iterator[str]:
    """Keys of recipes with their type and default: another default is another run for who leaves the key out."""
    for block in blocks():
        variant = f" ({block.variant})" if block.variant else ""
        yield from (f"{field.key}{variant}: {field.kind}, {field.default}" for field in block.fields)


def study_keys() -> Iterator[str]:
    schema = study_schema()
    for name, block in {"Study": schema, **schema["$defs"]}.items():
        yield from (f"{name}.{key}" for key in block["properties"])


def exit_codes() -> Iterator[str]:
    """Codes that commands end with, and the errors behind them."""
    yield f"{errors.EXIT_DONE}: done"
    yield f"{errors.EXIT_INTERRUPTED}: Ctrl-C"
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, errors.VitscaleError):
            yield f"{value.exit_code}: {name}"


def python_names() -> Iterator[str]:
    """Names with their parameters, and of contracts the public methods and attributes."""
    for module, names in NAMES.items():
        for name in names:
            value = getattr(importlib.import_module(module), name)
            path = f"{module}.{name}"
            yield path if inspect.isclass(value) and issubclass(value, Exception) else f"{path}{_parameters(value)}"
            if path in CONTRACTS:
                yield from (f"{path}.{member}" for member in _members(value))


def _parameters(value: Any) -> str:
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError):  # a type alias
        return ""
    return f"({', '.join(name for name in parameters if name != 'self' and not name.startswith('_'))})"


def _members(contract: type) -> Iterator[str]:
    own = [each for each in contract.__mro__ if each.__module__.startswith("vitscale")]
    for name in sorted({name for each in own for name in (*vars(each), *getattr(each, "__annotations__", ()))}):
        if not name.startswith("_") and name != "model_config":
            member = inspect.getattr_static(contract, name, None)
            function = getattr(member, "__func__", member)
            yield f"{name}{_parameters(function)}" if inspect.isfunction(function) else name


def files(run: Path, report: Path) -> Iterator[str]:
    """Files of a dataset, a run and a report, and the keys in them.

    Args:
        run: a finished smoke run, its data in it. What several ranks add to its metrics: tests/test_command_line.py.
        report: the report of it.
    """
    yield f"order of samples: version {ORDER_VERSION}"
    for name, schema in {"*.idx.parquet": PROVENANCE, "rejects.parquet": REJECTS, "dedup.parquet": DECISIONS}.items():
        yield from (f"{name} {field.name}: {_type(field)}" for field in schema)
    list(verify_run(run, Asked(steps=0, shards=False, evaluations=False)))  # writes verified.json
    for path in sorted(run.rglob("*")):
        if path.is_file() and "tensorboard" not in path.parts:
            yield f"run/{_numbers_as_n(str(path.relative_to(run)))}"
    for path in (
        *run.glob("smoke-data-*/train/manifest.json"),
        *run.glob("checkpoints/step-*/index.json"),
        *(run / name for name in ("DONE", "newest-checkpoint.json", "metrics.jsonl", "launch.jsonl", "verified.json")),
        report / "results.json",
    ):
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        yield from (f"{path.name} {key}" for line in lines for key in _keys(json.loads(line)))


def _type(field: pa.Field) -> str:
    return f"{field.type}{'' if field.nullable else ', required'}"


def _numbers_as_n(text: str) -> str:
    return re.sub(r"\d+", "N", text)


_FREE = ("recipe", "shapes", "versions", "made_by", "options", "metrics", "curves", "notes", "class_names", "paper")
"""Keys whose own keys are of the model, the recipe, the libraries or what was measured."""


def _keys(content: Any, above: str = "") -> Iterator[str]:
    """Dotted keys of JSON; of lists, those of their items. A version is shown with its value."""
    if isinstance(content, list):
        for item in content:
            yield from _keys(item, f"{above}[]")
    elif isinstance(content, dict) and not above.rpartition(".")[2].startswith(_FREE):
        for key, value in content.items():
            here = f"{above}.{key}" if above else key
            yield f"{here} = {value}" if key in ("schema_version", "version", "kind", "event") else here
            yield from _keys(value, here)


def the_list(run: Path, report: Path) -> str:
    sections = {
        "Commands, arguments, options": commands(),
        "Exit codes": exit_codes(),
        "Keys of recipes": recipe_keys(),
        "Keys of studies": study_keys(),
        "Files": files(run, report),
        "Python": python_names(),
    }
    parts = ["\n".join([f"# {title}", *sorted(set(lines))]) for title, lines in sections.items()]
    return "\n\n".join(["# Made by `make stable-names`; docs/stability.md says what it means.", *parts, ""])


def smoke_run(folder: Path) -> tuple[Path, Path]:
    run, report = folder / "run", folder / "report"
    vitscale = [sys.executable, "-m", "vitscale"]
    launch = ["launch", "demo", "--smoke", "--ranks", "1", "--run-dir", str(run)]
    for command in (launch, ["report", str(run), "-o", str(report)]):
        # A known device would add a figure (mfu).
        on_cpus = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run([*vitscale, *command], capture_output=True, text=True, env=on_cpus, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return run, report


@pytest.fixture(scope="module")
def today(tmp_path_factory) -> list[str]:
    """Made by a process of its own: other tests register parts of theirs in this one.

    `-P`: beside this file lies tests/data_tools, which would be taken for the package data_tools.
    """
    made = tmp_path_factory.mktemp("stable") / "names.txt"
    command = [sys.executable, "-P", __file__, str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return made.read_text(encoding="utf-8").splitlines()


def test_what_is_promised_is_what_there_is(today):
    promised = LIST.read_text(encoding="utf-8").splitlines()
    gone = [line for line in promised if line not in today]
    new = [line for line in today if line not in promised]
    assert not gone and not new, (
        f"{gone} went, {new} came. If that is meant: `make stable-names`, and a line in CHANGELOG.md"
    )


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else LIST
    with tempfile.TemporaryDirectory() as folder:
        target.write_text(the_list(*smoke_run(Path(folder))), encoding="utf-8")
