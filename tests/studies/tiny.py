"""A recipe so small that a study of it runs in a minute, and studies of it."""

from pathlib import Path

import yaml

RECIPE = """
model: {patch_size: 8, width: 64, depth: 1, mlp_dim: 64, num_heads: 1, head: linear}
data: {train: train, image_size: 16, threads: 1, crop: {area: [0.5, 1.0]}}
batch: {global: 16, micro_max: 16}
objective: {loss: softmax}
optimizer: {name: adamw, lr: 1e-3}
schedule: {duration: {steps: 4}}
precision: fp32
logging: {trackers: []}
"""
SPLITS = {"train": "colours/train", "dev": "colours/dev", "full": "colours/full", "test": "colours/test"}


def write_study(folder: Path, parts: dict, recipe: str = RECIPE, **more) -> Path:
    """A study beside a recipe tiny.yaml; a part without a recipe is of that one."""
    (folder / "tiny.yaml").write_text(recipe)
    content = {"parts": {name: {"recipe": "tiny.yaml", **part} for name, part in parts.items()}, **more}
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path
