"""Models: images in [-1, 1] -> logits. Nothing here knows of training."""

from vitscale.models.build import Model, build_model, compile_blocks, weight_dtype
from vitscale.models.initialise import initial_value, initialise
from vitscale.models.resnet import ResNet
from vitscale.models.vit import ViT

__all__ = ["Model", "ResNet", "ViT", "build_model", "compile_blocks", "initial_value", "initialise", "weight_dtype"]
