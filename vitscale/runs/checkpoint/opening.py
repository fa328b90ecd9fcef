"""Opens weights, of a run, of a file in any format or fresh ones: what is there, before any value is read."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vitscale.ground.errors import CheckpointError, RecipeError, os_errors
from vitscale.models import Model, initial_value
from vitscale.models.weights import (
    HEAD,
    Description,
    Entry,
    Reader,
    Source,
    describe,
    has_head,
    open_weights,
    own_description,
    parameters,
)
from vitscale.recipe import Classification, Normalise, Recipe, differences, validate_model, validate_recipe
from vitscale.recipe.families import Model as ModelBlock
from vitscale.recipe.families import architecture, nearest
from vitscale.runs.checkpoint.directory import checkpoint_directory
from vitscale.runs.checkpoint.store import CheckpointReader, CheckpointStore
from vitscale.runs.checkpoint_index import EMA, MASTER, CheckpointIndex, steps_among
from vitscale.runs.directory import recipe_of_run
from vitscale.runs.names import INDEX_FILE, RECIPE_FILE

Kind = Literal["a run", "a file of weights", "a model's name"]
ReadPiece = Callable[[str, str, int, int], Tensor]
"""(kind, name, start, length) -> those elements of a flattened parameter, as `CheckpointReader.read` has them."""


@dataclass(frozen=True)
class OpenWeights:
    """Weights of which no value is read yet."""

    title: str  # for messages
    source: Source  # names and shapes, and how to read
    description: Description | None  # the model that they are for; None if they do not say, and nobody else does
    facts: dict[str, Any]  # what identifies the weights, besides their files
    files: dict[str, str] = field(default_factory=dict)  # of a checkpoint: name -> sha256
    recipe: Recipe | None = None  # that a checkpoint was trained with

    @property
    def model(self) -> ModelBlock | None:
        """The checked block of the model."""
        if self.description is None:
            return None
        return validate_model(self.description.model, self.description.image_size, str(self.source.path))

    @property
    def class_names(self) -> list[str] | None:
        """The names of the outputs, if known."""
        return (self.description or self.source).class_names

    @property
    def normalise(self) -> Normalise | None:
        """How the images that the weights expect are normalised, if known."""
        return (self.description or self.source).normalise

    @property
    def identity(self) -> dict[str, Any]:
        return {**self.facts, "files": self.files}

    def fit(
        self,
        model: dict[str, Any] | None = None,
        image_size: int | None = None,
        *,
        drop_head: bool = False,
        report: Callable[[str], None] = print,
    ) -> tuple[Description, Model, dict[str, Reader]]:
        """Find out how to read each parameter of the model that the weights are for.

        Args:
            model: the `model` block, for files that do not name it.
            image_size: the size to which position embeddings are resampled; by default that of the weights.
            drop_head: leave the head out; one that the weights do not have is left out anyway.

        Returns the description, the model on the meta device, and parameter's name -> reader. Raises as `describe` and
        `parameters` do.
        """
        own = describe(self.source, model, image_size, self.description)
        if model is None and self.description is None:
            report(
                f"{self.source.path} names no model: taken for {own.title}, as its tensors are; --model tells better"
            )
        if self.source.image_size not in (None, own.image_size) and image_size is None:
            report(
                f"{self.source.path}: its preprocessing makes images of {self.source.image_size} pixels; used with "
                f"{own.image_size}, which its positions are for"
            )
        is_headless = own.num_classes is None and (self.recipe is not None or not has_head(self.source))
        built = own.build(with_head=not is_headless)
        return own, built, parameters(built, self.source, HEAD if drop_head or is_headless else (), report)


def of_checkpoint(
    name: str | Path, where: str, index: CheckpointIndex, read: ReadPiece, kind: str | None = None
) -> OpenWeights:
    """The weights of a checkpoint's backbone; `kind` is the evaluated one by default. Raises `RecipeError`.

    `name` is how the user called the run or checkpoint, `where` the folder of the checkpoint.
    """
    kind = kind or index.evaluated_kind
    which = "" if kind == MASTER else f" ({kind.replace(EMA, 'average', 1).replace('.', ' ')})"
    recipe = validate_recipe(index.recipe, f"the recipe in {where}")

    def entry(name: str, shape: list[int]) -> Entry:
        piece = partial(read, kind, name)
        return Entry(name, tuple(shape), lambda: piece(0, prod(shape)).view(shape), piece)

    entries = {name: entry(name, shape) for name, shape in index.shapes.items()}
    beside = {name: entries.pop(name) for name in index.shapes if recipe.objective.owns(name)}
    return OpenWeights(
        f"{name} step {index.step:,}{which}",
        Source(Path(name), "safetensors", entries, beside=beside),
        describe_run(recipe.dump()["model"], recipe, index),
        {"step": index.step, "kind": kind},
        {file.path: file.sha256 for file in index.files},
        recipe,
    )


def describe_run(model: dict[str, Any], recipe: Recipe, index: CheckpointIndex) -> Description:
    """The model of a checkpoint, by the block that it was trained with and a recipe, which may be another one."""
    names = index.data.get("class_names") if recipe.objective.has_classes else None
    num_classes, data = None if names is None else len(names), recipe.data
    loss = recipe.objective.loss if isinstance(recipe.objective, Classification) else None
    return Description(model, data.image_size, num_classes, names, index.step, data.eval_crop, data.normalise, loss)


def of_file(path: Path) -> OpenWeights:
    """The weights in a file or folder, described as far as it tells. Raises `CheckpointError`."""
    source = open_weights(path)
    return OpenWeights(f"{path} ({source.form})", source, own_description(source), {"form": source.form})


def kind_of(source: str) -> Kind:
    """What a source is, by what lies there. Raises `RecipeError` if nothing does and no model has this name."""
    path = Path(source)
    try:
        if (path / RECIPE_FILE).exists() or checkpoint_step(path) is not None:
            return "a run"
        if path.exists():
            return "a file of weights"
    except OSError as error:
        raise RecipeError(f"{str(error.filename)[:100]}: {error.strerror}") from None
    try:
        architecture(source)
    except ValueError:
        near = nearest(source)
        known = "" if path.suffix or near is None else f", and no model of this name; the nearest is {near!r}"
        raise RecipeError(f"{source}: there is no such run, file or folder{known}") from None
    return "a model's name"


def open_model(
    source: str,
    step: int | None = None,
    *,
    use_average: bool = True,
    average: str | None = None,
    image_size: int | None = None,
    num_classes: int | None = None,
    head: str = "linear",
    seed: int = 0,
    report: Callable[[str], None] = print,
) -> OpenWeights:
    """The weights of any source.

    Args:
        source: a run's directory or a checkpoint's folder; weights in any format; or a model's name, for fresh weights.
        step: for a run, the step of the checkpoint; by default the newest one that verifies.
        use_average: for a run, whether to take the average of the weights if it keeps one.
        average: for a run, the name of another average to take; by default ema.
        image_size, num_classes, head, seed: of fresh weights; by default for 224 pixels, and without a head.
        report: called with what is worth knowing: damaged checkpoints, a recipe.yaml that names another model now.

    Raises `RecipeError`, `CheckpointError` and, for checkpoints at a URL that does not answer, `StorageError`.
    """
    kind, path = kind_of(source), Path(source)
    if kind == "a file of weights":
        return of_file(path)
    if kind == "a model's name":
        block = {"name": source, "head": head, "num_classes": num_classes}
        return _fresh(Description(block, image_size or 224, num_classes), seed)
    recipe, reader = open_run(path, step, report)
    stored = reader.index.evaluated_kind if average is None else reader.index.kind_of_average(average)
    weights = of_checkpoint(path, str(reader.folder), reader.index, reader.read, stored if use_average else MASTER)
    assert weights.description is not None
    if edits := differences(weights.description.model, recipe.dump()["model"], "model."):
        report(f"{path / RECIPE_FILE} was edited ({'; '.join(edits)}); what was trained is exported")
    return replace(weights, description=replace(weights.description, eval_crop=recipe.data.eval_crop))


def _fresh(description: Description, seed: int) -> OpenWeights:
    model, title = description.build(with_head=description.num_classes is not None), description.title

    def entry(name: str, shape: torch.Size) -> Entry:
        return Entry(name, tuple(shape), lambda: initial_value(model, name, shape, seed))

    entries = {name: entry(name, parameter.shape) for name, parameter in model.named_parameters()}
    return OpenWeights(title, Source(Path(title), "safetensors", entries), description, {"seed": seed})


def is_weights(source: Path) -> bool:
    """Whether this is a file or folder of weights rather than a run's directory. Raises `RecipeError`."""
    with os_errors(f"{str(source)[:100]}: cannot be read", RecipeError):
        return source.is_file() or ((source / "config.json").is_file() and not (source / RECIPE_FILE).is_file())


def checkpoint_step(path: Path) -> int | None:
    """The step by a checkpoint folder's name; None for no checkpoint. Raises `RecipeError` for another name."""
    if not path.is_dir() or is_weights(path) or (path / RECIPE_FILE).exists():
        return None
    if steps := steps_among([path.absolute().name]):
        return steps[0]
    if (path / INDEX_FILE).is_file():
        raise RecipeError(f"{path} is a checkpoint whose folder is no longer named after its step")
    return None


def run_directory(source: Path) -> Path | None:
    """The directory of the run that a source is, or that has it among its checkpoints; None if there is none."""
    above = source.absolute().parent.parent
    return next((place for place in (source, above) if (place / RECIPE_FILE).is_file()), None)


def open_run(
    run_dir: Path, step: int | None = None, report: Callable[[str], None] = print
) -> tuple[Recipe, CheckpointReader]:
    """A run's recipe, and its newest checkpoint that verifies, or the one of `step`.

    The folder of a checkpoint stands for its step, with the recipe that it was trained with.

    Raises `RecipeError` if there is no run, `CheckpointError` if there is no such checkpoint, and `StorageError` if the
    checkpoints are at a URL that does not answer.
    """
    if (own := checkpoint_step(run_dir)) is not None:
        if step not in (None, own):
            raise RecipeError(f"step {step}: {run_dir} is the checkpoint of step {own}")
        opened = CheckpointStore(run_dir.absolute().parent).open(own)
        return trained_recipe(opened), opened
    recipe = recipe_of_run(run_dir)
    store = CheckpointStore(checkpoint_directory(recipe, run_dir))
    if step is None:
        reader = store.newest(report=report)
        if reader is None:
            raise CheckpointError(f"{run_dir} has no checkpoint yet")
        return recipe, reader
    if step not in store.steps():
        raise CheckpointError(f"{run_dir} has no checkpoint of step {step}; it has those of {store.steps()}")
    return recipe, store.open(step)


def trained_recipe(reader: CheckpointReader) -> Recipe:
    """The recipe that a checkpoint was trained with, from its own record: unlike recipe.yaml, that has a checksum."""
    return validate_recipe(reader.index.recipe, f"the recipe in {reader.folder}")
