"""The model card of an export: the README.md that a hub shows, from what is known of the model and of its run."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

from vitscale.about.report.datasets import deduplication, open_dataset, tests_of
from vitscale.ground.safe_text import printable, without_secrets
from vitscale.ground.weight_formats import Format
from vitscale.ground.wording import counted, shortened
from vitscale.models.weights import Description
from vitscale.runs.run import Run

_LIBRARIES = {"hf": "transformers", "timm": "timm"}


def model_card(
    description: Description,
    form: Format,
    lines: Sequence[str],
    run: Run | None = None,
    *,
    is_as_evaluated: bool = True,
    licence: str | None = None,
) -> str:
    """The text of a model card: YAML for the hub, then Markdown.

    Args:
        description: the model, as written: without classes if its head was left out.
        lines: Python that opens the model.
        run: the run that the weights are from; `is_as_evaluated` if that evaluates this model, at its image size.
        licence: the hub's name of the licence; by default `unknown`.
    """
    classes, step, evaluation = description.num_classes, description.step, dict[str, float | None]()
    front: dict[str, object] = {
        "license": _plain(licence or "unknown"),
        "library_name": _LIBRARIES.get(form, "vitscale"),
        "pipeline_tag": "image-feature-extraction" if classes is None else "image-classification",
        "tags": ["vitscale", "vision"],
    }
    if run is not None and classes is not None and is_as_evaluated and step is not None:
        evaluation = dict(run.metrics.evaluations).get(step, {})
    if evaluation:
        front["metrics"] = ["accuracy"]
    parameters = sum(parameter.numel() for parameter in description.build().parameters())
    of_head = "none" if classes is None else f"{classes:,}"
    facts = [("parameters", f"{parameters:,}"), ("images", description.pictures), ("classes", of_head)]
    text = ["---", yaml.safe_dump(front, sort_keys=False, allow_unicode=True).rstrip(), "---", ""]
    text += [f"# {_escaped(description.title)}", "", "```python", *lines, "```", "", *_table(("model", ""), facts)]
    if run is None:
        return "\n".join([*text, "Nothing is known here of how its weights were trained.", ""])
    text += _table(("training", ""), _of_training(run, step))
    if evaluation:
        results = ((key, f"{value:g}") for key, value in evaluation.items() if value is not None)
        text += _table(("result", f"step {step:,}"), results)
    return "\n".join([*text, *_table(("trained on", "tested on", "search for copies", "left out"), _of_copies(run))])


def _of_training(run: Run, step: int | None) -> list[tuple[str, str]]:
    recipe, cost = run.recipe, run.cost
    train = open_dataset(run, recipe.data.train).manifest
    images = "" if train is None else f", {counted(train.num_samples, 'image')}"
    facts = [
        ("run", run.name),
        ("recipe", f"{recipe.objective.kind}, image size {recipe.data.image_size}, seed {recipe.seed}"),
        ("data", f"{recipe.data.train}{images}"),
        ("optimizer", f"{recipe.optimizer.name}, {recipe.batch.global_size:,} images a step"),
        ("steps", f"{'?' if step is None else f'{step:,}'} of {run.total_steps or '?'}"),
    ]
    if recipe.init is not None:
        facts.append(("began with", Path(recipe.init.source).name))
    if cost is not None:
        exaflops = cost.exaflops * (1 if step is None else min(step / cost.step, 1))
        facts.append(("compute", f"{exaflops:.4g} exaFLOPs, {cost.images_per_s:,.0f} images/s"))
    return facts


def _of_copies(run: Run) -> Iterable[tuple[str, str, str, str]]:
    """For each training set of the run and those before it and each test set: what is recorded about copies."""
    for each in run.chain:
        for name in tests_of(run):
            train = open_dataset(each, each.recipe.data.train)
            found = deduplication(train, open_dataset(run, name), "training")
            yield train.name, name, found.status, str(found.left_out_for_it or found.left_out_in_all or "")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    listed = [f"| {' | '.join(map(_escaped, row))} |" for row in rows]
    return [f"| {' | '.join(head)} |", "|" + " --- |" * len(head), *listed, ""] if listed else []


def _plain(text: str) -> str:
    """Text in one line of bounded length, without secrets and control characters."""
    return shortened(printable(without_secrets(text)), 400)


def _escaped(text: str) -> str:
    """As `_plain`, and plain in Markdown and in the HTML within it."""
    return re.sub(r"([!-+:-@\[-`{-~])", r"\\\1", _plain(text)).replace("www.", "www\\.")
