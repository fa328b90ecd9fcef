"""Weights in and out of every format: Google's `.npz`, timm's and transformers', and ours.

A table for each family says what our parameters are called in a format and how their values are laid out there; it is
read in both directions. Reading and writing hold one parameter at a time.
"""

from vitscale.ground.weight_formats import Format
from vitscale.models.weights.description import FUNCTIONS, Description, describe, own_description, recognised
from vitscale.models.weights.foreign import HEAD
from vitscale.models.weights.opening import open_weights
from vitscale.models.weights.preprocessing import WHOLE_PICTURE
from vitscale.models.weights.reading import Reader, has_head, load_weights, parameters, parameters_beside
from vitscale.models.weights.source import Entry, Source
from vitscale.models.weights.writing import loading_lines, write_weights
