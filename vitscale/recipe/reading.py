"""Reads files and command-line settings into a validated recipe.

Every mistake is a `RecipeError` that names the key, the value, what was expected and, for an unknown key, the nearest
valid one.
"""

import difflib
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pydantic
from pydantic import TypeAdapter, create_model

from vitscale.ground.block import Block, Contradictions
from vitscale.ground.errors import RecipeError, os_errors, turned
from vitscale.ground.safe_text import without_secrets
from vitscale.ground.wording import describe_expected, did_you_mean, shortened
from vitscale.recipe.comparing import changes
from vitscale.recipe.durations import Duration
from vitscale.recipe.families import SIZES, Model, ModelBlock, architecture, by_name
from vitscale.recipe.families import nearest as nearest_model
from vitscale.recipe.fields import any_of, blocks, keys, keys_in, nearest, without_indices
from vitscale.recipe.objectives import DEFAULT_KIND
from vitscale.recipe.schema import Recipe
from vitscale.recipe.strict_yaml import parse_yaml, read_yaml

_Block = TypeVar("_Block")
_MODEL: TypeAdapter[Model] = TypeAdapter(ModelBlock)

# Blocks that have several kinds -> the key that names the kind, and its value where it is missing.
_TAGS = {
    "optimizer": ("name", None),
    "objective": ("kind", DEFAULT_KIND),
    "model": ("family", None),
    "data.operations.N": ("kind", None),
    "data.views.N.operations.N": ("kind", None),
    "evaluation.evaluators.N": ("kind", None),
}
SCHEMA_LINE = "# yaml-language-server: $schema="
"""The beginning of the line by which editors find a file's schema."""
_MOST_FILES = 50  # that extend each other
_MOST_LINES = 50
# Blocks -> the key that somebody means who gives them a single value. `model` alone is read so.
_ALONE = {"optimizer": "name", "objective": "kind", "data": "train", "schedule": "decay", "batch": "global"}


@cache
def _kinds_of(key: str) -> list[str]:
    """The kinds that a block of `_TAGS` can be, without other packages'. For messages only: it takes a while."""
    return [block.variant for block in blocks() if block.key == key and "." not in block.variant]


def recipes_dir() -> Path:
    """The folder of the recipes that come with vitscale, in a checkout or an installed package."""
    package = Path(__file__).parent.parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def find_recipe(recipe: str | Path) -> Path:
    """The file of a recipe given by its path, or by its name if it comes with vitscale."""
    path = Path(recipe)
    with os_errors(f"{str(recipe)[:100]}...: cannot be read", RecipeError):
        if path.is_file():
            return path
    name = path.as_posix().removeprefix("recipes/").removesuffix(".yaml")
    shipped = recipes_dir() / f"{name}.yaml"
    if shipped.parent in (recipes_dir(), recipes_dir() / "finetune") and shipped.is_file():
        return shipped
    if path.exists():
        own = path / "recipe.yaml"  # a run's
        hint = f"; did you mean {own}?" if own.is_file() else ""
        what = "a folder" if path.is_dir() else "no regular file"
        raise RecipeError(f"{path} is {what}: expected a recipe's file{hint}")
    hint = _did_you_mean(_recipes_near(path))
    raise RecipeError(
        f"there is no recipe {str(recipe)!r}{hint and f' ({hint})'}: expected a file, or one that comes with vitscale; "
        f"`vitscale recipe` lists them"
    )


def _recipes_near(path: Path) -> list[str]:
    """What a path that does not exist may be a mistake for: a file beside it, or a recipe that comes with vitscale."""
    try:
        beside = [str(file) for file in path.parent.iterdir() if file.suffix in (".yaml", ".yml")]
    except OSError:
        beside = []
    stem = path.with_suffix("") if path.suffix in (".yaml", ".yml") else path
    same = [file for file in beside if Path(file).with_suffix("") == stem]
    by_last = {name.rpartition("/")[2]: name for name in list_recipes()}
    shipped = [by_last[last] for last in difflib.get_close_matches(stem.name, by_last, n=1)]
    return (same or difflib.get_close_matches(str(path), beside, n=1, cutoff=0.8) or shipped)[:1]


def recipe_name(recipe: str | Path) -> str:
    """How messages call a recipe's file: by its name if it comes with vitscale, else by its path."""
    path = Path(recipe)
    if path.is_relative_to(recipes_dir()):
        return path.relative_to(recipes_dir()).with_suffix("").as_posix()
    return str(recipe)


def list_recipes() -> dict[str, str]:
    """The recipes that come with vitscale: name, such as `h14_jft` or `finetune/pets` -> title."""
    folder = recipes_dir()
    files = sorted(folder.glob("*.yaml")) + sorted(folder.glob("finetune/*.yaml"))
    return {file.relative_to(folder).with_suffix("").as_posix(): recipe_title(file) for file in files}


def recipe_title(file: Path) -> str:
    """The title of a recipe or study: its first line but the schema's; with an ellipsis if the sentence goes on."""
    with file.open(encoding="utf-8") as lines:
        title = next(line for line in lines if not line.startswith(SCHEMA_LINE)).removeprefix("# ").rstrip("\n")
    return title if title.endswith(".") else f"{title.rstrip(',;')} ..."


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge `over` onto `base`, block by block; a duration, or a block of another kind, is replaced as a whole."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if key == "model":
            below, value = by_name(below), by_name(value)
            if isinstance(below, dict) and isinstance(value, dict) and value.get("name") and not below.get("name"):
                below = {key: kept for key, kept in below.items() if key not in SIZES}  # the name says them all
        if isinstance(below, dict) and isinstance(value, dict) and not _is_duration(value):
            merged[key] = value if _is_of_another_kind(key, below, value) else _merge(below, value)
        else:
            merged[key] = value
    return merged


def _is_of_another_kind(key: str, old: dict[str, Any], new: dict[str, Any]) -> bool:
    tag, default = _TAGS.get(key, ("", None))
    return bool(tag) and tag in new and new[tag] != old.get(tag, default)


def _is_duration(block: dict[str, Any]) -> bool:
    return bool(block) and set(block) <= set(Duration.model_fields)


def read_content(path: Path, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A recipe merged onto what it extends, as plain data; `chain`: who extends it. Raises `RecipeError`."""
    if path.resolve() in chain or len(chain) > _MOST_FILES:
        raise RecipeError(f"{path}: extends itself: {' -> '.join(str(p.name) for p in (*chain, path))}")
    content = read_yaml(path)
    # Of a file that is something else, no word is repeated: it may hold secrets.
    if not isinstance(content, dict) or (content and not content.keys() & {"extends", *Recipe.model_fields}):
        raise RecipeError(f"{path}: expected a mapping of keys such as model, data and batch")
    base = content.pop("extends", None)
    if base is None:
        return content
    if not isinstance(base, str):
        raise RecipeError(f"{path}: extends: {shortened(repr(base))}: expected the file name of one recipe")
    base_path = path.parent / base
    try:
        if not base_path.is_file():
            base_path = find_recipe(base)
    except (RecipeError, OSError) as error:
        raise RecipeError(f"{path}: extends: {shortened(str(error))}") from None
    return _merge(read_content(base_path, (*chain, path.resolve())), content)


def apply_setting(content: dict[str, Any], setting: str) -> dict[str, Any]:
    """Apply one setting `a.b=c` to plain data. Raises `RecipeError` for anything else."""
    key, equals, text = setting.partition("=")
    if not equals or not all(key.split(".")):
        raise RecipeError(f"--set {setting}: expected KEY=VALUE, e.g. --set optimizer.lr=3e-4")
    value = parse_yaml(text, f"--set {key}")
    for part in reversed(key.split(".")):
        value = {part: value}
    unit = key.rpartition(".")[2]
    if unit in Duration.model_fields and "." in key:
        # `--set schedule.duration.steps=5` replaces the unit that the file has.
        content = _without(content, key.split(".")[:-1])
    return _merge(content, value)


def _without(content: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    head, *rest = keys
    below = content.get(head)
    if not isinstance(below, dict):
        return content
    if rest:
        return {**content, head: _without(below, rest)}
    return {key: value for key, value in content.items() if key != head} if _is_duration(below) else content


def load_recipe(recipe: str | Path, settings: Sequence[str] = ()) -> Recipe:
    """Read a recipe by its path, or its name if it comes with vitscale; override it by `a.b=c`, values in YAML.

    Raises `RecipeError`: one message that lists everything that is wrong.
    """
    path = find_recipe(recipe)
    return override(read_content(path), settings, str(path))


def model_block(model: str | None, settings: Sequence[str] = ()) -> dict[str, Any] | None:
    """The `model` block of a model's or a recipe's name, with settings; None without a name. Raises `RecipeError`."""
    for setting in settings:
        if not setting.startswith("model."):
            raise RecipeError(f"--set {setting}: only the model of a recipe counts here; expected model.KEY=VALUE")
    if model is None:
        if settings:
            raise RecipeError("--set changes the model that --model gives; name that too")
        return None
    try:
        architecture(model)
    except ValueError:
        try:
            find_recipe(model)
        except RecipeError as error:
            hint = f"; as a model's name it is nearest to {near!r}" if (near := nearest_model(model)) else ""
            raise RecipeError(f"--model: {error}{hint}") from None
        return load_recipe(model, settings).dump()["model"]
    content: dict[str, Any] = {"model": {"name": model}}
    for setting in settings:
        content = apply_setting(content, setting)
    return content["model"]


def refuse_secrets(recipe: Recipe, where: str) -> Recipe:
    """The same recipe. Raises `RecipeError` if it has a password or token, as it is copied to many places."""
    dumped = recipe.dump()
    text = json.dumps(dumped)
    if (bare := without_secrets(text)) == text:
        return recipe
    keys = ", ".join(key for key, _, _ in changes(dumped, json.loads(bare)))
    raise RecipeError(
        f"{where}: {keys}: a password, token or signature. A recipe is copied into the run's directory and its "
        "checkpoints. Leave the secret out, and set it in fsspec's configuration (a file in "
        "~/.config/fsspec, or variables such as FSSPEC_SFTP_PASSWORD) or in the variables of the protocol "
        "(AWS_SECRET_ACCESS_KEY); for datasets, the URL may also be in VITSCALE_DATA_ROOT or datasets.yaml"
    )


def override(content: dict[str, Any], settings: Sequence[str], where: str) -> Recipe:
    """A recipe from plain data with settings `a.b=c` applied; `where` opens the error message."""
    for setting in settings:
        content = apply_setting(content, setting)
    return validate_recipe(content, where)


def read_recipe(path: Path) -> Recipe:
    """A recipe from one complete file, such as a run directory's."""
    return validate_recipe(read_content(path), str(path))


def validate_recipe(content: dict[str, Any], where: str) -> Recipe:
    """A recipe from plain data; `where` opens the error message."""
    return _validate(Recipe.model_validate, content, f"{where} is not a valid recipe", more=_contradictions)


def _contradictions(content: dict[str, Any], broken: Collection[str]) -> Iterator[str]:
    """The contradictions among the valid fields of a recipe whose fields in `broken` are invalid, one line each."""
    sound = {}
    for name, field in Recipe.model_fields.items():
        if name in content and name not in broken:
            alone = create_model(name, __base__=Block, **{name: (field.annotation, field)})  # type: ignore[call-overload]
            sound[name] = getattr(alone.model_validate({name: content[name]}), name)
    yield from Recipe.model_construct(**sound).contradictions(broken)


def validate_model(content: dict[str, Any], image_size: int, where: str) -> Model:
    """A `model` block from plain data, checked for images of this size; `where` opens the error message."""
    model = _validate(_MODEL.validate_python, content, f"{where} is not a valid model", inside="model.")
    with turned(f"{where}: image_size {image_size}", RecipeError, ValueError):
        model.check_image_size(image_size)
    return model


def _validate(
    validate: Callable[[dict[str, Any]], _Block],
    content: dict[str, Any],
    complaint: str,
    inside: str = "",
    more: Callable[[dict[str, Any], Collection[str]], Iterator[str]] | None = None,
) -> _Block:
    """A block from plain data. If fields are invalid, `more` yields further lines about the valid ones."""
    try:
        return validate(content)
    except pydantic.ValidationError as error:
        lines = [line for details in error.errors()[:_MOST_LINES] for line in _describe(details, inside)]
        broken = {str(details["loc"][0]) for details in error.errors() if details["loc"]}
        if broken and more is not None:
            lines += [f"recipe: {line}" for line in more(content, broken)]
        raise RecipeError(f"{complaint}:\n" + "\n".join(f"  {shortened(line)}" for line in lines)) from None


def _describe(details: Any, inside: str) -> Sequence[str]:
    """Describe a mistake that pydantic found in a block, in lines; `inside` is the prefix of the block's keys."""
    error = details.get("ctx", {}).get("error")
    found = error.lines if isinstance(error, Contradictions) else [error]
    return [_line({**details, "ctx": {**details.get("ctx", {}), "error": one}}, inside) for one in found]


def _line(details: Any, inside: str) -> str:
    kinds = {kind for key in _TAGS for kind in _kinds_of(key)}
    parts = [part for part in details["loc"] if part not in kinds]
    kind, value, facts = details["type"], details["input"], details.get("ctx", {})
    if kind != "extra_forbidden":
        known = keys()
        while parts and without_indices(inside + ".".join(map(str, parts))).removesuffix(".N") not in known:
            parts.pop()  # the type, of several, that pydantic tried
    key = ".".join(map(str, parts))
    if kind == "extra_forbidden":
        block = (inside + key).rpartition(".")[0]
        near = [each.removeprefix(inside) for each in nearest(inside + key)]
        if near == [key]:  # of another kind
            own = details["loc"][-2]
            of_kind = (each for each in blocks() if (each.key, each.variant) == (without_indices(block), own))
            valid = next((", ".join(each.keys) for each in of_kind), "")
            return f"{key}: {own} has no such key; its keys: {valid}"
        valid = ", ".join(keys_in(block))
        return f"{key}: unknown key; {_did_you_mean(near) or f'valid keys: {valid}'}"
    if kind == "missing":
        return f"{key}: missing; set it in the recipe or with --set {key}=..."
    if kind == "union_tag_not_found":
        place = without_indices(key)
        return f"{key}.{_TAGS[place][0]}: missing; expected {any_of(sorted(_kinds_of(place)))}"
    if kind == "union_tag_invalid":
        key, value = f"{key}.{_TAGS[without_indices(key)][0]}", facts["tag"]
        kind, facts = "literal_error", {"expected": facts["expected_tags"]}
    if kind == "value_error":
        return f"{key or inside[:-1] or 'recipe'}: {facts['error']}"
    if kind == "literal_error":
        offered = re.findall(r"'([^']*)'", facts["expected"]) or [facts["expected"].lower()]
        hint = did_you_mean(str(value), offered)
        return f"{key}: {value!r}: expected {any_of(offered)}{hint and f'; {hint}'}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        valid = ", ".join(keys_in(inside + key))
        place = without_indices(key)
        choice = _kinds_of(place) if place in _TAGS else None
        if choice:
            valid = f"{_TAGS[place][0]} ({any_of(sorted(choice))}) and those that belong to it"
        meant = isinstance(value, str | int) and key in _ALONE and (choice is None or value in choice)
        hint = f"; did you mean {{{_ALONE[key]}: {value}}}?" if meant else ""
        return f"{key}: {value!r}: expected a block of keys{valid and f': {valid}'}{hint}"
    return f"{key}: {value!r}: {describe_expected(details)}"


def _did_you_mean(near: Sequence[str]) -> str:
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""
