"""A folder for timm: timm opens it by its own name for folders, with our logits, and so do we."""

import json

import peers  # noqa: F401 (makes timm importable)
import pytest
import torch
from models.small_models import images
from models.weights.exported import (
    NAMES,
    TINY,
    assert_equal_logits,
    described,
    differing,
    edited,
    finished_run,
    loaded,
    valued,
    write,
)
from models.weights.test_weights_peers import prepared

from vitscale.cli.export import export
from vitscale.ground.errors import RecipeError
from vitscale.models.weights import Description, describe, open_weights, write_weights
from vitscale.recipe import EvalCrop, Normalise
from vitscale.recipe.families import REGISTRY, architecture

timm = pytest.importorskip("timm")
SIZE = 64


@pytest.mark.parametrize(
    "block",
    [
        {"name": "ViT-Ti/16", "depth": 3},
        {"name": "ViT-S/32", "depth": 2, "pool": "mean"},
        TINY | {"width": 49, "num_heads": 7, "mlp_dim": 150},
        {"name": "R+ViT-Ti/16", "depth": 2},
        {"name": "R26+ViT-S/32", "depth": 1},
        {"name": "ResNet50x1"},
    ],
    ids=lambda block: str(block.get("name", "own dimensions")),
)
def test_timm_opens_the_folder(block, tmp_path):
    description, model = prepared(block)
    out = write(model, description, "timm", tmp_path, name="timm")
    peer = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    assert_equal_logits(model, peer)
    config = timm.data.resolve_model_data_config(peer)
    assert tuple(config["input_size"]) == (3, SIZE, SIZE)
    assert [*config["mean"], *config["std"]] == [0.5] * 6
    notes: list[str] = []
    assert differing(model, loaded(description, out, notes)) == [] and notes == []


def test_without_a_head(tmp_path):
    description, model = prepared({"name": "ViT-Ti/16", "depth": 2})
    out = write(model, description, "timm", tmp_path, drop_head=True, name="timm")
    peer = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    with torch.no_grad():
        assert (peer(images(SIZE).permute(0, 3, 1, 2)) - model(images(SIZE)).tokens[:, 0]).abs().max() < 1e-4


@pytest.mark.parametrize("name", REGISTRY)
def test_every_model_has_a_name_or_is_refused(name, tmp_path):
    model = Description({"name": name, "head": "linear"}, 224, 7).build()
    found = model.foreign().timm()
    if found is None:
        assert name in {"ResNet50x2", "ResNet152x1", "ResNet200x3"} or name.startswith(("Axial", "DINO"))
        with pytest.raises(RecipeError, match=r"\btimm\b"):
            export(name, "timm", tmp_path / "out", num_classes=7)
        assert list(tmp_path.iterdir()) == []
        return
    with torch.device("meta"):
        peer = timm.create_model(found.name, num_classes=7, **found.arguments)
    assert sum(p.numel() for p in peer.parameters()) == sum(p.numel() for p in model.parameters())
    assert architecture(name) == model.shape


@pytest.mark.parametrize(
    ("crop", "mode", "interpolation"),
    [
        (EvalCrop(), "center", "bilinear"),
        (EvalCrop(resize="pil_bicubic"), "center", "bicubic"),
        (EvalCrop(kind="square", fraction=0.9, resize="pil_bilinear"), "squash", "bilinear"),
        (None, "squash", "bilinear"),
    ],
)
def test_what_the_folder_says(crop, mode, interpolation, tmp_path):
    normalise = Normalise(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]) if crop else None
    description = Description(TINY | {"head": "linear"}, SIZE, 7, NAMES, eval_crop=crop, normalise=normalise)
    out = write(valued(description), description, "timm", tmp_path, name="timm")
    peer = timm.create_model(f"local-dir:{out}", pretrained=True)
    assert peer.pretrained_cfg["label_names"] == NAMES
    config = timm.data.resolve_model_data_config(peer)
    assert (config["crop_mode"], config["interpolation"]) == (mode, interpolation)
    resize, cut, *_, normalises = timm.data.create_transform(**config).transforms
    normalise = normalise or Normalise()
    torch.testing.assert_close(normalises.mean, torch.tensor(normalise.mean))
    torch.testing.assert_close(normalises.std, torch.tensor(normalise.std))
    edge = resize.size if isinstance(resize.size, int) else resize.size[0]
    wanted = SIZE / (crop.fraction if crop else 1)
    assert tuple(cut.size) == (SIZE, SIZE) and abs(edge - wanted) <= 1 and (edge - SIZE) % 2 == 0
    found = describe(open_weights(out), TINY)
    assert found.class_names == NAMES and found.eval_crop is not None and found.normalise == normalise
    assert found.eval_crop.kind == ("central" if mode == "center" else "square")
    assert found.eval_crop.fraction == pytest.approx(SIZE / edge)
    assert found.eval_crop.resize == f"pil_{interpolation}"


def test_what_a_folder_leaves_out_is_what_timm_takes(tmp_path):
    description = described(TINY)
    out = write(valued(description), description, "timm", tmp_path, name="timm")
    config = json.loads((out / "config.json").read_text())["pretrained_cfg"]
    left = {key: value for key, value in config.items() if key not in ("mean", "std", "interpolation")}
    edited(out / "config.json", pretrained_cfg=left)
    config = timm.data.resolve_model_data_config(timm.create_model(f"local-dir:{out}", pretrained=True))
    expected = Normalise(mean=list(config["mean"]), std=list(config["std"]))
    found = describe(open_weights(out), TINY)
    assert found.normalise == expected != Normalise()
    assert found.eval_crop is not None and found.eval_crop.resize == f"pil_{config['interpolation']}" == "pil_bicubic"


def test_the_printed_line_opens_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = valued(described(TINY))
    finished_run(tmp_path / "run", model, TINY | {"head": "linear"})
    export("run", "timm", tmp_path / "it's.safetensors")
    scope: dict = {}
    exec("\n".join(line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("    ")), scope)
    assert_equal_logits(model, scope["model"].eval())


def test_other_heads_and_activations_are_the_folder_s(tmp_path):
    description = described(TINY)
    model = valued(description)
    out = write(model, description, "timm", tmp_path, name="timm")
    arguments = json.loads((out / "config.json").read_text())["model_args"]
    edited(out / "config.json", model_args=arguments | {"num_heads": 6})
    with pytest.raises(RecipeError, match=r"num_heads 6, not 3"):
        describe(open_weights(out), TINY)
    del arguments["act_layer"]
    edited(out / "config.json", model_args=arguments)
    assert describe(open_weights(out), TINY).model["mlp"] == "exact_gelu"
    with pytest.raises(RecipeError, match=r"mlp 'exact_gelu', not 'gelu'"):
        describe(open_weights(out), TINY | {"mlp": "gelu"})


def test_folders_are_not_called_as_files_are(tmp_path):
    description = described(TINY)
    for form, name in (("timm", "a.npz"), ("hf", "a.safetensors"), ("hf", "b.pth")):
        with pytest.raises(RecipeError, match=name):
            write_weights(tmp_path / name, form, description, lambda name: torch.zeros(1))
    assert list(tmp_path.iterdir()) == []
    assert write(valued(description), description, "timm", tmp_path).is_file()
