"""docs/photos_example.md, taken at its word: all of its commands in their order, with runs of a few steps."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from documented_commands import REPOSITORY
from test_readme import folder  # noqa: F401  # photos/train/CLASS and photos/test/CLASS

from vitscale.shards.generated import write_generated_dataset

_STEPS = 4


def _blocks() -> list[tuple[str, str]]:
    """(name of the file that a block is, or "" for commands; its text)."""
    page = (REPOSITORY / "docs" / "photos_example.md").read_text(encoding="utf-8")
    found = []
    for match in re.finditer(r"(?:^    .*\n)+", page, re.MULTILINE):
        text = re.sub(r"^    ", "", match[0], flags=re.MULTILINE)
        names = re.findall(r"^`(\w+\.yaml)`:\n\n\Z", page[: match.start()], re.MULTILINE)
        if names or text.startswith("vitscale "):
            found.append((names[0] if names else "", text))
    return found


@pytest.mark.slow
def test_the_commands_lead_from_photos_to_a_report(folder: Path):  # noqa: F811
    for split in ("train-clean", "test"):
        write_generated_dataset(folder / "DATA" / "cifar10" / split, [256])
    script = ["set -euo pipefail", ". .venv/bin/activate"]
    for name, text in _blocks():
        content = yaml.safe_load(text) if name else {}
        if "schedule" in content:
            content["schedule"] = {"duration": {"steps": _STEPS}, "warmup": {"steps": 1}}
        if name:
            (folder / name).write_text(yaml.safe_dump(content))
        else:
            script.append(text)
    ran = subprocess.run(["bash", "-c", "\n".join(script)], cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = json.loads((folder / "report" / "results.json").read_text())
    assert results["states"] == {"done": 5} and (folder / "report" / "index.html").is_file()
    assert (folder / "clothes-vit" / "config.json").is_file()
