"""What a file of weights is of: the model, the image size and the classes; read from the file as far as it says so."""

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from vitscale.architectures import ResNetShape, Shape, architecture
from vitscale.errors import CheckpointError, RecipeError
from vitscale.models.build import Model, build_of_block
from vitscale.models.weights import huggingface
from vitscale.models.weights.source import Source
from vitscale.models.weights.table import table
from vitscale.recipe import validate_model

METADATA_KEY = "vitscale"
_VERSION = 1


@dataclass(frozen=True)
class Description:
    """A model without its values.

    Args:
        model: the block of a recipe, as plain data.
        image_size: side of the square input in pixels.
        num_classes: K; None where the file has no head.
        class_names: of the K outputs, where they are known.
    """

    model: dict[str, Any]
    image_size: int
    num_classes: int | None
    class_names: list[str] | None = None

    def build(self) -> Model:
        """The model on the meta device. Raises `RecipeError`."""
        block = validate_model(self.model, self.image_size, "the model of these weights")
        with torch.device("meta"):
            return build_of_block(block, image_size=self.image_size, num_classes=self.num_classes or 1)

    def to_json(self) -> str:
        """For a file's metadata."""
        content = {
            "version": _VERSION,
            "model": {key: value for key, value in self.model.items() if value is not None},
            "image_size": self.image_size,
            "num_classes": self.num_classes,
            "class_names": self.class_names,
        }
        return json.dumps(content, ensure_ascii=False)


def named(name: str, num_classes: int, image_size: int, head: str) -> Description:
    """An architecture by its name. Raises `RecipeError` naming the nearest one."""
    _shape(name)
    return Description({"name": name, "head": head, "num_classes": num_classes}, image_size, num_classes)


def describe(source: Source, name: str | None = None, image_size: int | None = None) -> Description:
    """What a source holds.

    Args:
        source: of any format.
        name: of the architecture; our own files say it themselves.
        image_size: to give the model; by default that of the source, or 224 where it does not tell (ResNets).

    Raises `RecipeError` where a name is missing or contradicts the file.
    """
    own = _own(source)
    if own is not None:
        if name is not None and name != own.model.get("name"):
            raise RecipeError(f"{source.path} says that it is {own.model.get('name') or own.model}, not {name}")
        return replace(own, image_size=image_size or own.image_size)
    if name is None:
        raise RecipeError(f"{source.path} ({source.form}) does not say which model it is of; name it: --model NAME")
    shape = _shape(name)
    pixels = _pixels_of_a_token(shape)
    # Any model of this name tells what its parameters are called in this format.
    block: dict[str, Any] = {"name": name, "head": "pretrain"}
    keys = {rule.ours: rule.theirs[0] for rule in table(Description(block, pixels, 1).build(), source.form)}
    found = {ours: source.entries[key].shape for ours, key in keys.items() if key in source.entries}
    if "cls" in keys and "cls" not in found:
        block["pool"] = "mean"
    if "pre_logits.weight" not in found:
        block["head"] = "linear"
    tokens = found.get("pos_embedding", ())
    side = math.isqrt(max(tokens[1] - ("cls" in found), 0)) if len(tokens) == 3 else 0
    num_classes = found["head.bias"][0] if found.get("head.bias") else None
    names = huggingface.class_names(source.path) if source.form == "hf" and source.path.is_dir() else None
    return Description(
        block, image_size or side * pixels or 224, num_classes, names if names and len(names) == num_classes else None
    )


def _pixels_of_a_token(shape: Shape) -> int:
    if isinstance(shape, ResNetShape):
        return shape.stride
    return shape.patch_size * (1 if shape.stem is None else shape.stem.stride)


def _shape(name: str) -> Shape:
    try:
        return architecture(name)
    except ValueError as error:
        raise RecipeError(str(error)) from None


def _own(source: Source) -> Description | None:
    text = source.metadata.get(METADATA_KEY)
    if text is None:
        return None
    try:
        content = json.loads(text)
        if content["version"] != _VERSION:
            raise CheckpointError(f"{source.path}: written by a later vitscale (version {content['version']})")
        own = Description(*(content[key] for key in ("model", "image_size", "num_classes", "class_names")))
        K, names = own.num_classes, own.class_names
        has_classes = K is None or (isinstance(K, int) and K > 0 and (names is None or len(names) == K))
        has_size = isinstance(own.image_size, int) and own.image_size > 0
        if not isinstance(own.model, dict) or not has_classes or not has_size:
            raise ValueError(f"model {own.model!r}, image_size {own.image_size!r}, num_classes {K!r}")
        return own
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{source.path}: its description of the model is damaged: {error!r}") from None
