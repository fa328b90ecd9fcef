"""The formats in which weights leave and enter. Pure data: no torch, so that a command line can offer them at once."""

from typing import Literal

Format = Literal["hf", "timm", "npz", "safetensors"]
"""`safetensors` is ours; `npz` is Google's, `timm` a state dict of timm's, `hf` a folder of transformers'."""

POSITIONS_RULE = "resampled, bilinear with corners aligned"
"""How position embeddings of another resolution become ours: the authors' way, whatever library the weights are of."""
