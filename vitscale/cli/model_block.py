"""The model that weights belong to, as `--model` and `--set` say it."""

from collections.abc import Sequence
from typing import Any

from vitscale.ground.errors import RecipeError
from vitscale.recipe import apply_setting, find_recipe, load_recipe
from vitscale.recipe.families import architecture, nearest


def model_block(model: str | None, settings: Sequence[str]) -> dict[str, Any] | None:
    """The model block that `--model`, a model's or a recipe's name, and `--set` give. Raises `RecipeError`."""
    if model is None:
        if settings:
            raise RecipeError("--set changes the model that --model gives; name that too")
        return None
    for setting in settings:
        if not setting.startswith("model."):
            raise RecipeError(f"--set {setting}: only the model of a recipe counts here; expected model.KEY=VALUE")
    content: dict[str, Any] = {"model": {"name": model}}
    try:
        architecture(model)
    except ValueError:
        try:
            find_recipe(model)
        except RecipeError as error:
            raise RecipeError(f"--model: {error}; as a model's name it is nearest to {nearest(model)!r}") from None
        return load_recipe(model, settings).dump()["model"]
    for setting in settings:
        content = apply_setting(content, setting)
    return content["model"]
