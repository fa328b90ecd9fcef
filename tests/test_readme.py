"""The README, taken at its word: its commands in its order, one after the other in one folder, on real photos."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pictures import unpack_photos

REPOSITORY = Path(__file__).resolve().parent.parent
STAYS_OPEN = re.compile(r"^tensorboard ", re.MULTILINE)  # serves until somebody ends it
# Of the README's recipe, what makes a run of hours one of seconds; its commands stay as they are.
SHRUNK: dict[str, Any] = {
    "model": {"patch_size": 8, "width": 32, "depth": 2, "mlp_dim": 32, "num_heads": 2, "head": "linear"},
    "batch": {"global": 32, "micro_max": 16},
    "data": {"image_size": 32},
    "schedule": {"duration": {"epochs": 2}, "warmup": {"steps": 1}, "decay": "cosine"},
    "evaluation": {"every": {"epochs": 1}},
}


def blocks(title: str) -> list[str]:
    """The code of a section, block by block."""
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", readme, re.MULTILINE | re.DOTALL)
    found = re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", section, re.MULTILINE)
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in found]


@pytest.fixture
def folder(tmp_path: Path, data_root: Path) -> Path:
    """What a clone holds as far as the commands need it, with `photos/train/CLASS` and `photos/test/CLASS`."""
    for name in ("vitscale", "recipes"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    activate = tmp_path / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f'export PATH="{Path(sys.executable).parent}:$PATH"\n')
    for split, source, of_each in (("train", "train", 12), ("test", "validation", 4)):
        unpack_photos(data_root / "clothing" / f"{source}.tar", tmp_path / "photos" / split, of_each)
    return tmp_path


def test_the_commands_for_own_images_work_word_for_word(folder):
    script = ["set -euo pipefail"]
    for block in blocks("Your own images"):
        if block.startswith("model:"):
            recipe = yaml.safe_load(block)
            small = {key: value | SHRUNK.get(key, {}) for key, value in recipe.items()} | {"model": SHRUNK["model"]}
            (folder / "photos.yaml").write_text(yaml.safe_dump(small))
        else:
            script.append(STAYS_OPEN.sub("command -v tensorboard # ", block))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VITSCALE")}
    shell = ["bash", "-c", "\n".join(script)]
    ran = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (folder / "runs" / "photos" / "DONE").is_file()
    assert (folder / "DATA" / "photos" / "clean" / "manifest.json").is_file()
