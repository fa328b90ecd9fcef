"""Swin in timm's, transformers' and its authors' files: every key, equal logits in both directions, other windows."""

import json
import re
from contextlib import nullcontext

import pytest
import torch
from models.weights.exported import (
    NAMES,
    assert_equal_logits,
    described,
    edited,
    loaded,
    randomised,
    written,
)
from safetensors.torch import load_file, save_file
from small_recipes import small_recipe
from torch.nn import functional as F

from vitscale.ground.errors import CheckpointError, RecipeError
from vitscale.models.weights import describe, load_weights, open_weights
from vitscale.training.beginning.initial_weights import check_initial_weights

timm = pytest.importorskip("timm")
SMALL = {"name": "Swin-T", "width": 32, "num_heads": 2, "blocks": [2, 2, 2, 2]}
# (block, side of the images): as published; windows of 12; every stage's windows in whole; later stages' clamped.
SIZES = [
    ({"name": "Swin-T"}, 224),
    ({**SMALL, "window": 12}, 384),
    ({**SMALL, "window": 2}, 64),
    ({**SMALL, "window": 4}, 64),
]
sizes = pytest.mark.parametrize(("block", "size"), SIZES, ids=["published", "12", "2", "clamped"])


def of_timm(model, num_classes=7):
    found = model.foreign().timm()
    return timm.create_model(found.name, num_classes=num_classes, **found.arguments).eval()


@sizes
def test_timm_computes_our_logits_and_we_its(block, size, tmp_path):
    path, model, _ = written(tmp_path, "timm", block, size)
    peer = of_timm(model)
    peer.load_state_dict(load_file(path), strict=True)
    assert_equal_logits(model, peer, size, 1e-5)
    torch.save({"state_dict": randomised(peer, 0.05).state_dict()}, tmp_path / "theirs.pth")
    source = open_weights(tmp_path / "theirs.pth")
    again = describe(source)
    assert (again.image_size, again.num_classes, again.build().shape) == (size, 7, model.shape)
    load_weights(model, source)
    assert_equal_logits(model, peer, size, 1e-5)


@pytest.mark.parametrize(("block", "size"), [*SIZES[:3], ({**SMALL, "window": 3}, 100)], ids=["7", "12", "2", "padded"])
def test_transformers_computes_our_logits_and_we_its(block, size, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder, model, _ = written(tmp_path, "hf", block, size, class_names=NAMES)
    peer, info = transformers.SwinForImageClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert_equal_logits(model, peer.eval(), size, 1e-5)
    randomised(peer, 0.05).save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "preprocessor_config.json").write_text((folder / "preprocessor_config.json").read_text())
    torch.save(peer.state_dict(), tmp_path / "modules.bin")
    for path in (tmp_path / "theirs", tmp_path / "modules.bin"):
        notes: list[str] = []
        load_weights(model, open_weights(path), report=notes.append)
        assert notes == []
        assert_equal_logits(model, peer, size, 1e-5)
    found = describe(open_weights(tmp_path / "theirs"))
    assert (found.image_size, found.build().shape, found.class_names) == (size, model.shape, NAMES)


def authors_state(path) -> dict[str, torch.Tensor]:
    """Our weights of timm's form under the names of microsoft/Swin-Transformer, with the buffers of its files."""
    state = {}
    for key, value in load_file(path).items():
        key = re.sub(r"^layers\.(\d)\.downsample", lambda at: f"layers.{int(at[1]) - 1}.downsample", key)
        state[key.replace("head.fc.", "head.")] = value
    for key in [key for key in state if key.endswith("relative_position_bias_table")]:
        layer = key.rpartition(".")[0]
        state[f"{layer}.relative_position_index"] = torch.zeros(49, 49, dtype=torch.int64)
        state[f"{layer.rpartition('.')[0]}.attn_mask"] = torch.zeros(64, 49, 49)
    return state


def test_the_files_of_the_authors(tmp_path):
    """timm's own reader of these files takes them for the same model."""
    from timm.models.swin_transformer import checkpoint_filter_fn

    path, model, description = written(tmp_path, "timm", {"name": "Swin-T", "blocks": [2, 2, 2, 2]}, 224)
    state = authors_state(path)
    torch.save({"model": state}, tmp_path / "swin.pth")
    peer = of_timm(model)
    peer.load_state_dict(checkpoint_filter_fn({"model": dict(state)}, peer), strict=True)
    notes: list[str] = []
    assert_equal_logits(loaded(description, tmp_path / "swin.pth", notes), peer, 224, 1e-5)
    assert notes == []


@pytest.mark.parametrize("form", ["timm", "hf", "safetensors"])
def test_biases_for_other_windows_are_the_authors(form, tmp_path):
    """Their load_pretrained, written out: bicubic over the table of offsets."""
    path, model, _ = written(tmp_path, form, {**SMALL, "window": 3}, 96)
    notes: list[str] = []
    larger = loaded(described({**SMALL, "window": 4}, 128), path, notes)
    assert len(notes) == 8
    theirs, ours = dict(model.named_parameters()), dict(larger.named_parameters())
    for name, value in theirs.items():
        if "relative_bias" in name:
            table = value.detach().reshape(25, -1)
            heads = table.shape[1]
            resized = F.interpolate(table.permute(1, 0).view(1, heads, 5, 5), size=(7, 7), mode="bicubic")
            torch.testing.assert_close(ours[name], resized.view(heads, 49).permute(1, 0).view(7, 7, heads))
        else:
            assert torch.equal(ours[name], value), name


def test_a_folder_says_what_it_is(tmp_path):
    block = {"name": "Swin-B", "window": 12, "width": 32, "num_heads": 1, "blocks": [2, 2, 2, 2]}
    folder, *_ = written(tmp_path, "hf", block, 384)
    config = json.loads((folder / "config.json").read_text())
    assert describe(open_weights(folder)).model["window"] == 12
    for key, value in (("mlp_ratio", 2.0), ("hidden_act", "relu"), ("depths", [2, 2, 2, 4]), ("window_size", 7)):
        edited(folder / "config.json", **config | {key: value})
        with pytest.raises(CheckpointError, match=key):
            describe(open_weights(folder))


def test_the_size_that_a_folder_states_is_that_of_its_images(tmp_path):
    folder, *_ = written(tmp_path, "hf", {**SMALL, "window": 2})
    (folder / "preprocessor_config.json").unlink()
    assert describe(open_weights(folder)).image_size == 64
    for size, known in (([96, 96], 96), ([96, 64], 64), ("large", 64), (10**9, 64)):
        edited(folder / "config.json", image_size=size)
        assert describe(open_weights(folder)).image_size == known
    edited(folder / "config.json", image_size=32)  # one place is left in the last stage
    with pytest.raises(CheckpointError, match="image_size"):
        describe(open_weights(folder))


def test_a_timm_folder_that_contradicts_its_tensors_is_refused(tmp_path):
    folder, *_ = written(tmp_path, "timm", {**SMALL, "window": 2}, name="folder")
    arguments = json.loads((folder / "config.json").read_text())["model_args"]
    assert describe(open_weights(folder)).image_size == 64
    for key, value in (
        *(("window_size", 7), ("embed_dim", 96), ("depths", [2, 2, 6, 2]), ("num_heads", [3, 6, 12, 24])),
        *(("patch_size", 2), ("window_size", [2, 4])),
    ):
        edited(folder / "config.json", model_args=arguments | {key: value})
        with pytest.raises(CheckpointError, match=key):
            describe(open_weights(folder))
    edited(folder / "config.json", model_args=arguments | {"window_size": [2, 2]})
    assert describe(open_weights(folder)).model["window"] == 2


@pytest.mark.parametrize("name", ["swin_s3_tiny_224", "swinv2_tiny_window8_256"])
def test_other_families_of_timm_are_not_taken_for_it(name, tmp_path):
    peer = timm.create_model(name, num_classes=7)
    save_file({key: value.contiguous() for key, value in peer.state_dict().items()}, tmp_path / "theirs.safetensors")
    with pytest.raises(RecipeError, match="--model"):
        describe(open_weights(tmp_path / "theirs.safetensors"))


def test_formats_refuse_what_they_would_compute_otherwise(tmp_path):
    for form in ("hf", "npz"):
        with pytest.raises(RecipeError, match=form):
            written(tmp_path, form, SMALL)
    assert described({**SMALL, "window": 3}, 100).build().foreign().timm() is None  # padded before it is shifted


@pytest.mark.parametrize("positions", ["resample", "keep"])
def test_a_run_with_larger_windows_begins_with_the_weights_of_smaller_ones(positions, tmp_path):
    weights, *_ = written(tmp_path, "safetensors", {**SMALL, "window": 2})
    blocks = {"objective": {"loss": "softmax"}, "init": {"from": str(weights), "positions": positions}}
    recipe = small_recipe({**SMALL, "window": 4, "head": "linear"}, data={"image_size": 128}, **blocks)
    with nullcontext() if positions == "resample" else pytest.raises((CheckpointError, RecipeError), match="relative"):
        check_initial_weights(recipe, list(NAMES), tmp_path / "run")
