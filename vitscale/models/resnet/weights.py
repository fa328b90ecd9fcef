"""The conversion rules of the ResNets (BiT), and of the stems of hybrids."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from vitscale.ground.errors import RecipeError
from vitscale.ground.weight_formats import Format
from vitscale.models.weights.foreign import Backbone, ForeignWeights, TimmModel
from vitscale.models.weights.rules import Rule, as_conv, as_flax_conv, flax_conv, flax_norm, renamed, same
from vitscale.models.weights.source import Source
from vitscale.models.weights.timm_hub import check_arguments, model_arguments
from vitscale.recipe.families import ResNetShape

if TYPE_CHECKING:
    from vitscale.models.resnet.model import ResNet


_CONVOLUTION = re.compile(r"stages\.(\d{1,4})\.blocks\.(\d{1,4})\.conv3\.weight")
_MOST_STAGES = 8
# Arguments of timm's that show in the tensors; and others, with the values that we compute.
_SEEN = {"layers", "channels", "width_factor", "stem_chs", "bottle_ratio"}
_TAKEN: dict[str, tuple[Any, ...]] = {
    **{"preact": (True,), "global_pool": ("avg", ""), "output_stride": (32,), "avg_down": (False,), "basic": (False,)},
    **{"stem_type": ("fixed",), "act_layer": ("relu", None)},
}
_TIMM_NAMES = {
    ResNetShape((3, 4, 6, 3), 1): "resnetv2_50x1_bit",
    ResNetShape((3, 4, 6, 3), 3): "resnetv2_50x3_bit",
    ResNetShape((3, 4, 23, 3), 1): "resnetv2_101x1_bit",
    ResNetShape((3, 4, 23, 3), 3): "resnetv2_101x3_bit",
    ResNetShape((3, 8, 36, 3), 2): "resnetv2_152x2_bit",
    ResNetShape((3, 8, 36, 3), 4): "resnetv2_152x4_bit",
}


class ResNetWeights(ForeignWeights):
    """As `ForeignWeights`, of a ResNet."""

    def __init__(self, model: "ResNet") -> None:
        self._model, self._shape = model, model.shape

    def refusal(self, form: Format) -> str | None:
        if form == "hf":
            alternative = "safetensors" if self._shape.mixing == "axial" else "timm"
            return f"hf holds Vision Transformers with a class token, and this is a ResNet; use {alternative}"
        if self._shape.mixing == "axial":
            return f"{form} holds ResNets with 3x3 convolutions, not axial attention; use safetensors"
        if form == "npz" and self._shape.variant == "v1":
            return "npz holds pre-activation ResNets (BiT, variant v2); this one is v1; use timm or safetensors"
        return None

    def rules(self, form: Format) -> list[Rule]:
        features = self._model.features
        if form == "timm":
            final = renamed("norm", "norm") if self._model.norm is not None else []
            return [*timm_features(self._model.features, "features.", ""), *final, *as_conv("head", "head.fc")]
        return [
            *_bit_features(features),
            *flax_norm("norm", "resnet/group_norm", "gamma", "beta"),
            *as_flax_conv("head", "resnet/head/conv2d"),
        ]

    def timm(self) -> TimmModel | None:
        if (name := _TIMM_NAMES.get(self._shape)) is None:
            return None
        about = {"num_features": self._shape.channels, "global_pool": "avg"}
        return TimmModel(name, {}, about, {"first_conv": "stem.conv", "classifier": "head.fc"}, fixed_size=False)

    def backbone(self) -> Backbone:
        """As `ForeignWeights.backbone`: BitBackbone, whose names are timm's but for the places of root and stages."""
        shape = self._shape
        if shape.mixing == "axial" or shape.variant == "v1":
            raise RecipeError(
                "transformers' BitBackbone is a ResNet with pre-activation and 3x3 convolutions (BiT, variant v2), and "
                "this is another; use timm or safetensors"
            )
        config = {
            "architectures": ["BitBackbone"],
            "model_type": "bit",
            "embedding_size": shape.root_channels,
            "hidden_sizes": [shape.stage_channels(stage) for stage in range(len(shape.blocks))],
            "depths": list(shape.blocks),
            "output_stride": shape.stride,
            "out_features": [f"stage{stage}" for stage in range(1, len(shape.blocks) + 1)],
        }
        places = (("stem.conv.", "embedder.convolution."), ("stages.", "encoder.stages."), (".blocks.", ".layers."))
        rules = []
        for rule in [*timm_features(self._model.features, "features.", ""), *renamed("norm", "norm")]:
            (name,) = rule.theirs
            for theirs, of_transformers in places:
                name = name.replace(theirs, of_transformers)
            rules.append(same(rule.ours, f"bit.{name}"))
        return Backbone(config, rules)


def recognise(source: Source) -> tuple[dict[str, Any], int | None] | None:
    """As `Model.recognise`: BiT, by the units in its stages and the width of its root."""
    name, root = model_arguments(source.config)[0], source.entries.get("stem.conv.weight")
    blocks = units_of(source.entries, _CONVOLUTION)
    is_other = bool(name) and not (name.startswith("resnetv2_") and name.endswith("_bit"))
    if source.form != "timm" or is_other or not blocks or root is None or root.shape[1:] != (3, 7, 7):
        return None
    check_arguments(source, _SEEN, _TAKEN)
    variant = "v2" if "norm.weight" in source.entries else "v1"
    return {"blocks": blocks, "width_factor": max(root.shape[0] // 64, 1), "variant": variant}, source.image_size


def units_of(keys: Iterable[str], pattern: re.Pattern[str]) -> list[int] | None:
    """The units of each stage, by keys that name stage and unit; None if there are more stages than a ResNet has."""
    units = {(int(found[1]), int(found[2])) for key in keys if (found := pattern.match(key))}
    stages = Counter(stage for stage, _ in units)
    return [stages[stage] for stage in sorted(stages)] if len(stages) <= _MOST_STAGES else None


def timm_features(features: nn.Module, ours: str, theirs: str) -> Iterator[Rule]:
    """Root and stages in timm; `ours` and `theirs` precede the names."""
    renames = {"proj": "downsample.conv", "proj_norm": "downsample.norm"}
    # timm has the root of a stem without stages (R+ViT-Ti/16) in the place of the whole ResNet.
    root = "stem." if any(name.startswith("stages.") for name, _ in features.named_parameters()) else ""
    for name, _ in features.named_parameters():
        place, layer, kind = name.rsplit(".", 2)
        if place == "root":
            place = f"{root}{layer}"
        else:
            _, stage, unit = place.split(".")
            place = f"stages.{stage}.blocks.{unit}.{renames.get(layer, layer)}"
        yield same(f"{ours}{name}", f"{theirs}{place}.{kind}")


def flax_stem(features: nn.Module, ours: str) -> Iterator[Rule]:
    """Root and stages of a hybrid in Google's .npz."""
    renames = {"proj": "conv_proj", "proj_norm": "gn_proj", "norm1": "gn1", "norm2": "gn2", "norm3": "gn3"}
    for place, layer in _layers(features):
        if place == "root":
            theirs = {"conv": "conv_root", "norm": "gn_root"}[layer]
        else:
            _, stage, unit = place.split(".")
            theirs = f"block{int(stage) + 1}/unit{int(unit) + 1}/{renames.get(layer, layer)}"
        name = f"{ours}{place}.{layer}"
        yield from flax_norm(name, theirs) if "norm" in layer else [flax_conv(name, theirs)]


def _bit_features(features: nn.Module) -> Iterator[Rule]:
    """Root and stages in BiT's .npz: the three convolutions of a unit are a, b and c."""
    letters = {"1": "a", "2": "b", "3": "c"}
    for place, layer in _layers(features):
        name = f"features.{place}.{layer}"
        if place == "root":
            yield flax_conv(name, "resnet/root_block/standardized_conv2d")
            continue
        _, stage, unit = place.split(".")
        theirs = f"resnet/block{int(stage) + 1}/unit{int(unit) + 1:02d}"
        theirs += "/a/proj" if layer == "proj" else f"/{letters[layer[-1]]}"
        if "norm" in layer:
            yield from flax_norm(name, f"{theirs}/group_norm", "gamma", "beta")
        else:
            yield flax_conv(name, f"{theirs}/standardized_conv2d")


def _layers(features: nn.Module) -> Iterator[tuple[str, str]]:
    """(place, layer) of every convolution and norm: `root` or `stages.S.U`, and `conv1`, `norm1`, `proj` ..."""
    for name, _ in features.named_parameters():
        place, layer, kind = name.rsplit(".", 2)
        if kind == "weight":
            yield place, layer
