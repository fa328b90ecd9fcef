"""From pictures in host memory to what a model takes."""

import torch
from torch import Tensor


def to_model_input(images: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """uint8 (B, H, W, 3) -> the same in [-1, 1] on the device: x / 127.5 - 1, computed in fp32, then `dtype`."""
    on_device = images.to(device)
    return (on_device.to(torch.float32) / 127.5 - 1.0).to(dtype)
