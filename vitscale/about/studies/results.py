"""results.json: what every entry of a study has come to, which split decided what, means and deviations over seeds."""

import json
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitscale.about.studies.choosing import mean_scores
from vitscale.about.studies.expansion import Choice, Entry
from vitscale.ground.errors import DataError
from vitscale.ground.vtab import TASKS, vtab_means
from vitscale.recipe import recipe_name
from vitscale.runs.reading import read_object

if TYPE_CHECKING:
    from vitscale.about.studies.running import StudyRun

RESULTS_FILE = "results.json"
_VERSION = 1
_TOP1 = "validation/top1"


def results_text(about: dict[str, Any], run: "StudyRun") -> str:
    """The content of results.json: `about`, then entries, choices and summaries."""
    entries = run.expansion.entries.values()
    summaries = list(_summaries(entries, run))
    content = {
        "version": _VERSION,
        **about,
        "entries": [_entry(entry, run) for entry in entries],
        "choices": [_choice(choice, run) for choice in run.expansion.choices.values()],
        "summaries": summaries,
        "vtab": list(_vtab(summaries, run)),
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def read_results(folder: Path) -> dict[str, Any] | None:
    """The content of results.json in a study's folder; None if there is none, or it is not a study's.

    Raises `DataError` for another version.
    """
    content = read_object(folder / RESULTS_FILE)
    if content is None or "entries" not in content:
        return None
    if content.get("version") != _VERSION:
        raise DataError(
            f"{folder / RESULTS_FILE}: version {content.get('version')!r}; this vitscale reads {_VERSION}: run the "
            "study's command again, which rewrites it"
        )
    return content


def _entry(entry: Entry, run: "StudyRun") -> dict[str, Any]:
    progress = run.progress[entry.name]
    option = None if progress.label is None else entry.option(progress.label)
    outcome = progress.outcome
    return {
        "name": entry.name,
        "part": entry.part,
        "state": "waiting" if progress.state == "running" else progress.state,  # readers find it so later
        "exit_code": progress.code,
        "why": progress.why,
        "dataset": entry.dataset,
        "evaluated_on": None if entry.split is None else {"split": entry.split, "dataset": entry.evaluated_on},
        "seed": entry.seed,
        "from": entry.parent,
        "choice": entry.choice,
        "recipe": None if option is None else recipe_name(option.source),
        "recipe_sha256": None if option is None else option.recipe_sha256,
        "settings": None if option is None else list(option.settings),
        "grid": None if option is None else dict(option.values),
        "metrics": {} if outcome is None else outcome.metrics,
        "step": None if outcome is None else outcome.step,
        "steps": None if outcome is None else outcome.steps,
        "exaflops": None if outcome is None else outcome.exaflops,
    }


def _choice(choice: Choice, run: "StudyRun") -> dict[str, Any]:
    scores, winner = run.scores(choice), run.winners.get(choice.name)
    return {
        "name": choice.name,
        "decided_by": {"split": "dev", "datasets": list(choice.decided_by)},
        "metric": choice.metric,
        "mode": choice.rule.mode,
        "is_decided": choice.name in run.winners,
        "winner": winner,
        "candidates": [
            {
                "label": label,
                "entries": list(choice.candidates[label]),
                "mean": mean,
                "grid": dict(run.expansion.entries[choice.candidates[label][0]].options[0].values),
            }
            for label, mean in mean_scores(scores).items()
        ],
    }


def _summaries(entries: Iterable[Entry], run: "StudyRun") -> Any:
    """Mean and sample standard deviation (n - 1) over entries that differ only in their seed, once all are done."""
    groups: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        groups.setdefault(_but_for_the_seed(entry, run), []).append(entry)
    for (part, _, dataset, split, label), group in groups.items():
        outcomes = [run.progress[entry.name].outcome for entry in group]
        found = [outcome.metrics for outcome in outcomes if outcome is not None]
        if len(found) < len(group):
            continue
        metrics = {}
        for key in found[0]:
            values = [each[key] for each in found if key in each]
            deviation = statistics.stdev(values) if len(values) > 1 else None
            metrics[key] = {"mean": statistics.fmean(values), "std": deviation, "n": len(values)}
        yield {
            "part": part,
            "from": ", ".join(dict.fromkeys(entry.parent for entry in group if entry.parent is not None)) or None,
            "dataset": dataset,
            "split": split,
            "label": label,
            "seeds": [entry.seed for entry in group],
            "entries": [entry.name for entry in group],
            "metrics": metrics,
        }


def _but_for_the_seed(entry: Entry, run: "StudyRun") -> tuple[Any, ...]:
    """What entries that differ only in their seed have in common; branches go with those of the other trunks."""
    label = None if entry.choice is not None else entry.options[0].label
    parent: Any = entry.parent
    if entry.parent is not None and entry.options[0].recipe.first_step:
        parent = _but_for_the_seed(run.expansion.entries[entry.parent], run)
    return entry.part, parent, entry.dataset, entry.split, label


def _vtab(summaries: list[dict[str, Any]], run: "StudyRun") -> Iterator[dict[str, Any]]:
    """VTAB-1k's scores of every part that has all 19 tasks: the means of each group, over tasks and over groups.

    Each is the mean and sample standard deviation over seeds of a mean over tasks, as in the paper's Table 2.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for summary in summaries:
        if summary["split"] != "dev" and summary["dataset"] in TASKS and _TOP1 in summary["metrics"]:
            groups.setdefault((summary["part"], summary["from"], summary["label"]), []).append(summary)
    for (part, parent, label), group in groups.items():
        seeds = {tuple(summary["seeds"]) for summary in group}
        if {summary["dataset"] for summary in group} != TASKS.keys() or len(group) != len(TASKS) or len(seeds) > 1:
            continue
        found: dict[str, list[float]] = {}
        for names in zip(*(summary["entries"] for summary in group), strict=True):
            outcomes = [run.progress[name].outcome for name in names]
            top1 = [None if outcome is None else outcome.metrics.get(_TOP1) for outcome in outcomes]
            known = {s["dataset"]: value for s, value in zip(group, top1, strict=True) if value is not None}
            if len(known) == len(TASKS):
                for what, mean in vtab_means(known).items():
                    found.setdefault(what, []).append(mean)
        yield {
            "part": part,
            "from": parent,
            "label": label,
            "metric": _TOP1,
            "means": {
                what: {
                    "mean": statistics.fmean(values),
                    "std": statistics.stdev(values) if len(values) > 1 else None,
                    "n": len(values),
                }
                for what, values in found.items()
            },
        }
