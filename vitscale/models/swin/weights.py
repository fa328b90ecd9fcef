"""The Swin Transformers in timm's and transformers' formats: conversion rules, other windows, and how to tell one."""

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional as F

from vitscale.ground.errors import RecipeError
from vitscale.ground.weight_formats import Format
from vitscale.models.layers import CHANNELS
from vitscale.models.resnet.weights import units_of
from vitscale.models.weights.foreign import Backbone, ForeignWeights, Resampling, TimmModel
from vitscale.models.weights.rules import Rule, renamed, same, stacked, torch_patches
from vitscale.models.weights.source import MOST_PIXELS, Source, contradicted
from vitscale.models.weights.timm_hub import check_arguments, model_arguments
from vitscale.recipe.families import SwinShape, architecture

if TYPE_CHECKING:
    from vitscale.models.swin.model import Swin

_TIMM_NAMES = {
    f"swin_{word}_patch4_window7_224": architecture(f"Swin-{word[0].upper()}")
    for word in ("tiny", "small", "base", "large")
}
# Our names in a block -> timm's, and those in the files of transformers.
_IN_BLOCK = {
    "norm1": ("norm1", "layernorm_before"),
    "attention.out": ("attn.proj", "attention.output.dense"),
    "norm2": ("norm2", "layernorm_after"),
    "mlp.fc1": ("mlp.fc1", "intermediate.dense"),
    "mlp.fc2": ("mlp.fc2", "output.dense"),
}
_PATCHES = {"timm": "patch_embed.proj.weight", "hf": "swin.embeddings.patch_embeddings.projection.weight"}
_BLOCK = re.compile(r"(?:swin\.encoder\.)?layers\.(\d{1,4})\.blocks\.(\d{1,4})\.(?:norm1|layernorm_before)\.weight$")
# Arguments of timm's that show in the tensors; and others, with the values that we compute.
_TAKEN: dict[str, tuple[Any, ...]] = {
    **{"global_pool": ("avg", ""), "mlp_ratio": (4,), "qkv_bias": (True,), "always_partition": (False,)},
    "norm_layer": (None, "layernorm"),
}
# What transformers' config.json has to say, and cannot be seen in the tensors, or not by us.
_OF_TRANSFORMERS: dict[str, Any] = {
    **{"mlp_ratio": 4, "qkv_bias": True, "hidden_act": "gelu", "use_absolute_embeddings": False},
    **{"layer_norm_eps": 1e-5, "num_channels": CHANNELS},
}


class SwinWeights(ForeignWeights):
    """As `ForeignWeights`, of a Swin Transformer."""

    def __init__(self, model: "Swin") -> None:
        self._model, self._shape = model, model.shape

    def refusal(self, form: Format) -> str | None:
        return "npz holds ViTs and ResNets, and this is a Swin; use timm or hf" if form == "npz" else None

    def rules(self, form: Format) -> list[Rule]:
        return list(self._rules(is_timm=form == "timm"))

    def _rules(self, *, is_timm: bool) -> Iterator[Rule]:
        """The rules; for transformers by the names that versions 4 and 5 both read and write."""
        embedding = "patch_embed" if is_timm else "swin.embeddings"
        patches = "proj" if is_timm else "patch_embeddings.projection"
        stages = "layers" if is_timm else "swin.encoder.layers"
        yield from torch_patches("embedding", f"{embedding}.{patches}", self._shape.patch_size)
        yield from renamed("embedding_norm", f"{embedding}.norm")
        for index, (stage, place) in enumerate(self._shape.stages()):
            ours, theirs = f"blocks.{index}", f"{stages}.{stage}.blocks.{place}"
            if stage > 0 and place == 0:
                merging = f"{stages}.{stage if is_timm else stage - 1}.downsample"
                yield from renamed(f"{ours}.merging.norm", f"{merging}.norm")
                yield same(f"{ours}.merging.reduction.weight", f"{merging}.reduction.weight")
            attention = f"{theirs}.attn" if is_timm else f"{theirs}.attention.self"
            yield _table(f"{ours}.attention", attention)
            if is_timm:
                yield from renamed(f"{ours}.attention.qkv", f"{attention}.qkv")
            else:
                parts = [f"{attention}.{part}" for part in ("query", "key", "value")]
                yield from stacked(f"{ours}.attention.qkv", parts)
            for our_layer, (of_timm, of_transformers) in _IN_BLOCK.items():
                yield from renamed(f"{ours}.{our_layer}", f"{theirs}.{of_timm if is_timm else of_transformers}")
        yield from renamed("norm", "norm" if is_timm else "swin.layernorm")
        yield from renamed("head", "head.fc" if is_timm else "classifier")

    def resampling(self, name: str, shape: tuple[int, ...], form: Format) -> Resampling | None:
        """As `ForeignWeights.resampling`: of a window's biases, by bicubic interpolation, as in the authors' code."""
        own = tuple(self._model.get_parameter(name).shape) if name.endswith(".relative_bias") else ()
        old = _side(shape)
        if not own or shape[-1] != own[-1] or old in (0, own[0]):
            return None

        def resample(bias_LLA: Tensor) -> Tensor:
            planes = bias_LLA.permute(2, 0, 1)[None].float()
            return F.interpolate(planes, size=own[:2], mode="bicubic")[0].permute(1, 2, 0).contiguous()

        return Resampling((old, old), (own[0], own[1]), resample)

    def timm(self) -> TimmModel | None:
        """As `ForeignWeights.timm`; None also where timm, which pads a map after it is shifted, computes otherwise."""
        shape, image_size = self._shape, self._model.image_size
        if any(
            shape.shift_of(stage, place, image_size)
            and shape.size_of(stage, image_size) % shape.window_of(stage, image_size)
            for stage, place in shape.stages()
        ):
            return None
        own = _dimensions(shape)
        alike = {
            name: {key: value for key, value in own.items() if _dimensions(named)[key] != value}
            for name, named in _TIMM_NAMES.items()
            if isinstance(named, SwinShape)
        }
        nearest = min(alike, key=lambda name: len(alike[name]))
        return TimmModel(
            nearest,
            {"img_size": image_size} | alike[nearest],
            {"num_features": shape.channels, "global_pool": "avg"},
            {"first_conv": "patch_embed.proj", "classifier": "head.fc"},
            fixed_size=True,
        )

    def transformers_config(self) -> dict[str, Any]:
        """As `ForeignWeights`'. Raises `RecipeError` for images so small that windows of later stages are smaller."""
        shape, image_size = self._shape, self._model.image_size
        last = shape.window_of(len(shape.blocks) - 1, image_size)
        if last < shape.window:
            raise RecipeError(
                f"hf holds Swin Transformers with windows of one size, and at {image_size} pixels those of the last "
                f"stage have {last} positions a side and not {shape.window}; use timm or safetensors"
            )
        return {
            "architectures": ["SwinForImageClassification"],
            "model_type": "swin",
            "image_size": image_size,
            **_dimensions(shape),
            **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0},
            **_OF_TRANSFORMERS,
        }

    def backbone(self) -> Backbone:
        """As `ForeignWeights.backbone`: SwinBackbone, which adds a norm behind each stage, at first without effect.

        Raises `RecipeError` for images on which a stage is one window: it shifts its second block nevertheless.
        """
        shape, size = self._shape, self._model.image_size
        if any(count > 1 and shape.size_of(stage, size) <= shape.window for stage, count in enumerate(shape.blocks)):
            least = shape.stride * shape.window + 1
            raise RecipeError(
                f"at {size} pixels a stage is one window, which transformers' SwinBackbone shifts and this model does "
                f"not: its maps are equal from {least} pixels on (--image-size {2 * least - 2})"
            )
        stages = [f"stage{stage}" for stage in range(1, len(shape.blocks) + 1)]
        config = self.transformers_config() | {"architectures": ["SwinBackbone"], "out_features": stages}
        return Backbone(config, self.rules("hf"))


def _dimensions(shape: SwinShape) -> dict[str, Any]:
    """The dimensions by the names that they have in timm and in transformers."""
    return {
        "patch_size": shape.patch_size,
        "embed_dim": shape.width,
        "depths": list(shape.blocks),
        "num_heads": [shape.heads_of(stage) for stage in range(len(shape.blocks))],
        "window_size": shape.window,
    }


def _table(ours: str, theirs: str) -> Rule:
    """(L, L, A) <-> (L * L, A)"""

    def join(values: tuple[Tensor, ...]) -> Tensor:
        side = _side(tuple(values[0].shape))
        return values[0].view(side, side, -1)

    return Rule(
        f"{ours}.relative_bias", (f"{theirs}.relative_position_bias_table",), lambda value: (value.flatten(0, 1),), join
    )


def _side(shape: tuple[int, ...]) -> int:
    """Offsets along one side of a table, (L, L, A) or (L * L, A); 0 for what is none."""
    side = shape[0] if len(shape) == 3 else math.isqrt(shape[0]) if len(shape) == 2 else 0
    return side if shape[:-1] in ((side, side), (side**2,)) else 0


def recognise(source: Source) -> tuple[dict[str, Any], int | None] | None:
    """As `Model.recognise`: by the blocks of the stages and their tables of biases."""
    prefix, attention = ("", "attn") if source.form == "timm" else ("swin.encoder.", "attention.self")
    name, shapes = model_arguments(source.config)[0], {key: entry.shape for key, entry in source.entries.items()}
    is_other = source.config.get("model_type") != "swin" if source.form == "hf" else name and name[:5] != "swin_"
    patches, blocks = shapes.get(_PATCHES.get(source.form, ""), ()), units_of(source.entries, _BLOCK)
    if is_other or not blocks or len(patches) != 4:
        return None
    tables = [
        shapes.get(f"{prefix}layers.{stage}.blocks.0.{attention}.relative_position_bias_table", ())
        for stage in range(len(blocks))
    ]
    windows = [(_side(table) + 1) // 2 for table in tables]
    if not all(windows):
        return None
    shape = SwinShape(patches[0], tuple(blocks), tables[0][1], windows[0], patches[-1])
    is_timm = source.form == "timm"
    key, arguments = ("img_size", model_arguments(source.config)[1]) if is_timm else ("image_size", source.config)
    stated = next(iter(_sides(arguments.get(key))), None)
    image_size = source.image_size or stated or shape.stride * windows[-1]
    if windows != [shape.window_of(stage, image_size) for stage in range(len(blocks))]:
        if image_size == stated:
            raise contradicted(source, key, stated, f"a size at which windows are {windows}, as its tables are")
        return None
    if is_timm:
        seen = {name: (value, [value, value]) for name, value in _dimensions(shape).items()}
        check_arguments(source, {"img_size"}, _TAKEN | seen)
    else:
        for name, expected in (_OF_TRANSFORMERS | _dimensions(shape)).items():
            if (value := source.config[name]) != expected:
                raise contradicted(source, name, value, repr(expected))
    return {key: list(value) if key == "blocks" else value for key, value in vars(shape).items()}, image_size


def _sides(size: Any) -> list[int]:
    """The side of square images that a config.json states, once or twice; empty for anything else."""
    sides = size if isinstance(size, list) else [size]
    return sides if len(set(map(repr, sides))) == 1 and type(sides[0]) is int and 0 < sides[0] <= MOST_PIXELS else []
