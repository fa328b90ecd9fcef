"""Training: the trainer, its DeepSpeed set-up, optimizer, schedule and metrics."""

import os

import torch

if not torch.cuda.is_available():
    # DeepSpeed looks for an accelerator when it is imported, and warns where it finds none. Nothing is missing here.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
