"""Checks that a process with a CUDA device makes: `python on_a_gpu.py NAME`; 77 where there is no device."""

import sys

import numpy as np
import torch
from torch.nn import functional as F

from vitscale import recipe
from vitscale.data.random_erasing import RandomErasing
from vitscale.models import initialise
from vitscale.models.vit import ViT
from vitscale.recipe.families import architecture
from vitscale.training.beginning.memory import expected_memory
from vitscale.training.deepspeed.attention import Attention


def attention(device: torch.device) -> None:
    """Head sizes of L/16, H/14 and g/14, with 197 and 257 tokens: values and gradients near those of fp32's formula."""
    for head, tokens in ((64, 197), (80, 257), (88, 257)):
        torch.manual_seed(0)
        inputs = [torch.randn(4, 8, tokens, head, device=device) for _ in range(3)]
        exact, rounded = ([one.to(dtype).requires_grad_() for one in inputs] for dtype in (torch.float, torch.bfloat16))
        query, key, value = exact
        expected = torch.softmax(query @ key.mT * head**-0.5, dim=-1) @ value
        with Attention(device).preferred():
            found = F.scaled_dot_product_attention(*rounded)
            found.float().square().sum().backward()
        expected.square().sum().backward()
        for one, other in ((found, expected), *((a.grad, b.grad) for a, b in zip(rounded, exact, strict=True))):
            error = (one.float() - other).norm() / other.norm()
            assert error < 0.02, (head, tokens, error)


def float8(device: torch.device) -> None:
    """Products of a dense layer, of tokens that are no multiple of 16, against those of numbers rounded by casts."""
    from vitscale.models.float8 import train_in_float8

    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 96, device=device, dtype=torch.bfloat16)
    blocks = torch.nn.ModuleList([torch.nn.Sequential(layer)])
    x = torch.randn(3, 257, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    towards = torch.randn(3, 257, 96, device=device, dtype=torch.bfloat16)
    weight = layer.weight.detach().clone()
    assert train_in_float8(blocks, device) == 1
    found = blocks[0](x)
    found.backward(towards)

    def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scale = torch.finfo(dtype).max / values.abs().max().float()
        return (values.float() * scale).to(dtype).float() / scale

    x8, w8 = (rounded(one.detach(), torch.float8_e4m3fn) for one in (x, weight))
    g8 = rounded(towards, torch.float8_e5m2)
    assert x.grad is not None
    pairs = {
        "forward": (found - layer.bias, x8 @ w8.T),
        "input": (x.grad, g8 @ w8),
        "weight": (blocks[0][0].weight.grad, g8.flatten(0, 1).T @ x8.flatten(0, 1)),
    }
    for name, (one, other) in pairs.items():
        assert (one.float() - other).norm() / other.norm() < 0.01, name


def memory(device: torch.device) -> None:
    """Saved activations of ViT-B/16 are within 5 % of what is planned."""
    from toy_recipes import make_recipe

    planned = make_recipe({"name": "ViT-B/16"}, micro_batch=32)
    model = ViT(architecture("ViT-B/16"), image_size=224, num_classes=1000)
    initialise(model, seed=0)
    model.to(device, torch.bfloat16)
    images = torch.rand(32, 224, 224, 3).to(device, torch.bfloat16)
    model(images).logits.sum().backward()  # libraries take what they keep
    before = torch.cuda.memory_allocated(device)
    loss = model(images).logits.sum()
    saved = torch.cuda.memory_allocated(device) - before
    expected = expected_memory(planned, 1000, 1, device="cuda").activations
    assert abs(saved / expected - 1) < 0.05, (saved, expected)
    del loss


def erasing(device: torch.device) -> None:
    """Random erasing has the same bits as on the CPU."""
    keys = np.random.default_rng(0).integers(0, 2**64, 64, dtype=np.uint64)
    images = torch.rand(64, 32, 32, 3, generator=torch.Generator().manual_seed(0))
    for mode in ("pixel", "mean"):
        operation = RandomErasing.of(recipe.RandomErasing(kind="random_erasing", probability=0.7, mode=mode))
        assert torch.equal(operation(images.to(device), keys).cpu(), operation(images, keys))


def speed(device: torch.device) -> None:
    """Batches grow until memory ends, twice; the largest that fits is found, and the device is as usable as before."""
    from inference_speed import throughputs

    from vitscale.recipe.families import model_of

    torch.cuda.set_per_process_memory_fraction(0.05)
    models = {"ViT-Ti/16": model_of(name="ViT-Ti/16", head="linear")}
    first, second = (next(throughputs(models, [224], device, "bf16", 0.2)) for _ in range(2))
    assert first.largest_batch and second.largest_batch and first.images_per_s and first.images_per_s > 0
    assert abs(first.largest_batch - second.largest_batch) <= first.largest_batch // 8
    torch.zeros(2**20, device=device)


CHECKS = {check.__name__: check for check in (attention, erasing, float8, memory, speed)}

if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit(77)
    CHECKS[sys.argv[1]](torch.device("cuda", 0))
