"""The same weights in transformers' and timm's Vision Transformer: the independent implementations we are held to."""

import sys

import torch

from vitscale.models import ViT


def _make_torchvision_importable() -> None:
    """Both peers import torchvision, which has no compiled part for some builds of torch: declare what it looks for."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        pass
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        _LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")  # what it declares lives as long as it does
_make_torchvision_importable()


def _conv(weight: torch.Tensor, patch: int) -> torch.Tensor:
    """(D, P*P*C) in height-width-channel order -> (D, C, P, P)."""
    return weight.view(-1, patch, patch, 3).permute(0, 3, 1, 2)


def transformers_vit(model: ViT) -> torch.nn.Module:
    """A `ViTForImageClassification` with this model's weights (linear head, class token)."""
    import transformers

    s, grid = model.shape, model.shape.grid(model.image_size)
    config = transformers.ViTConfig(
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
    targets = dict(peer.named_parameters())
    ours = {name: parameter.detach() for name, parameter in model.named_parameters()}
    values = {
        "vit.embeddings.cls_token": ours["cls"],
        "vit.embeddings.position_embeddings": ours["pos_embedding"],
        "vit.embeddings.patch_embeddings.projection.weight": _conv(ours["embedding.weight"], s.patch_size),
        "vit.embeddings.patch_embeddings.projection.bias": ours["embedding.bias"],
        "vit.layernorm.weight": ours["norm.weight"],
        "vit.layernorm.bias": ours["norm.bias"],
        "classifier.weight": ours["head.weight"],
        "classifier.bias": ours["head.bias"],
    }
    layer_prefix = next(name for name in targets if name.endswith("layernorm_before.weight"))
    layer_prefix = layer_prefix.split("0.layernorm_before")[0]
    attention_names = [name for name in targets if name.startswith(f"{layer_prefix}0.attention")]
    for kind in ("weight", "bias"):
        for i in range(s.depth):
            block, layer = f"blocks.{i}.", f"{layer_prefix}{i}."
            parts = ours[f"{block}attention.qkv.{kind}"].chunk(3)
            for word, short, part in zip(("query", "key", "value"), "qkv", parts, strict=True):
                (name,) = [n for n in attention_names if n.endswith((f".{word}.{kind}", f".{short}_proj.{kind}"))]
                values[name.replace(f"{layer_prefix}0.", layer)] = part
            rest = [n for n in targets if n.startswith(layer) and n.endswith(kind) and n not in values]
            find = lambda *words: next(n for n in rest if any(word in n for word in words))  # noqa: B023, E731
            values[find("layernorm_before")] = ours[f"{block}norm1.{kind}"]
            values[find("layernorm_after")] = ours[f"{block}norm2.{kind}"]
            values[find("attention.output", "o_proj")] = ours[f"{block}attention.out.{kind}"]
            values[find("intermediate", "fc1")] = ours[f"{block}mlp.fc1.{kind}"]
            out = [n for n in rest if ("output.dense" in n or "fc2" in n) and "attention" not in n]
            values[out[0]] = ours[f"{block}mlp.fc2.{kind}"]
    assert values.keys() == targets.keys()
    with torch.no_grad():
        for name, value in values.items():
            targets[name].copy_(value)
    return peer


def timm_vit(model: ViT) -> torch.nn.Module:
    """timm's `VisionTransformer` with this model's weights (linear head)."""
    import timm

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
    renamed = {
        "cls": "cls_token",
        "pos_embedding": "pos_embed",
        "embedding": "patch_embed.proj",
        "attention.out": "attn.proj",
    }
    renamed["attention.qkv"] = "attn.qkv"
    values = {}
    for name, value in model.named_parameters():
        value = _conv(value, s.patch_size) if name == "embedding.weight" else value
        for old, new in renamed.items():
            if name == old or name.startswith(f"{old}.") or f".{old}." in name:
                name = name.replace(old, new)
                break
        values[name] = value.detach()
    peer.load_state_dict(values)
    return peer
