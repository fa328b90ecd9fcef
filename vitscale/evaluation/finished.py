"""Opens finished models for inference: a run's checkpoint, or weights in any format.

Under `torchrun` every process has the model, spread over several devices if need be, and its own part of the
images.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import align_module_device
from torch import nn

from vitscale.data.augmentation import EvalTransform
from vitscale.data.image_operations import to_model_input
from vitscale.data.settings import Reading
from vitscale.data.shards import Manifest
from vitscale.evaluation.build import build_evaluators, exact_pass
from vitscale.evaluation.contract import MakeLoader, evaluate
from vitscale.evaluation.placing import ReadTensor, is_main, join, place, tell
from vitscale.evaluation.splits import common_samples
from vitscale.ground.errors import RecipeError, VitscaleError
from vitscale.ground.weight_formats import POSITIONS_RULE
from vitscale.models import BlockTokens, Model, Outputs, weight_dtype
from vitscale.models.weights import WHOLE_PICTURE, Description, Source
from vitscale.objectives import Objective, build_objective
from vitscale.recipe import Data, EvalCrop, Normalise, Recipe, override
from vitscale.recipe.datasets import find_dataset_or_folder
from vitscale.recipe.families import model_of
from vitscale.runs.checkpoint import MASTER, CheckpointReader
from vitscale.runs.checkpoint.opening import describe_run, is_weights, open_model, open_run, trained_recipe
from vitscale.runs.checkpoint_index import data_root

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_BY_DISTANCE = "resampled, splines over distances that grow by a factor"
_BICUBIC, _ANTIALIASED = "resampled, bicubic with edges in one place", "resampled, bicubic and antialiased"
_OF_DINOV2 = {"dinov2": "resampled, bicubic by a factor of (new + 0.1) / old", "dinov2_with_registers": _ANTIALIASED}


def empty_objective(recipe: Recipe, reader: CheckpointReader) -> Objective:
    """A checkpoint's objective on the meta device. Raises `CheckpointError` if the checkpoint is of another model."""
    with torch.device("meta"):
        objective = build_objective(recipe, len(reader.index.data.get("class_names") or ()))
    reader.check_shapes({name: list(parameter.shape) for name, parameter in objective.named_weights()})
    return objective


def stored_values(objective: Objective, reader: CheckpointReader, use_average: bool) -> dict[str, ReadTensor]:
    """How to read each parameter of an objective from its checkpoint."""
    kind = reader.index.evaluated_kind if use_average else MASTER
    names = zip(objective.named_parameters(), objective.named_weights(), strict=True)
    return {ours: partial(reader.parameter, stored, kind) for (ours, _), (stored, _) in names}


_Opened = tuple[Description, Model | Objective, Mapping[str, ReadTensor], torch.dtype]


class FinishedModel:
    """A trained model on this process's device, with all that is needed to run it on images.

    Args:
        source: a run's directory, or weights in any format that `vitscale export` reads; with `weights`, also a model's
            name, for fresh ones.
        settings: for a run, `a.b=c` overrides of its recipe, for example another `evaluation.validation`.
        step: for a run, the step of the checkpoint; by default the newest one that verifies.
        use_average: for a run, whether to use the average of the weights if it keeps one.
        weights: for weights, what their file does not say.
        precision: for a run, the precision of the weights instead of its own.
        max_memory_gb: as in `placing.place`.
        on_cpu: compute on the CPU even if there is a GPU.
        report: called with what is worth knowing.

    Attributes:
        accelerator: Accelerate's view of this process among the others.
        recipe: the run's recipe; None for weights.
        description: the model, without its values.
        title, step: the model's name, and the checkpoint's step if it is known.
        class_names: the names of the K outputs; None if unknown, and for a model without classes.
        num_classes: K; None for a model without classes.
        image_size: side S of the square input in pixels.
        eval_crop, normalise: the crop of each image, and the normalisation of its pixels.
        loss: the loss that the classes were trained with, which turns outputs into probabilities; softmax if unknown.
        positions: how position embeddings were resampled, and `positions_of_origin` how the library that the weights
            come from would have done it; None if they were not.
        precision: the precision of the weights, fp32 or bf16.

    Raises as `open_run` does, `RecipeError` for the settings, and `CheckpointError` for weights.
    """

    def __init__(
        self,
        source: Path,
        settings: Sequence[str] = (),
        step: int | None = None,
        *,
        use_average: bool = True,
        weights: "OfWeights | None" = None,
        precision: Literal["fp32", "bf16"] | None = None,
        max_memory_gb: float | None = None,
        on_cpu: bool = False,
        report: Callable[[str], None] = tell,
    ) -> None:
        self.source, self.accelerator, self._report = source, join(on_cpu), report
        self.recipe: Recipe | None = None
        self.positions: str | None = None
        self.positions_of_origin: str | None = None
        description, model, values, self._dtype = (
            self._open_weights(weights or OfWeights())
            if weights is not None or is_weights(source)
            else self._open(settings, step, use_average)
        )
        if precision is not None:
            self._dtype = _DTYPES[precision]
        self.description = description
        self.title, self.step, self.image_size = description.title, description.step, description.image_size
        self.class_names, self.num_classes = description.class_names, description.num_classes
        self.eval_crop, self.normalise = description.eval_crop or WHOLE_PICTURE, description.normalise or Normalise()
        self.loss = description.loss or "softmax"
        self.precision = "fp32" if self._dtype == torch.float32 else "bf16"
        self._model = place(model, values, self._dtype, self.accelerator, max_memory_gb)

    def _open(self, settings: Sequence[str], step: int | None, use_average: bool) -> _Opened:
        recipe, reader = open_run(self.source, step, self._report)
        trained = trained_recipe(reader).dump()
        as_trained = recipe.dump() | {"model": trained["model"]}
        as_trained["data"] |= {"root": data_root(recipe, reader.index), "normalise": trained["data"]["normalise"]}
        self.recipe = recipe = override(as_trained, settings, "the recipe of the run")
        description = describe_run(as_trained["model"], recipe, reader.index)
        self._batch, self._data = recipe.evaluation.batch, recipe.data
        objective = empty_objective(recipe, reader)
        return description, objective, stored_values(objective, reader, use_average), weight_dtype(recipe)

    def _open_weights(self, weights: "OfWeights") -> _Opened:
        found = open_model(
            str(self.source),
            image_size=weights.image_size,
            num_classes=weights.num_classes,
            seed=weights.seed,
            report=self._report,
        )
        description, model, values = found.fit(weights.model, weights.image_size, report=self._report)
        if any(read.is_resampled for read in values.values()):
            self.positions = model_of(**description.model).positions_rule
            self.positions_of_origin = rule_of_origin(found.source, self.positions)
            if found.source.form == "hf" and found.source.config.get("model_type") in _OF_DINOV2:
                self.positions = self.positions_of_origin
        if (names := weights.class_names) is not None:
            if len(names) != description.num_classes:
                raise RecipeError(
                    f"{len(names)} class names, and the model of {self.source} has {description.num_classes or 'no'} "
                    "classes"
                )
            description = replace(description, class_names=list(names))
        if description.normalise is None and found.source.path.exists():
            self._report(f"{self.source} does not say how pixels are normalised: assuming [-1, 1], as in the paper")
        self._batch, self._data = weights.batch, Data(train="")
        return description, model, values, _DTYPES[weights.precision]

    @property
    def backbone(self) -> Model:
        """The model that `predict` runs; if it is spread, some of its parameters are not on this device."""
        found = self._model.backbone if isinstance(self._model, Objective) else self._model
        assert isinstance(found, Model)
        return found

    @property
    def computes_in(self) -> tuple[torch.device, torch.dtype]:
        """The device and dtype of its input: where its weights are, which may have been moved meanwhile."""
        if hasattr(self._model, "hf_device_map"):  # it is spread
            return self.accelerator.device, self._dtype
        weight = next(self._model.parameters())
        return weight.device, weight.dtype

    @contextmanager
    def reading(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Within this context all parameters of these modules of the backbone are loaded, wherever they are kept."""
        with ExitStack() as stack:
            for part in {part: None for module in modules for part in module.modules()}:
                stack.enter_context(align_module_device(part))
            yield

    @torch.no_grad()
    def predict(self, images: torch.Tensor) -> Outputs:
        """The model's outputs for images, uint8 (B, S, S, 3)."""
        return self._model(to_model_input(images, *self.computes_in, self.normalise))

    @torch.no_grad()
    def block_tokens(self, images: torch.Tensor, count: int) -> BlockTokens:
        """The tokens of the last `count` blocks for images, uint8 (B, S, S, 3)."""
        return self.backbone.block_tokens(to_model_input(images, *self.computes_in, self.normalise), count)

    @torch.no_grad()
    def predict_patches(self, images: torch.Tensor) -> Outputs:
        """As `predict`, but `pooled` are the patches' tokens after the final norm, by row and column: (B, h, w, D).

        Raises `RecipeError` for a model without patches.
        """
        if (side := self.backbone.anatomy().grid) is None:
            raise RecipeError(f"{self.title} does not say where its patches are").on_all_ranks()
        tokens = self.predict(images).tokens
        return Outputs(tokens, tokens[:, -(side**2) :].unflatten(1, (side, side)), None)

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter with its name; on the meta device if the model is spread and its value is elsewhere."""
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach()

    def dataset(self, name: str) -> Manifest:
        """The dataset `NAME[/SPLIT] | PATH | URL`; for a run, names are looked up under its `data.root`, then here.

        Raises `RecipeError`, `DataError` and `StorageError`.
        """
        return Manifest.load(find_dataset_or_folder(name, self._data.root))

    def loader(self, manifest: Manifest, crop: EvalCrop | None = None, border: int = 0) -> MakeLoader:
        """Makes loaders over this process's part of a dataset, seen through `EvalTransform`.

        `crop` is `eval_crop` by default. Raises `DataError` for a dataset without samples.
        """
        crop = crop or self.eval_crop
        return exact_pass(
            manifest,
            EvalTransform.of(crop, border),
            self.image_size,
            self._batch,
            Reading.of(self._data, pinned=self.accelerator.device.type == "cuda"),
            rank=self.accelerator.process_index,
            world=self.accelerator.num_processes,
        )

    def policy(self, crop: EvalCrop | None = None, border: int = 0) -> dict[str, Any]:
        """Which model this is and how images become its input: recorded with every result, as JSON values."""
        crop = crop or self.eval_crop
        return {
            "model": self.title,
            "step": self.step,
            "image_size": self.image_size,
            "crop": crop.kind,
            "crop_fraction": crop.fraction,
            "border": border,
            "resize": crop.resize,
            "mean": self.normalise.mean,
            "std": self.normalise.std,
            "positions": self.positions or "as trained",
            "positions_of_origin": self.positions_of_origin or "as trained",
            "precision": self.precision,
        }


@dataclass(frozen=True)
class OfWeights:
    """What a weights file may not say itself.

    Args:
        model: a recipe's `model` block; our own files contain it.
        image_size: side S of the input in pixels, to which position embeddings are resampled; the file's by default.
        class_names: the names of the outputs.
        batch: the number of images that a process forwards at once.
        precision: the precision of the weights, in which the model computes.
        num_classes, seed: of a named model's fresh weights; without classes it has no head.
    """

    model: dict[str, Any] | None = None
    image_size: int | None = None
    class_names: Sequence[str] | None = None
    batch: int = 64
    precision: Literal["fp32", "bf16"] = "fp32"
    num_classes: int | None = None
    seed: int = 0


def rule_of_origin(source: Source, ours: str = POSITIONS_RULE) -> str:
    """How the library that weights come from resamples positions by default; docs/weights.md has the differences."""
    if ours != POSITIONS_RULE:  # biases of windows: by timm's `resize_rel_pos_bias_table`
        return _BY_DISTANCE if source.form == "timm" else ours
    if source.form == "timm":
        return _ANTIALIASED
    return _OF_DINOV2.get(source.config.get("model_type", ""), _BICUBIC) if source.form == "hf" else POSITIONS_RULE


def evaluate_finished(model: FinishedModel) -> dict[str, float]:
    """A run's metrics by its recipe's evaluators, the same on all processes. Raises `RecipeError` if it has none."""
    if model.recipe is None:
        raise RecipeError(
            f"{model.source} is a file of weights, which has no recipe; say what to evaluate it on: --data"
        )
    processes = {"rank": model.accelerator.process_index, "world": model.accelerator.num_processes}
    evaluators = build_evaluators(model.recipe, model.class_names or [], **processes)
    if model.recipe.evaluation.validation is not None:
        tell_common_samples(model, model.dataset(model.recipe.evaluation.validation))
    if not evaluators:
        if not model.recipe.objective.has_classes:
            raise RecipeError(
                f"the run's recipe has no evaluation, and its objective ({model.recipe.objective.kind}) no classes; "
                f"measure its representation: vitscale fewshot RUN --train DATASET --test DATASET"
            )
        raise RecipeError(
            "the run's recipe has no evaluation; add one: --data DATASET, or --set evaluation.validation=DATASET"
        )
    return evaluate(evaluators, model.predict)


def tell_common_samples(model: FinishedModel, dataset: Manifest) -> None:
    """Print how many of the dataset's samples the run was trained on, if its training data can be read from here."""
    if model.recipe is None or not is_main():
        return
    with suppress(VitscaleError):
        if found := common_samples(dataset, model.dataset(model.recipe.data.train)):
            tell(f"{found}, which the run was trained on")
