"""The same weights in transformers' and timm's Vision Transformer: the independent implementations we are held to."""

from typing import Any

import torch

from vitscale.ground.weight_formats import Format
from vitscale.models.vit import ViT
from vitscale.models.weights import huggingface
from vitscale.models.weights.foreign import table


def _values(model: ViT, form: Format) -> dict[str, torch.Tensor]:
    """The model's weights under a peer's names, by the converter: a wrong name or layout would change the logits."""
    ours = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {
        key: part
        for rule in table(model, form)
        for key, part in zip(rule.theirs, rule.split(ours[rule.ours]), strict=True)
    }


def transformers_vit(model: ViT) -> torch.nn.Module:
    """A `ViTForImageClassification` with this model's weights (linear head, class token)."""
    import transformers

    assert model.head is not None
    s, grid = model.shape, model.shape.grid(model.image_size)
    make: Any = transformers.ViTConfig  # whose base class takes some of the fields
    config = make(
        hidden_size=s.width,
        num_hidden_layers=s.depth,
        num_attention_heads=s.num_heads,
        intermediate_size=s.mlp_dim,
        hidden_act="gelu_pytorch_tanh",
        layer_norm_eps=1e-6,
        image_size=grid * s.patch_size,
        patch_size=s.patch_size,
        num_labels=model.head.out_features,
    )
    peer = transformers.ViTForImageClassification(config).eval()
    values = _values(model, "hf")
    # Its modules have other names from version 5 on than its files.
    peer.load_state_dict({name: values[huggingface.file_name(name)] for name in peer.state_dict()})
    return peer


def timm_vit(model: ViT) -> torch.nn.Module:
    """timm's `VisionTransformer` with this model's weights (linear head)."""
    import timm

    assert model.head is not None
    s = model.shape
    peer = timm.models.vision_transformer.VisionTransformer(
        img_size=model.image_size,
        patch_size=s.patch_size,
        num_classes=model.head.out_features,
        global_pool="token" if model.pool == "cls" else "avg",
        class_token=model.pool == "cls",
        embed_dim=s.width,
        depth=s.depth,
        num_heads=s.num_heads,
        mlp_ratio=s.mlp_dim / s.width,
        act_layer="gelu_tanh",
        norm_layer="layernorm",
        fc_norm=False,
    ).eval()
    for module in peer.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-6
    peer.load_state_dict(_values(model, "timm"))
    return peer
