"""What the report says, as data: everything that the page shows, numbers first."""

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vitscale.about.report import records
from vitscale.about.report.datasets import Dataset, deduplication, open_dataset, shown_path
from vitscale.about.report.paper import beside_the_paper
from vitscale.about.studies.reading import studies_dir
from vitscale.about.studies.results import read_results
from vitscale.ground.errors import RecipeError, VitscaleError
from vitscale.ground.page import Figures
from vitscale.ground.versions import versions
from vitscale.runs.names import RECIPE_FILE
from vitscale.runs.run import Run

KIND = "vitscale report"
_VERSION = 1
_VALIDATION = "validation/"
_COUNTED = ("/top1", "/top5")  # metrics that are shares of the images


@dataclass(frozen=True)
class _Item:
    """A run of the report: what its study says about it, and the run itself if it has begun."""

    name: str
    run: Run | None
    entry: Mapping[str, Any]
    problem: str = ""

    @property
    def split(self) -> str:
        """`dev`, `test`, or `evaluation` if no study says which of them."""
        return (self.entry.get("evaluated_on") or {}).get("split") or "evaluation"

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics at its end; none before."""
        if self.entry and (self.run is None or self.entry["state"] != "done"):
            return self.entry["metrics"] if self.entry["state"] == "done" else {}
        return self.run.evaluation if self.run is not None else {}

    @property
    def state(self) -> str:
        """Its state in a word, for people."""
        if self.entry and self.entry["state"] not in ("waiting", "running"):
            return str(self.entry["state"])
        if self.run is None:
            return "not begun"
        return "done" if self.run.is_done else "unfinished"


def gather(
    sources: Sequence[Path], title: str | None = None, inspected: Sequence[tuple[Path, Figures]] = ()
) -> dict[str, Any]:
    """The content of the report's results.json.

    Args:
        sources: directories of runs, and of at most one study.
        title: the page's title; by default the study's name, or the runs'.
        inspected: folders of inspections, with what was drawn there.

    Raises `RecipeError` for what is neither, or is named twice, and `DataError` if records are broken.
    """
    study, items = _items(sources)
    runs = _all_runs(items)
    given = {item.run.directory.resolve() for item in items if item.run is not None}
    policies: list[dict[str, Any]] = []
    datasets: dict[tuple[str, str | None], Dataset] = {}
    results = list(_results(items, policies, datasets))
    named = title or (study and str(study.get("study"))) or ", ".join(item.name for item in items)
    return {
        "kind": KIND,
        "version": _VERSION,
        "title": named,
        "sources": [str(source) for source in sources],
        "study": None if study is None else _about(study),
        "made_by": versions(),
        "states": _counted(item.state for item in items),
        "results": results,
        "policies": policies,
        "choices": [] if study is None else study.get("choices", []),
        "vtab": [] if study is None else study.get("vtab", []),
        "paper": beside_the_paper(results),
        "deduplication": _deduplications(items, datasets),
        "datasets": [dataset.content() for dataset in datasets.values()],
        "compute": _compute(runs, given),
        "inspections": [{"folder": str(folder), **_inspection(figures)} for folder, figures in inspected],
        "runs": [_run(item) for item in items]
        + [
            {"role": "begun with", "state": "done" if run.is_done else "unfinished", "why": "", **records.content(run)}
            for run in runs
            if run.directory.resolve() not in given
        ],
    }


def _about(study: Mapping[str, Any]) -> dict[str, Any]:
    file = str(study.get("file"))
    shown = Path(file).name if Path(file).parent == studies_dir() else shown_path(file)
    settings = _shown_settings(study.get("settings") or [])
    return {"study": study.get("study"), "file": shown, "engine": study.get("engine"), "settings": settings}


def _shown_settings(settings: Iterable[str]) -> list[str]:
    """KEY=VALUE, whose values may be paths."""
    pairs = (setting.partition("=") for setting in settings)
    return [f"{key}{sign}{shown_path(value)}" for key, sign, value in pairs]


def _items(sources: Sequence[Path]) -> tuple[dict[str, Any] | None, list[_Item]]:
    study: dict[str, Any] | None = None
    items: list[_Item] = []
    for source in sources:
        found = read_results(source) if not (source / RECIPE_FILE).is_file() else None
        if found is None:
            run = records.read_run(source)
            if run.cost is None:
                raise RecipeError(f"{source}: nothing to report yet: the run has not written its first metrics")
            items.append(_Item(run.name, run, {}))
            continue
        if study is not None:
            raise RecipeError(f"{source} is a second study; a report takes one study and any number of runs")
        study = found
        items += [_entry_item(source, entry) for entry in found["entries"]]
    names = [item.run.directory.resolve() for item in items if item.run is not None]
    if twice := [str(name) for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise RecipeError(f"{twice[0]} is named twice; name each run once")
    return study, items


def _entry_item(folder: Path, entry: Mapping[str, Any]) -> _Item:
    directory = folder / str(entry["name"])
    if not (directory / RECIPE_FILE).is_file():
        return _Item(str(entry["name"]), None, entry)
    try:
        return _Item(str(entry["name"]), records.read_run(directory), entry)
    except VitscaleError as error:  # of one entry: the page shows it beside the others
        return _Item(str(entry["name"]), None, entry, str(error))


def _all_runs(items: Sequence[_Item]) -> list[Run]:
    """All runs, and those that they go back to, each once."""
    found: dict[Path, Run] = {}
    for item in items:
        for run in item.run.chain if item.run is not None else []:
            found.setdefault(run.directory.resolve(), run)
    return list(found.values())


def _run(item: _Item) -> dict[str, Any]:
    entry, run = item.entry, item.run
    content: dict[str, Any] = {
        "role": "entry" if entry else "run",
        "name": item.name,
        "state": item.state,
        "why": item.problem or str(entry.get("why") or ""),
        "recipe": entry.get("recipe"),
        "settings": _shown_settings(entry.get("settings") or []),
        "recipe_sha256": entry.get("recipe_sha256"),
    }
    if run is not None:
        content |= {**records.content(run), "name": item.name}
    return content


def _inspection(figures: Figures) -> dict[str, Any]:
    """An inspection without its drawings."""
    content = asdict(figures)
    del content["version"]
    for figure in content["figures"]:
        del figure["svg"], figure["width"]
    return content


# ---- Results ---------------------------------------------------------------------------------------------------------


def _results(
    items: Sequence[_Item], policies: list[dict[str, Any]], datasets: dict[tuple[str, str | None], Dataset]
) -> Iterator[dict[str, Any]]:
    """Mean and sample standard deviation (n - 1) over runs that differ only in their seed, metric by metric."""
    groups: dict[str, list[_Item]] = {}
    for item in items:
        groups.setdefault(_but_for_the_seed(item), []).append(item)
    for group in groups.values():
        first = next((item for item in group if item.run is not None), None)
        if first is None or first.run is None:
            continue
        done = [item for item in group if item.metrics]
        for metric in sorted({key for item in done for key in item.metrics}):
            values = [item.metrics[metric] for item in done if metric in item.metrics]
            named, crop = first.run.recipe.measured_on(metric)
            letter = None if crop is None else _letter(policies, records.policy(first.run, crop))
            dataset = None if named is None else _dataset(datasets, first.run, named)
            yield {
                "label": _label(first),
                "part": first.entry.get("part"),
                "model": first.run.recipe.model.describe(),
                "begins_with": records.begins_with(first.run.trunk),
                "pretraining_data": first.run.chain[-1].recipe.data.train if first.run.trunk.parent else None,
                "pretraining_samples": _samples(first.run.chain[-1]),
                "exaflops": _exaflops(first.run),
                "task": None if named is None else task_of(named),
                "dataset": named,
                "split": item_split(first, metric),
                "metric": metric,
                "policy": letter,
                "mean": statistics.fmean(values),
                "std": statistics.stdev(values) if len(values) > 1 else None,
                "interval": _interval(statistics.fmean(values), dataset) if metric.endswith(_COUNTED) else None,
                "n": len(values),
                "n_planned": len(group),
                "seeds": [_seed(item) for item in done if metric in item.metrics],
                "samples": None if dataset is None or dataset.manifest is None else dataset.manifest.num_samples,
                "runs": [item.name for item in done if metric in item.metrics],
            }


def _interval(share: float, dataset: Dataset | None) -> list[float] | None:
    """Wilson's interval of 95 % for a share of a dataset's images; None if their number is not known."""
    if dataset is None or dataset.manifest is None:
        return None
    n, z = dataset.manifest.num_samples, statistics.NormalDist().inv_cdf(0.975)
    middle, half = share + z**2 / (2 * n), z * (share * (1 - share) / n + (z / (2 * n)) ** 2) ** 0.5
    return [(middle - half) / (1 + z**2 / n), (middle + half) / (1 + z**2 / n)]


def item_split(item: _Item, metric: str) -> str:
    """The split that a metric belongs to: a study names one for the validation alone."""
    return item.split if metric.startswith(_VALIDATION) else "evaluation"


def _but_for_the_seed(item: _Item) -> str:
    if item.entry:
        keys = ("part", "from", "dataset", "choice", "grid", "recipe")
        content = {key: item.entry.get(key) for key in keys}
        if item.run is not None and item.run.recipe.first_step:
            content["from"] = item.run.but_for_the_seed  # branches of trunks that differ in their seed
        return json.dumps([content, item.split], sort_keys=True)
    assert item.run is not None
    return json.dumps(item.run.but_for_the_seed, sort_keys=True)


def _label(item: _Item) -> str:
    if not item.entry:
        return item.name
    grid = item.entry.get("grid") or {}
    parts = [str(item.entry["part"]), *(f"{key} {json.dumps(value)}" for key, value in grid.items())]
    return ", ".join(parts)


def _seed(item: _Item) -> int | None:
    if item.entry.get("seed") is not None:
        return int(item.entry["seed"])
    return None if item.run is None else item.run.recipe.seed


def _exaflops(run: Run, until: int | None = None) -> float | None:
    """exaFLOPs of a run, or of its steps up to one, and of the runs that it goes back to: trunks up to the branch."""
    if run.cost is None:
        return None
    first = run.recipe.first_step
    share = 1.0 if until is None else (until - first) / (run.cost.step - first)
    before = 0.0 if run.parent is None else _exaflops(run.parent, first or None)
    return None if before is None else before + share * run.cost.exaflops


def _samples(run: Run) -> int | None:
    return None if run.index is None else run.index.num_samples


def task_of(dataset: str) -> str:
    """A dataset's name without its split: `pets` for `pets/test`, `vtab/dtd` for `vtab/dtd/test`."""
    parts = [part for part in dataset.split("/") if part not in ("", ".", "..", "~")]
    named = parts[-2:-1] if dataset.startswith(("/", ".", "~")) or "://" in dataset else parts[:-1]
    return "/".join(named or parts)


def _letter(policies: list[dict[str, Any]], policy: dict[str, Any]) -> str:
    for known in policies:
        if {key: value for key, value in known.items() if key != "name"} == policy:
            return str(known["name"])
    name = chr(ord("A") + len(policies)) if len(policies) < 26 else f"A{len(policies)}"
    policies.append({"name": name, **policy})
    return name


# ---- Data ------------------------------------------------------------------------------------------------------------


def _dataset(datasets: dict[tuple[str, str | None], Dataset], run: Run, name: str) -> Dataset:
    """A dataset, opened once for each root: two runs may mean different folders by one name."""
    key = name, run.recipe.data.root
    if key not in datasets:
        datasets[key] = open_dataset(run, name)
    return datasets[key]


def _deduplications(items: Sequence[_Item], datasets: dict[tuple[str, str | None], Dataset]) -> list[dict[str, Any]]:
    """Every pair of a training set and a set that the trained model, or one derived from it, is evaluated on."""
    found: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for item in items:
        if item.run is None:
            continue
        fewshot = item.run.recipe.evaluation.fewshot
        names = [task.test for task in fewshot.tasks] if fewshot is not None else []
        validation = item.run.recipe.evaluation.validation
        if validation is not None and item.split == "dev":
            _dataset(datasets, item.run, validation)  # its manifest is listed; a part of the training set is no test
        elif validation is not None:
            names.append(validation)
        role = "training"
        for run in item.run.chain:
            opened = _dataset(datasets, run, run.recipe.data.train)
            for name in names:
                test = _dataset(datasets, item.run, name)
                where = [one.manifest.where if one.manifest is not None else one.name for one in (opened, test)]
                key = where[0], where[1], role, name
                if key not in found:
                    found[key] = deduplication(opened, test, role)
            if run is item.run.trunk:
                role = "pre-training"
    return sorted(found.values(), key=lambda row: (row["test"], row["role"], row["train"]))


# ---- Compute ---------------------------------------------------------------------------------------------------------


def _compute(runs: Sequence[Run], given: Iterable[Path]) -> dict[str, Any]:
    """What all reported runs together have spent, and what those before them have."""
    inside = set(given)

    def of(chosen: Sequence[Run]) -> dict[str, Any]:
        costs = [run.cost for run in chosen if run.cost is not None]
        seconds = [cost.device_seconds for cost in costs]
        return {
            "runs": len(costs),
            "images": sum(cost.images for cost in costs),
            "exaflops": sum(cost.exaflops for cost in costs),
            "device_hours": sum(one for one in seconds if one is not None) / 3600,
            "runs_without_device_hours": sum(one is None for one in seconds),
        }

    return {
        "reported": of([run for run in runs if run.directory.resolve() in inside]),
        "begun_with": of([run for run in runs if run.directory.resolve() not in inside]),
        "all": of(runs),
    }


def _counted(states: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for state in states:
        found[state] = found.get(state, 0) + 1
    return found
