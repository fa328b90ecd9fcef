"""The parts of the Vision Transformers that came after the paper, against plain formulas and published counts."""

import math

import numpy as np
import pytest
import torch
from messages import assert_messages
from models.small_models import images, with_values
from pydantic import ValidationError
from small_recipes import small_recipe
from timm.layers import DropPath, calculate_drop_path_rates
from torch.nn import functional as F

from vitscale.data.draws import stretches
from vitscale.ground.wording import describe_mistake
from vitscale.models import initial_value
from vitscale.models.build import build_of_block
from vitscale.models.vit import ViT
from vitscale.models.vit.positions import sincos_positions
from vitscale.recipe.families import UNSET, model_of

TINY = {"patch_size": 8, "width": 48, "depth": 3, "mlp_dim": 40, "num_heads": 3, "head": "linear"}
ROPE = {"position": {"kind": "rope"}}
SINCOS = {"position": {"kind": "sincos"}}
ALL = {
    **{"norm": "rms", "norm_eps": 1e-4, "mlp": "swiglu", "qkv_bias": "no_key", "qk_norm": True, "layer_scale": 0.1},
    **{"registers": 3, "drop_path": 0.5, **ROPE},
}
EVA = {
    **{"mlp": "swiglu", "qkv_bias": "no_key", "sub_norm": "all", "pool": "normed_mean"},
    **{"position": {"kind": "1d_rope"}, "drop_path": 0.5},
}
VIT_5 = {
    **{"norm": "rms", "mlp": "exact_gelu", "qkv_bias": "none", "qk_norm": True, "layer_scale": 0.1, "registers": 4},
    **{"class_position": False, "position": {"kind": "1d_rope", "unit": "patch", "registers_base": 100.0}},
}


def made(size: int = 32, num_classes: int | None = 7, every: int = 0, **keys) -> ViT:
    """A small model whose every parameter is random."""
    block = model_of(**TINY | keys)
    return with_values(build_of_block(block, image_size=size, num_classes=num_classes, checkpoint_every=every))


# ---- Plain formulas --------------------------------------------------------------------------------------------------


def normed(x: torch.Tensor, values: dict, name: str, kind: str, eps: float) -> torch.Tensor:
    norm = F.rms_norm if kind == "rms" else F.layer_norm
    parameters = [values[f"{name}.{key}"] for key in ("weight", "bias") if f"{name}.{key}" in values]
    return norm(x, x.shape[-1:], *parameters, eps=eps)


def turned(x: torch.Tensor, n: int, kind: str, base: float, before: int, side: float) -> torch.Tensor:
    """Queries or keys (B, T, A, d) of patches as complex numbers, times e^(i * angle)."""
    quarter = x.shape[-1] // 4
    factors = torch.ones(x.shape[1], 2 * quarter, dtype=torch.complex128)
    for row in range(n):
        for column in range(n):
            for i in range(quarter):
                for axis, at in enumerate((row, column)):
                    place = at * side / n if kind == "1d_rope" else 2 * math.pi * (2 * (at + 0.5) / n - 1)
                    angle = place * base ** (-i / quarter)
                    factors[before + row * n + column, axis * quarter + i] = complex(math.cos(angle), math.sin(angle))
    points = torch.complex(*x.double().chunk(2, -1)) * factors[:, None]
    return torch.cat([points.real, points.imag], -1)


def mlp(x: torch.Tensor, values: dict, name: str, kind: str) -> torch.Tensor:
    hidden = F.linear(x, values[f"{name}.fc1.weight"], values[f"{name}.fc1.bias"])
    if kind == "swiglu":
        gate, value = hidden.chunk(2, -1)
        hidden = F.silu(gate) * value
    else:
        hidden = F.gelu(hidden, approximate="none" if kind == "exact_gelu" else "tanh")
    if f"{name}.norm.weight" in values:
        hidden = normed(hidden, values, f"{name}.norm", "layer", 1e-6)
    return hidden @ values[f"{name}.fc2.weight"].T + values[f"{name}.fc2.bias"]


def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(B, S, A, d), (B, T, A, d) twice -> (B, S, A * d)"""
    scores = torch.einsum("bsad,btad->bast", query, key) / math.sqrt(query.shape[-1])
    return torch.einsum("bast,btad->bsad", scores.softmax(-1), value).flatten(2)


def by_hand(model: ViT, pixels: torch.Tensor, keys: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and representation of a model with global attention, in fp64."""
    values = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    keys = {"norm": "layer", "norm_eps": 1e-6, "mlp": "gelu", "registers": 0, "class_position": True} | keys
    heads, n, depth = TINY["num_heads"], pixels.shape[1] // TINY["patch_size"], TINY["depth"]
    x = model.patchify(pixels.double()) @ values["embedding.weight"].T + values["embedding.bias"]
    if keys.get("position") == SINCOS["position"]:
        x = x + sincos_positions(n, x.shape[-1], x)
    pool, count = keys.get("pool", "cls"), len(pixels)
    has_class = pool in ("cls", "normed_mean")
    before = [values["cls"].expand(count, -1, -1)] if has_class else []
    if "pos_embedding" in values:
        positions = values["pos_embedding"][0]
        if has_class and keys["class_position"]:
            before[0], positions = before[0] + positions[:1], positions[1:]
        x = x + positions
    if keys["registers"]:
        before.append(values["registers"].expand(count, -1, -1))
    x = torch.cat([*before, x], 1)
    first = x.shape[1] - n * n
    for block in (f"blocks.{i}" for i in range(depth)):
        own = normed(x, values, f"{block}.norm1", keys["norm"], keys["norm_eps"])
        parts = [own @ part.T for part in values[f"{block}.attention.qkv.weight"].chunk(3)]
        if f"{block}.attention.qkv.bias" in values:
            parts = [x + y for x, y in zip(parts, values[f"{block}.attention.qkv.bias"].chunk(3), strict=True)]
        if f"{block}.attention.query_bias" in values:
            parts[0] = parts[0] + values[f"{block}.attention.query_bias"]
            parts[2] = parts[2] + values[f"{block}.attention.value_bias"]
        query, key, value = (part.unflatten(-1, (heads, -1)) for part in parts)
        if keys.get("qk_norm"):
            query = normed(query, values, f"{block}.attention.query_norm", keys["norm"], keys["norm_eps"])
            key = normed(key, values, f"{block}.attention.key_norm", keys["norm"], keys["norm_eps"])
        if "rope" in (kind := (position := keys.get("position", {})).get("kind", "")):
            base = position.get("base", {"rope": 100, "1d_rope": 10_000}[kind])
            side = n if position.get("unit") == "patch" else 16
            query, key = (turned(part, n, kind, base, first, side) for part in (query, key))
            if of_registers := position.get("registers_base"):
                square = math.isqrt(keys["registers"])
                place = (square, kind, of_registers, first - square**2, square)
                query, key = (turned(part, *place) for part in (query, key))
        mixed = attended(query, key, value)
        if f"{block}.attention.norm.weight" in values:
            mixed = normed(mixed, values, f"{block}.attention.norm", keys["norm"], keys["norm_eps"])
        mixed = mixed @ values[f"{block}.attention.out.weight"].T + values[f"{block}.attention.out.bias"]
        x = x + mixed * values.get(f"{block}.layer_scale1", 1.0)
        own = normed(x, values, f"{block}.norm2", keys["norm"], keys["norm_eps"])
        x = x + mlp(own, values, f"{block}.mlp", keys["mlp"]) * values.get(f"{block}.layer_scale2", 1.0)
    mean = x[:, first:].mean(1)
    x = normed(x, values, "norm", keys["norm"], keys["norm_eps"])
    if pool == "normed_mean":
        return x, normed(mean, values, "norm", keys["norm"], keys["norm_eps"])
    if pool != "map":
        return x, x[:, 0] if has_class else x[:, first:].mean(1)
    query = (values["map.probe"] @ values["map.query.weight"].T + values["map.query.bias"]).expand(count, -1, -1)
    key, value = (x @ values["map.key_value.weight"].T + values["map.key_value.bias"]).chunk(2, -1)
    y = attended(*(part.unflatten(-1, (heads, -1)) for part in (query, key, value)))
    y = y @ values["map.out.weight"].T + values["map.out.bias"]
    own = normed(y, values, "map.norm", keys["norm"], keys["norm_eps"])
    return x, (y + mlp(own, values, "map.mlp", keys["mlp"]))[:, 0]


@pytest.mark.parametrize(
    "keys",
    [
        *({"norm": "rms"}, {"norm": "layer", "norm_eps": 0.1}, {"mlp": "exact_gelu"}, {"mlp": "swiglu"}),
        *({"qkv_bias": "no_key"}, {"qkv_bias": "none", "qk_norm": True}, {"layer_scale": 0.1}, {"registers": 3}),
        *({"registers": 3, "class_position": False}, {"registers": 3, "pool": "mean"}, {"pool": "map"}, SINCOS),
        *({"registers": 3, "pool": "map", **SINCOS}, ROPE),
        *({"position": {"kind": "rope", "base": 10}, "registers": 2, "pool": "map"}, ALL, ALL | {"pool": "map"}),
        *({"sub_norm": "mlp"}, {"sub_norm": "all", "pool": "map"}, {"pool": "normed_mean", "registers": 2}),
        *({"position": {"kind": "1d_rope", "base": 100}, "registers": 2, "class_position": False}, EVA, VIT_5),
    ],
    ids=lambda keys: "-".join(keys),
)
def test_a_model_with_a_part_is_the_plain_formula(keys):
    model, pixels = made(**keys).eval(), images(32)
    with torch.no_grad():
        found = model(pixels)
    tokens, pooled = by_hand(model, pixels, keys)
    assert (found.tokens - tokens).abs().max() < 1e-4
    assert (found.pooled - pooled).abs().max() < 1e-4


# ---- What training does with them ------------------------------------------------------------------------------------


def test_drop_path_leaves_out_branches_of_images_and_keeps_the_mean():
    """As timm's, with the masks that it draws."""
    model = made(drop_path=0.5)
    assert [block.drop_path for block in model.blocks] == pytest.approx(calculate_drop_path_rates(0.5, 3))
    assert model.path_shares == [0.0, 0.0, 0.25, 0.25, 0.5, 0.5]
    assert made(drop_path=0.5, drop_path_rule="uniform").path_shares == [0.5] * 6
    block, theirs = model.blocks[1].train(), DropPath(0.25).train()
    x = torch.randn(64, 5, 48, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    expected = x + theirs(block.attention(block.norm1(x)))
    expected = expected + theirs(block.mlp(block.norm2(expected)))
    torch.manual_seed(1)
    paths = torch.stack([torch.empty(64, 1, 1).bernoulli_(0.75) for _ in range(2)]) > 0
    torch.testing.assert_close(block(x, paths=paths), expected)
    assert model.eval().kept_paths([x]) is None


def test_without_masks_torch_draws_them():
    model = made(drop_path=0.5).train()
    one, other = model.kept_paths([torch.zeros(9000, 1), torch.zeros(4, 1)])
    assert (one.shape, other.shape) == ((6, 9000), (6, 4))
    assert (1 - one.float().mean(1) - torch.tensor(model.path_shares)).abs().max() < 0.032  # six standard deviations


DROPOUT = {"dropout": 0.3, "registers": 2, "class_position": False}


@pytest.mark.parametrize("keys", [ALL, ALL | {"pool": "map"}, DROPOUT, EVA])
def test_recomputed_activations_change_no_gradient_and_all_parameters_have_one(keys):
    gradients = []
    for every in (0, 1, 2):
        model = made(every=every, **keys).train()
        torch.manual_seed(5)
        model(images(32, batch=8)).logits.square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]) and torch.equal(gradient, gradients[2][name])
    assert [name for name, gradient in gradients[0].items() if gradient.abs().max() == 0] == []


def test_layers_are_counted_from_the_head_for_every_part():
    block = model_of(**TINY | ALL | {"pool": "map", "position": {"kind": "1d"}})
    model = build_of_block(block, image_size=32, num_classes=7, checkpoint_every=0)
    found = {name: block.layers_above(name) for name, _ in model.named_parameters()}
    assert {found[name] for name in ("registers", "pos_embedding", "embedding.weight")} == {4}
    eva = model_of(**TINY | EVA)
    parts = ("attention.norm.weight", "attention.query_bias", "mlp.norm.bias")
    assert {eva.layers_above(f"blocks.1.{part}") for part in parts} == {2}
    for i in range(3):
        assert {count for name, count in found.items() if name.startswith(f"blocks.{i}.")} == {3 - i}
    assert {count for name, count in found.items() if name.startswith(("map.", "norm.", "head."))} == {0}


# ---- How they begin --------------------------------------------------------------------------------------------------


def test_initial_values():
    keys = {"width": 192, "mlp_dim": 256, "pool": "map", "layer_scale": 1e-5, "sub_norm": "all"}
    block = model_of(**TINY | ALL | keys)
    model = build_of_block(block, image_size=32, num_classes=7, checkpoint_every=0)
    value = {name: initial_value(model, name, parameter.shape, 0) for name, parameter in model.named_parameters()}
    assert [value[f"blocks.1.layer_scale{i}"].unique().item() for i in (1, 2)] == pytest.approx([1e-5, 1e-5])
    for name in ("norm", "blocks.0.norm1", "blocks.0.attention.query_norm", "map.norm", "map.mlp.norm"):
        assert torch.all(value[f"{name}.weight"] == 1)
    for name in ("attention.norm", "mlp.norm"):
        assert torch.all(value[f"blocks.0.{name}.weight"] == 1)
    for name in ("blocks.0.attention.query_bias", "blocks.0.attention.value_bias", "map.query.bias", "map.out.bias"):
        assert torch.all(value[name] == 0)
    # Equal ones would have equal gradients for ever.
    assert value["registers"].std().item() == pytest.approx(0.02, rel=0.1)
    for stacked, outputs in (("blocks.0.mlp.fc1", 256), ("map.mlp.fc1", 256), ("map.key_value", 192)):
        for half in value[f"{stacked}.weight"].chunk(2):
            assert half.abs().max().item() == pytest.approx(math.sqrt(6 / (192 + outputs)), rel=1e-3)
    assert value["map.probe"].abs().max().item() == pytest.approx(math.sqrt(6 / 193), rel=0.05)


# ---- As a recipe has them --------------------------------------------------------------------------------------------


def dumped(**keys) -> dict:
    return small_recipe(keys, data={"image_size": 64}).dump()["model"]


def test_a_resolved_recipe_has_a_part_only_where_it_is_set():
    assert dumped(name="ViT-B/16") == UNSET | {"name": "ViT-B/16", "head": "pretrain"}
    assert dumped(name="ResNet50x1").keys() == UNSET.keys()
    with_parts = dumped(**TINY | ALL)
    resolved = {"position": {"kind": "rope", "at": "stem", "base": 100.0}}
    assert {key: with_parts[key] for key in ALL} == ALL | resolved
    assert dumped(**with_parts) == with_parts
    assert dumped(name="DINOv3-S/16")["position"]["kind"] == "rope"
    assert dumped(name="DINOv2-S/14")["position"] == UNSET["position"]
    assert dumped(name="DINOv3-S/16", position={"kind": "1d"})["position"] == UNSET["position"]
    eva = dumped(name="EVA02-Ti/14")
    assert eva["position"] == {"kind": "1d_rope", "at": "stem", "base": 10_000.0}
    assert (eva["pool"], dumped(name="EVA02-Ti/14", pool="cls")["pool"]) == ("normed_mean", "cls")
    assert dumped(**eva) == eva


@pytest.mark.parametrize(
    "keys",
    [
        *({"num_heads": 8, **ROPE}, {"position": {"kind": "1d", "base": 10.0}}),
        *({"position": {"kind": "rope", "at": "shared"}}, {"position": {"kind": "sincos", "at": "shared"}}),
        *({"width": 54, **SINCOS}, {"attention": "axial", "registers": 1}, {"attention": "axial", "drop_path": 0.1}),
        *(VIT_5 | {"registers": 3}, {"position": {"kind": "rope", "unit": "patch"}}, {"drop_path_rule": "uniform"}),
        *({"attention": "axial", **ROPE}, {"attention": "axial", "position": {"kind": "1d_rope"}}),
        *({"attention": "axial", "pool": "normed_mean"}, {"position": {"kind": "1d_rope", "at": "every_layer"}}),
        *({"registers": 1, "position": {"kind": "relative"}}, {"class_position": False, "position": {"at": "shared"}}),
        {"name": "ResNet50x1", "norm": "rms"},
    ],
)
def test_what_does_not_go_together(keys):
    block = keys if "name" in keys else TINY | keys
    with pytest.raises(ValueError) as caught:
        model_of(**block)
    mistakes = caught.value.errors() if isinstance(caught.value, ValidationError) else ()
    assert_messages("model", {str(keys): describe_mistake(*mistakes) if mistakes else str(caught.value)})


# ---- Rotations that training stretches ------------------------------------------------------------------------------


def test_blocks_are_stretched_as_dinov3_does_in_training_alone():
    """Each block by its own factors, against attention whose angles are written out; evaluation and factors of 1 are
    what they were.
    """
    model = made(depth=2, registers=1, num_classes=None, position={"kind": "rope", "rescale": 2.0, "jitter": 1.5})
    pixels, seen = images(32, 2), []
    plain = model.eval()(pixels).tokens
    assert model.train().stretch == (2.0, 1.5)
    assert torch.equal(model(pixels).tokens, plain)
    of_grid = {4: [(2.0, 0.5), (1.25, 1.0)], 2: [(1.0, 1.0), (0.75, 3.0)]}
    model.stretches = of_grid.__getitem__
    for block in model.blocks:
        block.attention.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[1]))
    model([pixels, images(16, 3)])
    for block, rotations in enumerate(seen):
        for (side, factors), found in zip(of_grid.items(), rotations, strict=True):
            centres = [(2 * at + 1) / side - 1 for at in range(side)]
            turns = [100 ** -(i / 4) for i in range(4)]
            expected = [
                [2 * math.pi * factors[block][axis] * (row, column)[axis] * turn for axis in (0, 1) for turn in turns]
                for row in centres
                for column in centres
            ]
            half = torch.tensor(expected, dtype=torch.float64)
            turned = torch.stack([half.cos().repeat(1, 2), torch.cat([-half.sin(), half.sin()], dim=1)])
            torch.testing.assert_close(found.double(), turned, rtol=0, atol=2e-6)
    assert torch.equal(model.eval()(pixels).tokens, plain)


def test_stretches_are_uniform_in_the_logarithm_and_drawn_for_each_block_size_and_update():
    drawn = np.log(np.array([stretches(key, 14, 40, 2.0, 1.0) for key in range(500)]))
    assert np.array_equal(drawn[..., 0], drawn[..., 1]) and len(np.unique(drawn)) > 0.99 * 500 * 40
    both = np.sort(drawn[..., 0].ravel()) / math.log(2)  # in [-1, 1]
    assert np.abs(both - np.linspace(-1, 1, both.size)).max() < 0.03
    assert abs(np.corrcoef(drawn[:, 0, 0], drawn[:, 1, 0])[0, 1]) < 0.15
    assert not np.array_equal(stretches(1, 14, 2, 2.0, 1.0), stretches(1, 7, 2, 2.0, 1.0))
    apart = np.log(stretches(1, 14, 40, 1.0, 3.0)) / math.log(3)
    assert np.abs(apart).max() <= 1 and np.abs(apart[:, 0] - apart[:, 1]).min() > 0
