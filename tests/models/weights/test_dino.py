"""DINOv2 with registers and DINOv3 of transformers: the same tokens from the same weights, in and out, key by key."""

import pytest
import torch
from messages import refusal
from models.small_models import count, images
from models.weights.exported import (
    described,
    differing,
    edited,
    printed_lines,
    randomised,
    run_of,
    valued,
    write,
    written,
)
from safetensors.torch import load_file
from torch.nn import functional as F

from vitscale.cli.export import export
from vitscale.ground.errors import CheckpointError, RecipeError
from vitscale.models import Model
from vitscale.models.build import build_of_block
from vitscale.models.weights import HEAD, Description, describe, load_weights, open_weights
from vitscale.recipe.families import REGISTRY, model_of

transformers = pytest.importorskip("transformers")
SIZE = 64
OURS = {"patch_size": 8, "width": 48, "depth": 2, "num_heads": 3, "layer_scale": 0.1, "registers": 3}
THEIRS = {
    **{"patch_size": 8, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "num_register_tokens": 3},
    **{"image_size": SIZE, "layerscale_value": 0.1},
}
V1, V2, V3 = "Dinov2", "Dinov2WithRegisters", "DINOv3ViT"
ROPE = {"position": {"kind": "rope"}, "norm_eps": 1e-5}
GATED = {"use_gated_mlp": True, "hidden_act": "silu", "intermediate_size": 72}
WIDER, NO_BIASES = {"intermediate_size": 192}, {"query_bias": False, "value_bias": False}
# name -> our block, transformers' class and configuration.
CASES = {
    "v2": ({"mlp": "exact_gelu", "mlp_dim": 144}, V2, {"mlp_ratio": 3}),
    "v2-tanh": ({"mlp_dim": 192}, V2, {"mlp_ratio": 4, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}),
    "v2-gated": ({"mlp": "swiglu", "mlp_dim": 128}, V2, {"mlp_ratio": 4, "use_swiglu_ffn": True}),
    "v2-no-bias": ({"mlp": "exact_gelu", "mlp_dim": 48, "qkv_bias": "none"}, V2, {"mlp_ratio": 1, "qkv_bias": False}),
    "v2-no-registers": ({"mlp": "exact_gelu", "mlp_dim": 96, "registers": 0}, V1, {"mlp_ratio": 2}),
    "v3": ({"mlp": "exact_gelu", "mlp_dim": 72, "qkv_bias": "no_key", **ROPE}, V3, {"intermediate_size": 72}),
    "v3-plus": (
        {"mlp": "swiglu", "mlp_dim": 192, "qkv_bias": "no_key", **ROPE},
        V3,
        GATED | {"intermediate_size": 192},
    ),
    "v3-7B": ({"mlp": "swiglu", "mlp_dim": 72, "qkv_bias": "none", **ROPE}, V3, GATED | NO_BIASES),
    "v3-base": (
        {"mlp": "swiglu", "mlp_dim": 72, **ROPE, "position": {"kind": "rope", "base": 10}, "norm_eps": 1e-3},
        V3,
        {**GATED, "key_bias": True, "rope_theta": 10.0, "layer_norm_eps": 1e-3},
    ),
}
every_case = pytest.mark.parametrize("case", CASES)


def ours_of(case: str) -> tuple[Description, Model]:
    description = described(OURS | CASES[case][0], SIZE)
    return description, valued(description)


def theirs_of(case: str) -> torch.nn.Module:
    """Transformers' model, every parameter random."""
    _, name, settings = CASES[case]
    config = getattr(transformers, f"{name}Config")(**THEIRS, **settings)
    return randomised(getattr(transformers, f"{name}Model")(config))


def assert_same_tokens(ours: Model, peer: torch.nn.Module) -> None:
    pixels = images(SIZE)
    with torch.no_grad():
        found = ours(pixels)
        expected = peer(pixels.permute(0, 3, 1, 2))
    assert found.tokens.std() > 0.1
    assert (found.tokens - expected.last_hidden_state).abs().max() < 1e-4
    assert (found.pooled - expected.pooler_output).abs().max() < 1e-4


@every_case
def test_their_folder_is_our_model_and_our_folder_theirs(case, tmp_path):
    peer = theirs_of(case)
    peer.save_pretrained(tmp_path / "folder")
    description, model = ours_of(case)
    source, notes = open_weights(tmp_path / "folder"), []
    load_weights(model, source, drop=HEAD, report=notes.append)
    assert_same_tokens(model, peer)
    assert len(notes) == 1 and "mask_token is not read" in notes[0]
    assert describe(source, OURS | CASES[case][0]).build().shape == model.shape
    # And back: every tensor but the mask.
    again = write(model, description, "hf", tmp_path, drop_head=True)
    before, after = (load_file(path / "model.safetensors") for path in (tmp_path / "folder", again))
    assert before.keys() == after.keys()
    assert [key for key in before if not torch.equal(before[key], after[key])] == ["embeddings.mask_token"]
    returned = valued(description, seed=1)
    load_weights(returned, open_weights(again), drop=HEAD)
    assert [name for name in differing(model, returned) if name not in HEAD] == []
    found, loading = type(peer).from_pretrained(again, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same_tokens(model, found.eval())
    assert found.embeddings.mask_token.abs().max() == 0


@pytest.mark.parametrize(("case", "size"), [(case, size) for case in CASES for size in (32, 80) if case[:2] == "v2"])
def test_positions_of_another_grid_are_resampled_as_dinov2_does(case, size, tmp_path):
    """With registers as transformers has it; without them its formula lacks the 0.1 of the authors' code."""
    peer = theirs_of(case)
    peer.save_pretrained(tmp_path / "folder")
    model = valued(described(OURS | CASES[case][0], size))
    load_weights(model, open_weights(tmp_path / "folder"), drop=HEAD, report=lambda note: None)
    found, grid = model.pos_embedding.detach(), size // OURS["patch_size"]
    with torch.no_grad():
        expected = peer.embeddings.interpolate_pos_encoding(torch.zeros(1, grid**2 + 1, OURS["width"]), size, size)
    if not model.shape.registers:
        table = peer.embeddings.position_embeddings.detach()
        planes = table[:, 1:].unflatten(1, (8, 8)).permute(0, 3, 1, 2)
        larger = F.interpolate(planes, scale_factor=(grid + 0.1) / 8, mode="bicubic")
        assert float((found - expected).abs().max()) > 1e-3
        expected = torch.cat([table[:, :1], larger.flatten(2).mT], dim=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in REGISTRY if name.startswith("DINO")])
def test_every_registered_model_is_theirs(name):
    """But for the mask token, which belongs to an objective."""
    block, size = model_of(name=name), 518 if name.startswith("DINOv2") else 224
    with torch.device("meta"):
        model = build_of_block(block, image_size=size, num_classes=None)
        theirs = model.foreign().transformers_config() | {"num_register_tokens": 4}
        if name.startswith("DINOv2"):
            theirs["mlp_ratio"] = 4
        else:
            theirs |= dict.fromkeys(("query_bias", "value_bias"), name != "DINOv3-7B/16")
        peer = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**theirs))
    assert count(model) == count(peer) - model.shape.width
    assert count(model) == sum(operation.params for operation in block.operations(size, None))


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("S+", {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536}),
        ("H+", {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 20, "intermediate_size": 5120}),
    ],
)
def test_the_configurations_of_the_plus_models(name, published):
    """As Meta's config.json has them."""
    found = Description({"name": f"DINOv3-{name}/16"}, 224, None).build().foreign().transformers_config()
    published = published | {
        **{"patch_size": 16, "image_size": 224, "num_register_tokens": 4, "layer_norm_eps": 1e-5},
        **{"use_gated_mlp": True, "hidden_act": "silu", "rope_theta": 100.0, "layerscale_value": 1e-5},
        **{"query_bias": True, "key_bias": False, "value_bias": True, "proj_bias": True, "mlp_bias": True},
    }
    assert {key: found.get(key) for key in published} == published


def test_a_bare_state_dict_of_theirs(tmp_path):
    peer = theirs_of("v3")
    torch.save(peer.state_dict(), tmp_path / "v3.pth")
    _, model = ours_of("v3")
    load_weights(model, open_weights(tmp_path / "v3.pth"), drop=HEAD)
    assert_same_tokens(model, peer)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("v3", {"rope_theta": 50.0}),
        ("v3", {"layer_norm_eps": 1e-6}),
        ("v3", {"hidden_act": "relu"}),
        ("v3", {"num_register_tokens": None}),
        ("v2", {"num_attention_heads": 6}),
        ("v2", {"model_type": "dinov3_vit"}),
        ("v2", {"model_type": "dinov2"}),
    ],
)
def test_a_config_of_another_model(case, changes, tmp_path):
    folder, *_ = written(tmp_path, "hf", OURS | CASES[case][0], drop_head=True)
    edited(folder / "config.json", **changes)
    with refusal((CheckpointError, RecipeError), "weights", f"{case} {changes}", {tmp_path: "FOLDER"}):
        describe(open_weights(folder), OURS | CASES[case][0])


@pytest.mark.parametrize(
    "change", [{"norm": "rms"}, {"qk_norm": True}, {"pool": "mean"}, {"mlp_dim": 100}, {"class_position": False}]
)
def test_what_neither_of_them_is_has_no_folder(change, tmp_path):
    with pytest.raises(RecipeError, match=r"\bhf\b"):
        written(tmp_path, "hf", OURS | CASES["v2"][0] | change, drop_head=True)


def test_they_have_no_place_for_a_head(tmp_path):
    with pytest.raises(RecipeError, match=r"\bhf\b.*head\.weight, head\.bias"):
        written(tmp_path, "hf", OURS | CASES["v3"][0])


def test_the_printed_lines_open_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_of(tmp_path / "run", OURS | CASES["v3"][0] | {"head": "linear"})
    export("run", "hf", tmp_path / "folder", drop_head=True)
    scope = {"transformers": transformers}
    exec(printed_lines(capsys), scope)
    assert_same_tokens(ours_of("v3")[1], scope["model"].eval())


@pytest.mark.parametrize("gated", [False, True])
def test_their_authors_own_file_with_registers(gated, tmp_path):
    """Against timm, which reads such files too: it adds the class token's position to the token."""
    timm = pytest.importorskip("timm").models.vision_transformer
    layer = {"mlp_layer": timm.SwiGLUPacked, "act_layer": torch.nn.SiLU} if gated else {}
    sizes = {"img_size": SIZE, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "init_values": 0.1} | layer
    peer = randomised(timm.VisionTransformer(**sizes, num_classes=0, reg_tokens=3, no_embed_class=True)).eval()
    theirs = {"reg_token": "register_tokens"} | ({"mlp.fc1": "mlp.w12", "mlp.fc2": "mlp.w3"} if gated else {})
    state = {"mask_token": torch.zeros(1, 48)}
    for key, value in peer.state_dict().items():
        for timms, name in theirs.items():
            key = key.replace(timms, name)
        state[key] = value
    state["pos_embed"] = torch.randn(1, 65, 48)
    torch.save(state, tmp_path / "reg4.pth")
    peer.load_state_dict(timm.checkpoint_filter_fn(dict(state), peer))
    source = open_weights(tmp_path / "reg4.pth")
    block = OURS | ({"mlp": "swiglu", "mlp_dim": 96} if gated else {"mlp": "exact_gelu", "mlp_dim": 192})
    model = valued(described(block | {"class_position": False}, SIZE))
    load_weights(model, source, drop=HEAD)
    with torch.no_grad():
        found, expected = model(images(SIZE)).pooled, peer(images(SIZE).permute(0, 3, 1, 2))
    assert (found - expected).abs().max() < 1e-4 and expected.std() > 0.1
