"""timm's Transformers with registers, DeiT-III, its attention pooling and other parts: the same logits, in and out."""

import pytest
import torch
from models.small_models import images
from models.weights.exported import described, differing, valued, write
from safetensors.torch import load_file, save_file

from vitscale.errors import RecipeError
from vitscale.models.weights import Description, describe, load_weights, open_weights, write_weights

timm = pytest.importorskip("timm")
SIZE = 64
OURS = {"patch_size": 8, "width": 48, "depth": 2, "num_heads": 3, "mlp_dim": 96, "mlp": "exact_gelu"}
THEIRS = {"img_size": SIZE, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
BESIDE = {"class_position": False, "layer_scale": 1e-5}
# timm's name -> our block, and its arguments.
CASES = {
    "deit3_small_patch16_224": (BESIDE, {"mlp_ratio": 2}),
    "vit_small_patch14_reg4_dinov2": (BESIDE | {"registers": 4}, {"mlp_ratio": 2}),
    "vit_giant_patch14_reg4_dinov2": (BESIDE | {"registers": 4, "mlp": "swiglu"}, {"mlp_ratio": 4}),
    "vit_medium_patch16_reg4_gap_256": (
        {"registers": 4, "layer_scale": 1e-5, "pool": "mean", "qkv_bias": "none"},
        {"mlp_ratio": 2, "qkv_bias": False, "init_values": 1e-5, "fc_norm": False},
    ),
    "vit_tiny_patch16_224": (
        {"norm": "rms", "qk_norm": True, "mlp": "gelu"},
        {"mlp_ratio": 2, "norm_layer": "rmsnorm", "qk_norm": True, "act_layer": "gelu_tanh"},
    ),
    "vit_base_patch16_224": (
        {"pool": "map", "mlp": "gelu"},
        {"mlp_ratio": 2, "global_pool": "map", "class_token": False, "act_layer": "gelu_tanh"},
    ),
}
every_case = pytest.mark.parametrize("name", CASES)


def theirs_of(name: str, num_classes: int = 7) -> torch.nn.Module:
    """timm's model, every parameter random."""
    peer = timm.create_model(name, num_classes=num_classes, **THEIRS, **CASES[name][1]).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return peer


def assert_equal_logits(ours: torch.nn.Module, peer: torch.nn.Module) -> None:
    pixels = images(SIZE)
    with torch.no_grad():
        found, expected = ours(pixels).logits, peer(pixels.permute(0, 3, 1, 2))
    assert found.std() > 0.1
    assert (found - expected).abs().max() < 1e-4


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
    values = {key: parameter.detach() for key, parameter in model.named_parameters()}
    write_weights(tmp_path / "folder", "timm", description, values.__getitem__)
    peer = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert_equal_logits(model, peer)
    returned, notes = valued(description, seed=1), []
    load_weights(returned, open_weights(tmp_path / "folder"), report=notes.append)
    assert differing(model, returned) == [] and notes == []


def test_another_form_of_gelu_is_told(tmp_path):
    description = described(OURS, SIZE)
    values = {key: parameter.detach() for key, parameter in valued(description).named_parameters()}
    write_weights(tmp_path / "folder", "timm", description, values.__getitem__)
    notes: list[str] = []
    load_weights(
        valued(described(OURS | {"mlp": "gelu"}, SIZE)), open_weights(tmp_path / "folder"), report=notes.append
    )
    assert len(notes) == 1 and "act_layer 'gelu' (here 'gelu_tanh')" in notes[0]


def test_what_timm_does_not_have(tmp_path):
    for keys, words in (
        ({"registers": 2}, "registers"),
        ({"qkv_bias": "no_key"}, "qkv_bias"),
        ({"norm_eps": 1e-5}, "norm_eps"),
        ({"pool": "map", "mlp": "swiglu"}, "mlp"),
        ({"position": {"kind": "rope"}}, "rotations"),
    ):
        description = described(OURS | keys, SIZE)
        with pytest.raises(RecipeError, match=f"timm holds.* {words}"):
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


def test_exact_gelu_and_another_epsilon_go_to_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    description = described(OURS | {"norm_eps": 1e-3}, SIZE)
    model = valued(description)
    folder = write(model, description, "hf", tmp_path)
    peer = transformers.ViTForImageClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        difference = model(images(SIZE)).logits - peer(images(SIZE).permute(0, 3, 1, 2)).logits
    assert difference.abs().max() < 1e-4
    notes: list[str] = []
    load_weights(model, open_weights(folder), report=notes.append)
    assert notes == []
