"""Every registered model: whole on the meta device, and small enough to compute with."""

import torch

from vitscale.models import Model
from vitscale.models.resnet import ResNet
from vitscale.models.swin import Swin
from vitscale.models.vit import ViT
from vitscale.recipe.families import Position, ResNetShape, Shape, SwinShape, architecture

# The authors' own test table, 1000 classes, output layer alone.
AUTHORS_COUNTS = {
    **{"ViT-Ti/16": 5_717_416, "ViT-S/16": 22_050_664, "ViT-S/32": 22_878_952, "ViT-B/8": 86_576_872},
    **{"ViT-B/16": 86_567_656, "ViT-B/32": 88_224_232, "ViT-L/16": 304_326_632, "ViT-L/32": 306_535_400},
    **{"ViT-H/14": 632_045_800, "R50+ViT-B/16": 98_659_112, "R50+ViT-L/32": 328_994_856, "R26+ViT-B/32": 101_383_976},
    **{"R26+ViT-S/32": 36_431_912, "R+ViT-Ti/16": 6_337_704},
}


def build(shape: Shape, image_size: int = 224, num_classes: int = 1000, **options) -> Model:
    """A model of a shape; Transformers with a linear head and the pooling that goes with their attention."""
    if isinstance(shape, ResNetShape):
        return ResNet(shape, image_size=image_size, num_classes=num_classes, **options)
    if isinstance(shape, SwinShape):
        return Swin(shape, image_size=image_size, num_classes=num_classes, **options)
    pool = "mean" if shape.attention == "axial" else "cls"
    options = {"head": "linear", "pool": pool} | options
    options["position"] = Position.model_validate(options.get("position", {}))  # a recipe's keys, or the block
    return ViT(shape, image_size=image_size, num_classes=num_classes, **options)


def on_meta(name: str, **options) -> Model:
    with torch.device("meta"):
        return build(architecture(name), **options)


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def small_block(name: str) -> dict:
    """The `model` block of a registered model with one small block, or a few narrow ones a stage."""
    shape = architecture(name)
    if isinstance(shape, ResNetShape):
        return {"name": name, "blocks": [1] * len(shape.blocks), "width_factor": 1}
    if isinstance(shape, SwinShape):  # two blocks, of which one has shifted windows
        return {"name": name, "width": 32, "num_heads": 1, "blocks": [2] * len(shape.blocks), "window": 2}
    stem = {} if shape.stem is None else {"blocks": [1] * len(shape.stem.blocks)}
    return {"name": name, "depth": 1, "width": 96, "mlp_dim": 80, "num_heads": 2} | stem


def computable_block(name: str) -> dict:
    """The `model` block of a registered model; above 100 million parameters it has one block, or a unit a stage."""
    if count(on_meta(name)) < 100e6:
        return {"name": name}
    small = small_block(name)
    return {key: small[key] for key in ("name", "depth", "blocks", "width_factor") if key in small}


def with_values(model: Model, seed: int = 0) -> Model:
    """Random values of the usual sizes for every parameter, so that nothing hides behind a zero or a one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "pos_embedding" not in name and "relative_bias" not in name:
                parameter.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
            else:
                is_scale = "norm" in name and name.endswith("weight")
                parameter.normal_(1.0 if is_scale else 0.0, 0.1, generator=generator)
    return model


def with_large_kernels(model: Model) -> Model:
    """Convolutions so large that no eps matters: timm adds it to the variance, the authors' v1 code elsewhere."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 4:
                parameter.mul_(parameter[0].numel() ** 0.5)
    return model


def images(size: int, batch: int = 2) -> torch.Tensor:
    """(B, H, W, 3) in [-1, 1]"""
    return torch.rand(batch, size, size, 3, generator=torch.Generator().manual_seed(2)) * 2 - 1
