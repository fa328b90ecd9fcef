"""The independent implementations that tests compare with import as their users import them, in this environment."""

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version

import pytest

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
