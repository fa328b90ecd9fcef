"""Models: images in [-1, 1] -> tokens, representation, logits. Nothing here knows of training."""

from vitscale.models.build import build_model, compile_blocks, is_compiled, weight_dtype
from vitscale.models.initialise import Initialiser, constant, initial_value, initialise, normal
from vitscale.models.model import Model
from vitscale.models.outputs import BlockTokens, Outputs
from vitscale.models.pyramid import SimpleFeaturePyramid

__all__ = [
    "BlockTokens",
    "Initialiser",
    "Model",
    "Outputs",
    "SimpleFeaturePyramid",
    "build_model",
    "compile_blocks",
    "constant",
    "initial_value",
    "initialise",
    "is_compiled",
    "normal",
    "weight_dtype",
]
