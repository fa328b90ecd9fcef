"""Models: images in [-1, 1] -> tokens, representation, logits. Nothing here knows of training."""

from vitscale.models.build import build_model, compile_blocks, is_compiled, weight_dtype
from vitscale.models.initialise import Initialiser, constant, initial_value, initialise, normal
from vitscale.models.model import BlockTokens, Model, Outputs
from vitscale.models.pyramid import SimpleFeaturePyramid
