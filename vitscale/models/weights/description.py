"""Which model, image size and classes a file of weights is for, as far as the file tells."""

import json
import math
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

import pydantic
import torch
from pydantic import Field

from vitscale.ground.errors import CheckpointError, RecipeError, turned
from vitscale.ground.extensions import implementation
from vitscale.ground.wording import describe_mistake, shortened
from vitscale.models.build import build_of_block
from vitscale.models.model import Model
from vitscale.models.weights.foreign import table
from vitscale.models.weights.preprocessing import WHOLE_PICTURE
from vitscale.models.weights.source import MOST_PIXELS, Source
from vitscale.recipe import EvalCrop, Normalise, validate_model
from vitscale.recipe.families import DIMENSIONS, FAMILIES, REGISTRY, Shape, architecture

METADATA_KEY = "vitscale"
FUNCTIONS = {"mlp", "norm_eps"}
"""The keys of a model that no tensor shows, and that are the weights' where they are left open."""
_VERSION = 1
_MAX_CLASSES = 10**9
_SOFTMAX, _SIGMOID = "single_label_classification", "multi_label_classification"
PROBLEM_TYPES = {"softmax": _SOFTMAX, "sigmoid": _SIGMOID, "bce": _SIGMOID}
"""A loss -> transformers' word for what its outputs are, in config.json; timm has none and passes it over."""
_LOSSES: dict[object, Literal["softmax", "sigmoid"]] = {_SOFTMAX: "softmax", _SIGMOID: "sigmoid"}


@dataclass(frozen=True)
class Description:
    """A model without its values.

    Args:
        model: the `model` block of a recipe, as plain data.
        image_size: side of the square input in pixels, at most 8192.
        num_classes: K, at most 1e9; None if the file has no head.
        class_names: the names of the K outputs, if known.
        step: the step of the checkpoint that the values are from, if any.
        eval_crop: the crop that the model was evaluated with, if known.
        normalise: how the images that the model is for are normalised, if known.
        loss: the loss that the classes were trained with, if known.
    """

    model: dict[str, Any]
    image_size: Annotated[int, Field(ge=1, le=MOST_PIXELS)]
    num_classes: Annotated[int, Field(ge=1, le=_MAX_CLASSES)] | None
    class_names: list[str] | None = None
    step: Annotated[int, Field(ge=0)] | None = None
    eval_crop: EvalCrop | None = None
    normalise: Normalise | None = None
    loss: Literal["sigmoid", "softmax", "bce"] | None = None

    @property
    def title(self) -> str:
        """The name, and the dimensions that replace some of its own: `ViT-B/32 with depth 8`."""
        name = self.model.get("name") or self.model.get("family")
        given = ((key, value) for key, value in self.model.items() if key in DIMENSIONS and value is not None)
        dimensions = ", ".join(f"{key} {value}" for key, value in given)
        return f"{name} with {dimensions}" if name and dimensions else str(name or dimensions)

    def build(self, *, with_head: bool = True) -> Model:
        """The model on the meta device, with one class if their number is not known. Raises `RecipeError`."""
        sizes = (("image size", self.image_size, MOST_PIXELS), ("num_classes", self.num_classes or 1, _MAX_CLASSES))
        for what, value, largest in sizes:
            if not 1 <= value <= largest:
                raise RecipeError(f"{self.title}: {what} {value:,}: expected 1 to {largest:,}")
        block = validate_model(self.model, self.image_size, self.title)
        with torch.device("meta"):
            num_classes = (self.num_classes or 1) if with_head else None
            return build_of_block(block, image_size=self.image_size, num_classes=num_classes)

    @property
    def pictures(self) -> str:
        """What an exported preprocessing shows of an image, in words; for a run it is that of its evaluation."""
        crop, size = self.eval_crop or WHOLE_PICTURE, f"{self.image_size} x {self.image_size} pixels"
        if crop.kind == "central":
            shown = f"the central {crop.fraction:g} of the short side, at {size}"
        elif crop.fraction < 1:
            shown = f"the central {crop.fraction:g} of each side, squashed to {size}"
        else:
            shown = f"the whole picture, squashed to {size}"
        if self.eval_crop is None:
            text = f"its preprocessing shows {shown}: the source names no crop"
        else:
            text = f"its preprocessing shows what the source's does: {shown}"
        if self.normalise is None:
            return f"{text}; pixels from -1 to 1: the source does not say how it normalises"
        return f"{text}; normalised by mean {self.normalise.mean} and std {self.normalise.std}"

    def to_json(self) -> str:
        """The description in JSON, for a file's metadata."""
        model = {key: value for key, value in self.model.items() if value is not None}
        content = {"version": _VERSION, **_STORED.dump_python(replace(self, model=model), warnings=False)}
        return json.dumps(content, ensure_ascii=False)


_STORED = pydantic.TypeAdapter(Description)


def describe(
    source: Source, model: dict[str, Any] | None = None, image_size: int | None = None, own: Description | None = None
) -> Description:
    """Describe what a source holds.

    Args:
        source: the weights, of any format.
        model: the `model` block of a recipe, a name at least; needed where the file does not describe its model. Head
            and pooling are the file's, and so are the form of GELU and epsilon where the block leaves them open.
        image_size: the size to give the model; by default that of the source, or 224 if it does not tell (ResNets).
        own: what is known of the model already; by default `own_description`.

    Raises `RecipeError` if a model is missing, or is not the one that the file says it is of.
    """
    own = own or own_description(source) or (recognised(source) if model is None else None)
    if own is not None:
        if model is not None:
            theirs = _facts(own.model)
            asked = _facts(
                {key: theirs[key] for key in FUNCTIONS & theirs.keys()}
                | {key: value for key, value in model.items() if value is not None}
            )
            if keys := [key for key, value in theirs.items() if asked.get(key) != value]:
                listed = "; ".join(f"{key} {theirs[key]!r}, not {asked.get(key)!r}" for key in keys)
                raise RecipeError(f"{source.path} says that it is {own.title}: {listed}")
        return replace(own, image_size=image_size or own.image_size)
    if model is None:
        named = source.config.get("architecture")
        what = "its model" if named is None else f"a model that is known here (it is {shortened(repr(named))})"
        raise RecipeError(
            f"{source.path} ({source.form}) does not name {what}; give it: --model NAME or --model RECIPE"
        )
    return _completed(source, _with_functions(source, model), image_size)


def _with_functions(source: Source, model: dict[str, Any]) -> dict[str, Any]:
    """The block with what the tensors are recognised to be of, where it leaves form of GELU and epsilon open."""
    with suppress(CheckpointError):
        if (alike := recognised(source)) is not None:
            ours, theirs = _facts(model), _facts(alike.model)
            differing = {key for key in FUNCTIONS & ours.keys() & theirs.keys() if ours[key] != theirs[key]}
            left = {key for key in differing if model.get(key) is None and "swiglu" not in (ours[key], theirs[key])}
            return model | {key: theirs[key] for key in left}
    return model


def _completed(source: Source, model: dict[str, Any], image_size: int | None) -> Description:
    """The description of the model of a block, its head, pooling and image size as the source has them."""
    pixels = _shape(model).stride
    # A model of these dimensions, whatever its head and classes, tells what its parameters are called in the format.
    is_distilled = bool(model.get("distilled"))
    block = model | {"head": "linear" if is_distilled else "pretrain", "num_classes": None}
    keys = {rule.ours: rule.theirs[0] for rule in table(Description(block, pixels, 1).build(), source.form)}
    found = {ours: source.entries[key].shape for ours, key in keys.items() if key in source.entries}
    if "cls" in keys and "cls" not in found and block.get("pool") in (None, "cls"):
        block["pool"] = "mean"
    if "pre_logits.weight" not in found:
        block["head"] = "linear"
    tokens = found.get("pos_embedding", ())
    of_class = (("cls" in found) + is_distilled) * (block.get("class_position") is not False)
    side = math.isqrt(max(tokens[1] - of_class, 0)) if len(tokens) == 3 else 0
    num_classes = found["head.bias"][0] if found.get("head.bias") else None
    names, outputs = source.class_names, source.config.get("problem_type")
    return Description(
        block,
        image_size or side * pixels or 224,
        num_classes,
        names if names and len(names) == num_classes else None,
        eval_crop=source.eval_crop,
        normalise=source.normalise,
        loss=_LOSSES.get(outputs) if isinstance(outputs, str) else None,
    )


def _shape(model: dict[str, Any]) -> Shape:
    return validate_model(model, MOST_PIXELS, str(model.get("name") or "the model")).shape()


def _facts(model: dict[str, Any]) -> dict[str, Any]:
    """What decides what a model computes from its weights, without pooling and initial values."""
    facts = validate_model(model, MOST_PIXELS, str(model.get("name") or "the model")).facts()
    scale = facts.get("layer_scale")
    return {key: value for key, value in facts.items() if key != "pool"} | {"layer_scale": scale and 1.0}


def recognised(source: Source) -> Description | None:
    """What can be told of the model of another library's file. Raises `CheckpointError` if that contradicts itself."""
    for family in FAMILIES:
        found = implementation(family.implementation, Model).recognise(source)
        if found is None:
            continue
        with turned(f"{source.path} ({source.form})", CheckpointError, RecipeError):
            return _completed(source, _named(found[0]), found[1])
    return None


def _named(block: dict[str, Any]) -> dict[str, Any]:
    """The block by the name of the most similar known model of the same width, without what goes without saying."""
    shape = _shape(block)
    usual = {field.name: field.default for field in fields(shape)}
    size = {"patch_size", "width", "mlp_dim", "num_heads", "stem", "blocks", "width_factor"}
    told: dict[str, set[str]] = {}
    for name in REGISTRY:
        if type(theirs := architecture(name)) is type(shape):
            told[name] = {key for key in usual if getattr(theirs, key) != getattr(shape, key)}
    alike = [name for name, keys in told.items() if not keys & size]
    if not alike:
        return {key: value for key, value in block.items() if key not in usual or value != usual[key]}
    name = min(alike, key=lambda each: len(told[each]))
    beside = block.keys() - usual.keys() - {"blocks"}
    return {"name": name} | {key: value for key, value in block.items() if key in told[name] | beside}


def own_description(source: Source) -> Description | None:
    """What a file of ours, or a folder's config.json, says about its model; None for other files.

    Raises `CheckpointError` if that is damaged, or contradicts the tensors.
    """
    text = source.metadata.get(METADATA_KEY)
    if text is None:
        return recognised(source) if source.config else None
    try:
        version = json.loads(text)["version"]
        if version != _VERSION:
            raise CheckpointError(f"{source.path}: written by a later vitscale (version {version!r})")
        own = _STORED.validate_json(text, strict=True)
        if own.step is not None and own.normalise is None:
            own = replace(own, normalise=Normalise())  # all runs had it before there was a choice
        if own.class_names is not None and len(own.class_names) != own.num_classes:
            raise ValueError(f"{len(own.class_names)} names of {own.num_classes} classes")
        validate_model(own.model, own.image_size, "its model")
    except pydantic.ValidationError as error:
        reason = describe_mistake(error.errors()[0])
    except (ValueError, KeyError, TypeError, RecursionError, RecipeError) as error:
        reason = str(error) if isinstance(error, RecipeError) else repr(error)
    else:
        return own
    raise CheckpointError(f"{source.path}: its description of the model is damaged: {reason}")
