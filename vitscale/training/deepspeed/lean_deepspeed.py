"""Imports DeepSpeed (0.19.8) without the parts that are unused here and that every rank would wait for at its start.

Its autotuner imports MLflow if that is installed, which is half of the import's time. Its Muon, which the first engine
imports, is decorated by `torch.compile`; importing that compiler takes a quarter of a rank's time before its first
step. And on CPUs it looks for an accelerator.
"""

import os
import sys

import torch

if not torch.cuda.is_available():
    # DeepSpeed looks for an accelerator when it is imported, and warns if it finds none. Nothing is missing here.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

if "mlflow" in sys.modules:
    import deepspeed
else:
    sys.modules["mlflow"] = None  # type: ignore[assignment]  # Python's mark for "not to be found"
    try:
        import deepspeed
    finally:
        del sys.modules["mlflow"]

deepspeed.runtime.compiler.compile = lambda: deepspeed.runtime.compiler.dummy_decorator
