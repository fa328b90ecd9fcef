"""Checks that all that a study's entries read is there and goes together, before the first of them starts."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from vitscale.about.studies.expansion import Expansion
from vitscale.data.shards import Manifest
from vitscale.evaluation.build import build_evaluators
from vitscale.evaluation.splits import check_splits
from vitscale.ground.errors import RecipeError, VitscaleError
from vitscale.ground.wording import listed
from vitscale.objectives import objective_class
from vitscale.recipe import Recipe
from vitscale.runs.done import read_done

_NAMED = 3


def check_entries(expansion: Expansion, folder: Path) -> None:
    """Check the data sets and initial weights of every unfinished entry, whichever candidate may win.

    Raises `RecipeError` with every problem: data sets and weights that are missing, damaged or of another model,
    classes that do not match, samples that are trained and evaluated on.
    """
    problems: dict[str, dict[str, None]] = {}  # -> names of entries, each once
    known: dict[str, list[str]] = {}
    unfinished = [entry for entry in expansion.entries.values() if read_done(folder / entry.name) is None]
    for entry, option in [(each, option) for each in unfinished for option in each.options]:
        content = option.recipe.dump()
        what = [content[key] for key in ("data", "evaluation", "objective", "model")]
        init = content["init"] if entry.parent is None else None  # else it is the parent's run, which comes first
        key = json.dumps([*what, init], sort_keys=True)
        if key not in known:
            known[key] = list(dict.fromkeys(_problems(option.recipe, folder / entry.name, entry.parent is None)))
        for problem in known[key]:
            problems.setdefault(problem, {})[entry.name] = None
    if problems:
        lines = [f"  {listed([*names], _NAMED)}: {problem}" for problem, names in problems.items()]
        raise RecipeError(
            "nothing was started, as some entries cannot read their inputs:\n"
            + "\n".join(lines)
            + "\nIf entries see other files than this machine does: --no-check"
        )


def _problems(recipe: Recipe, run_dir: Path, has_own_weights: bool) -> Iterator[str]:
    """What is wrong with what a recipe names, in words; `run_dir` is the directory in which it would run."""
    try:
        train = Manifest.load(recipe.dataset_path(recipe.data.train))
    except VitscaleError as error:
        yield str(error)
        if recipe.evaluation.validation is not None:
            yield from _tried(lambda: Manifest.load(recipe.dataset_path(recipe.evaluation.validation or "")))
        return
    yield from _tried(lambda: objective_class(recipe).num_outputs(recipe, train))
    broken = list(_tried(lambda: build_evaluators(recipe, train.class_names)))
    yield from broken or _tried(lambda: check_splits(recipe, train))
    if recipe.init is not None and has_own_weights:
        from vitscale.training.beginning import initial_weights  # loads DeepSpeed, which takes seconds

        yield from _tried(lambda: initial_weights.check_initial_weights(recipe, list(train.class_names), run_dir))


def _tried(check: Callable[[], object]) -> Iterator[str]:
    try:
        check()
    except VitscaleError as error:
        yield str(error)
