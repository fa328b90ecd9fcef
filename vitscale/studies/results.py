"""results.json: what every entry of a study has come to, which split decided what, means and deviations over seeds."""

import json
import statistics
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vitscale.studies.choosing import mean_scores
from vitscale.studies.expansion import Choice, Entry

if TYPE_CHECKING:
    from vitscale.studies.running import StudyRun

RESULTS_FILE = "results.json"
_VERSION = 1


def results_text(about: dict[str, Any], run: "StudyRun") -> str:
    """The content of results.json: `about` beside entries, choices and summaries."""
    entries = run.expansion.entries.values()
    content = {
        "version": _VERSION,
        **about,
        "entries": [_entry(entry, run) for entry in entries],
        "choices": [_choice(choice, run) for choice in run.expansion.choices.values()],
        "summaries": list(_summaries(entries, run)),
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _entry(entry: Entry, run: "StudyRun") -> dict[str, Any]:
    progress = run.progress[entry.name]
    option = None if progress.label is None else entry.option(progress.label)
    outcome = progress.outcome
    return {
        "name": entry.name,
        "part": entry.part,
        "state": "waiting" if progress.state == "running" else progress.state,  # as whoever reads this finds it later
        "exit_code": progress.code,
        "why": progress.why,
        "dataset": entry.dataset,
        "evaluated_on": None if entry.split is None else {"split": entry.split, "dataset": entry.evaluated_on},
        "seed": entry.seed,
        "from": entry.parent,
        "choice": entry.choice,
        "recipe": None if option is None else option.source,
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
    """Mean and sample standard deviation (n - 1) over entries that differ in their seed alone, once all are done."""
    groups: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        label = None if entry.choice is not None else entry.options[0].label
        groups.setdefault((entry.part, entry.parent, entry.dataset, entry.split, label), []).append(entry)
    for (part, parent, dataset, split, label), group in groups.items():
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
            "from": parent,
            "dataset": dataset,
            "split": split,
            "label": label,
            "seeds": [entry.seed for entry in group],
            "entries": [entry.name for entry in group],
            "metrics": metrics,
        }
