"""The contract of a family with other libraries' formats: names and layouts of its parameters, and configurations."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitscale.ground.errors import RecipeError
from vitscale.ground.weight_formats import Format
from vitscale.models.model import Model
from vitscale.models.weights.rules import Rule, same

HEAD = (*("head.weight", "head.bias", "pre_logits.weight", "pre_logits.bias"), *("head_dist.weight", "head_dist.bias"))
"""Our parameters that only a head has: those that `--drop-head` leaves out."""


class Resampling(NamedTuple):
    """How a parameter of another resolution becomes ours.

    Args:
        old, new: (rows, columns) of the positions.
        resample: their tensor -> ours.
    """

    old: tuple[int, int]
    new: tuple[int, int]
    resample: Callable[[Tensor], Tensor]


class TimmModel(NamedTuple):
    """A model as `timm.create_model` builds it.

    Args:
        name: timm's name for it.
        arguments: the arguments besides the name, without the number of classes.
        about: what else config.json says.
        layers: names of the first convolution and the classifier, for config.json's part on pretraining.
        fixed_size: whether it takes images of one size.
    """

    name: str
    arguments: dict[str, Any]
    about: dict[str, Any]
    layers: dict[str, str | list[str]]
    fixed_size: bool


class Backbone(NamedTuple):
    """A model as one of transformers' backbones, those of `AutoBackbone`, which have feature maps and no head.

    Args:
        config: the content of config.json.
        rules: a rule for every parameter that its maps depend on.
    """

    config: dict[str, Any]
    rules: Sequence[Rule]


class ForeignWeights:
    """One model in the formats of other libraries. Each family has a subclass; by default no format has the model."""

    def refusal(self, form: Format) -> str | None:
        """Why a format cannot hold this model; None if it can."""
        return f"format {form} has no such model; safetensors, vitscale's own, has any"

    def rules(self, form: Format) -> Sequence[Rule]:
        """A rule for every parameter, if the format can hold the model, except `pre_logits` if it has none."""
        raise NotImplementedError

    def resampling(self, name: str, shape: tuple[int, ...], form: Format) -> Resampling | None:
        """How our parameter is made of one of this shape in a format, if they differ by nothing but the resolution."""
        return None

    def timm(self) -> TimmModel | None:
        """timm's model; None if timm has no name for it."""
        return None

    def transformers_config(self) -> dict[str, Any]:
        """What transformers' config.json says of the model, classes aside, where `refusal` of hf is None."""
        raise NotImplementedError

    def backbone(self) -> Backbone:
        """transformers' backbone that computes the maps of `Model.feature_maps`. Raises `RecipeError` without one."""
        raise RecipeError("transformers has no backbone that computes what this model does; use safetensors")


def table(model: Model, form: Format) -> list[Rule]:
    """One rule for each parameter of a model, except `pre_logits` if a format has none.

    Raises `RecipeError` saying what the format can hold.
    """
    if form == "safetensors":
        return [same(name, name) for name, _ in model.named_parameters()]
    if (reason := model.foreign().refusal(form)) is not None:
        raise RecipeError(reason)
    return list(model.foreign().rules(form))


def their_shapes(model: nn.Module, rules: Iterable[Rule]) -> dict[str, tuple[int, ...]]:
    """Key -> shape of every array in a table of this model, or of what an objective adds to one."""
    ours = {name: torch.empty(parameter.shape, device="meta") for name, parameter in model.named_parameters()}
    shapes = {}
    for rule in rules:
        for key, part in zip(rule.theirs, rule.split(ours[rule.ours]), strict=True):
            shapes[key] = tuple(part.shape)
    return shapes
