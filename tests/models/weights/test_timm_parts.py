"""timm's Transformers with registers, distilled DeiT, DeiT-III, EVA-02, its attention pooling and other parts: the same
logits, in and out."""

import json

import pytest
import torch
from messages import refusal
from models.weights.exported import assert_equal_logits, described, differing, edited, loaded, randomised, valued, write
from safetensors.torch import load_file, save_file

from vitscale.ground.errors import CheckpointError, RecipeError
from vitscale.models.weights import Description, describe, load_weights, open_weights
from vitscale.models.weights.foreign import table, their_shapes
from vitscale.recipe.families import model_of

timm = pytest.importorskip("timm")
SIZE = 64
OURS = {"patch_size": 8, "width": 48, "depth": 2, "num_heads": 3, "mlp_dim": 96, "mlp": "exact_gelu"}
THEIRS = {"img_size": SIZE, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
EVA = {"mlp": "swiglu", "qkv_bias": "no_key", "position": {"kind": "1d_rope"}}
BESIDE = {"class_position": False, "layer_scale": 1e-5}
# timm's name -> our block, and its arguments.
CASES = {
    "deit3_small_patch16_224": (BESIDE, {"mlp_ratio": 2}),
    "vit_small_patch14_reg4_dinov2": (BESIDE | {"registers": 4}, {"mlp_ratio": 2}),
    "vit_giant_patch14_reg4_dinov2": (BESIDE | {"registers": 4, "mlp": "swiglu"}, {"mlp_ratio": 4}),
    "deit_small_distilled_patch16_224": ({"distilled": True}, {"mlp_ratio": 2}),
    "vit_medium_patch16_reg4_gap_256": (
        {"registers": 4, "layer_scale": 1e-5, "pool": "mean", "qkv_bias": "none"},
        {"mlp_ratio": 2, "qkv_bias": False, "init_values": 1e-5, "fc_norm": False},
    ),
    "vit_tiny_patch16_224": (
        {"norm": "rms", "qk_norm": True, "mlp": "gelu"},
        {"mlp_ratio": 2, "norm_layer": "rmsnorm", "qk_norm": True, "act_layer": "gelu_tanh"},
    ),
    "vit_small_patch16_224": (
        {"sub_norm": "all", "pool": "normed_mean"},
        {"mlp_ratio": 2, "scale_attn_norm": True, "scale_mlp_norm": True, "global_pool": "avg"},
    ),
    "vit_small_patch32_224": ({"sub_norm": "mlp"}, {"mlp_ratio": 2, "scale_mlp_norm": True}),
    # A side of these is 8 patches, and of those that EVA-02's angles are told in 16.
    "eva02_small_patch14_224": (EVA | {"pool": "normed_mean", "mlp_dim": 128}, {}),
    "eva02_base_patch14_224": (EVA | {"pool": "normed_mean", "sub_norm": "mlp"}, {"mlp_ratio": 2}),
    "eva02_base_patch16_clip_224": (
        EVA | {"sub_norm": "all", "position": {"kind": "1d_rope", "base": 100.0}},
        {"mlp_ratio": 2, "rope_temperature": 100.0},
    ),
    "vit_base_patch16_224": (
        {"pool": "map", "mlp": "gelu"},
        {"mlp_ratio": 2, "global_pool": "map", "class_token": False, "act_layer": "gelu_tanh"},
    ),
}
every_case = pytest.mark.parametrize("name", CASES)


def theirs_of(name: str, num_classes: int = 7) -> torch.nn.Module:
    """timm's model, every parameter random."""
    return randomised(timm.create_model(name, num_classes=num_classes, **THEIRS, **CASES[name][1]))


@every_case
def test_weights_in_and_out(name, tmp_path):
    peer, description = theirs_of(name), described(OURS | CASES[name][0], SIZE)
    save_file(peer.state_dict(), tmp_path / "theirs.safetensors")
    model = valued(description)
    source = open_weights(tmp_path / "theirs.safetensors")
    assert describe(source, OURS | CASES[name][0]).image_size == SIZE
    load_weights(model, source)
    assert_equal_logits(model, peer)
    again = load_file(write(model, description, "timm", tmp_path))
    theirs = peer.state_dict()
    assert again.keys() == theirs.keys()
    assert all(torch.equal(again[key], theirs[key]) for key in again)


@every_case
def test_timm_opens_our_folder(name, tmp_path):
    description = described(OURS | CASES[name][0], SIZE)
    model = valued(description)
    out = write(model, description, "timm", tmp_path, name="folder")
    assert_equal_logits(model, timm.create_model(f"local-dir:{out}", pretrained=True).eval())
    notes: list[str] = []
    assert differing(model, loaded(description, out, notes)) == [] and notes == []


def test_what_timm_does_not_have(tmp_path):
    for keys in (
        *({"registers": 2}, {"qkv_bias": "no_key"}, {"norm_eps": 1e-5}, {"pool": "map", "mlp": "swiglu"}),
        *({"pool": "map", "sub_norm": "mlp"}, {"position": {"kind": "rope"}}, {"position": {"kind": "1d_rope"}}),
        EVA | {"pool": "map"},
    ):
        description = described(OURS | keys, SIZE)
        with refusal(RecipeError, "weights", f"timm {keys}"):
            write(valued(description), description, "timm", tmp_path)


@pytest.mark.parametrize("size", ["S", "B", "L", "g"])
def test_the_shapes_of_dinov2_are_timm_s(size):
    block = {"name": f"DINOv2-{size}/14", "class_position": False, "head": "linear"}
    found = Description(block, 518, 7).build().foreign().timm()
    with torch.device("meta"):
        peer = timm.create_model(found.name, num_classes=7, **found.arguments)
        named = {"S": "small", "B": "base", "L": "large", "g": "giant"}[size]
        published = timm.create_model(f"vit_{named}_patch14_reg4_dinov2", num_classes=7)
    shapes = {name: parameter.shape for name, parameter in peer.named_parameters()}
    assert shapes == {name: parameter.shape for name, parameter in published.named_parameters()}


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("EVA02-Ti/14", "eva02_tiny_patch14_336"),
        ("EVA02-S/14", "eva02_small_patch14_336"),
        ("EVA02-B/14", "eva02_base_patch14_448"),
        ("EVA02-L/14", "eva02_large_patch14_448"),
    ],
)
def test_the_shapes_of_eva_02_are_timm_s(name, theirs):
    with torch.device("meta"):
        published = timm.create_model(theirs, num_classes=7)
    size = published.patch_embed.img_size[0]
    model = Description({"name": name, "head": "linear"}, size, 7).build()
    assert their_shapes(model, table(model, "timm")) == {
        key: tuple(parameter.shape) for key, parameter in published.named_parameters()
    }
    counted = sum(operation.params for operation in model_of(name=name, head="linear").operations(size, 7))
    assert counted == sum(parameter.numel() for parameter in published.parameters())


@pytest.mark.parametrize("changes", [{"num_heads": 6}, {"rope_temperature": 100.0}, {"ref_feat_shape": [24, 24]}])
def test_a_folder_of_another_eva_02(changes, tmp_path):
    description = described(OURS | CASES["eva02_base_patch14_224"][0], SIZE)
    config = write(valued(description), description, "timm", tmp_path, name="folder") / "config.json"
    edited(config, model_args=json.loads(config.read_text())["model_args"] | changes)
    with refusal((CheckpointError, RecipeError), "weights", f"EVA-02 {changes}", {tmp_path: "FOLDER"}):
        describe(open_weights(tmp_path / "folder"), OURS | CASES["eva02_base_patch14_224"][0])


def test_exact_gelu_and_another_epsilon_go_to_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    description = described(OURS | {"norm_eps": 1e-3}, SIZE)
    model = valued(description)
    folder = write(model, description, "hf", tmp_path)
    assert_equal_logits(model, transformers.ViTForImageClassification.from_pretrained(folder).eval())
    notes: list[str] = []
    load_weights(model, open_weights(folder), report=notes.append)
    assert notes == []
