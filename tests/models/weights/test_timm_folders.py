"""A folder for timm: timm opens it by its own name for folders, with our logits, and so do we."""

import json
import math

import pytest
import torch
from messages import refusal
from models.small_models import images
from models.weights.exported import (
    LINEAR,
    NAMES,
    TINY,
    assert_equal_logits,
    described,
    differing,
    edited,
    loaded,
    opened_by_timm,
    prepared,
    printed_lines,
    run_of,
    valued,
    write,
    written,
)
from timm.models.resnetv2 import ResNetV2

from vitscale.cli.export import export
from vitscale.ground.errors import CheckpointError, RecipeError
from vitscale.models.weights import Description, describe, open_weights, write_weights
from vitscale.models.weights.foreign import table, their_shapes
from vitscale.recipe import EvalCrop, Normalise
from vitscale.recipe.families import REGISTRY, architecture, model_of

timm = pytest.importorskip("timm")
SIZE = 64
MAE = {"position": {"kind": "sincos", "table": "mae"}}


@pytest.mark.parametrize(
    "block",
    [
        {"name": "ViT-Ti/16", "depth": 3},
        {"name": "ViT-S/32", "depth": 2, "pool": "mean"},
        *(TINY | {"pool": "map"}, TINY | MAE, TINY | {"position": {"kind": "sincos"}}),
        TINY | {"width": 49, "num_heads": 7, "mlp_dim": 150},
        {"name": "R+ViT-Ti/16", "depth": 2},
        {"name": "R26+ViT-S/32", "depth": 1},
        {"name": "ResNet50x1"},
    ],
    ids=lambda block: str(block.get("name", "own dimensions")),
)
def test_timm_opens_the_folder_and_the_npz(block, tmp_path):
    description, model = prepared(block)
    out = write(model, description, "timm", tmp_path, name="timm")
    peer = opened_by_timm(out)
    assert_equal_logits(model, peer)
    config = timm.data.resolve_model_data_config(peer)
    assert tuple(config["input_size"]) == (3, SIZE, SIZE)
    assert [*config["mean"], *config["std"]] == [0.5] * 6
    notes: list[str] = []
    assert differing(model, loaded(description, out, notes)) == [] and notes == []
    if "position" not in block:  # which timm has learned, and Google's files do not hold
        with torch.no_grad():
            for parameter in peer.parameters():
                parameter.fill_(torch.nan)
        peer.load_pretrained(str(write(model, description, "npz", tmp_path)))
        assert_equal_logits(model, peer)


def test_without_a_head(tmp_path):
    out, model, _ = written(tmp_path, "timm", {"name": "ViT-Ti/16", "depth": 2}, drop_head=True, name="timm")
    with torch.no_grad():
        found = opened_by_timm(out)(images(SIZE).permute(0, 3, 1, 2))
        assert (found - model(images(SIZE)).tokens[:, 0]).abs().max() < 1e-4


PUBLISHED = {  # what timm calls models that others have published
    **{"ViT-b/32": "vit_small_patch32_224", "ViT-B/16": "vit_base_patch16_224", "ViT-L/16": "vit_large_patch16_224"},
    **{"R50+ViT-B/16": "vit_base_r50_s16_224", "R50+ViT-L/32": "vit_large_r50_s32_224"},
    **{"R26+ViT-S/32": "vit_small_r26_s32_224", "R+ViT-Ti/16": "vit_tiny_r_s16_p8_224"},
    **{f"ResNet{depth}x{width}": f"resnetv2_{depth}x{width}_bit" for depth in (50, 101) for width in (1, 3)},
    **{f"ResNet152x{width}": f"resnetv2_152x{width}_bit" for width in (2, 4)},
    **{f"Swin-{name[0].upper()}": f"swin_{name}_patch4_window7_224" for name in ("tiny", "small", "base", "large")},
    **{f"EVA02-{size}/14": f"eva02_{name}_patch14_336" for size, name in (("Ti", "tiny"), ("S", "small"))},
    **{f"EVA02-{name[0].upper()}/14": f"eva02_{name}_patch14_448" for name in ("base", "large")},
    **{f"DINOv2-{name[0].upper()}/14": f"vit_{name}_patch14_reg4_dinov2" for name in ("small", "base", "large")},
    "DINOv2-g/14": "vit_giant_patch14_reg4_dinov2",
}


@pytest.mark.parametrize("name", REGISTRY)
def test_every_model_has_timm_s_keys_and_shapes_or_is_refused(name, tmp_path):
    """Of the model that timm makes of the folder's name and arguments, and of the published one; and counted."""
    block, theirs, size = {"name": name, "head": "linear"}, [], 224
    if name.startswith("DINOv2"):
        block["class_position"] = False  # with it they are refused
    with torch.device("meta"):
        if name in PUBLISHED:
            width = {"embed_dim": 384} if name == "ViT-b/32" else {}
            theirs.append(timm.create_model(PUBLISHED[name], num_classes=7, **width))
            size = theirs[0].patch_embed.img_size[0] if hasattr(theirs[0], "patch_embed") else size
        model = Description(block, size, 7).build()
        if found := model.foreign().timm():
            theirs.append(timm.create_model(found.name, num_classes=7, **found.arguments))
        elif name.startswith("ResNet"):  # a depth or width of which timm has no folder
            shape = architecture(name)
            theirs.append(ResNetV2(layers=shape.blocks, width_factor=shape.width_factor, num_classes=7))
    if found is None:
        assert name in {"ResNet50x2", "ResNet152x1", "ResNet200x3"} or name.startswith(("Axial", "DINOv3"))
        with pytest.raises(RecipeError, match=r"\btimm\b"):
            export(name, "timm", tmp_path / "out", num_classes=7)
        assert list(tmp_path.iterdir()) == []
    for peer in theirs:
        shapes = {key: tuple(parameter.shape) for key, parameter in peer.named_parameters()}
        assert their_shapes(model, table(model, "timm")) == shapes
        counted = sum(operation.params for operation in model_of(**block).operations(size, 7))
        assert counted == sum(map(math.prod, shapes.values()))


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
    peer = opened_by_timm(out)
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
    out, *_ = written(tmp_path, "timm", name="timm")
    config = json.loads((out / "config.json").read_text())["pretrained_cfg"]
    left = {key: value for key, value in config.items() if key not in ("mean", "std", "interpolation")}
    edited(out / "config.json", pretrained_cfg=left)
    config = timm.data.resolve_model_data_config(opened_by_timm(out))
    expected = Normalise(mean=list(config["mean"]), std=list(config["std"]))
    found = describe(open_weights(out), TINY)
    assert found.normalise == expected != Normalise()
    assert found.eval_crop is not None and found.eval_crop.resize == f"pil_{config['interpolation']}" == "pil_bicubic"


def test_the_printed_line_opens_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_of(tmp_path / "run")
    export("run", "timm", tmp_path / "it's.safetensors")
    scope: dict = {}
    exec(printed_lines(capsys), scope)
    assert_equal_logits(valued(described(LINEAR)), scope["model"].eval())


def test_other_heads_and_activations_are_the_folder_s(tmp_path):
    out, *_ = written(tmp_path, "timm", name="timm")
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


EVA = {"mlp": "swiglu", "qkv_bias": "no_key", "position": {"kind": "1d_rope"}}
EXACT = TINY | {"mlp": "exact_gelu"}


def test_what_timm_does_not_have(tmp_path):
    for keys in (
        *({"registers": 2}, {"qkv_bias": "no_key"}, {"norm_eps": 1e-5}, {"pool": "map", "mlp": "swiglu"}),
        *({"pool": "map", "sub_norm": "mlp"}, {"position": {"kind": "rope"}}, {"position": {"kind": "1d_rope"}}),
        EVA | {"pool": "map"},
    ):
        with refusal(RecipeError, "weights", f"timm {keys}"):
            written(tmp_path, "timm", EXACT | keys)


@pytest.mark.parametrize("changes", [{"num_heads": 6}, {"rope_temperature": 100.0}, {"ref_feat_shape": [24, 24]}])
def test_a_folder_of_another_eva_02(changes, tmp_path):
    block = EXACT | EVA | {"pool": "normed_mean", "sub_norm": "mlp"}
    folder, *_ = written(tmp_path, "timm", block, name="folder")
    arguments = json.loads((folder / "config.json").read_text())["model_args"]
    edited(folder / "config.json", model_args=arguments | changes)
    with refusal((CheckpointError, RecipeError), "weights", f"EVA-02 {changes}", {tmp_path: "FOLDER"}):
        describe(open_weights(folder), block)
