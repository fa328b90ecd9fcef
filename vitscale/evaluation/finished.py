"""Evaluating a checkpoint on its own, in one process, without the trainer."""

from collections.abc import Sequence
from pathlib import Path

import torch

from vitscale.checkpoint import MASTER, CheckpointReader, CheckpointStore, checkpoint_place
from vitscale.data import to_model_input
from vitscale.errors import CheckpointError, RecipeError
from vitscale.evaluation.build import build_evaluators, evaluation_loader
from vitscale.evaluation.contract import evaluate
from vitscale.models import Outputs, weight_dtype
from vitscale.objectives import Objective, build_objective
from vitscale.recipe import Recipe, override, read_recipe, validate_recipe
from vitscale.runs.names import RECIPE_FILE
from vitscale.shards import Manifest
from vitscale.storage import is_url


def open_run(run_dir: Path, step: int | None = None) -> tuple[Recipe, CheckpointReader]:
    """The recipe of a run and its newest checkpoint that verifies, or that of `step`.

    Raises `RecipeError` where there is no run, `CheckpointError` where there is no such checkpoint, and `StorageError`
    where they are at a URL that does not answer.
    """
    saved = run_dir / RECIPE_FILE
    if not saved.is_file():
        raise RecipeError(f"{run_dir} is no run directory: there is no {saved.name} in it")
    recipe = read_recipe(saved)
    store = CheckpointStore(checkpoint_place(recipe, run_dir))
    if step is None:
        reader = store.newest(report=print)
        if reader is None:
            raise CheckpointError(f"{run_dir} has no checkpoint yet")
        return recipe, reader
    if step not in store.steps():
        raise CheckpointError(f"{run_dir} has no checkpoint of step {step}; it has those of {store.steps()}")
    return recipe, store.open(step)


def trained_recipe(reader: CheckpointReader) -> Recipe:
    """What a checkpoint was trained by, by its own record, which has a checksum: a run's recipe.yaml can be edited."""
    return validate_recipe(reader.index.recipe, f"the recipe in {reader.folder}")


def empty_objective(recipe: Recipe, reader: CheckpointReader) -> Objective:
    """The objective of a checkpoint on the meta device. Raises `CheckpointError` where the checkpoint is of another."""
    with torch.device("meta"):
        objective = build_objective(recipe, len(reader.index.data["class_names"]))
    reader.check_shapes({name: list(parameter.shape) for name, parameter in objective.named_weights()})
    return objective


def load_model(
    recipe: Recipe, reader: CheckpointReader, device: torch.device, *, use_average: bool = True
) -> Objective:
    """The objective of a checkpoint in evaluation mode, in the precision that it was trained in.

    Its weights are their average where the run keeps one, unless `use_average` is False.
    """
    kind = reader.index.evaluated_kind if use_average else MASTER
    dtype = weight_dtype(recipe)
    model = empty_objective(recipe, reader).to(dtype).to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_weights():
            parameter.copy_(reader.parameter(name, kind))
    return model.eval()


def _data_root(recipe: Recipe, reader: CheckpointReader) -> str | None:
    """`data.root`; a relative one as the run, which may have begun in another folder, had it, if it is still there."""
    root, began_in = recipe.data.root, reader.index.data.get("working_directory")
    if root is None or began_in is None or is_url(root) or root.startswith("~"):
        return root
    then = Path(began_in, root)
    return str(then) if then.exists() else root


class FinishedModel:
    """A checkpoint's model on this machine's device, and what its recipe says of looking at it.

    Args:
        run_dir: the run's directory.
        settings: `a.b=c` overrides of the recipe, for example another `evaluation.validation`.
        step: of the checkpoint; the newest one that verifies by default.
        use_average: of the weights, where the run keeps one.

    Raises as `open_run` does, and `RecipeError` for the settings.
    """

    def __init__(
        self, run_dir: Path, settings: Sequence[str] = (), step: int | None = None, *, use_average: bool = True
    ) -> None:
        recipe, reader = open_run(run_dir, step)
        as_trained = recipe.dump() | {"model": trained_recipe(reader).dump()["model"]}
        as_trained["data"] |= {
            "root": _data_root(recipe, reader),
            "normalise": trained_recipe(reader).dump()["data"]["normalise"],
        }
        self.recipe = override(as_trained, settings, "the recipe of the run")
        self.step: int = reader.index.step
        self.class_names: list[str] = reader.index.data["class_names"]
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = load_model(self.recipe, reader, self._device, use_average=use_average)
        self._dtype = next(self._model.parameters()).dtype

    @torch.no_grad()
    def predict(self, images: torch.Tensor) -> Outputs:
        """Outputs of images uint8 (B, S, S, 3)."""
        return self._model.predict(to_model_input(images, self._device, self._dtype, self.recipe.data.normalise))


def evaluate_run(
    run_dir: Path, settings: Sequence[str] = (), step: int | None = None, *, use_average: bool = True
) -> tuple[int, dict[str, float]]:
    """(step, metrics) of a checkpoint by the evaluators of its recipe; arguments and errors as of `FinishedModel`."""
    model = FinishedModel(run_dir, settings, step, use_average=use_average)
    evaluators = build_evaluators(model.recipe, model.class_names)
    if not evaluators:
        raise RecipeError("the run's recipe has no evaluation; add one: --set evaluation.validation=DATASET")
    return model.step, evaluate(evaluators, model.predict)


def predicted_classes(model: FinishedModel, manifest: Manifest) -> dict[int, str]:
    """The most probable class of each selected sample of a dataset: uid -> class name."""
    found = {}
    for batch in evaluation_loader(model.recipe, manifest, model.recipe.data.eval_crop)():
        logits = model.predict(batch.images).logits
        assert logits is not None, "a model without classes predicts none"
        classes = logits.argmax(dim=1).tolist()
        rows = zip(batch.uids.tolist(), classes, batch.mask.tolist(), strict=True)
        found.update({uid: model.class_names[index] for uid, index, is_sample in rows if is_sample})
    return found
