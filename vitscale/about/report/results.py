"""What runs have come to: means over runs that differ only in their seed, metric by metric, each under its policy."""

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vitscale.about.report import records
from vitscale.about.report.datasets import Dataset, open_dataset
from vitscale.about.report.records import Policy
from vitscale.about.studies.results import EntryResult, Spread, but_for_the_seed
from vitscale.runs.intervals import accuracy_intervals
from vitscale.runs.run import Run

_VALIDATION = "validation/"


@dataclass(frozen=True)
class Item:
    """A run of the report: what its study says about it, and the run itself if it has begun."""

    name: str
    run: Run | None
    entry: EntryResult | None = None
    problem: str = ""

    @property
    def split(self) -> str:  # as in `Result`
        on = None if self.entry is None else self.entry.evaluated_on
        return "evaluation" if on is None else on.split

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics at its end; none before."""
        if self.entry is not None and self.entry.state != "done":
            return {}
        if self.run is None:
            return {} if self.entry is None else self.entry.metrics
        return self.run.evaluation

    @property
    def state(self) -> str:
        """Its state in a word, for people."""
        if self.entry is not None and self.entry.state not in ("waiting", "running"):
            return self.entry.state
        if self.run is None:
            return "not begun"
        return "done" if self.run.is_done else "unfinished"

    @property
    def seed(self) -> int | None:
        """The seed that its study gives, or its recipe's."""
        if self.entry is not None and self.entry.seed is not None:
            return self.entry.seed
        return None if self.run is None else self.run.recipe.seed

    @property
    def label(self) -> str:
        """What sets it apart from the others, but for the seed."""
        if self.entry is None:
            return self.name
        grid = self.entry.grid or {}
        return ", ".join([self.entry.part, *(f"{key} {json.dumps(value)}" for key, value in grid.items())])


@dataclass(frozen=True, kw_only=True)
class Result:
    """A metric of runs that differ only in their seed."""

    label: str
    part: str | None  # of the study
    model: str
    begins_with: str | None  # the run, or the file, whose weights it began with; for a branch, its trunk's
    pretraining_data: str | None  # the training set of the first of the runs that it goes back to
    pretraining_samples: int | None
    exaflops: float | None  # of one run and of those that it goes back to
    task: str | None
    dataset: str | None
    split: str  # `dev`, `test`, or `evaluation` if no study says which of them
    metric: str
    policy: str | None  # the name of a `Policy`; None for evaluators that have one of their own
    mean: float  # as `std` and `n` in `Spread`
    std: float | None
    interval: tuple[float, float] | None  # of 95 %, by Wilson, of the mean; None for what is no share of `samples`
    n: int
    n_planned: int
    seeds: list[int | None]
    samples: int | None
    runs: list[str]


class Datasets:
    """The datasets that runs name, each opened once for each root: two runs may mean different folders by one name."""

    def __init__(self) -> None:
        self.opened: dict[tuple[str, str | None], Dataset] = {}

    def of(self, run: Run, name: str) -> Dataset:
        key = name, run.recipe.data.root
        if key not in self.opened:
            self.opened[key] = open_dataset(run, name)
        return self.opened[key]


def results(items: Sequence[Item], policies: list[Policy], datasets: Datasets) -> Iterator[Result]:
    """All results; adds their policies and datasets to those known."""
    for group in _seed_groups(items):
        begun = [(item, item.run) for item in group if item.run is not None]
        if not begun:
            continue
        (first, run), done = begun[0], [item for item in group if item.metrics]
        oldest = run.chain[-1]
        data = oldest.recipe.data.train
        trained_on = datasets.of(oldest, data).samples if oldest.index is None else oldest.index.num_samples
        for metric in sorted({key for item in done for key in item.metrics}):
            measured = [item for item in done if metric in item.metrics]
            spread = Spread.of([item.metrics[metric] for item in measured])
            named, crop = run.recipe.measured_on(metric)
            policy = None if crop is None else _letter(policies, records.policy(run, crop))
            samples = None if named is None else datasets.of(run, named).samples
            yield Result(
                label=first.label,
                part=None if first.entry is None else first.entry.part,
                model=run.recipe.model.describe(),
                begins_with=records.begins_with(run.trunk),
                pretraining_data=data if run.trunk.parent else None,
                pretraining_samples=trained_on,
                exaflops=_exaflops(run),
                task=None if named is None else task_of(named),
                dataset=named,
                split=first.split if metric.startswith(_VALIDATION) else "evaluation",  # a study names no other
                metric=metric,
                policy=policy,
                mean=spread.mean,
                std=spread.std,
                interval=accuracy_intervals({metric: spread.mean}, samples).get(metric),
                n=spread.n,
                n_planned=len(group),
                seeds=[item.seed for item in measured],
                samples=samples,
                runs=[item.name for item in measured],
            )


def _seed_groups(items: Sequence[Item]) -> list[list[Item]]:
    entries = {item.name: item.entry for item in items if item.entry is not None}
    branches = {item.name for item in items if item.run is not None and item.run.recipe.first_step}
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        if item.entry is not None:
            key: Hashable = but_for_the_seed(item.entry, entries, branches.__contains__)
        else:
            key = None if item.run is None else json.dumps(item.run.but_for_the_seed, sort_keys=True)
        groups.setdefault(key, []).append(item)
    return list(groups.values())


def _exaflops(run: Run, until: int | None = None) -> float | None:
    """exaFLOPs of a run, or of its steps up to one, and of the runs that it goes back to: trunks up to the branch."""
    if run.cost is None:
        return None
    first = run.recipe.first_step
    share = 1.0 if until is None or run.cost.step == first else (until - first) / (run.cost.step - first)
    before = 0.0 if run.parent is None else _exaflops(run.parent, first or None)
    return None if before is None else before + share * run.cost.exaflops


def task_of(dataset: str) -> str:
    """A dataset's name without its split: `pets` for `pets/test`, `vtab/dtd` for `vtab/dtd/test`."""
    parts = [part for part in dataset.split("/") if part not in ("", ".", "..", "~")]
    named = parts[-2:-1] if dataset.startswith(("/", ".", "~")) or "://" in dataset else parts[:-1]
    return "/".join(named or parts)


def _letter(policies: list[Policy], policy: Policy) -> str:
    for known in policies:
        if replace(known, name="") == policy:
            return known.name
    name = chr(ord("A") + len(policies)) if len(policies) < 26 else f"A{len(policies)}"
    policies.append(replace(policy, name=name))
    return name
