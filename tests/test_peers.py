"""The independent implementations that tests compare with import as their users import them, in this environment."""

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
import torch

from vitscale.cli.export import export

_HF = "from transformers import ViTForImageClassification, ViTImageProcessor, BitImageProcessor, AutoImageProcessor"


@pytest.mark.parametrize("lines", ["import timm; timm.create_model('vit_tiny_patch16_224')", _HF])
def test_a_plain_process_imports_peer(lines):
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_peer_is_installed_where_ci_runs():
    """Elsewhere a test whose peer is missing skips; in CI that would be a check that nobody makes."""
    if "CI" not in os.environ:
        pytest.skip("asks CI's environment alone (CI=true)")
    missing = []
    for requirement in [*(requires("vitscale") or []), "timm"]:
        (name,) = re.findall(r"^[\w.-]+", requirement)
        try:
            version(name)
        except PackageNotFoundError:
            missing.append(name)
    assert missing == []


LOADING = """
import torch
assert torch.__version__ == sys.argv[1], torch.__version__
exec(sys.argv[2])
print(sum(parameter.numel() for parameter in model.parameters()))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_export_prints_runs_in_a_fresh_environment(tmp_path, capsys):
    """There make setup-peers has put timm and transformers beside a torch, and there is no vitscale."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    root = Path(__file__).parent.parent
    installs = [python, "-m", "pip", "install", "-q", "-c", root / "constraints.txt", f"torch=={torch.__version__}"]
    if subprocess.run(installs, check=False).returncode != 0:
        pytest.skip(f"torch {torch.__version__} cannot be installed here")
    done = subprocess.run(
        ["bash", "cluster/setup.sh", environment, "--peers"], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for form, out in (("timm", "a"), ("timm", "a.safetensors"), ("hf", "b")):
        export("ViT-Ti/16", form, tmp_path / out, num_classes=3, image_size=32)
        printed = capsys.readouterr().out.splitlines()
        lines = "\n".join(line.strip() for line in printed if line.startswith("    "))
        arguments = [python, "-c", f"import sys\n{LOADING}", torch.__version__, lines]
        loaded = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert loaded.returncode == 0, loaded.stderr
        assert f"{int(loaded.stdout.split()[-1]):,} parameters" in "\n".join(printed)
