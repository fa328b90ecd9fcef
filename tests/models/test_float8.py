"""Dense layers in float8 against products of numbers that torch's own casts have rounded."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("torchao")

from vitscale.ground.errors import RecipeError
from vitscale.models import initialise
from vitscale.models.float8 import train_in_float8
from vitscale.models.vit import ViT
from vitscale.recipe.families import architecture

CPU = torch.device("cpu")


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """To the nearest multiples that `dtype` has where its largest value stands for the tensor's own."""
    scale = torch.finfo(dtype).max / values.abs().max()
    return (values * scale).to(dtype).double() / scale.double()


def blocks_of(*layers: nn.Module) -> nn.ModuleList:
    """Layers as the blocks of a model, in float8."""
    blocks = nn.ModuleList([nn.Sequential(layer) for layer in copy.deepcopy(layers)])
    train_in_float8(blocks, CPU)
    return blocks


def test_products_are_those_of_rounded_numbers():
    torch.manual_seed(0)
    layer = nn.Linear(32, 48)
    with torch.no_grad():
        layer.weight.mul_(7)
    block = blocks_of(layer)[0]
    x, towards = torch.randn(5, 17, 32, requires_grad=True), torch.randn(5, 17, 48) * 1e-4
    block(x).backward(towards)
    x8, w8 = rounded(x.detach(), torch.float8_e4m3fn), rounded(layer.weight.detach(), torch.float8_e4m3fn)
    g8 = rounded(towards, torch.float8_e5m2)
    assert torch.allclose(block(x).double(), x8 @ w8.T + layer.bias.double(), rtol=1e-4, atol=1e-5)
    assert x.grad is not None
    assert torch.allclose(x.grad.double(), g8 @ w8, rtol=1e-4, atol=1e-9)
    weight, bias = block[0].weight, block[0].bias
    assert torch.allclose(weight.grad.double(), g8.flatten(0, 1).T @ x8.flatten(0, 1), rtol=1e-4, atol=1e-8)
    assert torch.allclose(bias.grad, towards.sum((0, 1)), rtol=1e-5, atol=1e-9)
    assert not torch.allclose(block(x), F.linear(x, layer.weight, layer.bias), rtol=1e-3, atol=1e-3)


def test_predictions_are_not_in_float8():
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 48), torch.randn(3, 32)
    block = blocks_of(layer)[0]
    assert torch.equal(block.eval()(x), layer(x))
    assert not torch.equal(block.train()(x), layer(x))


def test_widths_that_the_product_does_not_take_stay_as_they_are():
    layers = [nn.Linear(24, 32), nn.Linear(32, 24), nn.Linear(32, 32)]
    x = [torch.randn(3, layer.in_features) for layer in layers]
    same = [
        torch.equal(*pair) for pair in ((b(v), a(v)) for a, b, v in zip(layers, blocks_of(*layers), x, strict=True))
    ]
    assert same == [True, True, False]


def test_a_model_without_such_a_layer_is_refused():
    with pytest.raises(RecipeError, match=r"\b16\b"):
        blocks_of(nn.Linear(24, 32), nn.Linear(32, 24))


def test_every_dense_layer_of_the_blocks_and_no_other():
    model = ViT(architecture("ViT-Ti/16"), image_size=32, num_classes=3)
    initialise(model, seed=0)
    before = {name: (parameter.data_ptr(), parameter.shape) for name, parameter in model.named_parameters()}
    train_in_float8(model.blocks, CPU)
    assert {name: (parameter.data_ptr(), parameter.shape) for name, parameter in model.named_parameters()} == before
    names = {name for name, module in model.named_modules() if "Float8" in type(module).__name__}
    layers = ("attention.qkv", "attention.out", "mlp.fc1", "mlp.fc2")
    assert names == {f"blocks.{index}.{layer}" for index in range(12) for layer in layers}
