"""A finished run for the commands that look at one."""

from pathlib import Path

import pytest
from models.weights.exported import LINEAR, TINY, described, finished_run, valued, write

from vitscale.data.shards.generated import CLASS_NAMES, write_generated_dataset


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, its two datasets, and its weights in every format; that of `.npz` tells no names of classes."""
    root = tmp_path_factory.mktemp("home")
    write_generated_dataset(root / "data" / "train", [30, 41], seed=1)
    write_generated_dataset(root / "data" / "test", [13, 24], seed=2)
    description = described(TINY, 64, len(CLASS_NAMES), list(CLASS_NAMES))
    model = valued(description)
    finished_run(
        root / "run",
        model,
        LINEAR,
        names=CLASS_NAMES,
        data={"root": str(root / "data")},
        evaluation={"validation": "test", "batch": 5},
        precision="fp32",
    )
    for form in ("npz", "timm", "hf", "safetensors"):
        write(model, description, form, root)
    return root
