"""results.json: what every entry of a study has come to, which split decided what, means and deviations over seeds."""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

import pydantic

from vitscale.about.studies.expansion import Choice, Entry
from vitscale.about.studies.forecast import METRIC, Forecast, Law, Point, check_follows
from vitscale.about.studies.outcomes import StudyState, mean_scores
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.vtab import TASKS, vtab_means
from vitscale.ground.wording import describe_mistake
from vitscale.recipe import recipe_name
from vitscale.runs.reading import read_object

RESULTS_FILE = "results.json"
_VERSION = 1
_TOP1 = "validation/top1"
_Name = Annotated[str, pydantic.StringConstraints(pattern=r"^\w[^/]*$")]  # of a folder in the study's
_From = Annotated[str | None, pydantic.Field(validation_alias="from")]
Number = Annotated[int | float, pydantic.Field(ge=-1e18, le=1e18)]  # a number of a file, with which can be computed


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (n - 1) over runs that differ only in their seed; None for a single one."""

    mean: float
    std: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:  # of at least one
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class About:
    """A study: its name, its file, what ran it, and its KEY=VALUE settings."""

    study: str
    file: str
    engine: str
    settings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Split:
    """The split that an entry is evaluated on, and that split as recipes name it."""

    split: str
    dataset: str | None


@dataclass(frozen=True)
class EntryResult:
    """An entry: what it is, as `Entry` has it, and what has come of it. `recipe` to `grid` are None before a choice."""

    name: _Name
    part: str
    state: str
    exit_code: int | None = None
    why: str = ""
    dataset: str | None = None
    evaluated_on: Split | None = None
    seed: int | None = None
    from_: _From = None
    choice: str | None = None
    recipe: str | None = None
    recipe_sha256: str | None = None
    settings: list[str] | None = None
    grid: dict[str, Any] | None = None
    metrics: dict[str, Number] = field(default_factory=dict)
    step: int | None = None
    steps: int | None = None
    exaflops: Number | None = None


@dataclass(frozen=True)
class Deciders:
    """The splits that decided a choice, as recipes name them."""

    split: str
    datasets: list[str]


@dataclass(frozen=True)
class Candidate:
    """A candidate and its mean over its entries; None if one has diverged or is not done."""

    label: str
    entries: list[str]
    mean: Annotated[float, pydantic.Field(ge=-1e18, le=1e18)] | None
    grid: dict[str, Any]


@dataclass(frozen=True)
class Decision:
    """A choice. `winner` is None before it is decided, and if every candidate has diverged."""

    name: str
    decided_by: Deciders
    metric: str
    mode: str
    is_decided: bool
    winner: str | None
    candidates: list[Candidate]


@dataclass(frozen=True)
class Summary:
    """Entries that differ only in their seed."""

    part: str
    from_: _From
    dataset: str | None
    split: str | None
    label: str | None
    seeds: list[int | None]
    entries: list[str]
    metrics: dict[str, Spread]


@dataclass(frozen=True)
class VtabScore:
    """VTAB-1k's scores of a part that has all 19 tasks: by what they are means of, over seeds."""

    part: str
    from_: _From
    label: str | None
    metric: str
    means: dict[str, Spread]


@dataclass(frozen=True)
class Scored:
    """A forecast, and the run that it was of: what the law says at its compute, and whether its loss is within."""

    forecast: Forecast
    run: Point | None = None
    expected: Number | None = None
    low: Number | None = None
    high: Number | None = None

    def __post_init__(self) -> None:
        if self.run is not None:
            check_follows(self.forecast.points, self.run.exaflops, (self.expected, self.low, self.high))

    @property
    def is_within(self) -> bool | None:
        """Whether the loss is in the interval; None before the run is done."""
        if self.run is None or self.low is None or self.high is None:
            return None
        return self.low <= self.run.loss <= self.high


@dataclass(frozen=True)
class StudyResults(About):
    """The content of results.json, but for its version."""

    entries: list[EntryResult] = field(default_factory=list)
    choices: list[Decision] = field(default_factory=list)
    summaries: list[Summary] = field(default_factory=list)
    vtab: list[VtabScore] = field(default_factory=list)
    forecasts: list[Scored] = field(default_factory=list)


_CONTENT = pydantic.TypeAdapter(StudyResults)


def plain(results: Any) -> dict[str, Any]:
    """A dataclass as JSON has it; `from_` is written `from`."""
    return asdict(results, dict_factory=lambda pairs: {key.removesuffix("_"): value for key, value in pairs})


def results_text(about: About, study: StudyState) -> str:
    """The content of results.json."""
    entries = {entry.name: _entry(entry, study) for entry in study.expansion.entries.values()}
    choices = [_choice(choice, study) for choice in study.expansion.choices.values()]
    summaries = list(_summaries(entries, study))
    results = StudyResults(
        **vars(about),
        entries=[*entries.values()],
        choices=choices,
        summaries=summaries,
        vtab=_vtab(summaries, entries),
        forecasts=[_scored(forecast, entries.get(name)) for name, forecast in study.forecasts.items()],
    )
    return json.dumps({"version": _VERSION, **plain(results)}, indent=1, allow_nan=False) + "\n"


def read_results(folder: Path) -> StudyResults | None:
    """The content of results.json in a study's folder; None if there is none, or it is not a study's.

    Raises `DataError` for another version, and if it is damaged.
    """
    content, path = read_object(folder / RESULTS_FILE), folder / RESULTS_FILE
    if content is None or "entries" not in content:
        return None
    if (version := content.get("version")) != _VERSION:
        again = "run the study's command again, which rewrites it"
        raise DataError(f"{path}: version {version!r}; this vitscale reads {_VERSION}: {again}")
    try:
        json.dumps(content, ensure_ascii=False, allow_nan=False).encode()  # neither NaN nor half a character
        return _CONTENT.validate_python(content)
    except pydantic.ValidationError as error:
        raise DataError(f"{path}: damaged: {describe_mistake(error.errors()[0])}") from None
    except (RecipeError, ValueError) as error:
        raise DataError(f"{path}: damaged: {error}") from None


def but_for_the_seed(
    entry: EntryResult, entries: Mapping[str, EntryResult], is_branch: Callable[[str], bool]
) -> tuple[Any, ...]:
    """What entries that differ only in their seed have in common; branches go with those of the other trunks."""
    origin: Any = entry.from_
    if origin in entries and is_branch(entry.name):
        origin = but_for_the_seed(entries[origin], entries, is_branch)
    split = None if entry.evaluated_on is None else entry.evaluated_on.split
    grid = json.dumps(entry.grid, sort_keys=True)
    return entry.part, origin, entry.dataset, split, entry.choice, grid, entry.recipe


def _entry(entry: Entry, study: StudyState) -> EntryResult:
    progress, label = study.progress[entry.name], study.label_of(entry)
    known: dict[str, Any] = {} if progress.outcome is None else progress.outcome._asdict()
    if label is not None:
        option = entry.option(label)
        known |= {"recipe": recipe_name(option.source), "recipe_sha256": option.recipe_sha256}
        known |= {"settings": list(option.settings), "grid": dict(option.values)}
    return EntryResult(
        name=entry.name,
        part=entry.part,
        state="waiting" if progress.state == "running" else progress.state,  # readers find it so later
        exit_code=progress.code,
        why=progress.why,
        dataset=entry.dataset,
        evaluated_on=None if entry.split is None else Split(entry.split, entry.evaluated_on),
        seed=entry.seed,
        from_=entry.parent,
        choice=entry.choice,
        **known,
    )


def _scored(forecast: Forecast, entry: EntryResult | None) -> Scored:
    loss = None if entry is None else entry.metrics.get(METRIC)
    if entry is None or entry.state != "done" or loss is None or not entry.exaflops:
        return Scored(forecast)
    return Scored(forecast, Point(entry.name, entry.exaflops, loss), *Law(forecast.points).at(entry.exaflops))


def _choice(choice: Choice, study: StudyState) -> Decision:
    candidates = []
    for label, mean in mean_scores(study.scores(choice)).items():
        names = choice.candidates[label]
        values = study.expansion.entries[names[0]].options[0].values
        candidates.append(Candidate(label, list(names), mean, dict(values)))
    is_decided, winner = choice.name in study.winners, study.winners.get(choice.name)
    by = Deciders("dev", list(choice.decided_by))
    return Decision(choice.name, by, choice.metric, choice.rule.mode, is_decided, winner, candidates)


def _summaries(entries: Mapping[str, EntryResult], study: StudyState) -> Iterator[Summary]:
    """Entries that differ only in their seed, once all are done."""
    known = study.expansion.entries
    groups: dict[tuple[Any, ...], list[EntryResult]] = {}
    for entry in entries.values():
        key = but_for_the_seed(entry, entries, lambda name: bool(known[name].options[0].recipe.first_step))
        groups.setdefault(key, []).append(entry)
    for group in groups.values():
        if any(entry.state != "done" for entry in group):
            continue
        first = known[group[0].name]
        yield Summary(
            part=first.part,
            from_=", ".join(dict.fromkeys(entry.from_ for entry in group if entry.from_ is not None)) or None,
            dataset=first.dataset,
            split=first.split,
            label=None if first.choice is not None else first.options[0].label,
            seeds=[entry.seed for entry in group],
            entries=[entry.name for entry in group],
            metrics={
                key: Spread.of([entry.metrics[key] for entry in group if key in entry.metrics])
                for key in group[0].metrics
            },
        )


def _vtab(summaries: Sequence[Summary], entries: Mapping[str, EntryResult]) -> list[VtabScore]:
    """VTAB-1k's scores of every part that has all 19 tasks: the means of each group, over tasks and over groups.

    Each is the mean and sample standard deviation over seeds of a mean over tasks, as in the paper's Table 2.
    """
    groups: dict[tuple[Any, ...], list[Summary]] = {}
    for summary in summaries:
        if summary.split != "dev" and summary.dataset in TASKS and _TOP1 in summary.metrics:
            groups.setdefault((summary.part, summary.from_, summary.label), []).append(summary)
    scores = []
    for (part, origin, label), group in groups.items():
        seeds = {tuple(summary.seeds) for summary in group}
        if {summary.dataset for summary in group} != TASKS.keys() or len(group) != len(TASKS) or len(seeds) > 1:
            continue
        found: dict[str, list[float]] = {}
        for names in zip(*(summary.entries for summary in group), strict=True):
            known = {entries[name].dataset or "": entries[name].metrics.get(_TOP1) for name in names}
            top1 = {dataset: value for dataset, value in known.items() if value is not None}
            if len(top1) == len(TASKS):
                for what, mean in vtab_means(top1).items():
                    found.setdefault(what, []).append(mean)
        means = {what: Spread.of(values) for what, values in found.items()}
        scores.append(VtabScore(part, origin, label, _TOP1, means))
    return scores
