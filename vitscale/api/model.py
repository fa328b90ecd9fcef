"""Models as modules of torch: opened from anything that holds weights, with the preprocessing that belongs to them.

Shape legend: B images, S side of the input in pixels, K classes, D width of the representation.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitscale.api.shown import Predictions
from vitscale.data.image_operations import to_model_input
from vitscale.data.shards.images import Reject
from vitscale.evaluation.finished import FinishedModel, OfWeights
from vitscale.evaluation.prediction import (
    AT_ONCE,
    Picture,
    Prediction,
    image_files,
    name_of,
    named_classes,
    pictures_of,
    predict_files,
    view_of,
)
from vitscale.ground.errors import DataError, RecipeError, check_numbers
from vitscale.ground.safe_text import shown
from vitscale.ground.weight_formats import Format
from vitscale.models import Outputs
from vitscale.models.weights import HEAD, write_weights
from vitscale.recipe import EvalCrop, Normalise, model_block
from vitscale.recipe.families import REGISTRY
from vitscale.runs.checkpoint.opening import Kind, kind_of
from vitscale.runs.run import Run

Images: TypeAlias = Picture | Tensor | Sequence[Picture]
"""A picture or several; or a tensor of them. Floating tensors (3, S, S) or (B, 3, S, S) are what `preprocess` makes;
uint8 tensors are pixels: (3, H, W), or (B, S, S, 3) as loaders yield them. Of folders all images are taken."""

# The options that each kind of source uses; an option that would have no effect is refused.
_OPTIONS: dict[Kind, set[str]] = {
    "a run": {"step", "use_average"},
    "a file of weights": {"model", "image_size", "class_names"},
    "a model's name": {"image_size", "class_names", "num_classes", "seed"},
}
_KINDS = "a path, bytes, an image of Pillow or an array of pixels; or all of them as one tensor"
_MARGIN = 0.25  # of the range of normalised pixels: filters that sharpen go a little beyond it


@dataclass(frozen=True)
class Preprocess:
    """Turns a picture into a model's input: evaluation's crop and normalisation. Can be pickled, for workers.

    Attributes:
        crop: the crop.
        image_size: side S of the input in pixels.
        normalise: the normalisation.
    """

    crop: EvalCrop
    image_size: int
    normalise: Normalise

    def __call__(self, picture: Picture) -> Tensor:
        """The input, fp32 (3, S, S). Raises `DataError` for what is not an image."""
        view = view_of(picture, self.crop, self.image_size)
        if isinstance(view, Reject):
            raise DataError(f"{name_of(picture, 0)}: {view.reason}")
        return to_model_input(view, torch.device("cpu"), torch.float32, self.normalise).permute(2, 0, 1)

    def check(self, images: Tensor) -> Tensor:
        """A batch of inputs (B, 3, S, S) as it is, of one (3, S, S) a batch. Raises `DataError` for anything else."""
        size = self.image_size
        expected = f"expected a batch of what `preprocess` makes: floats (B, 3, {size}, {size})"
        if not images.is_floating_point():
            raise DataError(f"a tensor of {images.dtype}; {expected}, or uint8 pixels (3, height, width)")
        batch = images[None] if images.ndim == 3 else images
        if batch.ndim != 4 or batch.shape[1:] != (3, size, size) or not len(batch):
            hint = ": channels come first, see torch.movedim" if images.shape[-1:] == (3,) else ""
            raise DataError(f"a tensor {tuple(images.shape)}; {expected}{hint}")
        if torch.compiler.is_compiling():
            return batch
        mean, std = self.normalise.mean, self.normalise.std
        low = min(-m / s for m, s in zip(mean, std, strict=True))
        high = max((1 - m) / s for m, s in zip(mean, std, strict=True))
        found, margin = torch.aminmax(batch.detach()), _MARGIN * (high - low)
        if not (found.min >= low - margin and found.max <= high + margin):  # a NaN, too
            raise DataError(
                f"values from {found.min:g} to {found.max:g}; expected pixels normalised by mean {mean} and std {std}, "
                f"from {low:.3g} to {high:.3g}: `preprocess` makes them of a picture"
            )
        return batch


class Model(nn.Module):
    """A model with its weights, in evaluation mode, on the GPU if there is one; `.to` moves it. From `load`.

    Attributes:
        backbone: the module of its family.
        preprocess: turns one picture into its input.
        source: what it was opened from.
        step: the checkpoint's step; None if it has none.
        class_names: the names of the K classes; None if they are unknown or there are none.
        num_classes: K; None for a model without classes.
    """

    def __init__(self, finished: FinishedModel, reopen: Callable[..., FinishedModel]) -> None:
        super().__init__()
        self.finished, self._reopen = finished, reopen
        self.backbone = finished.backbone
        self.preprocess = Preprocess(finished.eval_crop, finished.image_size, finished.normalise)
        self.source, self.step = str(finished.source), finished.step
        self.class_names, self.num_classes = finished.class_names, finished.num_classes
        self._shapes = _shapes(self.backbone)
        self._lock, self._inside, self._modes = RLock(), 0, list[tuple[nn.Module, bool]]()
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Inputs as `preprocess` makes them, (B, 3, S, S) -> logits, fp32 (B, K); without classes, as `features`.

        Raises `DataError` for tensors of another shape, dtype or range.
        """
        outputs = self.outputs(images)
        return outputs.pooled.float() if outputs.logits is None else outputs.logits

    def outputs(self, images: Tensor) -> Outputs:
        """As `forward`, but tokens (B, T, D), representation (B, D) and logits. With gradients, if torch keeps them."""
        batch = self.preprocess.check(images).permute(0, 2, 3, 1)  # our models take channels last
        found: Outputs = self.backbone(batch.to(*self.finished.computes_in).contiguous())
        return found

    def predict(self, images: Images, top: int = 5) -> Predictions:
        """The `top` most probable classes of each picture, with their probabilities, as `vitscale predict` has them.

        Raises `RecipeError` for a model without classes, `DataError` for what is not an image.
        """
        if self.num_classes is None:
            raise RecipeError(f"{self.source} has no classes to be predicted; `features` has its representations")
        check_numbers(1, top=top)
        self._check_unchanged()
        if not isinstance(images, Tensor):
            with self.evaluating():
                found = list(predict_files(self.finished, _pictures(images), top))
            if bad := next((each for each in found if each.problem is not None), None):
                raise DataError(f"{bad.file}: {bad.problem}")
            return Predictions(found)
        rows = [row for each in self._all_outputs(images) for row in named_classes(self.finished, each, top)]
        return Predictions(Prediction(f"picture {at}", row) for at, row in enumerate(rows))

    def features(self, images: Images) -> Tensor:
        """The representations of pictures, fp32 (B, D) on the CPU. Raises `DataError` for what is not an image."""
        return torch.cat([outputs.pooled.float().cpu() for outputs in self._all_outputs(images)])

    def save(
        self,
        out: str | os.PathLike[str],
        format: Format = "safetensors",
        *,
        drop_head: bool = False,
        as_backbone: bool = False,
    ) -> Path:
        """Write the weights as they are now, as `vitscale export` does; returns the file or folder.

        What was rounded to bf16 when it was opened, and not changed since, is read once more, in fp32.

        Args:
            out: the file, or the folder of hf and timm; nothing is overwritten.
            format: safetensors (ours), npz (Google's), timm, or hf (transformers).
            drop_head: leave the output layer out.
            as_backbone: for hf: as one of transformers' backbones, with feature maps and no head.

        Raises `RecipeError` if the format cannot hold the model or `out` exists, `CheckpointError` without room.
        """
        if format not in get_args(Format):
            raise RecipeError(f"format={format!r}: expected one of {', '.join(get_args(Format))}")
        self._check_unchanged()
        whole = self.finished if self.finished.precision == "fp32" else self._reopen(precision="fp32", report=_quiet)
        values, unrounded = (dict(each.backbone.named_parameters()) for each in (self.finished, whole))

        def value(name: str) -> Tensor:
            now, before = values[name].detach().cpu(), unrounded[name].detach().cpu()
            is_as_opened = torch.equal(before.bfloat16().to(now.dtype), now)
            return (before if is_as_opened else now).float().contiguous()

        drop_head = drop_head or values.keys().isdisjoint(HEAD)
        with self.finished.reading([self.backbone]), whole.reading([whole.backbone]):
            write_weights(
                Path(out),
                format,
                self.finished.description,
                value,
                drop_head,
                report=lambda note: None,
                as_backbone=as_backbone,
            )
        return Path(out)

    def train(self, mode: bool = True) -> "Model":
        """As of any module. Warns of weights in bf16, in which most of an optimizer's steps round to nothing."""
        if mode and self.finished.computes_in[1] != torch.float32:
            warnings.warn("its weights are bf16: to train them, load(..., precision='fp32')", stacklevel=2)
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lock = RLock()  # copies and pickles have one of their own

    def _check_unchanged(self) -> None:
        """Raise `RecipeError` if modules were replaced, so that names of classes and formats say nothing of it."""
        now = _shapes(self.backbone)
        if self.backbone is not self.finished.backbone or now != self._shapes:
            other = sorted({*now.items()} ^ {*self._shapes.items()})[:1]
            raise RecipeError(
                f"{self.source}: its modules were replaced{''.join(f' ({name} {shape})' for name, shape in other)}; "
                "its classes and formats are those of what was opened. Call it as a module: model(inputs)"
            )

    @contextmanager
    def evaluating(self) -> Iterator[FinishedModel]:
        """Within this context it computes as in evaluation, without gradients; afterwards its mode is as before."""
        with self._lock:  # threads share the mode: the first to come sets it, the last to leave sets it back
            if not self._inside:
                self._modes = [(module, module.training) for module in self.modules()]
                self.eval()
            self._inside += 1
        try:
            with torch.no_grad():
                yield self.finished
        finally:
            with self._lock:
                self._inside -= 1
                for module, mode in self._modes if not self._inside else ():
                    module.training = mode

    def _all_outputs(self, images: Images) -> Iterator[Outputs]:
        if not isinstance(images, Tensor):
            inputs: Tensor | list[Picture] = _pictures(images)
        elif images.dtype == torch.uint8:
            inputs = self.views(images)
        else:
            inputs = self.preprocess.check(images)
        for first in range(0, len(inputs), AT_ONCE):
            group = inputs[first : first + AT_ONCE]
            with self.evaluating() as finished:
                if not isinstance(group, Tensor):
                    group = pictures_of(finished, group, first)
                outputs = finished.predict(group) if group.dtype == torch.uint8 else self.outputs(group)
            yield outputs

    def views(self, images: Images) -> Tensor:
        """Pictures as it sees them, uint8 (B, S, S, 3). Raises `DataError` for what is not an image."""
        if not isinstance(images, Tensor):
            return pictures_of(self.finished, _pictures(images))
        size, is_pixels = self.preprocess.image_size, images.dtype == torch.uint8
        if is_pixels and images.shape[1:] == (size, size, 3):
            return images
        if is_pixels and images.ndim == 3 and images.shape[0] == 3:
            return pictures_of(self.finished, [np.ascontiguousarray(images.movedim(0, -1).cpu().numpy())])
        raise DataError(
            f"a tensor {tuple(images.shape)} of {images.dtype}; expected pixels, uint8 (3, height, width), or what a "
            f"loader yields, (B, {size}, {size}, 3)"
        )


def load(
    source: "str | os.PathLike[str] | Run",
    step: int | None = None,
    *,
    precision: Literal["fp32", "bf16"] | None = None,
    use_average: bool | None = None,
    model: str | None = None,
    image_size: int | None = None,
    class_names: Sequence[str] | None = None,
    num_classes: int | None = None,
    seed: int | None = None,
) -> Model:
    """A model from a run, from weights in any format, or fresh by its name.

    Args:
        source: a run's directory, the folder of one of its checkpoints, a file or folder of weights, or a name of
            `list_models`: "ViT-B/16".
        step: for a run, the step of the checkpoint; by default the newest.
        precision: the precision of the weights, in which the model computes; by default a run's own, else fp32. Weights
            that are to be trained further want fp32.
        use_average: for a run, False for its last weights instead of the average, if it keeps one.
        model: for weights that do not say it, their model: a name, or a recipe.
        image_size: for weights and names, side of the input in pixels; position embeddings are resampled.
        class_names: for weights and names, the names of the classes.
        num_classes: for a name, K; without it, and without `class_names`, the model has no head.
        seed: for a name, the seed of the initial weights, by default 0.

    Raises `RecipeError` if there is no such source, or for options that it does not use; `CheckpointError` for a run
    without a checkpoint and for a file that is damaged, no model, or of a later version.
    """
    where = str(source.directory) if isinstance(source, Run) else os.fspath(source)
    kind = kind_of(where)
    options: dict[str, object] = {"step": step, "use_average": use_average, "model": model, "image_size": image_size}
    options |= {"class_names": class_names, "num_classes": num_classes, "seed": seed}
    if foreign := sorted({name for name, value in options.items() if value is not None} - _OPTIONS[kind]):
        raise RecipeError(f"{', '.join(foreign)}: no effect, since {where} is {kind}")
    if precision not in (None, "fp32", "bf16"):
        raise RecipeError(f"precision={precision!r}: expected 'fp32' or 'bf16'")
    if kind == "a run":
        opening = partial(FinishedModel, Path(where), (), use_average=use_average is not False, report=_warn)
        finished = opening(step=step, precision=precision)
        return Model(finished, partial(opening, step=finished.step))
    names = None if class_names is None else list(class_names)
    is_fresh = kind == "a model's name"
    if is_fresh and num_classes is None and names is not None:
        num_classes = len(names)
    if isinstance(class_names, str) or not all(isinstance(name, str) for name in names or ()):
        raise RecipeError("class_names: expected a list of names")
    check_numbers(1, image_size=image_size, num_classes=num_classes)
    check_numbers(0, seed=seed)
    block, seed = model_block(model), seed or 0
    about = OfWeights(block, image_size, names, precision=precision or "fp32", num_classes=num_classes, seed=seed)
    opening = partial(FinishedModel, Path(where), weights=about, report=_quiet if is_fresh else _warn)
    return Model(opening(), opening)


def predict(model: "Model | Run | str | os.PathLike[str]", images: Images, top: int = 5) -> Predictions:
    """The `top` most probable classes of pictures, by a model or what `load` opens: see `Model.predict`."""
    return opened(model).predict(images, top)


def list_models() -> list[str]:
    """The names of the architectures that `vitscale models` lists: "ViT-B/16", ..."""
    return list(REGISTRY)


def opened(model: "Model | Run | str | os.PathLike[str]") -> Model:
    """The model itself, or the one of a source."""
    return model if isinstance(model, Model) else load(model)


def _quiet(note: str) -> None:
    """That a fresh head is all zeros is no news."""


def _warn(note: str) -> None:
    warnings.warn(shown(note), stacklevel=4)


def _pictures(images: Picture | Sequence[Picture]) -> list[Picture]:
    """One picture or several as a list, folders replaced by the images in them. Raises `DataError` for other things."""
    if isinstance(images, str | os.PathLike | bytes | Image.Image | np.ndarray):
        several: list[Picture] = [images]
    elif isinstance(images, Iterable):
        several = list(images)
    else:
        raise DataError(f"{type(images).__name__}; expected pictures: {_KINDS}")
    if len(several) == 1 and isinstance(several[0], np.ndarray) and several[0].ndim == 4:
        several = list(several[0])
    found: list[Picture] = []
    for at, picture in enumerate(several):
        if isinstance(picture, str | os.PathLike):
            if os.path.isdir(picture):  # noqa: PTH112 (without an error for what no file is called)
                found += image_files([Path(picture)])
                continue
        elif not isinstance(picture, bytes | Image.Image | np.ndarray):
            raise DataError(f"picture {at}: {type(picture).__name__}; expected {_KINDS}")
        found.append(picture)
    if not found:
        raise DataError("no pictures")
    return found


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in module.named_parameters()}
