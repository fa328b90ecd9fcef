"""Expands a study into its entries: a pure function, which validates every recipe that may come to run."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from vitscale.about.studies.forecast import LEAST_RUNS
from vitscale.about.studies.reading import DEV, MOST_RUNS, Part, Selection, Study
from vitscale.ground.errors import RecipeError, VitscaleError
from vitscale.ground.storage import is_url
from vitscale.ground.wording import counted, did_you_mean
from vitscale.recipe import Recipe, find_recipe, override, read_content, recipe_sha256, refuse_secrets
from vitscale.recipe.strict_yaml import parse_yaml

_VALIDATION = "validation/"  # the prefix of the metrics of a recipe's `evaluation.validation`

_MOST_PROBLEMS = 50
_Candidate = tuple[str, str, dict[str, Any]]  # a label, a recipe, and the grid's values


@dataclass(frozen=True)
class Option:
    """A recipe that an entry may come to run."""

    label: str  # what sets it apart from other candidates, in file names; empty without a grid
    source: str  # the recipe's file
    settings: tuple[str, ...]  # KEY=VALUE, on top of it
    values: Mapping[str, Any]  # of the grid
    recipe: Recipe  # with all of these

    @cached_property
    def recipe_sha256(self) -> str:
        """The digest of all fields, defaults included; in hexadecimal."""
        return recipe_sha256(self.recipe.dump())


@dataclass(frozen=True)
class Entry:
    """One run of a study; its directory has its name."""

    name: str
    part: str
    dataset: str | None  # its name in the study
    split: str | None  # of that data set, on which it is evaluated: `dev` or `test`; None without a data set
    evaluated_on: str | None  # that split as recipes name it
    seed: int | None  # that the study gives or that is taken from the parent; None for the recipe's own
    parent: str | None  # the entry whose run it begins with
    options: tuple[Option, ...]  # a single one; if the entry waits for a choice, one for each candidate that may win
    choice: str | None = None  # the name of that choice
    depends_on: tuple[str, ...] = ()
    forecast_from: tuple[str, ...] = ()  # the runs by which its loss is forecast

    def option(self, label: str | None) -> Option:
        """The option that runs: the only one, or the winner's."""
        if self.choice is None:
            return self.options[0]
        return next(option for option in self.options if option.label == label)


@dataclass(frozen=True)
class Choice:
    """A choice of one winner among candidates."""

    name: str  # the part and, if there are several, the run that they begin with and the data set
    rule: Selection
    metric: str  # as runs report it
    candidates: Mapping[str, tuple[str, ...]]  # label -> entries, over which the metric is averaged
    decided_by: tuple[str, ...]  # the development splits, as recipes name them

    @property
    def entries(self) -> tuple[str, ...]:
        """The runs of all candidates."""
        return tuple(entry for entries in self.candidates.values() for entry in entries)


@dataclass(frozen=True)
class Expansion:
    """The entries of a study, each after those it depends on, and its choices, by name."""

    entries: dict[str, Entry] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)


def expand(study: Study, folder: Path, settings: Sequence[str] = (), beside: Path | None = None) -> Expansion:
    """Expand a study into all of its runs, with `settings` KEY=VALUE for the recipes of all entries.

    Each run has a directory of its name in a folder, to which runs that begin with another's weights refer. Recipes
    given by a path are looked for first `beside` the study's file, in its folder.

    Raises `RecipeError` for a recipe that is not valid, an edge to nothing, a cycle, two entries of one name, and if a
    choice could see a test split.
    """
    expander = _Expander(study, folder, settings, beside)
    for name in study.parts:
        expander.add(name, ())
    return expander.expansion


class _Expander:
    def __init__(self, study: Study, folder: Path, settings: Sequence[str], beside: Path | None) -> None:
        self.expansion = Expansion()
        self.study, self._folder, self.settings = study, folder, settings
        self._finals: dict[str, list[str]] = {}
        self._beside, self._content = beside, cache(read_content)
        self._valid: dict[tuple[str, ...], Recipe] = {}
        self._tests = {
            splits.test: f"parts.{name}.datasets.{dataset}.test"
            for name, part in study.parts.items()
            for dataset, splits in part.datasets.items()
            if splits.test is not None
        }

    def add(self, name: str, chain: tuple[str, ...]) -> None:
        """Add a part, after those that it begins with."""
        if name in self._finals:
            return
        if name in chain:
            raise RecipeError(f"parts.{name}: a cycle: {' -> '.join((*chain[chain.index(name) :], name))}")
        part = self.study.parts[name]
        parents: list[str | None] = [*self._entries_before(part.source, "from", (*chain, name))]
        smaller = self._entries_before(part.forecast, "forecast", (*chain, name))
        self._finals[name] = []
        for parent in parents or [None]:
            label = "-".join([name, *([parent] if parent is not None and len(parents) > 1 else [])])
            _PartOfOneParent(self, part, name, label, parent, smaller).add()

    def _entries_before(self, sources: Sequence[str], key: str, chain: tuple[str, ...]) -> list[str]:
        """The entries that a part names, after adding what they are in."""
        found = []
        for source in sources:
            other = source.partition("-")[0]  # no part has one in its name
            if other in self.study.parts:
                self.add(other, chain)
            found += self._entries_of(source, f"{chain[-1]}.{key}")
        return found

    def _entries_of(self, source: str, where: str) -> list[str]:
        if source in self._finals:
            return self._finals[source]
        if source in self.expansion.entries:
            return [source]
        hint = did_you_mean(source, [*self.study.parts, *self.expansion.entries])
        raise RecipeError(f"parts.{where}: there is no part or entry {source!r}{hint and f'; {hint}'}")

    def begin(self, part: Part, parent: str, where: str) -> dict[str, Any]:
        """What a run sets that begins with a parent's: `init.from`, the same everywhere, and what the part takes."""
        begin: dict[str, Any] = {"init.from": str((self._folder / parent).absolute())}
        for key in part.take:
            values = []
            for option in self.expansion.entries[parent].options:
                value: Any = option.recipe.dump()
                for word in key.split("."):
                    value = value.get(word) if isinstance(value, dict) else None
                values.append(value)
            if values[0] is None or any(value != values[0] for value in values):
                raise RecipeError(
                    f"parts.{where}.take: {key}: the recipe of {parent} has none, or leaves it to a choice"
                )
            begin[key] = values[0]
        return begin

    def recipe(self, where: str, source: str, settings: Sequence[str]) -> tuple[Path, Recipe]:
        """(the recipe's file, the recipe with settings, validated once)."""
        beside = None if self._beside is None else self._beside / source
        path = beside if beside is not None and beside.is_file() else find_recipe(source)
        key = (str(path), *settings)
        if key not in self._valid:
            self._valid[key] = refuse_secrets(override(self._content(path), settings, where), where)
        return path, self._valid[key]

    def enter(self, entry: Entry, *, is_final: bool) -> None:
        """Add an entry. Raises `RecipeError` if another one has its name."""
        if entry.name in self.expansion.entries:
            raise RecipeError(f"parts.{entry.part}: two entries are called {entry.name}: a value is twice in a list")
        if len(self.expansion.entries) >= MOST_RUNS:
            raise RecipeError(f"parts.{entry.part}: the study has more than {MOST_RUNS:,} runs; use several studies")
        self.expansion.entries[entry.name] = entry
        for option in entry.options:
            if option.recipe.selection is not None:
                self._refuse_tests(option, f"{entry.name}, whose recipe selects a checkpoint (selection),")
        if is_final:
            self._finals[entry.part].append(entry.name)

    def choose(self, choice: Choice) -> None:
        """Add a choice. Raises `RecipeError` if a recipe that decides it sees a test split."""
        self.expansion.choices[choice.name] = choice
        for name in choice.entries:
            self._refuse_tests(self.expansion.entries[name].options[0], f"{name}, a candidate,")

    def _refuse_tests(self, option: Option, who: str) -> None:
        """Raise `RecipeError` if a recipe by which something is chosen names a test split of the study."""
        tests = {_place(test, option.recipe): key for test, key in self._tests.items()}
        for text in _texts(option.recipe.dump()):
            if key := tests.get(_place(text, option.recipe)):
                raise RecipeError(f"{who} would see {text!r}, which is {key}: no choice may see a test split")


class _PartOfOneParent:
    """The entries of a part that begin with one run, or with no run."""

    def __init__(
        self, expander: _Expander, part: Part, name: str, label: str, parent: str | None, smaller: Sequence[str]
    ) -> None:
        self._expander, self._part, self._name, self._label, self._parent = expander, part, name, label, parent
        self._begin = {} if parent is None else expander.begin(part, parent, name)
        self._parents = () if parent is None else (parent,)
        self._candidates, self._smaller = list(_combinations(part)), smaller

    def add(self) -> None:
        part = self._part
        datasets: Sequence[str | None] = [*part.datasets] or [None]
        seeds: Sequence[int | None] = part.seeds or [None]
        self._validate(datasets)
        entries = {  # dataset -> label of the candidate -> names
            dataset: {
                candidate[0]: tuple(self._candidate(dataset, candidate, seed) for seed in seeds)
                for candidate in self._candidates
            }
            for dataset in datasets
        }
        if part.selection is None:
            return
        choices: dict[str | None, Choice] = {}
        if part.selection.shared:
            labels = entries[datasets[0]]
            shared = {label: tuple(e for each in entries.values() for e in each[label]) for label in labels}
            choices = dict.fromkeys(datasets, self._choice(self._label, part.selection, shared))
        else:
            for dataset, candidates in entries.items():
                choices[dataset] = self._choice(self._named(dataset), part.selection, candidates)
        if part.refit is not None:
            for dataset, choice in choices.items():
                for seed in part.refit.seeds:
                    self._refit(dataset, choice, seed)

    def _validate(self, datasets: Sequence[str | None]) -> None:
        """Raise one `RecipeError` for all recipes of the part that are not valid."""
        problems: dict[str, None] = {}  # in order, each once
        for dataset, candidate in itertools.product(datasets, self._candidates):
            try:
                self._option(self._named(dataset, candidate[0]), candidate, dataset, None)
            except RecipeError as error:
                problems[str(error)] = None
                if len(problems) > _MOST_PROBLEMS:
                    break
        if problems:
            raise RecipeError("\n".join(problems))

    def _candidate(self, dataset: str | None, candidate: _Candidate, seed: int | None) -> str:
        name = self._named(dataset, candidate[0], None if seed is None else f"seed{seed}")
        split, dev = (None, None) if dataset is None else ("dev", self._part.datasets[dataset].dev)
        options, seed_of_run = (self._option(name, candidate, dataset, seed),), self._begin.get("seed", seed)
        smaller = self._smaller_of(dataset)
        before = (*self._parents, *smaller)
        entry = Entry(name, self._name, dataset, split, dev, seed_of_run, self._parent, options, None, before, smaller)
        self._expander.enter(entry, is_final=self._part.refit is None)
        return name

    def _smaller_of(self, dataset: str | None) -> tuple[str, ...]:
        """The runs by which one on this data set is forecast. Raises `RecipeError` if they are too few."""
        entries = self._expander.expansion.entries
        found = tuple(name for name in self._smaller if entries[name].dataset in (None, dataset))
        if self._smaller and len(found) < LEAST_RUNS:
            of = f" on {dataset}" if dataset else ""
            raise RecipeError(f"parts.{self._name}.forecast: {counted(len(found), 'run')}{of}; expected {LEAST_RUNS}")
        return found

    def _refit(self, dataset: str | None, choice: Choice, seed: int) -> None:
        assert dataset is not None
        name, test = self._named(dataset, "full", f"seed{seed}"), self._part.datasets[dataset].test
        options = tuple(self._option(name, each, dataset, seed, is_refit=True) for each in self._candidates)
        depends_on = (*choice.entries, *self._parents)
        entry = Entry(name, self._name, dataset, "test", test, seed, self._parent, options, choice.name, depends_on)
        self._expander.enter(entry, is_final=True)

    def _option(
        self, name: str, candidate: _Candidate, dataset: str | None, seed: int | None, *, is_refit: bool = False
    ) -> Option:
        """A recipe with settings: the study's, part's, data set's, grid's, command line's, splits', and the seed."""
        label, source, values = candidate
        blocks, last = [self._expander.study.settings, self._part.settings], dict(self._begin)
        if dataset is not None:
            source, splits = source.replace("{dataset}", dataset), self._part.datasets[dataset]
            blocks.append(splits.settings)
            last["data.train"] = splits.full if is_refit else splits.train
            last["evaluation.validation"] = splits.test if is_refit else splits.dev
        pairs = [pair for block in (*blocks, values) for pair in block.items()]
        settings = [*map(_setting, pairs), *self._expander.settings, *map(_setting, last.items())]
        path, recipe = self._expander.recipe(f"parts.{name} ({source})", source, settings)
        if seed is not None:
            settings.append(f"seed={seed}")
            recipe = recipe.model_copy(update={"seed": seed})  # the seed's bounds are the same in both schemas
        return Option(label, str(path), tuple(settings), values, recipe)

    def _choice(self, name: str, rule: Selection, candidates: Mapping[str, tuple[str, ...]]) -> Choice:
        metric = _VALIDATION + rule.metric.removeprefix(DEV)
        entries = self._expander.expansion.entries
        names = [entry for of_label in candidates.values() for entry in of_label]
        probe = entries[names[0]].options[0].recipe.dump()
        probe["evaluation"]["every"] = {"steps": 1}
        probe["selection"] = {"metric": metric, "mode": rule.mode}
        override(probe, [], f"parts.{self._name}.selection")  # the recipe's schema knows what is evaluated
        decided_by = tuple(dict.fromkeys(str(entries[entry].evaluated_on) for entry in names))
        choice = Choice(name, rule, metric, candidates, decided_by)
        self._expander.choose(choice)
        return choice

    def _named(self, dataset: str | None, *words: str | None) -> str:
        of_dataset = dataset if len(self._part.datasets) > 1 or dataset != self._name else None
        return "-".join(word for word in (self._label, of_dataset, *words) if word)


def _combinations(part: Part) -> Iterator[_Candidate]:
    keys = [key for axis in part.grid for key in axis]
    points = [
        [dict(zip(axis, values, strict=True)) for values in zip(*axis.values(), strict=True)] for axis in part.grid
    ]
    for recipe in part.recipes:
        stem = [Path(recipe.replace("{dataset}", "")).stem] if len(part.recipes) > 1 else []
        for combined in itertools.product(*(enumerate(axis) for axis in points)):
            words = [_word(keys, index, point) for index, point in combined]
            values = {key: value for _, point in combined for key, value in point.items()}
            yield "-".join([*stem, *words]), recipe, values


def _word(keys: Sequence[str], index: int, point: Mapping[str, Any]) -> str:
    """The name of a point of an axis: keys, shortened from the left as far as they stay distinct, and values."""
    words = []
    for key, value in point.items():
        if isinstance(value, str):
            shown = re.sub(r"[^A-Za-z0-9.]+", "_", value).strip("_.")
        else:
            shown = json.dumps(value) if isinstance(value, int | float) else f"_{index}"
        words.append(_short(key, keys) + shown)
    return "-".join(words)


def _short(key: str, keys: Sequence[str]) -> str:
    """The last parts of a key, as few as tell it from all other keys."""
    parts = key.split(".")
    endings = (".".join(parts[-count:]) for count in range(1, len(parts)))
    return next((end for end in endings if sum(f".{other}".endswith(f".{end}") for other in keys) == 1), key)


def _setting(pair: tuple[str, Any]) -> str:
    """KEY=VALUE as on a command line; the value reads as what it is."""
    key, value = pair
    if isinstance(value, str):
        try:
            if parse_yaml(value, "") == value:
                return f"{key}={value}"
        except RecipeError:
            pass
    return f"{key}={json.dumps(value)}"


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for below in content.values() if isinstance(content, dict) else content:
            yield from _texts(below)


def _place(dataset: str, recipe: Recipe) -> str:
    """The real path of a dataset if it is there, otherwise its name."""
    try:
        where = recipe.dataset_path(dataset)
        return where if is_url(where) else str(Path(where).resolve())
    except (VitscaleError, ValueError, OSError):
        return dataset
