"""Vision Transformers as transformers' backbones: DINOv2's and DINOv3's, and VitDet's for those without a class token.

transformers' ViT has no backbone of its own. DINOv2 is the same Transformer with layer scales, which are ones here in
models without; the positions of tokens that have none are zeros.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.nn import functional as F

from vitscale.ground.errors import RecipeError
from vitscale.models.layers import CHANNELS
from vitscale.models.vit import dino
from vitscale.models.vit.weights import patches_and_fixed_positions
from vitscale.models.weights.foreign import Backbone
from vitscale.models.weights.huggingface import ACTIVATIONS
from vitscale.models.weights.rules import Rule, renamed, same

if TYPE_CHECKING:
    from vitscale.models.vit.model import ViT

_VITDET = "vitdet"


def backbone(model: "ViT") -> Backbone:
    """As `ForeignWeights.backbone`. DINOv3's has the final norm behind its maps, the others have none."""
    shape, is_v3 = model.shape, dino.model_type(model) == dino.DINOV3
    kind = dino.DINOV3 if is_v3 else _VITDET if model.cls is None else dino.DINOV2[shape.registers > 0]
    name = "VitDetBackbone" if kind == _VITDET else dino.ARCHITECTURES[kind].replace("Model", "Backbone")
    if not is_v3 and (parts := list(_missing(model, is_vitdet=kind == _VITDET))):
        raise RecipeError(
            f"transformers' {name}, the nearest to this model, has no {', '.join(parts)}; use safetensors"
        )
    image_size = shape.grid(model.image_size) * shape.patch_size
    config = {"architectures": [name], "image_size": image_size, "out_features": [f"stage{shape.depth}"]}
    if kind == _VITDET:
        config |= {
            "model_type": kind,
            **{"hidden_size": shape.width, "num_hidden_layers": shape.depth, "num_attention_heads": shape.num_heads},
            **{"mlp_ratio": shape.mlp_dim // shape.width, "hidden_act": ACTIVATIONS[shape.mlp]},
            **{"layer_norm_eps": shape.norm_eps, "pretrain_image_size": image_size, "patch_size": shape.patch_size},
            **{"num_channels": CHANNELS, "qkv_bias": shape.qkv_bias == "all"},
        }
        return Backbone(config, [*_embedding(model, "embeddings.projection"), *_vitdet(model)])
    config |= dino.configuration(model, kind) | {"apply_layernorm": is_v3, "reshape_hidden_states": True}
    rules = list(dino.rules(model, kind))
    if is_v3:
        return Backbone(config, rules)
    own = [rule for rule in rules if rule.ours not in ("embedding.weight", "embedding.bias", "pos_embedding")]
    return Backbone(config, [*_embedding(model, "embeddings.patch_embeddings.projection"), *own])


def _missing(model: "ViT", *, is_vitdet: bool) -> Iterator[str]:
    """The parts of a model that DINOv2's backbones, or VitDet's, do not have."""
    shape = model.shape
    parts = {
        "axial attention": shape.attention != "full",
        "ResNet before it": shape.stem is not None,
        f"norm: {shape.norm}": shape.norm != "layer",
        "qk_norm": shape.qk_norm,
        f"sub_norm: {shape.sub_norm}": shape.sub_norm != "none",
        f"qkv_bias: {shape.qkv_bias}": shape.qkv_bias == "no_key",
        "distillation token": shape.distilled,
        f"positions of kind {model.position} at {model.position_at}": (
            model.position not in ("1d", "sincos") or model.position_at != "stem"
        ),
        f"mlp_dim {shape.mlp_dim} at width {shape.width}": dino.mlp_ratio(shape) is None,
        "layer_scale": is_vitdet and shape.layer_scale is not None,
        "registers": is_vitdet and shape.registers > 0,
        "mlp: swiglu": is_vitdet and shape.mlp == "swiglu",
    }
    yield from (part for part, is_missing in parts.items() if is_missing)


def _embedding(model: "ViT", patches: str) -> Iterator[Rule]:
    """The rules of the patch embedding and of the positions, the first of which belongs to a class token."""
    positions = "embeddings.position_embeddings"
    yield from patches_and_fixed_positions(model, patches, positions, 1)
    if model.pos_embedding is None:
        return
    rule = same("pos_embedding", positions)
    if model.cls is None or not model.shape.class_position:
        rule = replace(rule, split=lambda own: (F.pad(own, (0, 0, 1, 0)),), join=lambda values: values[0][:, 1:])
    yield rule


def _vitdet(model: "ViT") -> Iterator[Rule]:
    """The rules of the blocks; VitDet has no final norm."""
    names = {"attention.qkv": "attention.qkv", "attention.out": "attention.proj"}
    for i in range(model.shape.depth):
        for layer in ("norm1", "attention.qkv", "attention.out", "norm2", "mlp.fc1", "mlp.fc2"):
            rules = renamed(f"blocks.{i}.{layer}", f"encoder.layer.{i}.{names.get(layer, layer)}")
            yield from rules[:1] if layer == "attention.qkv" and model.shape.qkv_bias == "none" else rules
