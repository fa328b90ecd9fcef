"""Formats for exporting and importing weights. Pure data, no torch, so that a command line can list them at once."""

from typing import Literal

Format = Literal["hf", "timm", "npz", "safetensors"]
"""`safetensors` is our own; `npz` is Google's, `timm` a state dict of timm, `hf` a folder of transformers."""

POSITIONS_RULE = "resampled, bilinear with corners aligned"
"""How position embeddings of another resolution are resampled: the authors' way, whatever library weights come from."""
