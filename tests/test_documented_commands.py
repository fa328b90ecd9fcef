"""Every command in every page is one: its program, its options, its recipe and the keys that it sets are there."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from documented_commands import PAGES, REPOSITORY, Command, documented_commands, texts
from typer.testing import CliRunner

from vitscale import pretrain
from vitscale.about.studies.reading import list_studies
from vitscale.cli.convert import app as convert_app
from vitscale.cli.flops import app as flops_app
from vitscale.cli.main import LaterCommand
from vitscale.cli.main import app as vitscale_app
from vitscale.ground.errors import VitscaleError
from vitscale.recipe import explain_fields, find_recipe, list_recipes, load_recipe
from vitscale.recipe.fields import keys, without_indices

COMMANDS = documented_commands()
APPS = {"vitscale": vitscale_app, "vitscale-convert": convert_app, "vitscale-flops": flops_app}
PARSERS = {name: typer.main.get_command(app) for name, app in APPS.items()}
_USAGE_ERROR: Any = typer.BadParameter.__base__
# What pages write for a name of the reader's own.
_OF_THE_READER = {"KEY", "FILE", "RECIPE", "RUN/recipe.yaml", "STUDY", "A", "B"}
AT_ONCE = ("-h", "--version", "--install-completion", "--show-completion")  # would act while they are parsed
# Commands that end within a second, need no data and change nothing.
CHEAP = {"recipe", "models", "flops"}
DRY = {"launch", "train"}


def parsed(command: Command) -> dict[str, Any]:
    """The command's parameters. Fails the test for what the parser refuses; a mention need not be whole."""
    if command.program == "pretrain":
        if not command.words and not command.is_whole:
            return {}
        return vars(pretrain.parse_arguments(list(command.words)))
    parser, words = PARSERS[command.program], list(command.words)
    while getattr(parser, "commands", None) and words and not words[0].startswith("-"):
        if words[0] not in parser.commands and "list" in parser.commands:
            words = ["run", *words]  # `vitscale study FILE`
        assert words[0] in parser.commands, f"{command}: there is no command {words[0]!r}"
        parser, words = parser.commands[words[0]], words[1:]
        parser = parser.load() if isinstance(parser, LaterCommand) else parser
    if words and words[0] in AT_ONCE:
        assert any(words[0] in parameter.opts for parameter in parser.params) or words[0] == "-h"
        return {}
    try:
        return parser.make_context(command.program, words).params
    except _USAGE_ERROR as error:
        is_part = type(error).__name__ in ("NoArgsIsHelpError", "MissingParameter")
        is_part |= "requires an argument" in error.format_message()
        assert is_part and not command.is_whole, f"{command}: {error.format_message()}"
        return {}


@pytest.mark.parametrize("page", sorted({command.page for command in COMMANDS}))
def test_the_commands_of_a_page_are_understood(page):
    for command in COMMANDS:
        if command.page == page:
            check(command)


def check(command: Command) -> None:
    """Fail the test for a command whose options, keys, recipe or study are not there."""
    parameters = parsed(command)
    settings = parameters.get("settings") or []
    for setting in settings:
        key = setting.partition("=")[0]
        assert without_indices(key) in keys(), f"{command}: recipes have no key {key!r}"
    asked = parameters.get("recipe")
    if isinstance(asked, str) and _is_shipped(asked):
        load_recipe(find_recipe(asked), settings)
    elif isinstance(asked, str):
        assert asked in _OF_THE_READER or _is_made(asked, command), f"{command}: the page makes no such recipe"
    study = parameters.get("study")
    if isinstance(study, str) and study not in list_studies():
        assert study in _OF_THE_READER or _is_made(study, command), f"{command}: the page makes no such study"
    if parameters.get("explain") and parameters["names"] and parameters["names"] != ["KEY"]:
        explain_fields(*parameters["names"])


def _is_made(file: str, command: Command) -> bool:
    """Whether the page, or the README that comes before it, speaks of this file."""
    pages = (REPOSITORY / page for page in (command.page, "README.md"))
    return file.startswith(("my_", "clean/")) or any(f"`{file}`" in page.read_text(encoding="utf-8") for page in pages)


def _is_shipped(recipe: str) -> bool:
    return recipe.removeprefix("recipes/").removesuffix(".yaml") in list_recipes()


def cheap_commands() -> Iterator[tuple[Command, list[str]]]:
    """Commands that are run as they stand, launches by their dry run; what several pages have, once."""
    unlike = {(command.program, command.words, command.is_whole): command for command in COMMANDS}
    for command in unlike.values():
        if command.program == "pretrain" or not command.is_whole:
            continue
        app, *words = ("vitscale", *command.words) if command.program == "vitscale" else ("", *command.words)
        name = words[0] if app and words else command.program.rpartition("-")[2]
        recipes = [word for word in words[1:] if _is_shipped(word)]
        if name in DRY and recipes and "--nodes" not in words:
            yield command, [*words, *([] if "--dry-run" in words else ["--dry-run"])]
        elif name in CHEAP and not any(word in _OF_THE_READER or word.endswith(".yaml") for word in words):
            if not {"--run", "--folder"} & set(words):
                yield command, words
        elif words in (["-h"], ["--version"], ["study"]):
            yield command, words


@pytest.mark.parametrize(("command", "words"), [pytest.param(*each, id=str(each[0])) for each in cheap_commands()])
def test_a_cheap_command_of_a_page_runs(command, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(APPS[command.program], words)
    if isinstance(result.exception, VitscaleError):
        raise result.exception
    assert result.exit_code == 0, result.output


def test_what_pages_tell_make_to_do_is_there():
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    asked = {
        (str(page.relative_to(REPOSITORY)), target)
        for page in PAGES
        for _, text, _ in texts(page)
        for target in re.findall(r"^make ([a-z-]+)", text)
    }
    assert asked and {target for _, target in asked} <= targets, asked
