"""What torch has compiled for one processor is not run on another."""

import os
import subprocess
import sys

import pytest
import torch

PROGRAM = """
import torch
from vitscale.recipe.families import ViTShape
from vitscale.models import compile_blocks, initialise
from vitscale.models.vit import ViT

vit = ViT(ViTShape(8, 64, 1, 128, 2), image_size=16, num_classes=3, head="linear")
initialise(vit, seed=0)
images = torch.rand(2, 16, 16, 3, generator=torch.Generator().manual_seed(0))
expected = vit(images).tokens
compile_blocks(vit.units())
tokens = vit(images).tokens
tokens.square().sum().backward()
assert torch.allclose(tokens, expected, atol=1e-4), (tokens - expected).abs().max()
"""


@pytest.mark.slow  # compiles twice
def test_a_processor_with_other_vectors_compiles_anew(tmp_path):
    capability = torch.backends.cpu.get_cpu_capability()
    for limit in ("avx2" if capability == "AVX512" else "default", capability.lower()):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "ATEN_CPU_CAPABILITY": limit}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
