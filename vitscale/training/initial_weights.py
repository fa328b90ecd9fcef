"""A run that begins at step 0 with the weights of another run or of a file: `init` in its recipe.

Every parameter comes from exactly one place: the weights, as they are or resampled; zero; or its initial value. What
the weights hold besides is an error, except a head that the recipe does not keep.
"""

import dataclasses
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitscale.checkpoint import EMA, CheckpointStore, Index, LocalPlace, Place, checkpoint_place
from vitscale.errors import CheckpointError, RecipeError, VitscaleError
from vitscale.families import Model
from vitscale.files.digests import file_digests
from vitscale.models.weights import HEAD, Entry, Reader, Source, notes, open_weights, own_description, parameters
from vitscale.models.weights.huggingface import distinct
from vitscale.objectives import build_objective
from vitscale.ranks import gather, on_rank_zero
from vitscale.recipe import Init, Normalise, Recipe, read_recipe, validate_model, validate_recipe
from vitscale.runs.checkpoints import steps_among
from vitscale.runs.directory import read_newest
from vitscale.runs.names import INDEX_FILE, RECIPE_FILE
from vitscale.training import distributed, fragments
from vitscale.wording import counted

_OUTPUT_LAYER = ("head.weight", "head.bias")
_ADVICE = "leave the whole head out, as for fine-tuning: model.head: linear and init.head: zero"
_READ_WITH_WEIGHTS = (".safetensors", ".bin", ".json")  # of a folder in another library's format


def check_initial_weights(recipe: Recipe, class_names: list[str], run_dir: Path) -> None:
    """Find what is wrong with `init` from names and shapes alone, before the ranks meet; for branches see `branch`.

    A run that has a checkpoint needs its initial weights no more, and nothing is looked at.

    Args:
        class_names: of the training data.

    Raises `RecipeError` where there are no such weights or they contradict the recipe, and `CheckpointError` where they
    are damaged or of another model.
    """
    if recipe.init is None or recipe.init.continues or has_begun(recipe, run_dir):
        return
    store, step = find_checkpoint(recipe.init)
    if store is None:
        found = _of_file(_path(recipe.init))
    else:
        found = _of_checkpoint(recipe.init, store.root, read_found_index(store, step), _not_read_yet)
    _Assignment(recipe, class_names, found)


def initial_source(
    recipe: Recipe,
    class_names: list[str],
    initial: fragments.Source,
    world: distributed.World,
    say: Callable[[str], None],
) -> tuple[fragments.Source, dict[str, Any] | None]:
    """Where a run that has no checkpoint yet takes its weights from; all ranks call it together.

    Args:
        class_names: of the training data.
        initial: the initial value of every parameter.
        say: tells people, on rank 0, what is taken from where.

    Returns:
        The source for `fragments.load`, and what identifies the weights, for the index of the run's checkpoints: their
        format, or step and kind, and the sha256 of each file; None where the recipe has no `init`.

    Raises as `check_initial_weights`, and `CheckpointError` where no checkpoint of a run verifies.
    """
    if recipe.init is None:
        return initial, None
    store, step = find_checkpoint(recipe.init, world)
    if store is None:
        path = _path(recipe.init)
        found = dataclasses.replace(_of_file(path), files=on_rank_zero(lambda: _digests(path)))
    else:
        reader = store.newest(lambda problem: say(f"WARNING: {problem}")) if step is None else store.open(step)
        if reader is None:
            raise _no_checkpoint(store).on_all_ranks()
        found = _of_checkpoint(recipe.init, str(reader.folder), reader.index, reader.read)
    try:
        assignment = _Assignment(recipe, class_names, found)
    except VitscaleError as error:
        raise error.on_all_ranks() from None
    for note in assignment.notes:
        say(f"{found.source.path}: {note}")
    say(assignment.describe())
    return _InitialWeights(assignment, initial), found.identity


def has_begun(recipe: Recipe, run_dir: Path) -> bool:
    """Whether a run has a checkpoint already, as far as can be told."""
    if read_newest(run_dir) is not None:
        return True
    with suppress(OSError):  # the run itself will say that it cannot read its checkpoints
        return bool(checkpoint_place(recipe, run_dir).steps())
    return False


# ---- What there is ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Found:
    """Weights of which no value is read yet.

    Attributes:
        title: for people.
        source: names and shapes, and how to read.
        model: of which the weights say that they are; None where they do not tell.
        class_names: of the outputs, where they are known.
        normalise: of the images that they are for, where it is known.
        facts: what identifies the weights, besides their files.
        files: name -> sha256.
    """

    title: str
    source: Source
    model: Model | None
    class_names: list[str] | None
    normalise: Normalise | None
    facts: dict[str, Any]
    files: dict[str, str]

    @property
    def identity(self) -> dict[str, Any]:
        return {**self.facts, "files": self.files}


def find_checkpoint(init: Init, world: distributed.World | None = None) -> tuple[CheckpointStore | None, int | None]:
    """The store and step of a checkpoint; no step where the newest one is meant, no store for a file of weights.

    Raises `RecipeError` where there is nothing, and where the recipe's step cannot be had from what there is.
    """
    path = _path(init)

    def store(place: Place) -> CheckpointStore:
        if world is None:
            return CheckpointStore(place)
        return CheckpointStore(place, rank=world.rank, gather=gather)

    try:
        path.stat()
        if (path / RECIPE_FILE).is_file():
            return store(checkpoint_place(read_recipe(path / RECIPE_FILE), path)), init.step
        if (path / INDEX_FILE).is_file():
            place = path.absolute()
            steps = steps_among([place.name])
            if not steps:
                raise RecipeError(
                    f"init.from: {path} is a checkpoint, and its folder not named after its step any more"
                )
            if init.step not in (None, steps[0]):
                raise RecipeError(f"init.step {init.step}: {path} is the checkpoint of step {steps[0]}")
            return store(LocalPlace(place.parent)), steps[0]
    except OSError as error:
        raise RecipeError(
            f"init.from: {str(path)[:200]}: {error.strerror}; expected a run's directory, the folder of one of its "
            f"checkpoints, or weights in a format of docs/weights.md"
        ) from None
    if init.step is not None:
        raise RecipeError(f"init.step {init.step}: {path} is no run, and has no steps")
    return None, None


def _path(init: Init) -> Path:
    return Path(os.path.expanduser(init.source))  # noqa: PTH111 (without an error where there is no home)


def read_found_index(store: CheckpointStore, step: int | None) -> Index:
    """The index of a checkpoint, or of the newest one that has a whole one; its files are not looked at.

    Raises `CheckpointError` where there is none.
    """
    problem = None
    try:
        found = store.steps()
    except OSError as error:
        raise CheckpointError(f"init.from: {store.root}: {error.strerror}") from None
    if step is not None and step not in found:
        raise CheckpointError(
            f"init.step {step}: {store.root} has no checkpoint of that step; it has those of "
            f"{', '.join(map(str, found)) or 'none'}. A run keeps the ones of checkpoint.keep_every"
        )
    steps = found if step is None else [step]
    for each in reversed(steps):
        try:
            return store.place.read_index(each)
        except CheckpointError as error:
            problem = problem or error
    raise problem or _no_checkpoint(store)


def _no_checkpoint(store: CheckpointStore) -> CheckpointError:
    return CheckpointError(f"init.from: the run has no checkpoint yet in {store.root}")


def _of_checkpoint(init: Init, where: str, index: Index, read: fragments.Source) -> _Found:
    kind = index.evaluated_kind
    recipe = validate_recipe(index.recipe, f"the recipe in {where}")
    shapes = {name: shape for name, shape in index.shapes.items() if name not in recipe.objective.own}

    def entry(name: str, shape: list[int]) -> Entry:
        piece = partial(read, kind, name)
        return Entry(name, tuple(shape), lambda: piece(0, torch.Size(shape).numel()).view(shape), piece)

    return _Found(
        title=f"{init.source} step {index.step:,}{' (average)' if kind == EMA else ''}",
        source=Source(Path(init.source), "safetensors", {name: entry(name, shape) for name, shape in shapes.items()}),
        model=recipe.model,
        class_names=index.data.get("class_names") if recipe.objective.has_classes else None,
        normalise=recipe.data.normalise,
        facts={"step": index.step, "kind": kind},
        files={file.path: file.sha256 for file in index.files},
    )


def _not_read_yet(kind: str, name: str, start: int, length: int) -> Tensor:
    raise AssertionError(f"{kind}/{name} is asked for where only names and shapes are known")


def _of_file(path: Path) -> _Found:
    source = open_weights(path)
    own = own_description(source)
    return _Found(
        title=f"{path} ({source.form})",
        source=source,
        model=None if own is None else validate_model(own.model, own.image_size, str(path)),
        class_names=source.class_names if own is None else own.class_names,
        normalise=source.normalise if own is None else own.normalise,
        facts={"form": source.form},
        files={},
    )


def _digests(path: Path) -> dict[str, str]:
    """Name -> sha256 of a file of weights, or of all that a folder of another library's format is read from."""
    try:
        files = [path] if path.is_file() else [file for file in path.iterdir() if file.suffix in _READ_WITH_WEIGHTS]
        return {file.name: file_digests(file).sha256 for file in sorted(files)}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


# ---- What becomes of it ----------------------------------------------------------------------------------------------


class _Assignment:
    """Where each parameter of a model comes from, all keys accounted for; nothing is read yet.

    Attributes:
        readers: of the parameters that are taken.
        zeros: names of those that begin with zeros.
        fresh: names of the others, which begin as without `init`.
        notes: what a reader of the source should know.

    Raises as `check_initial_weights`.
    """

    def __init__(self, recipe: Recipe, class_names: list[str], found: _Found) -> None:
        assert recipe.init is not None
        self._found = found
        with torch.device("meta"):
            model = build_objective(recipe, len(class_names)).backbone
        names = [name for name, _ in model.named_parameters()]
        drop = [] if recipe.init.head == "keep" else [name for name in names if name in _OUTPUT_LAYER]
        if recipe.init.head == "initial" and not _has_pre_logits(found.source):
            drop = [name for name in names if name in HEAD]
        self.notes = notes(model, found.source)
        self.readers: dict[str, Reader] = parameters(
            model,
            found.source,
            drop,
            report=lambda note: None,
            resample=recipe.init.positions == "resample",
            advice=_ADVICE,
        )
        self.zeros = frozenset(drop) if recipe.init.head == "zero" else frozenset()
        self.fresh = [name for name in drop if name not in self.zeros]
        if found.model is not None:
            _check_model(found, recipe.model)
        if found.normalise not in (None, recipe.data.normalise):
            raise _other_normalisation(found, recipe.data.normalise)
        if found.normalise is None:
            self.notes.append(f"does not say how its images are normalised; here by {_in_yaml(recipe.data.normalise)}")
        if recipe.init.head == "keep":
            _check_classes(found, class_names)

    def describe(self) -> str:
        """One line for people."""
        resampled = sum(reader.is_resampled for reader in self.readers.values())
        parts = [f"{counted(len(self.readers) - resampled, 'tensor')} taken"]
        parts += [f"{resampled:,} resampled"] if resampled else []
        parts += [f"{layer} zero" for layer in _layers(sorted(self.zeros))]
        parts += [f"{layer} initial" for layer in _layers(self.fresh)]
        used = {key for reader in self.readers.values() for key in reader.keys}
        left = _layers([entry.key for key, entry in self._found.source.entries.items() if key not in used])
        parts += [f"left out: {', '.join(left)}"] if left else []
        return f"weights from {self._found.title}: {', '.join(parts)}"


def _has_pre_logits(source: Source) -> bool:
    """Whether a model with this layer can have it from a source: no other format has a place for it."""
    return source.form in ("safetensors", "npz") and any(key.startswith("pre_logits") for key in source.entries)


def _layers(keys: list[str]) -> list[str]:
    """The layers that keys of any format belong to, in their order."""
    return list(dict.fromkeys(re.sub(r"[./](weight|bias|kernel|scale)$", "", key) for key in keys))


def _check_model(found: _Found, ours: Model) -> None:
    """Compare what no shape of a parameter shows, such as the number of heads."""
    assert found.model is not None
    theirs, own = found.model.facts(), ours.facts()
    if differing := [key for key in own if theirs.get(key) != own[key]]:
        listed = "; ".join(f"model.{key} {theirs.get(key)!r}, the recipe's is {own[key]!r}" for key in differing)
        raise RecipeError(f"init.from: {found.title} is of another model: it has {listed}")


def _other_normalisation(found: _Found, ours: Normalise) -> RecipeError:
    assert found.normalise is not None
    return RecipeError(
        f"init.from: {found.title} is for images normalised by {_in_yaml(found.normalise)}, and the recipe's are by "
        f"{_in_yaml(ours)}; set data.normalise: --set 'data.normalise={_in_yaml(found.normalise)}'"
    )


def _in_yaml(normalise: Normalise) -> str:
    return f"{{mean: {normalise.mean}, std: {normalise.std}}}"


def _check_classes(found: _Found, class_names: list[str]) -> None:
    """Compare the names of the classes, where both sides have them; their number is a shape of the head."""
    theirs = found.class_names
    if theirs is None or len(theirs) != len(class_names) or theirs in (class_names, distinct(class_names)):
        return
    first = next(i for i, (their, our) in enumerate(zip(theirs, class_names, strict=True)) if their != our)
    raise RecipeError(
        f"init.head: keep: {found.title} and data.train have other classes: number {first} is {theirs[first]!r} there, "
        f"and {class_names[first]!r} here; use init.head: zero, or data whose classes are the same in the same order"
    )


class _InitialWeights:
    """An assignment as a source of fragments."""

    def __init__(self, assignment: _Assignment, initial: fragments.Source) -> None:
        self._assignment, self._initial = assignment, initial
        self._whole = fragments.InPieces(lambda name: assignment.readers[name]())

    def __call__(self, kind: str, name: str, start: int, length: int) -> Tensor:
        if name in self._assignment.zeros:
            return torch.zeros(length)
        reader = self._assignment.readers.get(name)
        if reader is None:
            return self._initial(kind, name, start, length)
        if reader.piece is not None:
            return reader.piece(start, length)
        return self._whole(kind, name, start, length)
