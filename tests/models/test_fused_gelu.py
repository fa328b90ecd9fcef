"""GELU with its own backward pass, by Triton's interpreter in a process of its own, against autograd in fp64."""

import copy
import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from vitscale.ground.errors import RecipeError
from vitscale.models import compile_blocks
from vitscale.models.build import build_of_block
from vitscale.recipe.families import model_of

SHAPES = [(1, 1), (5, 130), (257, 67), (2, 300, 129)]  # neither a program's rows nor a tile divide them
MODEL = {"patch_size": 8, "width": 24, "depth": 2, "mlp_dim": 35, "num_heads": 2, "head": "linear"}


def kernel() -> None:
    """Both gradients, from inputs that include GELU's tails; Triton's interpreter cuts to bf16, and rounds not."""
    from vitscale.models.vit.fused_gelu import gelu_backward

    torch.manual_seed(0)
    for dtype, within in ((torch.bfloat16, 2.0**-7), (torch.float32, 1e-5)):
        for shape in SHAPES:
            for form in ("tanh", "none"):
                before, towards = ((3 * torch.randn(shape)).to(dtype) for _ in range(2))
                before.view(-1)[0] = 30.0
                exact, bias = before.double().requires_grad_(), torch.zeros(shape[-1]).double().requires_grad_()
                F.gelu(exact + bias, approximate=form).backward(towards.double())
                found = gelu_backward(towards.mT.contiguous().mT, before, form == "tanh")
                assert [one.dtype for one in found] == [dtype] * 2
                for one, other in zip(found, (exact.grad, bias.grad), strict=True):
                    assert one.shape == other.shape
                    assert torch.allclose(one.double(), other, rtol=within, atol=1e-4), (dtype, shape, form)


def blocks() -> None:
    """A model's outputs keep their bits and its gradients agree, eager and in one graph a block."""
    from vitscale.models.vit.fused_gelu import fuse_gelu

    with pytest.raises(RecipeError):
        fuse_gelu(build_of_block(model_of(**MODEL, mlp="swiglu"), image_size=32, num_classes=5))
    for form in ("gelu", "exact_gelu"):
        torch.manual_seed(0)
        plain = build_of_block(model_of(**MODEL, mlp=form), image_size=32, num_classes=5)
        for parameter in plain.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        fused = copy.deepcopy(plain)
        fuse_gelu(fused)
        compiled = copy.deepcopy(fused)
        compile_blocks(compiled, "aot_eager")
        images, towards = torch.randn(3, 32, 32, 3), torch.randn(3, 5)
        found = [model(images).logits for model in (plain, fused, compiled)]
        for logits in found:
            assert torch.equal(logits, found[0])
            logits.backward(towards)
        for model in (fused, compiled):
            for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-5), (form, name)


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which torch for CPUs comes without"
)
@pytest.mark.parametrize("check", ["kernel", "blocks"])
def test_by_the_interpreter(check):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run([sys.executable, __file__, check], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


if __name__ == "__main__":
    {"kernel": kernel, "blocks": blocks}[sys.argv[1]]()
