"""DeepSpeed, imported without what it looks for in vain: an accelerator on CPUs, and MLflow.

Its autotuner, which nothing here uses, imports MLflow wherever that is installed: half of the seconds that the import
takes, at the start of every rank.
"""

import os
import sys

import torch

if not torch.cuda.is_available():
    # DeepSpeed looks for an accelerator when it is imported, and warns where it finds none. Nothing is missing here.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

if "mlflow" in sys.modules:
    import deepspeed
else:
    sys.modules["mlflow"] = None  # type: ignore[assignment]  # what Python itself takes as "not to be found"
    try:
        import deepspeed
    finally:
        del sys.modules["mlflow"]

__all__ = ["deepspeed"]
