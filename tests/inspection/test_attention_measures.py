"""How far attention reaches, how spread it is, its rollout: by NumPy on what timm and transformers report."""

import numpy as np
import pytest
import torch
from models.weights.exported import TINY, described, valued, write
from safetensors.torch import load_file
from torch.nn import functional as F

from vitscale.evaluation.inspection import attention
from vitscale.evaluation.inspection.attention import Attending, AttentionMeter, chunks, distances, watching
from vitscale.evaluation.inspection.looking import look, parts_of
from vitscale.ground.errors import RecipeError
from vitscale.models.anatomy import Anatomy, AttentionLayer

IMAGES = torch.randint(0, 256, (7, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
HYBRID = {"blocks": [1, 1], "width_factor": 1, "patch_size": 1, "width": 48, "depth": 2, "mlp_dim": 96, "num_heads": 3}
VARIANTS = {
    **{"plain": TINY, "registers": TINY | {"registers": 2}, "mean": TINY | {"pool": "mean"}},
    "map": TINY | {"pool": "map"},
    "normed_mean": TINY | {"pool": "normed_mean", "position": {"kind": "1d_rope"}, "qkv_bias": "no_key"},
    "rope": TINY | {"position": {"kind": "rope"}, "registers": 1, "qk_norm": True},
    "relative": TINY | {"position": {"kind": "relative"}},
    **{"every_layer": TINY | {"position": {"kind": "2d", "at": "every_layer"}}, "axial": TINY | {"attention": "axial"}},
    **{"axial_relative": TINY | {"attention": "axial", "position": {"kind": "relative"}}, "hybrid": HYBRID},
}


def inside(block, images=IMAGES, parts=("attention", "rollout"), batch=3, pictures=5):
    model = valued(described(block))
    return model, look(model, predictor(model), images, "a model", parts, pictures=pictures, batch=batch)


def predictor(model):
    return lambda images: model(images.float() / 127.5 - 1)


def attention_distance(attention: np.ndarray, grid: int, stride: int, before: int) -> np.ndarray:
    """Pixels (B, A): the mean over asking patches of the distance to patches, by attention to patches."""
    row, column = np.divmod(np.arange(grid**2), grid)
    apart = stride * np.hypot(row[:, None] - row, column[:, None] - column)
    patches = attention[:, :, before:, before:]
    return ((patches * apart).sum(-1) / patches.sum(-1)).mean(-1)


def rollout(attention: list[np.ndarray]) -> np.ndarray:
    """(B, T, T): the product over layers (Abnar and Zuidema, 2020; appendix D.7)."""
    identity = np.eye(attention[0].shape[-1])
    joint = identity
    for weights in attention:
        mixed = weights.mean(axis=1) + identity
        joint = (mixed / mixed.sum(-1, keepdims=True)) @ joint
    return joint


def test_measures_are_those_of_numpy_on_the_attention_that_timm_extracts(tmp_path):
    timm, timm_utils = pytest.importorskip("timm"), pytest.importorskip("timm.utils")
    block = TINY | {"qk_norm": True, "registers": 2, "class_position": False}
    model, found = inside(block)
    config_of = model.foreign().timm()
    theirs = timm.create_model(config_of.name, num_classes=7, **config_of.arguments).eval()
    theirs.load_state_dict(load_file(write(model, described(block), "timm", tmp_path)))
    for layer in theirs.blocks:
        layer.attn.fused_attn = False
    extract = timm_utils.AttentionExtract(theirs, names=["blocks.*.attn.attn_drop"], mode="eval", method="hook")
    with torch.no_grad():
        extracted = extract((IMAGES.float() / 127.5 - 1).permute(0, 3, 1, 2)).values()
    expected = [weights.double().numpy() for weights in extracted]
    assert list(found.reach) == ["1", "2"]
    for weights, reach, shown in zip(expected, found.reach.values(), found.maps.values(), strict=True):
        np.testing.assert_allclose(reach.distance, attention_distance(weights, 8, 8, 3), rtol=1e-4)
        entropy = -(weights * np.log(weights)).sum(-1)[:, :, 3:].mean(-1)
        np.testing.assert_allclose(reach.entropy, entropy, rtol=1e-4)
        np.testing.assert_allclose(reach.on_patches, weights[:, :, 3:, 3:].sum(-1).mean(-1), rtol=1e-4)
        np.testing.assert_allclose(shown, weights.mean(1)[:5, 0, 3:], rtol=1e-3)
    np.testing.assert_allclose(found.rollout, rollout(expected)[:5, 0, 3:], rtol=1e-3)


def test_attention_within_windows_is_what_transformers_reports(tmp_path):
    """The last block of each stage, whose windows are shifted where there are several."""
    transformers = pytest.importorskip("transformers")
    block = {"name": "Swin-T", "width": 32, "num_heads": 2, "blocks": [2, 2, 2], "window": 4}
    model, found = inside(block, parts=("attention", "norms"))
    shifts = [layer.windows.shift for layer in model.anatomy().attention]
    assert shifts == [0, 2, 0, 2, 0, 0]
    peer = transformers.SwinForImageClassification.from_pretrained(
        write(model, described(block), "hf", tmp_path), attn_implementation="eager"
    )
    with torch.no_grad():
        seen = peer((IMAGES.float() / 127.5 - 1).permute(0, 3, 1, 2), output_attentions=True)
    assert parts_of(model, "it", None) == ["filters", "attention", "alignment", "norms", "colours"]
    with pytest.raises(RecipeError, match="windows"):
        parts_of(model, "it", ["rollout"])
    for stage, weights in enumerate(seen.attentions):
        reach, windows = found.reach[f"stage {stage + 1}.2"], len(weights) // len(IMAGES)
        expected = attention_distance(weights.numpy(), 4, 4 * 2**stage, 0)
        np.testing.assert_allclose(reach.distance, expected.reshape(len(IMAGES), windows, -1).mean(1), rtol=1e-4)
        side, shown = int(windows**0.5), found.maps[f"stage {stage + 1}.2"]
        received = weights.mean(dim=(1, 2)).reshape(len(IMAGES), side, side, 4, 4).numpy()
        of_map = received.transpose(0, 1, 3, 2, 4).reshape(len(IMAGES), 4 * side, 4 * side)
        of_map = np.roll(of_map, (shifts[2 * stage + 1],) * 2, (1, 2)).reshape(len(IMAGES), -1)
        np.testing.assert_allclose(shown, of_map[: len(shown)], rtol=1e-3, atol=1e-7)
    assert [values.shape[1] for values in found.norms.values()] == [256, 256, 64, 64, 16, 16]


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_captured_is_what_attention_computes(name):
    """Torch's own kernel gives the weights where the values are the identity. Rows sum to 1, so rollouts do."""
    model = valued(described(VARIANTS[name]))
    anatomy, seen = model.anatomy(), {}

    def compare(layer, attending):
        query, key, bias = attending
        values = torch.eye(key.shape[2]).expand(*key.shape[:2], -1, -1)
        expected = F.scaled_dot_product_attention(query, key, values, attn_mask=bias)
        ours = torch.empty_like(expected)
        for chunk in chunks(attending):
            ours[chunk.images, :, chunk.queries] = chunk.weights
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-4)
        seen[layer] = seen.get(layer, 0) + 1

    modules = {layer.module: layer.name for layer in anatomy.attention} | (
        {anatomy.pooling: "pooling"} if anatomy.pooling else {}
    )
    with torch.no_grad(), watching(modules, compare):
        predictor(model)(IMAGES)
    assert seen == dict.fromkeys(modules.values(), 1)
    _, found = inside(VARIANTS[name])
    assert found.rollout.shape == (5, anatomy.grid**2) and (found.rollout >= 0).all()
    assert list(found.reach) == list(found.maps) == [layer.name for layer in anatomy.attention]
    assert all(reach.distance.shape == (7, 3) for reach in found.reach.values())
    on_others = 1 - found.rollout.sum(dim=1)
    assert (on_others.abs() < 1e-5).all() if not anatomy.before else (on_others > 0).all()


def test_axial_attention_is_that_of_a_grid_which_sees_lines_alone():
    """The rollout of row and column attention is that of the same weights as (N, N), zeros outside lines."""
    model = valued(described(VARIANTS["axial"]))
    n, whole = model.anatomy().grid, []

    def keep(layer, attending):
        lines = torch.cat([chunk.weights for chunk in chunks(attending)]).view(len(IMAGES), n, -1, n, n).mean(dim=2)
        dense = torch.zeros(len(IMAGES), n, n, n, n)  # row, column of the asking patch, of the other
        for line in range(n):
            if layer.endswith("rows"):
                dense[:, line, :, line, :] = lines[:, line]
            else:
                dense[:, :, line, :, line] = lines[:, line]
        whole.append(dense.reshape(len(IMAGES), 1, n * n, n * n).double().numpy())

    with torch.no_grad(), watching({layer.module: layer.name for layer in model.anatomy().attention}, keep):
        predictor(model)(IMAGES)
    _, found = inside(VARIANTS["axial"])
    np.testing.assert_allclose(found.rollout, rollout(whole).mean(axis=1)[:5], rtol=1e-4)
    for weights, reach in zip(whole, found.reach.values(), strict=True):
        heads = reach.distance.mean(dim=1, keepdim=True)
        np.testing.assert_allclose(heads, attention_distance(weights, n, 8, 0), rtol=1e-4)
    for weights, shown in zip(whole, found.maps.values(), strict=True):
        np.testing.assert_allclose(shown, weights[:5, 0].mean(axis=1), rtol=1e-4)


def test_figures_do_not_depend_on_chunks_and_batches(monkeypatch):
    _, expected = inside(VARIANTS["relative"], batch=7)
    monkeypatch.setattr(attention, "_CHUNK", 999)  # a part of one image's queries
    _, found = inside(VARIANTS["relative"], batch=2)
    torch.testing.assert_close(found.rollout, expected.rollout)
    for layer, reach in found.reach.items():
        torch.testing.assert_close(reach.distance, expected.reach[layer].distance)
        torch.testing.assert_close(reach.entropy, expected.reach[layer].entropy)


def test_nothing_is_left_behind_and_outputs_are_those_of_a_plain_pass():
    model = valued(described(TINY))
    before = predictor(model)(IMAGES).logits
    look(model, predictor(model), IMAGES, "a model", parts_of(model, "a model", None))
    assert torch.equal(predictor(model)(IMAGES).logits, before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("radius", [1, 2, 3])
def test_attention_of_a_known_radius_reaches_so_far(radius):
    """Every patch attends, evenly, to those `radius` steps away in its row or column, and to the first token."""
    grid, stride = 7, 16
    apart = distances(grid, stride, "grid")
    allowed = (apart == radius * stride).float()
    bias = torch.zeros(1, 1, 1 + grid**2, 1 + grid**2)
    bias[0, 0, 1:, 1:] = allowed.log()
    zero = torch.zeros(2, 3, 1 + grid**2, 4)
    meter = AttentionMeter(
        Anatomy({}, [AttentionLayer("1", torch.nn.Identity(), "grid")], grid=grid, stride=stride, before=1)
    )
    meter.begin(2)
    meter.observe("1", Attending(zero, zero, bias))
    (reach,) = meter.reach["1"]
    torch.testing.assert_close(reach.distance, torch.full((2, 3), float(radius * stride)))
    neighbours = allowed.sum(dim=1)
    torch.testing.assert_close(reach.entropy[0, 0], (neighbours + 1).log().mean())
    torch.testing.assert_close(reach.on_patches[0, 0], (neighbours / (neighbours + 1)).mean())
