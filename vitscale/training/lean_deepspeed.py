"""DeepSpeed, imported without what nothing here uses of it and every rank would wait for at its start (0.19.8).

Its autotuner imports MLflow wherever that is installed: half of the seconds that the import takes. Its Muon, which the
first engine imports, is decorated by `torch.compile`: a quarter of what a rank does before its first step is the import
of that compiler. And on CPUs it looks for an accelerator.
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

deepspeed.runtime.compiler.compile = lambda: deepspeed.runtime.compiler.dummy_decorator

__all__ = ["deepspeed"]
