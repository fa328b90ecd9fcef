"""What the report says, as data: everything that the page shows, numbers first; and how it is written."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitscale.about.report.datasets import DatasetRecord, Deduplication, deduplication, shown_path, tests_of
from vitscale.about.report.datasets import record_of as record_of_dataset
from vitscale.about.report.paper import PaperTable, VtabTable, beside_the_paper
from vitscale.about.report.records import Policy, RunRecord, read_run, record_of
from vitscale.about.report.results import Datasets, Item, Result, results
from vitscale.about.studies.reading import studies_dir
from vitscale.about.studies.results import (
    About,
    Decision,
    EntryResult,
    Scored,
    StudyResults,
    VtabScore,
    plain,
    read_results,
)
from vitscale.ground.errors import RecipeError, VitscaleError, os_errors
from vitscale.ground.files.durable import make_folder, remove_leftovers, write_text
from vitscale.ground.versions import versions
from vitscale.runs.names import RECIPE_FILE
from vitscale.runs.reading import read_object
from vitscale.runs.run import Run

PAGE_FILE = "index.html"
RESULTS_FILE = "results.json"
_KIND = "vitscale report"
_VERSION = 1
_BEGUN_WITH = "begun with"


@dataclass(frozen=True)
class ReportedRun:
    """A run of the report: a `run` that was named, an `entry` of the study, or one that others have `begun with`."""

    role: str
    name: str
    state: str
    why: str = ""
    recipe: str | None = None
    settings: list[str] = field(default_factory=list)
    recipe_sha256: str | None = None
    record: RunRecord | None = None  # None before it has begun, and if `why` says that it cannot be read


@dataclass(frozen=True)
class Spent:
    """What runs have cost together."""

    runs: int
    images: int
    exaflops: float
    device_hours: float
    runs_without_device_hours: int


@dataclass(frozen=True)
class Compute:
    """What the reported runs have cost, and those that they have begun with."""

    reported: Spent
    begun_with: Spent
    all: Spent


@dataclass(frozen=True)
class Report:
    """The content of a report; `made_by` has versions by name, `states` the number of runs by state."""

    kind: str
    version: int
    title: str
    sources: list[str]
    study: About | None
    made_by: dict[str, str]
    states: dict[str, int]
    results: list[Result]
    policies: list[Policy]
    choices: list[Decision]
    vtab: list[VtabScore]
    forecasts: list[Scored]
    paper: list[PaperTable | VtabTable]
    deduplication: list[Deduplication]
    datasets: list[DatasetRecord]
    compute: Compute
    runs: list[ReportedRun]

    def plain(self) -> dict[str, Any]:
        """The content of results.json; a run and its record are one object."""
        content = plain(self)
        for place, run in enumerate(content["runs"]):
            record = run.pop("record") or {}
            if run["role"] == _BEGUN_WITH:  # it has no place in the study
                run = {key: run[key] for key in ("role", "state", "why")}
            content["runs"][place] = run | record
        return content


def gather(sources: Sequence[Path], title: str | None = None) -> Report:
    """What the report says of directories of runs, and of at most one study.

    The title is by default the study's name, or the runs'.

    Raises `RecipeError` for what is neither, or is named twice, and `DataError` if records are broken.
    """
    study, items = _items(sources)
    named = {item.run.directory.resolve(): item.run for item in items if item.run is not None}
    runs: dict[Path, Run] = {}
    for run in [run for start in named.values() for run in start.chain]:
        runs.setdefault(run.directory.resolve(), run)
    reported = [run for place, run in runs.items() if place in named]
    before = [run for place, run in runs.items() if place not in named]
    policies: list[Policy] = []
    datasets = Datasets()
    found = list(results(items, policies, datasets))
    return Report(
        kind=_KIND,
        version=_VERSION,
        title=title or (study.study if study is not None else ", ".join(item.name for item in items)),
        sources=[str(source) for source in sources],
        study=None if study is None else _about(study),
        made_by=versions(),
        states=dict(Counter(item.state for item in items)),
        results=found,
        policies=policies,
        choices=[] if study is None else study.choices,
        vtab=[] if study is None else study.vtab,
        forecasts=[] if study is None else study.forecasts,
        paper=beside_the_paper(found),
        deduplication=_deduplications(items, datasets),
        datasets=[record_of_dataset(dataset) for dataset in datasets.opened.values()],
        compute=Compute(_spent(reported), _spent(before), _spent(runs.values())),
        runs=[*map(_reported, items), *(_reported(Item(run.name, run), _BEGUN_WITH) for run in before)],
    )


def _about(study: About) -> About:
    file = shown_path(study.file) if Path(study.file).parent != studies_dir() else Path(study.file).name
    return About(study.study, file, study.engine, _shown_settings(study.settings))


def _shown_settings(settings: Iterable[str]) -> list[str]:
    """KEY=VALUE, whose values may be paths."""
    pairs = (setting.partition("=") for setting in settings)
    return [f"{key}{sign}{shown_path(value)}" for key, sign, value in pairs]


def _items(sources: Sequence[Path]) -> tuple[StudyResults | None, list[Item]]:
    study: StudyResults | None = None
    items: list[Item] = []
    for source in sources:
        found = read_results(source) if not (source / RECIPE_FILE).is_file() else None
        if found is None:
            run = read_run(source)
            if run.cost is None:
                raise RecipeError(f"{source}: nothing to report yet: the run has not written its first metrics")
            items.append(Item(run.name, run))
            continue
        if study is not None:
            raise RecipeError(f"{source} is a second study; a report takes one study and any number of runs")
        study = found
        items += [_entry_item(source, entry) for entry in found.entries]
    names = [item.run.directory.resolve() for item in items if item.run is not None]
    if twice := [str(name) for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise RecipeError(f"{twice[0]} is named twice; name each run once")
    return study, items


def _entry_item(folder: Path, entry: EntryResult) -> Item:
    directory = folder / entry.name
    try:
        if not (directory / RECIPE_FILE).is_file():
            return Item(entry.name, None, entry)
        return Item(entry.name, read_run(directory), entry)
    except (VitscaleError, OSError) as error:  # of one entry: the page shows it beside the others
        return Item(entry.name, None, entry, str(error))


def _reported(item: Item, role: str = "run") -> ReportedRun:
    entry, record = item.entry, None if item.run is None else replace(record_of(item.run), name=item.name)
    if entry is None:
        return ReportedRun(role, item.name, item.state, item.problem, record=record)
    settings, sha256 = _shown_settings(entry.settings or []), entry.recipe_sha256 if record is None else None
    why = item.problem or entry.why
    return ReportedRun("entry", item.name, item.state, why, entry.recipe, settings, sha256, record)


def _deduplications(items: Sequence[Item], datasets: Datasets) -> list[Deduplication]:
    """Every pair of a training set and a set that the trained model, or one derived from it, is evaluated on."""
    found: dict[tuple[str, str, str, str], Deduplication] = {}
    for item in items:
        if item.run is None:
            continue
        names, validation, role = tests_of(item.run), item.run.recipe.evaluation.validation, "training"
        if validation is not None and item.split == "dev":
            datasets.of(item.run, names.pop())  # its manifest is listed; a part of the training set is no test
        for run in item.run.chain:
            opened = datasets.of(run, run.recipe.data.train)
            for name in names:
                test = datasets.of(item.run, name)
                where = [one.manifest.where if one.manifest is not None else one.name for one in (opened, test)]
                key = where[0], where[1], role, name
                if key not in found:
                    found[key] = deduplication(opened, test, role)
            if run is item.run.trunk:
                role = "pre-training"
    return sorted(found.values(), key=lambda pair: (pair.test, pair.role, pair.train))


def _spent(runs: Iterable[Run]) -> Spent:
    costs = [run.cost for run in runs if run.cost is not None]
    images, exaflops = sum(cost.images for cost in costs), sum(cost.exaflops for cost in costs)
    seconds = [cost.device_seconds for cost in costs]
    device_hours = sum(one for one in seconds if one is not None) / 3600
    return Spent(len(costs), images, exaflops, device_hours, runs_without_device_hours=seconds.count(None))


def check_folder(folder: Path) -> None:
    """Raise `RecipeError` for a folder that holds something other than a report: no other results are overwritten."""
    with os_errors(f"--out {str(folder)[:100]}: cannot be used", RecipeError):
        if folder.exists() and not folder.is_dir():
            raise RecipeError(f"--out {folder}: is a file; expected a folder")
        if (folder / RECIPE_FILE).exists():
            raise RecipeError(f"--out {folder}: is a run's directory; choose another folder")
        there = [name for name in (PAGE_FILE, RESULTS_FILE) if (folder / name).exists()]
    if there and (read_object(folder / RESULTS_FILE) or {}).get("kind") != _KIND:
        raise RecipeError(f"--out {folder}: contains {there[0]}, which no report wrote; choose another folder")


def write_report(folder: Path, report: Report, page: str) -> None:
    """Write both files, complete or absent, over an earlier report. Raises as `check_folder`, and `DataError`."""
    check_folder(folder)
    with os_errors(f"--out {folder}: cannot be written"):
        make_folder(folder)
        remove_leftovers(folder)
        write_text(folder / RESULTS_FILE, json.dumps(report.plain(), indent=1, allow_nan=False) + "\n")
        write_text(folder / PAGE_FILE, page)
