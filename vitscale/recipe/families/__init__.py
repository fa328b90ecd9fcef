"""Model families, each defined once and without torch, and the registry, which picks the family of a `model` block.

A block names the family of another package itself: `family: my_package.Mixer`.
"""

import difflib
from typing import Annotated, Any

from pydantic import PlainSerializer, WrapValidator

from vitscale.ground.block import has_default
from vitscale.ground.extensions import block_class
from vitscale.ground.wording import shortened
from vitscale.recipe.families.family import Model, Patches, Pool, Shape
from vitscale.recipe.families.position import Position
from vitscale.recipe.families.resnet import ResNet, ResNetShape
from vitscale.recipe.families.swin import Swin, SwinShape
from vitscale.recipe.families.vit import ViT, has_class_token
from vitscale.recipe.families.vit_shape import DropPathRule, ViTShape

FAMILIES: tuple[type[Model], ...] = (ViT, ResNet, Swin)
REGISTRY = tuple(name for family in FAMILIES for name in family.names)
"""The models that `vitscale models` lists and the tests cover; other names of the same patterns work as well."""
DIMENSIONS = tuple(dict.fromkeys(key for family in FAMILIES for key in family.dimensions))
"""Keys of a `model` block that each replace one dimension of the named model."""

_LONGEST_NAME = 100
_OPTIONAL = tuple(key for family in FAMILIES for key in family.optional)
SIZES = tuple(key for key in DIMENSIONS if key not in _OPTIONAL)
"""Those that a model without a name has to have."""
UNSET: dict[str, Any] = dict.fromkeys(
    ("name", *SIZES, "num_classes", "pool", "head", "head_bias", "dropout", "position")
) | {"dropout": 0.0, "position": Position().model_dump()}
"""The keys that every resolved recipe has, in this order, as when all families shared one block. A key that a family
does not have is written with the value given here, and the family accepts it with that value."""


def architecture(name: str) -> Shape:
    """Dimensions of a named model such as `ViT-L/16`, `R50+ViT-B/16`, `ResNet152x2` or `Swin-B`.

    Raises `ValueError`, naming the nearest known model if one is near.
    """
    return _named(name)[1]


def _named(name: str) -> tuple[type[Model], Shape]:
    for family in FAMILIES if len(name) <= _LONGEST_NAME else ():
        if (shape := family.named(name)) is not None:
            return family, shape
    near = nearest(name)
    hint = f" (did you mean {near!r}?)" if near else ""
    raise ValueError(f"unknown model {shortened(name)!r}{hint}; see `vitscale models`")


def nearest(name: str) -> str | None:
    """The registered name most similar to `name`; None if even that one is of other letters for the most part."""
    likeness, near = max((_likeness(name[:_LONGEST_NAME], known), known) for known in REGISTRY)
    return near if likeness[0] > 0.5 else None


def _likeness(name: str, known: str) -> tuple[float, float]:
    """Similarity without regard to case, then with it, which tells b from B."""
    loose = difflib.SequenceMatcher(None, name.lower(), known.lower()).ratio()
    return loose, difflib.SequenceMatcher(None, name, known).ratio()


def model_of(**content: Any) -> Model:
    """The `model` block with these keys, of the family that they imply. Raises `ValueError`."""
    return _validated(content)


def by_name(content: Any) -> Any:
    """Plain data of a `model` block, of which a name alone, `ViT-B/16`, is short for `{name: ViT-B/16}`."""
    return {"name": content} if isinstance(content, str) else content


def _validated(content: Any) -> Model:
    """The block of the family that plain data imply; keys of other families are allowed at their `UNSET` values."""
    content = by_name(content)
    if isinstance(content, Model):
        return content
    if not isinstance(content, dict):
        return ViT.model_validate(content)
    family = _family(content)
    own = dict(content)
    for key, unset in (UNSET | dict.fromkeys(_OPTIONAL)).items():
        if key in own and key not in family.model_fields:
            value = own.pop(key)
            whole = unset | value if isinstance(unset, dict) and isinstance(value, dict) else value
            if whole != unset:
                raise ValueError(family.refusal(key, value, content.get("name")))
    model = family.model_validate(own)
    if model.family is not None and model.name is not None and family.named(model.name) is None:
        raise ValueError(f"name {model.name!r}: {model.family} knows no such model")
    return model


def _family(content: dict[str, Any]) -> type[Model]:
    """The block's family: by its `family` key, else by its name, else by its dimensions.

    A block without a name is a Swin if it has a window, a ResNet if it has dimensions and all of them are a ResNet's,
    otherwise a Transformer.
    """
    if content.get("family") is not None:
        return block_class(content["family"], Model, "model")  # type: ignore[type-abstract]  # its subclasses are whole
    name = content.get("name")
    if isinstance(name, str):
        return _named(name)[0]
    given = {key for key in DIMENSIONS if content.get(key) is not None}
    if "window" in given:
        return Swin
    return ResNet if given and given <= set(ResNet.dimensions) else ViT


def _resolved(model: Model) -> dict[str, Any]:
    own = model.model_dump(mode="json", by_alias=True)
    if model.family is not None:
        return own
    own = {
        key: value
        for key, value in own.items()
        if key not in ("family", *model.optional) or not has_default(model, key)
    }
    return {key: own.get(key, value) for key, value in UNSET.items()} | own


ModelBlock = Annotated[
    ViT | ResNet | Swin, WrapValidator(lambda content, _: _validated(content)), PlainSerializer(_resolved)
]
"""The `model` of a recipe: the block of one family, chosen by its name or dimensions."""
