"""Models: images in [-1, 1] -> tokens, representation, logits. Nothing here knows of training."""

from vitscale.models.build import Model, build_model, compile_blocks, weight_dtype
from vitscale.models.initialise import Initialiser, constant, initial_value, initialise, normal
from vitscale.models.outputs import Outputs
from vitscale.models.resnet import ResNet
from vitscale.models.vit import ViT

__all__ = [
    "Initialiser",
    "Model",
    "Outputs",
    "ResNet",
    "ViT",
    "build_model",
    "compile_blocks",
    "constant",
    "initial_value",
    "initialise",
    "normal",
    "weight_dtype",
]
