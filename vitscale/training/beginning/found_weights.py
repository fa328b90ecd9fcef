"""Finds the weights that a recipe names, of a run or a file, and describes them before any value is read.

They are what `init` starts from, or what a teacher of `objective` computes with.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitscale.ground.errors import CheckpointError, RecipeError, os_errors
from vitscale.ground.files.digests import file_digests
from vitscale.ground.ranks import from_rank_zero, gather, on_rank_zero
from vitscale.models.weights.huggingface import distinct
from vitscale.recipe import Init, Normalise, Teacher, read_recipe
from vitscale.recipe.families import Model
from vitscale.runs.checkpoint import CheckpointIndex, CheckpointStore, checkpoint_directory
from vitscale.runs.checkpoint.opening import OpenWeights, checkpoint_step, of_checkpoint, of_file
from vitscale.runs.names import RECIPE_FILE
from vitscale.training.deepspeed.distributed import World

_READ_WITH_WEIGHTS = (".safetensors", ".bin", ".json")  # what is read of a folder in another library's format


Named = Init | Teacher
"""A block of a recipe that names weights: `source` is a run, a checkpoint of one, or a file or folder of weights."""


def find_weights(named: Named) -> OpenWeights:
    """The weights' names and shapes only, before the ranks meet; a checkpoint's files are not looked at.

    Raises `RecipeError` if there are no such weights, and `CheckpointError` if they are damaged.
    """
    store, step = find_checkpoint(named)
    if store is None:
        return of_file(_path(named))
    return of_checkpoint(str(named.source), store.root, read_found_index(named, store, step), _not_read_yet)


def open_found(named: Named, world: World, say: Callable[[str], None]) -> OpenWeights:
    """The weights, for reading; all ranks call it together. Damaged checkpoints are reported by `say`, on rank 0.

    Raises as `find_weights`, and `CheckpointError` if no checkpoint of a run verifies.
    """
    store, step = find_checkpoint(named, world)
    if store is None:
        path = _path(named)
        return replace(of_file(path), files=on_rank_zero(lambda: digests(path)))
    reader = store.newest(lambda problem: say(f"WARNING: {problem}")) if step is None else store.open(step)
    if reader is None:
        raise _no_checkpoint(named, store).on_all_ranks()
    return of_checkpoint(str(named.source), str(reader.folder), reader.index, reader.read)


def find_checkpoint(named: Named, world: World | None = None) -> tuple[CheckpointStore | None, int | None]:
    """The store and step of a checkpoint; step None means the newest, store None a file of weights.

    Raises `RecipeError` if nothing is there, or if what is there does not have the recipe's step.
    """
    path = _path(named)
    together: dict[str, Any] = {}
    if world is not None:
        together = {"rank": world.rank, "gather": gather, "share": from_rank_zero}
    expected = "expected a run's directory, one of its checkpoints' folders, or weights in a format of docs/weights.md"
    with os_errors(f"{named.key}.from: {str(path)[:200]}: {expected}", RecipeError):
        path.stat()
        if (path / RECIPE_FILE).is_file():
            directory = checkpoint_directory(read_recipe(path / RECIPE_FILE), path)
            return CheckpointStore(directory, **together), named.step
        if (step := checkpoint_step(path)) is not None:
            if named.step not in (None, step):
                raise RecipeError(f"{named.key}.step {named.step}: {path} is the checkpoint of step {step}")
            return CheckpointStore(path.absolute().parent, **together), step
    if named.step is not None:
        raise RecipeError(f"{named.key}.step {named.step}: {path} is not a run, so it has no steps")
    return None, None


def _path(named: Named) -> Path:
    return Path(os.path.expanduser(str(named.source)))  # noqa: PTH111 (without an error where there is no home)


def read_found_index(named: Named, store: CheckpointStore, step: int | None) -> CheckpointIndex:
    """A checkpoint's index, by default the newest intact; no files are read. Raises `CheckpointError` without one."""
    problem = None
    with os_errors(f"{named.key}.from: {store.root}: cannot be read", CheckpointError):
        steps = store.steps()
    if step is not None and step not in steps:
        raise CheckpointError(
            f"{named.key}.step {step}: {store.root} has no checkpoint of that step; it has those of "
            f"{', '.join(map(str, steps)) or 'none'}. A run keeps the ones of checkpoint.keep_every"
        )
    for each in reversed(steps) if step is None else [step]:
        try:
            return store.directory.read_index(each)
        except CheckpointError as error:
            problem = problem or error
    raise problem or _no_checkpoint(named, store)


def _no_checkpoint(named: Named, store: CheckpointStore) -> CheckpointError:
    return CheckpointError(f"{named.key}.from: the run has no checkpoint yet in {store.root}")


def _not_read_yet(kind: str, name: str, start: int, length: int) -> Tensor:
    raise AssertionError(f"{kind}/{name} is asked for where only names and shapes are known")


def digests(path: Path) -> dict[str, str]:
    """Name -> sha256 of a file of weights, or of every file that is read of a folder in another library's format."""
    with os_errors(f"{path}: cannot be read", CheckpointError):
        files = [path] if path.is_file() else [file for file in path.iterdir() if file.suffix in _READ_WITH_WEIGHTS]
        return {file.name: file_digests(file).sha256 for file in sorted(files)}


def check_model(named: Named, weights: OpenWeights, model: Model, whose: str, normalise: Normalise, field: str) -> None:
    """Compare what no parameter's shape shows, such as the number of heads, and how images are normalised.

    Args:
        whose: names the recipe's model in the error.
        field: the recipe's key for the normalisation.
    """
    if weights.model is not None:
        theirs, ours = weights.model.facts(), model.facts()
        if {theirs.get("layer_scale"), ours.get("layer_scale")}.isdisjoint({None}):
            theirs["layer_scale"] = ours["layer_scale"]  # only where it begins
        if "window" in theirs and "window" in ours:
            theirs["window"] = ours["window"]  # tables of another one are resampled, as positions are, or do not fit
        fixed = {key: ours[key] for key in ("position.kind", "position.table") if ours.get("position.kind") == "sincos"}
        if weights.source.form in ("timm", "hf") and theirs.get("position.kind") == "1d":
            theirs |= fixed  # which such files hold like learned ones, and whose values are compared
        if differing := [key for key in ours if theirs.get(key) != ours[key]]:
            listed = "; ".join(f"model.{key} {theirs.get(key)!r}, {whose} is {ours[key]!r}" for key in differing)
            raise RecipeError(f"{named.key}.from: {weights.title} is of another model: it has {listed}")
    if weights.normalise not in (None, normalise):
        wanted = in_yaml(weights.normalise)
        raise RecipeError(
            f"{named.key}.from: {weights.title} expects images normalised by {wanted}, but the recipe "
            f"normalises by {in_yaml(normalise)}; set {field}: --set '{field}={wanted}'"
        )


def in_yaml(normalise: Normalise) -> str:
    """The normalisation as written on a command line."""
    return f"{{mean: {normalise.mean}, std: {normalise.std}}}"


def check_classes(weights: OpenWeights, class_names: list[str], where: str, otherwise: str) -> None:
    """Compare the names of the classes, if both sides have them; their number shows in the head's shape.

    Args:
        where: begins the error's message.
        otherwise: begins the advice at its end.
    """
    theirs = weights.class_names
    if theirs is None or len(theirs) != len(class_names) or theirs in (class_names, distinct(class_names)):
        return
    first = next(i for i, (their, our) in enumerate(zip(theirs, class_names, strict=True)) if their != our)
    raise RecipeError(
        f"{where}: {weights.title} and data.train have other classes: number {first} is {theirs[first]!r} there, "
        f"and {class_names[first]!r} here; {otherwise}data whose classes are the same in the same order"
    )
