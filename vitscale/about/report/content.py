"""What the report says, as data: everything that the page shows, numbers first."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitscale.about.report.datasets import DatasetRecord, Deduplication, deduplication, shown_path
from vitscale.about.report.datasets import record_of as record_of_dataset
from vitscale.about.report.paper import PaperTable, VtabTable, beside_the_paper
from vitscale.about.report.records import Policy, RunRecord, read_run, record_of
from vitscale.about.report.results import Datasets, Item, Result, results
from vitscale.about.studies.reading import studies_dir
from vitscale.about.studies.results import About, Decision, EntryResult, StudyResults, VtabScore, plain, read_results
from vitscale.ground.errors import RecipeError, VitscaleError
from vitscale.ground.page import Figures
from vitscale.ground.versions import versions
from vitscale.runs.names import RECIPE_FILE
from vitscale.runs.run import Run

KIND = "vitscale report"
_VERSION = 1
_BEGUN_WITH = "begun with"


@dataclass(frozen=True)
class ReportedRun:
    """A run of the report: a `run` that was named, an `entry` of the study, or one that others have `begun with`.

    `record` is None before it has begun, and if `why` says that it cannot be read.
    """

    role: str
    name: str
    state: str
    why: str
    recipe: str | None
    settings: list[str]
    recipe_sha256: str | None
    record: RunRecord | None


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
class Inspection:
    """What `vitscale inspect` has drawn in a folder."""

    folder: str
    figures: Figures


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
    paper: list[PaperTable | VtabTable]
    deduplication: list[Deduplication]
    datasets: list[DatasetRecord]
    compute: Compute
    inspections: list[Inspection]
    runs: list[ReportedRun]

    def plain(self) -> dict[str, Any]:
        """The content of results.json: all but the drawings; a run and its record are one object."""
        content = plain(self)
        content["inspections"] = [{"folder": one["folder"], **one["figures"]} for one in content["inspections"]]
        for inspection in content["inspections"]:
            del inspection["version"]
            for figure in inspection["figures"]:
                del figure["svg"], figure["width"]
        content["runs"] = [_flat(run, run.pop("record") or {}) for run in content["runs"]]
        return content


def _flat(run: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    if run["role"] == _BEGUN_WITH:  # it has no place in the study
        run = {key: run[key] for key in ("role", "state", "why")}
    return run | record


def gather(sources: Sequence[Path], title: str | None = None, inspected: Sequence[tuple[Path, Figures]] = ()) -> Report:
    """What the report says.

    Args:
        sources: directories of runs, and of at most one study.
        title: the page's title; by default the study's name, or the runs'.
        inspected: folders of inspections, with what was drawn there.

    Raises `RecipeError` for what is neither, or is named twice, and `DataError` if records are broken.
    """
    study, items = _items(sources)
    named = [item.run for item in items if item.run is not None]
    given = {run.directory.resolve() for run in named}
    runs: dict[Path, Run] = {}
    for run in [run for start in named for run in start.chain]:
        runs.setdefault(run.directory.resolve(), run)
    before = [run for place, run in runs.items() if place not in given]
    policies: list[Policy] = []
    datasets = Datasets()
    found = list(results(items, policies, datasets))
    deduplications = _deduplications(items, datasets)
    return Report(
        kind=KIND,
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
        paper=beside_the_paper(found),
        deduplication=deduplications,
        datasets=[record_of_dataset(dataset) for dataset in datasets.opened.values()],
        compute=Compute(
            _spent(run for place, run in runs.items() if place in given), _spent(before), _spent(runs.values())
        ),
        inspections=[Inspection(str(folder), figures) for folder, figures in inspected],
        runs=[*map(_reported, items), *map(_begun_with, before)],
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


def _reported(item: Item) -> ReportedRun:
    entry, record = item.entry, None if item.run is None else replace(record_of(item.run), name=item.name)
    return ReportedRun(
        role="run" if entry is None else "entry",
        name=item.name,
        state=item.state,
        why=item.problem or ("" if entry is None else entry.why),
        recipe=None if entry is None else entry.recipe,
        settings=[] if entry is None else _shown_settings(entry.settings or []),
        recipe_sha256=entry.recipe_sha256 if record is None and entry is not None else None,
        record=record,
    )


def _begun_with(run: Run) -> ReportedRun:
    return ReportedRun(
        _BEGUN_WITH, run.name, "done" if run.is_done else "unfinished", "", None, [], None, record_of(run)
    )


def _deduplications(items: Sequence[Item], datasets: Datasets) -> list[Deduplication]:
    """Every pair of a training set and a set that the trained model, or one derived from it, is evaluated on."""
    found: dict[tuple[str, str, str, str], Deduplication] = {}
    for item in items:
        if item.run is None:
            continue
        fewshot = item.run.recipe.evaluation.fewshot
        names = [task.test for task in fewshot.tasks] if fewshot is not None else []
        validation = item.run.recipe.evaluation.validation
        if validation is not None and item.split == "dev":
            datasets.of(item.run, validation)  # its manifest is listed; a part of the training set is no test
        elif validation is not None:
            names.append(validation)
        role = "training"
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
    seconds = [cost.device_seconds for cost in costs]
    return Spent(
        runs=len(costs),
        images=sum(cost.images for cost in costs),
        exaflops=sum(cost.exaflops for cost in costs),
        device_hours=sum(one for one in seconds if one is not None) / 3600,
        runs_without_device_hours=sum(one is None for one in seconds),
    )
