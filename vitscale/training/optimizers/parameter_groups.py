"""Which parameters are trained, and how: groups by weight decay and by a factor of the learning rate."""

from typing import Any

from torch import nn

from vitscale.ground.block import has_default
from vitscale.ground.errors import RecipeError
from vitscale.objectives import Objective
from vitscale.recipe import Optimizer, Recipe, group_of, matches

LR_FACTOR = "lr_factor"  # the key of a group of torch's optimizer that holds its factor of the learning rate
BASE_DECAY = "base_weight_decay"  # the key of its weight decay before a schedule changes it
INDEX = "index"  # the key of its place in the recipe's `optimizer.groups` if it begins later than the others, else None


def parameter_groups(recipe: Recipe, objective: Objective) -> list[dict[str, Any]]:
    """Groups for torch's optimizer with `params`, `weight_decay` and `lr_factor`; frozen parameters are in none.

    Groups of parameters that `decay_exclude` does not match come first, then the others; groups, and the parameters in
    them, are in the model's order. For all parameters of a group the optimizer keeps the same kinds of state in the
    parameter's shape: under ZeRO 1 to 3 the parameters lie side by side in one tensor, and so does their state.

    Raises `RecipeError` for an exclusion or a group that matches no parameter, and if nothing is left to train.
    """
    settings = recipe.optimizer
    names = [name for name, _ in objective.named_weights()]
    if settings.decay_exclude is not None and not any(_is_excluded(settings, name) for name in names):
        raise RecipeError(f"optimizer.decay_exclude: {settings.decay_exclude!r} matches none of the model's parameters")
    try:
        settings.check_parameters({name: _shape(parameter) for name, parameter in objective.named_weights()})
    except ValueError as error:
        raise RecipeError(str(error)) from None
    _check_groups(settings, names)
    groups: dict[tuple[bool, float, float, tuple[str, ...], int | None], list[nn.Parameter]] = {}
    for name, parameter in objective.named_weights():
        group, is_excluded = group_of(settings, name), _is_excluded(settings, name)
        if group is not None and group.frozen:
            continue
        decay, factor, index = 0.0 if is_excluded else settings.weight_decay, 1.0, None
        if settings.layer_decay is not None:
            factor = settings.layer_decay ** recipe.model.layers_above(name)
        if group is not None:
            decay = decay if group.weight_decay is None else group.weight_decay
            factor *= group.lr_factor
            index = None if has_default(group, "begin") else settings.groups.index(group)
        shape = _shape(parameter)
        kept = tuple(kind for kind, of_kept in recipe.kept(name, shape).items() if of_kept == shape)
        groups.setdefault((is_excluded, decay, factor, kept, index), []).append(parameter)
    if not groups:
        raise RecipeError("optimizer.groups: every parameter is frozen, so nothing is left to train")
    return [
        {"params": parameters, "weight_decay": decay, BASE_DECAY: decay, LR_FACTOR: factor, INDEX: index}
        for (_, decay, factor, _, index), parameters in sorted(groups.items(), key=lambda item: item[0][0])
    ]


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO 3 keeps the whole shape in ds_shape


def _is_excluded(settings: Optimizer, name: str) -> bool:
    return settings.decay_exclude is not None and matches(settings.decay_exclude, name)


def _check_groups(settings: Optimizer, names: list[str]) -> None:
    chosen = [group_of(settings, name) for name in names]
    for index, group in enumerate(settings.groups):
        if not any(group is each for each in chosen):
            is_late = any(matches(group.match, name) for name in names)
            why = "only parameters of groups before it" if is_late else "none of the model's parameters"
            raise RecipeError(f"optimizer.groups.{index}.match: {group.match!r} matches {why}")
