"""Reads and validates a study's file. Every mistake is a `RecipeError` with key, value and what was expected."""

import difflib
from pathlib import Path
from typing import Any

import pydantic

from vitscale.about.studies.schema import DataSet, Part, Refit, Selection, Study
from vitscale.ground.block import Block
from vitscale.ground.errors import RecipeError
from vitscale.ground.wording import describe_expected, shortened
from vitscale.recipe import recipe_title, recipes_dir
from vitscale.recipe.strict_yaml import read_yaml

_MOST_LINES = 50
# Keys that lead to a block, * for any name -> the block.
_BLOCKS: dict[tuple[str, ...], type[Block]] = {
    (): Study,
    ("parts", "*"): Part,
    ("parts", "*", "datasets", "*"): DataSet,
    ("parts", "*", "selection"): Selection,
    ("parts", "*", "refit"): Refit,
}


def studies_dir() -> Path:
    """The folder of the studies that come with vitscale."""
    return recipes_dir() / "studies"


def study_schema() -> dict[str, Any]:
    """The JSON Schema of a study's file. The fields of recipes that it sets are not told apart."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Study.model_json_schema()}


def list_studies() -> dict[str, str]:
    """The studies that come with vitscale: stem -> what its first line says."""
    return {file.stem: recipe_title(file) for file in sorted(studies_dir().glob("*.yaml"))}


def find_study(study: str | Path) -> Path:
    """The file of a study given by path, or by the stem of one that comes with vitscale. Raises `RecipeError`."""
    path = Path(study)
    try:
        if path.is_file():
            return path
    except OSError as error:
        raise RecipeError(f"{str(study)[:100]}...: {error.strerror}") from None
    shipped = studies_dir() / f"{path.name.removesuffix('.yaml')}.yaml"
    if path.parent in (Path(), Path("studies"), Path("recipes/studies")) and shipped.is_file():
        return shipped
    near = difflib.get_close_matches(path.name.removesuffix(".yaml"), list_studies(), n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise RecipeError(
        f"there is no study {str(study)!r}{hint}: expected a file, or one that comes with vitscale; `vitscale study` "
        f"lists them"
    )


def load_study(study: str | Path) -> Study:
    """Read and validate a study. Its recipes are not read yet: `expand` does that. Raises `RecipeError`."""
    path = find_study(study)
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: expected a mapping with the key parts")
    try:
        return Study.model_validate(content)
    except pydantic.ValidationError as error:
        lines = "\n".join(f"  {shortened(_describe(details))}" for details in error.errors()[:_MOST_LINES])
        raise RecipeError(f"{path} is not a valid study:\n{lines}") from None


def _describe(details: Any) -> str:
    """One line on a mistake that pydantic found."""
    parts = [str(part) for part in details["loc"] if part not in ("str", "list[str]")]  # which of two types it tried
    key, kind = ".".join(parts), details["type"]
    if kind == "extra_forbidden":
        valid = _keys_of(tuple(parts[:-1]))
        near = difflib.get_close_matches(parts[-1], valid, n=1)
        return f"{key}: unknown key; " + (f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(valid)}")
    if kind == "missing":
        return f"{key}: missing"
    if kind == "value_error":
        return f"{key}: {details['ctx']['error']}" if key else str(details["ctx"]["error"])
    if kind in ("model_type", "dict_type"):
        return f"{key}: {details['input']!r}: expected a block of keys"
    return f"{key}: {details['input']!r}: {describe_expected(details)}"


def _keys_of(place: tuple[str, ...]) -> list[str]:
    """The valid keys of the block at this place."""
    named = tuple("*" if index in (1, 3) else part for index, part in enumerate(place))
    return [field.alias or name for name, field in _BLOCKS[named].model_fields.items()]
