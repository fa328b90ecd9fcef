"""What a source says of itself is held against the model, and a source that changes while it is read is named."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from models.weights.exported import TINY, described, edited, run_of, valued, write, written
from PIL import Image
from safetensors.torch import load_file, save_file

from vitscale.cli.export import export
from vitscale.evaluation.finished import FinishedModel
from vitscale.ground.errors import CheckpointError, RecipeError
from vitscale.models.weights import Description, describe, open_weights, write_weights
from vitscale.models.weights import huggingface as hf
from vitscale.recipe import Normalise

IMAGENET = Normalise(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])


def folder(tmp_path, class_names=None):
    return written(tmp_path, "hf", class_names=class_names)[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 6}, "num_heads 6, not 3"),
        ({"num_attention_heads": None}, "num_heads 12, not 3"),  # transformers' default
        ({"qkv_bias": False}, "qkv_bias"),
        ({"hidden_size": 96}, "hidden_size.*96.*48"),
        ({"patch_size": [4, 4]}, "patch_size.*4.*8"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers.*1000000.*2"),
        ({"num_channels": 4}, "num_channels.*4.*3"),
        ({"intermediate_size": 9}, "mlp_dim 9, not 96"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_attention_heads": "3\x1b[31m"}, r"num_attention_heads is '3\\x1b"),
        ({"num_attention_heads": 7}, "width 48.*num_heads 7"),
        ({"layer_norm_eps": -1e-6}, "norm_eps.*-1e-06"),
        ({"layer_norm_eps": float("nan")}, "norm_eps.*nan"),
        ({"layer_norm_eps": "small"}, "norm_eps.*small"),
        ({"hidden_act": "relu"}, "hidden_act.*relu.*gelu"),
        ({"hidden_act": ["gelu"]}, "hidden_act.*gelu"),
        ({"model_type": "x" * 10_000}, "model_type"),
    ],
)
def test_a_config_of_another_model(changes, words, tmp_path):
    path = folder(tmp_path)
    edited(path / "config.json", **changes)
    with pytest.raises((CheckpointError, RecipeError), match=words) as caught:
        describe(open_weights(path), TINY)
    assert len(str(caught.value)) < 1000 and str(caught.value).replace("\n", "").isprintable()


def test_what_a_config_leaves_out_is_what_transformers_takes():
    transformers = pytest.importorskip("transformers")
    for kind, defaults in hf._DEFAULTS.items():
        config = transformers.AutoConfig.for_model(kind).to_dict()
        assert {key: config[key] for key in defaults} == defaults


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Normalise()),
        ({"image_mean": IMAGENET.mean, "image_std": IMAGENET.std}, IMAGENET),
        ({"do_normalize": False}, Normalise(mean=[0.0] * 3, std=[1.0] * 3)),
        ({"do_rescale": False}, None),
        ({"rescale_factor": 1 / 127.5}, None),
        ({"image_mean": [0.5]}, None),
        ({"image_std": [0.5, 0.5, 0.0]}, None),
        ({"image_mean": None, "image_std": None}, None),
    ],
)
def test_how_a_preprocessor_normalises(changes, expected, tmp_path):
    path = folder(tmp_path)
    edited(path / "preprocessor_config.json", **changes)
    assert describe(open_weights(path), TINY).normalise == expected


def test_brackets_without_end(tmp_path):
    path = folder(tmp_path)
    for name in ("preprocessor_config.json", "model.safetensors.index.json"):
        (path / name).write_text("[" * 100_000)
        with pytest.raises(CheckpointError, match=re.escape(name)):
            open_weights(path)
        (path / name).unlink()
        (path / "model.safetensors").unlink(missing_ok=True)


def test_an_exported_run_keeps_its_normalisation(tmp_path):
    """Through a file of ours to a folder of transformers', whose processor prepares an image as the run does."""
    transformers = pytest.importorskip("transformers")
    data = {"normalise": IMAGENET.model_dump(), "eval_crop": {"kind": "square", "fraction": 1.0}}
    run = run_of(tmp_path / "run", data=data, precision="fp32")
    export(str(run), "safetensors", tmp_path / "own.safetensors")
    export(str(tmp_path / "own.safetensors"), "hf", tmp_path / "hf")
    own = describe(open_weights(tmp_path / "own.safetensors"))
    assert own.normalise == describe(open_weights(tmp_path / "hf"), TINY).normalise == IMAGENET
    picture = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "hf")
    peer = transformers.ViTForImageClassification.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        expected = peer(processor(picture, return_tensors="pt")["pixel_values"]).logits
    found = FinishedModel(run).predict(torch.from_numpy(picture)[None]).logits
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("loss", ["sigmoid", "softmax", "bce"])
def test_weights_keep_the_loss_that_turns_outputs_into_probabilities(loss, tmp_path):
    run = run_of(tmp_path / "run", objective={"kind": "classification", "loss": loss}, precision="fp32")
    places = {"hf": "hf", "timm": "timm", "safetensors": "ours.safetensors"}
    for form, place in places.items():
        export(str(run), form, tmp_path / place)
    export(str(tmp_path / "hf"), "timm", tmp_path / "again.safetensors")
    softmax = {
        FinishedModel(tmp_path / place).loss == "softmax" for place in ("run", "again.safetensors", *places.values())
    }
    assert softmax == {loss == "softmax"}
    transformers, timm = pytest.importorskip("transformers"), pytest.importorskip("timm")
    image, pixels = Image.new("RGB", (64, 64), "red"), torch.zeros(1, 64, 64, 3, dtype=torch.uint8)
    pixels[..., 0] = 255
    logits = FinishedModel(run).predict(pixels).logits
    expected = logits.softmax(1) if loss == "softmax" else logits.sigmoid()
    theirs = transformers.pipeline("image-classification", model=str(tmp_path / "hf"))(image, top_k=1)[0]["score"]
    assert theirs == pytest.approx(expected.max().item(), abs=1e-4)
    timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True)


def test_of_runs_from_before_there_was_a_choice_the_normalisation_is_known(tmp_path):
    """What they exported does not say it; of a stranger's weights that were written then nothing is known."""
    for step, expected in ((3, Normalise()), (None, None)):
        description = replace(described(TINY), step=step)
        path = write(valued(description), description, "safetensors", tmp_path)
        tensors = load_file(path)
        own = {key: value for key, value in json.loads(description.to_json()).items() if key != "normalise"}
        save_file(tensors, path, {"vitscale": json.dumps(own)})
        assert describe(open_weights(path)).normalise == expected
        path.unlink()


def test_classes_of_one_name_are_told_apart(tmp_path, capsys):
    path = folder(tmp_path, ["crane", "ox", "crane", "crane (0)", "ox (4)", "a", "b"])
    config = json.loads((path / "config.json").read_text())
    labels = [config["id2label"][str(i)] for i in range(7)]
    assert labels == ["crane (0) (0)", "ox", "crane (2)", "crane (0) (3)", "ox (4)", "a", "b"]
    assert config["label2id"] == {label: i for i, label in enumerate(labels)}
    assert "crane" in capsys.readouterr().out


def test_the_title_names_what_was_replaced():
    block = {"name": "R50+ViT-B/16", "width": 64, "depth": 2, "num_heads": None, "head": "linear"}
    assert Description(block, 64, 7).title == "R50+ViT-B/16 with width 64, depth 2"
    with pytest.raises(RecipeError, match=r"ViT-B/16.*10,000,000.*8,192"):
        Description({"name": "ViT-B/16"}, 10**7, 7).build()
    with pytest.raises(RecipeError, match=r"ViT-B/16.*num_classes 10,000,000,000"):
        Description({"name": "ViT-B/16"}, 224, 10**10).build()


@pytest.mark.parametrize(("form", "kind"), [("safetensors", "gone"), ("npz", "gone"), ("timm", "cut"), ("hf", "other")])
def test_a_source_that_changes_while_it_is_read_is_to_blame(form, kind, tmp_path):
    path, _, description = written(tmp_path, form)
    source = open_weights(path)
    file = path / "model.safetensors" if form == "hf" else path
    if kind == "gone":
        file.unlink()
    elif kind == "cut":
        file.write_bytes(file.read_bytes()[:5000])
    else:
        (tmp_path / "new").mkdir()
        (written(tmp_path / "new", form, num_classes=9)[0] / "model.safetensors").replace(file)
    key = "head/kernel" if form == "npz" else "classifier.weight" if form == "hf" else "head.weight"
    with pytest.raises(CheckpointError) as caught:
        write_weights(tmp_path / "v.npz", "npz", description, lambda name: source.entries[key].read())
    assert str(file) in str(caught.value) and "v.npz" not in str(caught.value)


def test_keys_that_are_no_names(tmp_path):
    torch.save({1: torch.ones(2), ("a", 2): torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"1, \('a', 2\)"):
        open_weights(tmp_path / "a.pt")


def test_an_index_names_files_beside_it(tmp_path):
    path = folder(tmp_path)
    (path / "model.safetensors").unlink()
    index = path / "model.safetensors.index.json"
    for name in ("a\0.safetensors", "\ud800.safetensors", "../x.safetensors", "gone.safetensors"):
        index.write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(CheckpointError, match="no file beside it"):
            open_weights(path)
    index.write_text(json.dumps({"weight_map": {}}) + " " * (65 << 20))
    with pytest.raises(CheckpointError, match="64 MiB"):
        open_weights(path)


@pytest.mark.parametrize(
    "changes",
    [
        *({"size": 10**400}, {"size": {"shortest_edge": 64}, "do_center_crop": False}),
        *({"size": {"longest_edge": 64, "shortest_edge": 32}}, {"size": [64, 64]}, {"do_resize": False}),
        *({"resample": 1}, {"resample": None}, {"do_flip_channel_order": True}, {"do_grayscale": True}),
    ],
)
def test_a_preprocessor_that_is_not_followed_is_told(changes, tmp_path):
    path = folder(tmp_path)
    source = open_weights(path)
    assert not source.notes and not source.seen_otherwise
    edited(path / "preprocessor_config.json", **changes)
    source = open_weights(path)
    (note,) = (*source.notes, *source.seen_otherwise)
    assert "preprocessing" in note


@pytest.mark.parametrize("form", ["safetensors", "npz", "timm", "hf"])
def test_our_own_description_has_the_step(form, tmp_path):
    description = replace(described(TINY), step=123)
    source = open_weights(write(valued(description), description, form, tmp_path))
    assert describe(source, TINY).step == (123 if form in ("safetensors", "timm") else None)
