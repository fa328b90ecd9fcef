"""Models: images in [-1, 1] -> logits. Nothing here knows of training."""

from vitscale.models.build import build_model
from vitscale.models.initialise import initial_value, initialise
from vitscale.models.vit import ViT

__all__ = ["ViT", "build_model", "initial_value", "initialise"]
