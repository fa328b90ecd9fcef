"""The Vision Transformer against published counts, transformers' and timm's implementations, and the paper's text."""

import math

import pytest
import torch
from models.small_models import build, images, with_values
from models.weights.exported import assert_equal_logits
from peers import timm_vit, transformers_vit

from vitscale.models import initial_value, initialise
from vitscale.models.vit import ViT
from vitscale.recipe.families import ViTShape, architecture

TINY = ViTShape(patch_size=8, width=48, depth=2, mlp_dim=96, num_heads=3)


def of(*layers: str) -> list[str]:
    """Names of the layers' parameters."""
    return [f"{layer}.{parameter}" for layer in layers for parameter in ("weight", "bias")]


def test_parameter_names_are_frozen():
    names = [name for name, _ in ViT(TINY, image_size=16, num_classes=5).named_parameters()]
    assert [name for name in names if not name.startswith("blocks.1.")] == [
        *("cls", "pos_embedding"),
        *of("embedding"),
        *of("blocks.0.norm1", "blocks.0.attention.qkv", "blocks.0.attention.out"),
        *of("blocks.0.norm2", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"),
        *of("norm", "pre_logits", "head"),
    ]


def randomised(**options) -> ViT:
    return with_values(build(TINY, num_classes=7, **options)).eval()


# The last pixels of 36 are not seen, and the peer is given the others.
@pytest.mark.parametrize(
    ("peer_of", "size", "pool"),
    [(transformers_vit, 32, "cls"), (transformers_vit, 36, "cls"), (timm_vit, 32, "cls"), (timm_vit, 32, "mean")],
)
def test_logits_equal_those_of_other_libraries(peer_of, size, pool):
    model = randomised(image_size=size, pool=pool)
    assert_equal_logits(model, peer_of(model), size, 1e-5)


def test_initial_values_are_those_of_the_authors_code():
    model = ViT(architecture("ViT-S/16"), image_size=224, num_classes=1000)
    initialise(model, seed=3)
    D = 384
    values = dict(model.named_parameters())
    assert torch.all(values["head.weight"] == 0) and torch.all(values["head.bias"] == 0)
    assert torch.all(values["cls"] == 0) and torch.all(values["norm.weight"] == 1)
    assert values["pos_embedding"].std().item() == pytest.approx(0.02, rel=0.02)
    # Xavier's bound for each of the three D x D matrices, not for the stacked one.
    for matrix in values["blocks.0.attention.qkv.weight"].chunk(3):
        assert matrix.abs().max().item() == pytest.approx(math.sqrt(6 / (2 * D)), rel=1e-3)
        assert matrix.std().item() == pytest.approx(math.sqrt(2 / (2 * D)), rel=0.01)
    assert torch.all(values["blocks.0.attention.qkv.bias"] == 0)
    assert values["blocks.3.mlp.fc1.bias"].std().item() == pytest.approx(1e-6, rel=0.1)
    embedding = values["embedding.weight"]  # fan-in 768; truncated at two standard deviations
    assert embedding.std().item() == pytest.approx(768**-0.5, rel=0.01)
    assert embedding.abs().max().item() < 2.3 * 768**-0.5


def test_logits_in_bf16_are_not_rounded_to_the_bias():
    """Between 8 and 16 bf16 has steps of 1/16: a bias of -10 must not put all logits on that grid."""
    model = ViT(TINY, image_size=32, num_classes=50)
    initialise(model, seed=0)
    with torch.no_grad():
        model.head.bias.fill_(-10.0)
        model.head.weight.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
        exact = model(images(32, batch=16)).logits
        rounded = model.bfloat16()(images(32, batch=16).bfloat16()).logits
    assert rounded.dtype == torch.float32
    assert (rounded - exact).abs().max() < 0.02
    distinct = sum(len(row.unique()) for row in rounded) / len(rounded)
    assert distinct > 45, "a grid of 1/16 would leave a handful of values"


def test_initial_values_depend_on_seed_and_name_alone():
    small, large = ViT(TINY, image_size=16, num_classes=5), ViT(TINY, image_size=16, num_classes=9)
    shape = torch.Size((144, 48))
    first = initial_value(small, "blocks.0.attention.qkv.weight", shape, seed=0)
    torch.rand(100)  # the global generator plays no part
    assert torch.equal(first, initial_value(large, "blocks.0.attention.qkv.weight", shape, seed=0))
    assert not torch.equal(first, initial_value(small, "blocks.1.attention.qkv.weight", shape, seed=0))
    assert not torch.equal(first, initial_value(small, "blocks.0.attention.qkv.weight", shape, seed=1))


def test_dropout_stands_where_the_paper_has_it():
    """After the position embedding, the attention output and both MLP layers: 1 + 3 a block, none elsewhere."""
    model = ViT(TINY, image_size=32, num_classes=7, dropout=0.5)
    calls = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda module, inputs, output, name=name: calls.append(name))
    initialise(model, 0)
    model.train()
    model(images(32))
    block = ["dropout", "mlp.dropout", "mlp.dropout"]
    assert calls == ["dropout"] + [f"blocks.{i}.{name}" for i in range(2) for name in block]


@pytest.mark.parametrize("name", ["ViT-B/0", "vit-b/16"])
def test_an_unknown_model_suggests_the_nearest(name):
    with pytest.raises(ValueError, match="'ViT-"):
        architecture(name)
