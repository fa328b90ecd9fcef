"""The conversion rules of the Vision Transformers and their hybrids."""

from collections.abc import Iterator

from vitscale.models.vit import ViT
from vitscale.models.weights.resnet import flax_stem, timm_features
from vitscale.models.weights.rules import (
    Rule,
    flax_attention,
    flax_dense,
    flax_norm,
    flax_patches,
    in_thirds,
    renamed,
    same,
    torch_patches,
)
from vitscale.weight_formats import Format


def refusal(model: ViT, form: Format) -> str | None:
    """Why a format cannot hold this Vision Transformer; None where it can."""
    if model.shape.attention == "axial":
        return f"{form} holds Transformers with global attention, not axial attention; use safetensors"
    if (model.position, model.position_at) != ("1d", "stem"):
        return f"{form} holds 1d position embeddings at the stem, not {_positions(model)}; use safetensors"
    if form == "hf" and model.shape.stem is not None:
        return "hf holds Vision Transformers without a ResNet before them; use timm or npz"
    if form == "hf" and model.cls is None:
        return "hf holds Vision Transformers with a class token, and this one pools the mean; use timm or npz"
    return None


def _positions(model: ViT) -> str:
    if model.position in ("none", "relative"):
        return {"none": "a model without any", "relative": "relative ones"}[model.position]
    place = {"stem": "", "every_layer": " in every layer", "shared": " shared by all layers"}[model.position_at]
    return f"{model.position} ones{place}"


def vit_rules(model: ViT, form: Format) -> list[Rule]:
    """Every parameter of a Transformer in a format that can hold it; `pre_logits` in npz alone."""
    if form == "npz":
        return list(_flax(model))
    return list(_timm(model) if form == "timm" else _transformers(model))


def _flax(model: ViT) -> Iterator[Rule]:
    if model.stem is not None:
        yield from flax_stem(model.stem, "stem.")
    yield from flax_patches("embedding", "embedding", model.shape.patch_size)
    if model.cls is not None:
        yield same("cls", "cls")
    yield same("pos_embedding", "Transformer/posembed_input/pos_embedding")
    for i in range(model.shape.depth):
        ours, theirs = f"blocks.{i}", f"Transformer/encoderblock_{i}"
        attention = f"{theirs}/MultiHeadDotProductAttention_1"
        yield from flax_norm(f"{ours}.norm1", f"{theirs}/LayerNorm_0")
        yield from flax_attention(f"{ours}.attention", attention, model.shape.num_heads)
        yield from flax_norm(f"{ours}.norm2", f"{theirs}/LayerNorm_2")
        yield from flax_dense(f"{ours}.mlp.fc1", f"{theirs}/MlpBlock_3/Dense_0")
        yield from flax_dense(f"{ours}.mlp.fc2", f"{theirs}/MlpBlock_3/Dense_1")
    yield from flax_norm("norm", "Transformer/encoder_norm")
    if model.pre_logits is not None:
        yield from flax_dense("pre_logits", "pre_logits")
    yield from flax_dense("head", "head")


def _timm(model: ViT) -> Iterator[Rule]:
    if model.stem is not None:
        yield from timm_features(model.stem, "stem.", "patch_embed.backbone.")
    yield from torch_patches("embedding", "patch_embed.proj", model.shape.patch_size)
    if model.cls is not None:
        yield same("cls", "cls_token")
    yield same("pos_embedding", "pos_embed")
    for i in range(model.shape.depth):
        block = f"blocks.{i}"
        yield from renamed(f"{block}.norm1", f"{block}.norm1")
        yield from renamed(f"{block}.attention.qkv", f"{block}.attn.qkv")
        yield from renamed(f"{block}.attention.out", f"{block}.attn.proj")
        yield from renamed(f"{block}.norm2", f"{block}.norm2")
        yield from renamed(f"{block}.mlp.fc1", f"{block}.mlp.fc1")
        yield from renamed(f"{block}.mlp.fc2", f"{block}.mlp.fc2")
    yield from renamed("norm", "norm")
    yield from renamed("head", "head")


def _transformers(model: ViT) -> Iterator[Rule]:
    """The names that transformers 4 and 5 both read, and both write."""
    yield same("cls", "vit.embeddings.cls_token")
    yield same("pos_embedding", "vit.embeddings.position_embeddings")
    yield from torch_patches("embedding", "vit.embeddings.patch_embeddings.projection", model.shape.patch_size)
    for i in range(model.shape.depth):
        ours, theirs = f"blocks.{i}", f"vit.encoder.layer.{i}"
        attention = f"{theirs}.attention.attention"
        yield from renamed(f"{ours}.norm1", f"{theirs}.layernorm_before")
        yield from in_thirds(f"{ours}.attention.qkv", (f"{attention}.query", f"{attention}.key", f"{attention}.value"))
        yield from renamed(f"{ours}.attention.out", f"{theirs}.attention.output.dense")
        yield from renamed(f"{ours}.norm2", f"{theirs}.layernorm_after")
        yield from renamed(f"{ours}.mlp.fc1", f"{theirs}.intermediate.dense")
        yield from renamed(f"{ours}.mlp.fc2", f"{theirs}.output.dense")
    yield from renamed("norm", "vit.layernorm")
    yield from renamed("head", "classifier")
