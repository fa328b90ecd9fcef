"""The conversion table of any model in any format: one rule for each parameter."""

from collections.abc import Iterable

import torch
from torch import nn

from vitscale.ground.errors import RecipeError
from vitscale.ground.weight_formats import Format
from vitscale.models.model import Model
from vitscale.models.weights.rules import Rule, same

HEAD = (*("head.weight", "head.bias", "pre_logits.weight", "pre_logits.bias"), *("head_dist.weight", "head_dist.bias"))
"""Our parameters that only a head has: those that `--drop-head` leaves out."""


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
