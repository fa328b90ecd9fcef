"""A study's file: its schema, typed, strict and frozen as a recipe's, and how it is read.

Every mistake is a `RecipeError` with key, value and what was expected.
"""

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, model_validator

from vitscale.ground.block import Block
from vitscale.ground.errors import RecipeError, os_errors
from vitscale.ground.wording import describe_expected, did_you_mean, shortened
from vitscale.recipe import recipe_title, recipes_dir
from vitscale.recipe.strict_yaml import read_yaml

DEV, TEST = "dev/", "test/"
MOST_RUNS = 2000
_MOST_LINES = 50
_NAME = re.compile(r"[A-Za-z0-9_.]+")
_Seed = Annotated[int, Field(ge=0, lt=2**63)]
_Values = Annotated[list[Any], Field(min_length=1)]


class DataSet(Block):
    """One data set by its splits, each named as `data.train` of a recipe."""

    train: str = Field(description="what candidates are trained on")
    dev: str = Field(description="what candidates are evaluated on, and chosen by")
    full: str | None = Field(None, description="what the winner is trained on again")
    test: str | None = Field(None, description="what the winner is evaluated on; nothing is ever chosen by it")
    settings: dict[str, Any] = Field({}, description="fields of the recipe for this data set alone")
    samples: int | None = Field(None, ge=1, lt=2**53, description="of `full`, for plans without the data")
    classes: int | None = Field(None, ge=1, lt=2**31, description="for plans without the data")


class Selection(Block):
    """Which candidate wins: by the mean over seeds of a metric of the development split at the end of its run."""

    metric: str = Field("dev/top1", description="dev/ and a metric of the recipe's validation")
    mode: Literal["max", "min"] = Field("max", description="whether high or low is good")
    shared: bool = Field(False, description="one winner for all data sets of the part, by the mean over them")

    @model_validator(mode="after")
    def _of_development(self) -> "Selection":
        if self.metric.startswith(TEST):
            raise ValueError(
                f"metric {self.metric!r}: no choice may see a test split; expected a metric of the development split, "
                f"such as dev/top1"
            )
        if not self.metric.removeprefix(DEV) or not self.metric.startswith(DEV):
            raise ValueError(f"metric {self.metric!r}: expected a metric of the development split, such as dev/top1")
        return self


class Refit(Block):
    """The winner once more: trained on `full`, evaluated on `test`, once for each seed."""

    seeds: list[_Seed] = Field([0, 1, 2], min_length=1, description="whose mean and standard deviation are the result")


class Part(Block):
    """Runs that differ in what the lists name: every combination is one entry."""

    recipe: str | list[str] = Field(
        description="a file or the stem of a recipe that comes with vitscale, or several; {dataset} in it is the name "
        "of the data set"
    )
    settings: dict[str, Any] = Field({}, description="fields of the recipe for all entries, by their dotted keys")
    grid: list[Annotated[dict[str, _Values], Field(min_length=1)]] = Field(
        [], description="axes, each {KEY: [VALUE, ...]}; lists of several keys in one axis go together, value by value"
    )
    datasets: dict[str, DataSet] = Field({}, description="name -> splits; without any, the recipe's own data")
    seeds: list[_Seed] = Field([], description="of each combination; none: the recipe's own")
    source: list[str] = Field(
        [],
        alias="from",
        description="entries, or parts for all that they end with: the runs that these begin with (init.from)",
    )
    take: list[str] = Field([], description="fields of the recipe that are those of the run it begins with")
    forecast: list[str] = Field(
        [],
        description="entries, or parts: smaller runs by whose loss and compute (a power law) the loss of each "
        "entry here is forecast, and written down before it begins; with data sets, those of the same one",
    )
    selection: Selection | None = Field(None, description="chooses one of the candidates")
    refit: Refit | None = Field(None, description="what becomes of the one that is chosen")

    @property
    def recipes(self) -> list[str]:
        """The recipes as a list, even if there is one."""
        return [self.recipe] if isinstance(self.recipe, str) else self.recipe

    @model_validator(mode="after")
    def _consistent(self) -> "Part":
        if not self.recipes:
            raise ValueError("recipe: expected one at least")
        for axis in self.grid:
            lengths = {key: len(values) for key, values in axis.items()}
            if len(set(lengths.values())) > 1:
                raise ValueError(f"grid: lists that go together are to be of one length, not {lengths}")
        settings = len(self.recipes) * math.prod(len(next(iter(axis.values()))) for axis in self.grid)
        most_seeds = max(1, len(self.seeds), len(self.refit.seeds) if self.refit is not None else 0)
        if settings * max(1, len(self.datasets)) * most_seeds > MOST_RUNS:
            raise ValueError(f"grid: more than {MOST_RUNS:,} runs")
        keys = [key for axis in self.grid for key in axis]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"grid: {key} is in two axes")
        if self.take and not self.source:
            raise ValueError("take needs from, which says whose fields these are")
        if self.selection is not None and not self.datasets:
            raise ValueError("selection needs datasets, whose dev it chooses by")
        if self.refit is not None and self.selection is None:
            raise ValueError("refit needs selection, which says what is run again")
        for name, splits in self.datasets.items():
            if self.refit is not None and (splits.full is None or splits.test is None):
                raise ValueError(f"refit needs datasets.{name}.full and datasets.{name}.test")
        return self


class Study(Block):
    """Many runs: parts, each a grid of entries."""

    settings: dict[str, Any] = Field({}, description="fields of the recipes of all parts, by their dotted keys")
    parts: dict[str, Part] = Field(min_length=1, description="name -> runs")

    @model_validator(mode="after")
    def _names(self) -> "Study":
        named = [("parts", name) for name in self.parts]
        named += [(f"parts.{name}.datasets", each) for name, part in self.parts.items() for each in part.datasets]
        for where, name in named:
            if not _NAME.fullmatch(name) or name.startswith("."):
                raise ValueError(f"{where}: {name!r}: expected a name of letters, digits, _ and .")
        return self


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
    with os_errors(f"{str(study)[:100]}...: cannot be read", RecipeError):
        if path.is_file():
            return path
    shipped = studies_dir() / f"{path.name.removesuffix('.yaml')}.yaml"
    if path.parent in (Path(), Path("studies"), Path("recipes/studies")) and shipped.is_file():
        return shipped
    hint = did_you_mean(path.name.removesuffix(".yaml"), list_studies())
    raise RecipeError(
        f"there is no study {str(study)!r}{hint and f' ({hint})'}: expected a file, or one that comes with vitscale; "
        f"`vitscale study` lists them"
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
    parts = [str(part) for part in details["loc"] if part not in ("str", "list[str]")]  # which of two types it tried
    key, kind = ".".join(parts), details["type"]
    if kind == "extra_forbidden":
        block = _BLOCKS[tuple("*" if index in (1, 3) else part for index, part in enumerate(parts[:-1]))]
        valid = [field.alias or name for name, field in block.model_fields.items()]
        return f"{key}: unknown key; {did_you_mean(parts[-1], valid) or 'valid keys: ' + ', '.join(valid)}"
    if kind == "missing":
        return f"{key}: missing"
    if kind == "value_error":
        return f"{key}: {details['ctx']['error']}" if key else str(details["ctx"]["error"])
    if kind in ("model_type", "dict_type"):
        return f"{key}: {details['input']!r}: expected a block of keys"
    return f"{key}: {details['input']!r}: {describe_expected(details)}"
