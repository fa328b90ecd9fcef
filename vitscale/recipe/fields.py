"""Every field of a recipe, as data and in words: its meaning, type, bounds and default, all from the schema."""

import difflib
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from pydantic import BaseModel

from vitscale.ground import extensions
from vitscale.ground.errors import RecipeError
from vitscale.recipe.durations import Duration
from vitscale.recipe.families import FAMILIES, UNSET
from vitscale.recipe.field_notes import NO_UNIT, notes
from vitscale.recipe.schema import Recipe

_COLUMNS = 80
_WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
_UNBOUNDED = 2**31  # limits from here on are those of number types, and are not shown
_OF_TEACHER = "objective.teacher."
_DURATION = "duration"
_TYPES = {
    "integer": "integer",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "object": "block",
    "null": "null",
}

_NEAR, _VERY_NEAR = 0.7, 0.85  # difflib cutoffs for a key of the same block and of another block
_SHOWN = 3
# Another program's name of a field -> the last part of its key here.
_SYNONYMS = {
    "base": "extends",
    "batch_size": "global",
    "dataset": "train",
    "dtype": "precision",
    "gradient_clipping": "clip_norm",
    "label_smoothing": "off",
    "learning_rate": "lr",
    "num_epochs": "epochs",
    "num_steps": "steps",
    "num_workers": "threads",
    "pretrained": "from",
    "resolution": "image_size",
    "stage": "zero_stage",
    "wd": "weight_decay",
    "workers": "threads",
}
_ABOUT = """\
# Fields of a recipe

`vitscale recipe --explain` prints this page. With a KEY such as `data` it prints
that part; with a single field, such as `batch.global`, also its unit, what else
it affects, and what the paper says. `vitscale recipe FILE` prints a recipe with
every default, `vitscale recipe --diff A B` the differences of two.

`vitscale recipe --schema` prints the same as a JSON schema. Editors use it to
complete and check a recipe if its first line names the schema:
`# yaml-language-server: $schema=FILE`. The shipped recipes use
recipes/recipe.schema.json.

`extends: FILE` names the recipe that this one is based on. A *duration*
is `{steps: N}`, `{epochs: X}` or `{examples: N}`. On the command line
`--set KEY=VALUE` replaces a field, with the value in YAML, as in
`--set schedule.duration.epochs=7`, and of a block the keys that are given. A
block of another kind replaces the whole block: after `--set
optimizer.name=muon` in a recipe with AdamW, `optimizer.weight_decay` and the
others have their defaults.

`model: ViT-B/16` is short for `model: {name: ViT-B/16}`; it takes the place of
the width, depth and other sizes of a model without a name. A recipe with
dotted paths, such as `family: my_package.Mixer`, is a program: only packages
that declare an entry point `vitscale.extensions` are imported, and those that
you name in VITSCALE_EXTENSIONS or in ~/.config/vitscale/extensions.txt."""


@dataclass(frozen=True)
class Field:
    """A field: its dotted key, its type with bounds, its default, and what it means."""

    key: str
    kind: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Block:
    """A block: its key ("" for the recipe), variant, meaning, fields, and keys, also those of the blocks in it."""

    key: str
    variant: str
    is_there_by_default: bool
    meaning: str
    fields: tuple[Field, ...]
    keys: tuple[str, ...]


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a recipe's file.

    The file that is extended may hold any part of the recipe, so nothing is required in a file with `extends`, nor in
    one without a model, which other files extend.
    """
    schema = Recipe.model_json_schema()
    for block in schema["$defs"].values():
        block.pop("required", None)
    for family in FAMILIES:
        keys_of_family = schema["$defs"][family.__name__]["properties"]
        keys_of_family |= {
            key: {"const": value, "description": "of other families"}
            for key, value in UNSET.items()
            if key not in keys_of_family
        }
    for field in schema["properties"].values():
        if "discriminator" in field:
            field["anyOf"] = field.pop("oneOf")  # the kind may be in the file extended, or the default
            field.pop("discriminator")
    for name, tag in (("model", "family"), ("objective", "kind"), ("optimizer", "name")):
        schema["properties"][name]["anyOf"].append(_named_by_path(tag))
    schema["properties"]["model"]["anyOf"].append({"type": "string", "description": "the name alone"})
    evaluators = schema["$defs"]["Evaluation"]["properties"]["evaluators"]
    evaluators["items"].pop("discriminator")
    whole = evaluators["items"] | {"required": ["kind", "train", "test"]}  # lists are not extended by others
    evaluators["items"] = {"anyOf": [whole, _named_by_path("kind")]}
    operations = schema["$defs"]["Data"]["properties"]["operations"]["items"]
    operations["oneOf"].append(_named_by_path("kind"))
    operations.pop("discriminator")
    schema["properties"]["extends"] = {"type": "string", "description": "the recipe that this one is based on"}
    required = schema.pop("required")
    for block in (schema, *schema["$defs"].values()):
        for field in block.get("properties", {}).values():
            if "description" not in field and "anyOf" in field:  # an optional block: editors show its key's description
                (inner,) = _inner_blocks(schema, field)
                field["description"] = inner["description"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "anyOf": [{"required": ["extends"]}, {"required": required}, {"not": {"required": ["model"]}}],
    }


def _named_by_path(tag: str) -> dict[str, Any]:
    """The schema of a block of another package: only the key that names it is known."""
    path = {"type": "string", "pattern": r"\.", "description": "the dotted path of a block of another package"}
    return {"type": "object", "description": "of another package", "properties": {tag: path}, "required": [tag]}


def blocks() -> tuple[Block, ...]:
    """All blocks, in the schema's order, each before those inside it; last those of other packages named so far."""
    named = [(place, path, block) for place, by_path in extensions.named.items() for path, block in by_path.items()]
    return (*_own_blocks(), *(block for each in named for block in _outside_blocks(*each)))


@cache
def _own_blocks() -> tuple[Block, ...]:
    schema = Recipe.model_json_schema()
    return tuple(dict.fromkeys(_blocks(schema, schema, "", {})))  # every optimizer has the same block of groups


@cache
def _outside_blocks(place: str, path: str, named: type[BaseModel]) -> tuple[Block, ...]:
    schema = named.model_json_schema()
    return tuple(_blocks(schema, schema, place, {}, path))


def keys() -> list[str]:
    """The dotted keys of all fields and blocks, with N for an index into a list of blocks."""
    fields = [field for block in blocks() for field in block.fields]
    names = [block.key for block in blocks() if block.key] + [field.key for field in fields]
    units = [f"{field.key}.{unit}" for field in fields if field.kind == _DURATION for unit in Duration.model_fields]
    return list(dict.fromkeys(["extends", *names, *units]))


def nearest(key: str) -> list[str]:
    """The keys that `key` may be a mistake for, likeliest first; empty if none is similar."""
    here, _, last = key.rpartition(".")
    block = without_indices(here)
    by_last: dict[str, list[str]] = {}
    for each in keys():
        by_last.setdefault(each.rpartition(".")[2], []).append(each)
    if near := difflib.get_close_matches(last, keys_in(block), n=1, cutoff=_NEAR):
        return [f"{here}.{near[0]}" if here else near[0]]
    meant = _SYNONYMS.get(last, last)
    if meant not in by_last:
        meant = next(iter(difflib.get_close_matches(last, by_last, n=1, cutoff=_VERY_NEAR)), "")
    found = by_last.get(meant, [])
    return ([each for each in found if block and each.startswith(f"{block}.")] or found)[:_SHOWN]


def keys_in(block: str) -> list[str]:
    """The last parts of the keys that a block can have."""
    inside = f"{without_indices(block)}." if block else ""
    return sorted({each.removeprefix(inside).partition(".")[0] for each in keys() if each.startswith(inside)})


def explain_fields(key: str | None = None) -> str:
    """Explain all fields in Markdown, or those that a key names; one field with all that is known about it.

    The key is that of a block or a field, or the last part of several fields' keys. Raises `RecipeError` for others.
    """
    if key is None:
        return "\n\n".join([_ABOUT, *map(_section, _each_once(_own_blocks()))])
    key = without_indices(key)
    if chosen := [block for block in blocks() if block.key == key or block.key.startswith(f"{key}.")]:
        return "\n\n".join(map(_section, chosen))
    chosen_keys = {key} if key in keys() else {each for each in keys() if each.endswith(f".{key}")}
    fields = [
        field
        for block in blocks()
        for field in block.fields
        if field.key in chosen_keys or chosen_keys & {f"{field.key}.{unit}" for unit in Duration.model_fields}
    ]
    if not fields:
        near = " or ".join(map(repr, nearest(key)))
        hint = f"did you mean {near}?" if near else "`vitscale recipe --explain` lists all"
        raise RecipeError(f"a recipe has no field {key!r}; {hint}")
    fields = list(dict.fromkeys(fields))
    if len({field.key for field in fields}) == 1:
        return "\n\n".join(map(_details, fields))
    return "\n".join(map(_item, fields))


def _each_once(found: Iterable[Block]) -> Iterator[Block]:
    """The blocks, with a teacher's reduced to a reference if they are explained elsewhere."""
    places: dict[Any, str] = {}
    for block in found:
        fields = tuple(
            (each.key.removeprefix(block.key), each.kind, each.default, each.meaning) for each in block.fields
        )
        place = places.setdefault((block.variant, block.meaning, fields), block.key)
        is_known = place != block.key and block.key.startswith(_OF_TEACHER)
        yield replace(block, meaning=f"As `{place}`.", fields=()) if is_known else block


def _blocks(
    schema: dict[str, Any], block: dict[str, Any], key: str, given: dict[str, Any] | None, variant: str = ""
) -> Iterator[Block]:
    """A block and all blocks inside it.

    `schema` resolves references. `given` are the block's defaults at this place, None if it is not there by default;
    `variant` is which of the blocks that are possible here it is.
    """
    fields: list[Field] = []
    below: list[Block] = []
    for name, field in block["properties"].items():
        path = f"{key}.{name}" if key else name
        inner = _inner_blocks(schema, field)
        if not inner or "items" in field:
            is_required = name in block.get("required", ())
            default = "required" if is_required else _default((given or {}).get(name, field.get("default")))
            kind = "list of blocks" if inner else _kind(field)
            fields.append(Field(path, kind, default, field.get("description", "")))
        for one in inner:
            # What tells it from others possible at its place: the value of its discriminating key, else its name.
            kinds = (each["const"] for each in one["properties"].values() if "const" in each)
            variant_below = next(kinds, one["title"]) if len(inner) > 1 else ""
            path_below = f"{path}.N" if "items" in field else path
            defaults: dict[str, Any] | None = field.get("default", {})
            if variant_below and defaults and defaults.get("kind", variant_below) != variant_below:
                defaults = {}  # the defaults belong to another kind of block
            below += _blocks(schema, one, path_below, defaults, variant_below)
    meaning, names = block.get("description", ""), tuple(block["properties"])
    yield Block(key, variant, given is not None, meaning, tuple(fields), names)
    yield from below


def _inner_blocks(schema: dict[str, Any], field: dict[str, Any]) -> list[dict[str, Any]]:
    """The blocks that a field can hold; a duration counts as a value, not as a block."""
    item = field.get("items", field)
    options = [
        item,
        *(option for place in (field, item) for key in ("anyOf", "oneOf") for option in place.get(key, ())),
    ]
    names = [option["$ref"].rpartition("/")[2] for option in options if "$ref" in option]
    return [schema["$defs"][name] for name in dict.fromkeys(names) if name != Duration.__name__]


def _default(value: Any) -> str:
    if value is None:
        return "optional"
    if isinstance(value, dict):
        value = {unit: length for unit, length in value.items() if length is not None}
    return f"default {_in_yaml(value)}"


def _kind(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_kind(option) for option in field["anyOf"] if option.get("type") != "null")
    if "$ref" in field:
        return _DURATION
    if "enum" in field:
        return any_of(field["enum"])
    if "const" in field:
        return _in_yaml(field["const"])
    if field["type"] == "array" and "enum" in field["items"]:
        return f"list of {_kind(field['items'])}"
    if field["type"] == "array":
        kind, _, bounds = _kind(field["items"]).partition(" ")
        return f"list of {kind}s {bounds}".rstrip()
    return " ".join([_TYPES.get(field["type"], field["type"]), *_bounds(field)])


def any_of(words: Sequence[str]) -> str:
    """`a, b or c`."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _bounds(field: dict[str, Any]) -> Iterator[str]:
    if "minimum" in field:
        yield f"from {_in_yaml(field['minimum'])}"
    if "exclusiveMinimum" in field:
        yield f"above {_in_yaml(field['exclusiveMinimum'])}"
    if field.get("maximum", _UNBOUNDED) < _UNBOUNDED:
        yield f"to {_in_yaml(field['maximum'])}"
    if field.get("exclusiveMaximum", _UNBOUNDED) < _UNBOUNDED:
        yield f"below {_in_yaml(field['exclusiveMaximum'])}"


def _in_yaml(value: Any) -> str:
    if isinstance(value, float):
        return re.sub(r"e([+-])0*", lambda match: "e" + match[1].strip("+"), f"{value:g}")
    if isinstance(value, list):
        return f"[{', '.join(map(_in_yaml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_in_yaml(each)}' for key, each in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def without_indices(key: str) -> str:
    """A key with every list index replaced by N."""
    return re.sub(r"\.\d+(?=\.|$)", ".N", key)


def _section(block: Block) -> str:
    title = f"## {block.key}" + (f" ({block.variant})" if block.variant else "") if block.key else "## Top level"
    optional = "" if block.is_there_by_default else " Not set by default."
    paragraphs = [" ".join(part.split()) for part in f"{block.meaning}{optional}".split("\n\n")]
    about = "\n\n".join(textwrap.fill(part, _COLUMNS, **_WHOLE_WORDS) for part in paragraphs)
    return "\n\n".join(filter(None, [title, about, "\n".join(map(_item, block.fields))]))


def _item(field: Field) -> str:
    text = f"- `{field.key}` ({field.kind}, {field.default})" + (f": {field.meaning}." if field.meaning else "")
    return textwrap.fill(text, _COLUMNS, subsequent_indent="  ", **_WHOLE_WORDS)


def _details(field: Field) -> str:
    """All that is known about one field, one line per fact."""
    noted = notes(field.key)
    unit = "steps, epochs or examples" if _DURATION in field.kind else noted.unit
    # Without a teacher's fields, which repeat the model's.
    others = (each for block in blocks() for each in block.fields if not each.key.startswith(_OF_TEACHER))
    named_by = [each for each in others if re.search(rf"\b{re.escape(field.key)}\b(?!\.)", each.meaning)]
    rows = {
        "type": field.kind,
        "unit": None if unit == NO_UNIT else unit,
        "default": field.default.removeprefix("default "),
        "meaning": field.meaning,
        "touches": noted.touches,
        "see also": ", ".join(dict.fromkeys(each.key for each in named_by)),
        "resuming": noted.resuming,
        "the paper": noted.paper,
    }
    width = max(map(len, rows))
    lines = [f"  {name:<{width}}  {text}" for name, text in rows.items() if text]
    indent = " " * (width + 4)
    return "\n".join(
        [field.key, *(textwrap.fill(line, _COLUMNS, subsequent_indent=indent, **_WHOLE_WORDS) for line in lines)]
    )
