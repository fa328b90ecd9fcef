"""The independent implementations that tests compare with import as their users import them, in this environment."""

import subprocess
import sys

import pytest

_HF = "from transformers import ViTForImageClassification, ViTImageProcessor, BitImageProcessor, AutoImageProcessor"


@pytest.mark.parametrize("lines", ["import timm; timm.create_model('vit_tiny_patch16_224')", _HF])
def test_a_plain_process_imports_peer(lines):
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
