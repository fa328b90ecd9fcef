"""Folders of timm's and transformers' with nothing said: the peer's logits from its own random weights on photos."""

import json
import logging
import tarfile
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from models.small_models import images
from models.weights.exported import (
    NAMES,
    TINY,
    assert_equal_logits,
    described,
    differing,
    edited,
    loaded,
    opened_by_timm,
    randomised,
    run_of,
    transformers_config,
    written,
)
from PIL import Image
from safetensors.torch import save_file

from vitscale.cli.export import export
from vitscale.ground.errors import CheckpointError, RecipeError, VitscaleError
from vitscale.models import Model
from vitscale.models.weights import Description, Entry, Source, own_description, parameters
from vitscale.recipe import override, read_recipe
from vitscale.recipe.families import model_of
from vitscale.runs.checkpoint.opening import open_model
from vitscale.runs.metrics import OF_EVALUATIONS
from vitscale.training.beginning.initial_weights import settle_functions

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
SMALL = {"img_size": 64, "depth": 2}
OURS = TINY | {"mlp": "exact_gelu"}
THEIRS = {"img_size": 64, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
HALF = THEIRS | {"mlp_ratio": 2}
BESIDE = {"class_position": False, "layer_scale": 1e-5}
EVA = {"mlp": "swiglu", "qkv_bias": "no_key", "position": {"kind": "1d_rope"}}
# timm's name -> its arguments, and what our block has to say where it is not one of the registered.
TIMM: dict[str, tuple[dict, dict | None]] = {
    **dict.fromkeys(("vit_tiny_patch16_224", "deit_tiny_patch16_224", "vit_tiny_r_s16_p8_224"), (SMALL, None)),
    **dict.fromkeys(("vit_base_patch32_siglip_256", "vit_base_patch16_gap_224"), (SMALL, None)),
    **dict.fromkeys(("vit_wee_patch16_reg1_gap_256", "vit_small_r26_s32_224"), (SMALL, None)),
    **{"resnetv2_50x1_bit": ({}, None), "eva02_tiny_patch14_224": (SMALL | {"img_size": 56}, None)},
    "deit3_small_patch16_224": (HALF, BESIDE),
    "vit_small_patch14_reg4_dinov2": (HALF, BESIDE | {"registers": 4}),
    "vit_giant_patch14_reg4_dinov2": (THEIRS | {"mlp_ratio": 4}, BESIDE | {"registers": 4, "mlp": "swiglu"}),
    "deit_small_distilled_patch16_224": (HALF, {"distilled": True}),
    "vit_medium_patch16_reg4_gap_256": (
        HALF | {"qkv_bias": False, "init_values": 1e-5, "fc_norm": False},
        {"registers": 4, "layer_scale": 1e-5, "pool": "mean", "qkv_bias": "none"},
    ),
    "vit_small_patch8_224": (
        HALF | {"norm_layer": "rmsnorm", "qk_norm": True, "act_layer": "gelu_tanh"},
        {"norm": "rms", "qk_norm": True, "mlp": "gelu"},
    ),
    "vit_small_patch16_224": (
        HALF | {"scale_attn_norm": True, "scale_mlp_norm": True, "global_pool": "avg"},
        {"sub_norm": "all", "pool": "normed_mean"},
    ),
    "vit_small_patch32_224": (HALF | {"scale_mlp_norm": True}, {"sub_norm": "mlp"}),
    # A side of these is 8 patches, and of those that EVA-02's angles are told in 16.
    "eva02_small_patch14_224": (THEIRS, EVA | {"pool": "normed_mean", "mlp_dim": 128}),
    "eva02_base_patch14_224": (HALF, EVA | {"pool": "normed_mean", "sub_norm": "mlp"}),
    "eva02_base_patch16_clip_224": (
        HALF | {"rope_temperature": 100.0},
        EVA | {"sub_norm": "all", "position": {"kind": "1d_rope", "base": 100.0}},
    ),
    "vit_base_patch16_224": (
        HALF | {"global_pool": "map", "class_token": False, "act_layer": "gelu_tanh"},
        {"pool": "map", "mlp": "gelu"},
    ),
}
OF_ALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 64, "patch_size": 8}
SIZED = OF_ALL | {"intermediate_size": 96}
CLASSES = {"id2label": dict(enumerate(NAMES)), "label2id": {name: i for i, name in enumerate(NAMES)}}
TRANSFORMERS = {
    "ViTForImageClassification": ("ViTConfig", SIZED | CLASSES),
    "ViTForImageClassification, quick GELU": ("ViTConfig", SIZED | CLASSES | {"hidden_act": "quick_gelu"}),
    "ViTModel": ("ViTConfig", SIZED | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
    "DeiTForImageClassificationWithTeacher": ("DeiTConfig", SIZED | CLASSES),
    "DeiTForImageClassification": ("DeiTConfig", SIZED | CLASSES),
    "DeiTModel": ("DeiTConfig", SIZED),
    "Dinov2Model": ("Dinov2Config", OF_ALL),
    "Dinov2WithRegistersModel": ("Dinov2WithRegistersConfig", OF_ALL | {"use_swiglu_ffn": True}),
    "DINOv3ViTModel": ("DINOv3ViTConfig", SIZED | {"num_register_tokens": 4}),
    "DINOv3ViTModel, no registers": ("DINOv3ViTConfig", SIZED | {"use_gated_mlp": True, "hidden_act": "silu"}),
}


@pytest.fixture(scope="module")
def photos(data_root: Path) -> list[Image.Image]:
    with tarfile.open(data_root / "clothing" / "validation.tar") as archive:
        found = [member for member in archive if member.name.endswith(".jpg")][:3]
        return [Image.open(archive.extractfile(member)).convert("RGB") for member in found]  # type: ignore[arg-type]


def opened(source: Path) -> tuple[Description, Model, list[str]]:
    """The model of a source with nothing said, its values loaded, and what was reported."""
    notes: list[str] = []
    description, model, readers = open_model(str(source)).fit(report=notes.append)
    model = model.to_empty(device="cpu").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(readers[name]())
    return description, model, notes


def saved_by_timm(name: str, folder: Path, **changes) -> torch.nn.Module:
    peer = randomised(timm.create_model(name, num_classes=7, **TIMM[name][0] | changes), 0.05)
    timm.models.save_for_hf(peer, folder, safe_serialization=True, model_config={"label_names": NAMES})
    return peer


@pytest.mark.parametrize("name", TIMM)
def test_a_folder_of_timm_s_in_and_out(name, photos, tmp_path):
    """With nothing said it is the same model with the same logits, and in timm so is what we write of it."""
    saved_by_timm(name, tmp_path / "folder")
    peer, block = opened_by_timm(tmp_path / "folder"), TIMM[name][1]
    config = timm.data.resolve_model_data_config(peer)
    pixels = torch.stack([timm.data.create_transform(**config)(photo) for photo in photos])
    description, model, notes = opened(tmp_path / "folder")
    with torch.no_grad():
        ours, theirs = model(pixels.permute(0, 2, 3, 1)).logits, peer(pixels)
    assert ours.std() > 0.05 and (ours - theirs).abs().max() < 1e-5
    assert block is None or model.shape == described(OURS | block).build().shape
    assert notes == [] and description.class_names == NAMES
    assert description.normalise.model_dump() == {"mean": list(config["mean"]), "std": list(config["std"])}
    assert description.eval_crop.fraction == pytest.approx(config["crop_pct"])
    assert description.image_size == config["input_size"][1]
    export(str(tmp_path / "folder"), "timm", tmp_path / "again")
    again = opened_by_timm(tmp_path / "again")
    assert differing(peer, again) == []
    with torch.no_grad():
        assert (again(pixels) - theirs).abs().max() < 1e-5


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_a_folder_of_transformers(case, photos, tmp_path):
    name, (kind, settings) = case.partition(",")[0], TRANSFORMERS[case]
    peer = randomised(getattr(transformers, name)(getattr(transformers, kind)(**settings)), 0.05)
    peer.save_pretrained(tmp_path)
    side = {"height": 64, "width": 64}
    processor = transformers.BitImageProcessor(size=side, crop_size=side, image_mean=[0.4, 0.5, 0.6])
    processor.save_pretrained(tmp_path)
    pixels = processor(photos, return_tensors="pt")["pixel_values"]
    description, model, _ = opened(tmp_path)
    with torch.no_grad():
        ours, theirs = model(pixels.permute(0, 2, 3, 1)), peer(pixels)
    if "logits" in theirs:
        assert ours.logits.std() > 0.05 and (ours.logits - theirs.logits).abs().max() < 1e-5
    else:
        assert ours.tokens.std() > 0.05 and (ours.tokens - theirs.last_hidden_state).abs().max() < 1e-5
        assert description.num_classes is None
    assert description.normalise.mean == [0.4, 0.5, 0.6]
    assert description.class_names == (NAMES if settings.items() >= CLASSES.items() else None)
    if description.num_classes is not None:
        export(str(tmp_path), "hf", tmp_path / "again")
        again = getattr(transformers, name).from_pretrained(tmp_path / "again").eval()
        with torch.no_grad():
            assert (again(pixels).logits - theirs.logits).abs().max() < 1e-5
        assert open_model(str(tmp_path)).fit(image_size=96, report=lambda note: None)[0].image_size == 96


def test_a_state_dict_alone(tmp_path):
    """Of timm's, wrapped as trainers do it, it is told by its tensors, and said so; its GELU goes where a recipe or a
    name leaves it open. One that we wrote says what it is.
    """
    peer = randomised(timm.create_model("vit_tiny_patch16_224", num_classes=7, **SMALL))
    state = {f"module.{key}": value for key, value in peer.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "theirs.pth")
    _, model, notes = opened(tmp_path / "theirs.pth")
    assert_equal_logits(model, peer)
    assert len(notes) == 1 and "ViT-Ti/16 with depth 2, mlp exact_gelu" in notes[0] and "--model" in notes[0]
    block = {"name": "ViT-Ti/16", "depth": 2}
    for given, expected in (({}, "exact_gelu"), ({"mlp": "gelu"}, "gelu")):
        description, _, _ = open_model(str(tmp_path / "theirs.pth")).fit(block | given, report=lambda note: None)
        assert description.model["mlp"] == expected
    run = run_of(tmp_path / "run", block | {"head": "linear"}, init={"from": str(tmp_path / "theirs.pth")})
    settled, words = settle_functions(read_recipe(run / "recipe.yaml"), tmp_path / "new")
    assert settled.model.mlp == "exact_gelu" and words is not None and "exact_gelu" in words
    ours, _, own = written(tmp_path, "timm", class_names=NAMES)
    assert open_model(str(ours)).class_names == own.class_names


@pytest.mark.slow
def test_what_no_tensor_shows_of_timm_s_models():
    """Of every name that timm has: heads, activation and epsilon as timm builds it, or no such model here."""
    known = 0
    for name in timm.list_models(["vit_*", "deit*", "eva02_*", "eva_large*", "flexivit_*"]):
        with torch.device("meta"):
            try:
                peer = timm.create_model(name, num_classes=7, depth=1)
            except (AssertionError, TypeError):  # another kind of model, which has no such argument
                continue
        entries = {key: Entry(key, tuple(value.shape), lambda: None) for key, value in peer.state_dict().items()}
        source = Source(Path(name), "timm", entries, config={"architecture": f"{name}.tag", "model_args": {"depth": 1}})
        try:
            found = own_description(source)
            if found is None:
                continue
            model = found.build()
            parameters(model, source, report=lambda note: None)
        except VitscaleError:
            continue
        known += 1
        block, shape = peer.blocks[0], model.shape
        act = {"GELU": "exact_gelu", "GELUTanh": "gelu", "QuickGELU": "quick_gelu", "SiLU": "swiglu"}
        theirs = block.attn.num_heads, block.norm1.eps, act[type(block.mlp.act).__name__]
        assert (name, shape.num_heads, shape.norm_eps, shape.mlp) == (name, *theirs)
    assert known > 100


_EVA = ("use_post_norm", "rope_rotate_half")
ARGUMENTS: list[tuple[str, dict, bool]] = [  # and whether it is refused
    ("vit_tiny_patch16_224", {"drop_path_rate": 0.3, "dynamic_img_size": True, "qk_norm": True}, False),
    ("vit_tiny_patch16_224", {"fc_norm": True}, True),
    ("vit_tiny_patch16_224", {"pool_include_prefix": True, "global_pool": "avg"}, True),
    ("eva02_tiny_patch14_224", {"use_fc_norm": False}, True),
    *(("eva02_tiny_patch14_224", {key: True}, True) for key in _EVA),
    ("eva02_tiny_patch14_224", {"use_rot_pos_emb": False}, True),
    ("eva02_tiny_patch14_224", {"rope_grid_indexing": "xy"}, True),
    ("eva02_tiny_patch14_224", {"rope_grid_offset": 0.5}, True),
    ("resnetv2_50x1_bit", {"drop_path_rate": 0.3, "global_pool": "avg", "preact": True}, False),
    *(("resnetv2_50x1_bit", {key: value}, True) for key, value in [("global_pool", "max"), ("avg_down", True)]),
    *(("resnetv2_50x1_bit", {key: value}, True) for key, value in [("act_layer", "gelu"), ("output_stride", 16)]),
]


@pytest.mark.parametrize(("name", "changes", "is_refused"), ARGUMENTS)
def test_an_argument_of_timm_s_is_computed_or_refused(name, changes, is_refused, tmp_path):
    """timm's logits, or an error: no argument is passed over."""
    peer = saved_by_timm(name, tmp_path, **changes)
    edited(tmp_path / "config.json", model_args=TIMM[name][0] | changes, global_pool=None)  # which timm does not read
    if is_refused:
        with pytest.raises(CheckpointError):
            opened(tmp_path)
        return
    pixels = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert (opened(tmp_path)[1](pixels.permute(0, 2, 3, 1)).logits - peer(pixels)).abs().max() < 1e-5


# ---- Transformers' Vision Transformer, and ours in it ----------------------------------------------------------------


@pytest.fixture
def complaints():
    """What transformers and Python complain of, as a list that fills."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Keep(logging.WARNING)
    transformers.utils.logging.get_logger("transformers").addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
        found += [str(warning.message) for warning in caught]
    transformers.utils.logging.get_logger("transformers").removeHandler(handler)


def opened_by_transformers(folder, complaints: list[str]) -> torch.nn.Module:
    peer, info = transformers.ViTForImageClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert complaints == []
    return peer.eval()


@pytest.mark.parametrize(
    ("block", "size"),
    [
        *((TINY, 64), (TINY, 60)),  # no multiple of 8: transformers is given the pixels that we see
        (TINY | {"mlp": "exact_gelu", "norm_eps": 1e-3}, 64),
        *((TINY | {"position": {"kind": "sincos", "table": table}}, 64) for table in ("mae", "big_vision")),
    ],
)
def test_transformers_opens_our_folder_and_computes_our_logits(block, size, complaints, tmp_path):
    folder, model, description = written(tmp_path, "hf", block, size, class_names=NAMES)
    peer = opened_by_transformers(folder, complaints)
    assert [peer.config.id2label[i] for i in range(7)] == NAMES and peer.config.label2id[NAMES[3]] == 3
    assert peer.config.image_size == size // 8 * 8
    assert_equal_logits(model, peer, size)
    notes: list[str] = []
    assert differing(model, loaded(description, folder, notes)) == [] and notes == []


def test_a_pretraining_head_leaves_transformers_the_representation_alone(complaints, tmp_path):
    block = TINY | {"head": "pretrain"}
    with pytest.raises(RecipeError, match=r"pre_logits.weight.*--drop-head"):
        written(tmp_path, "hf", block)
    folder, model, _ = written(tmp_path, "hf", block, drop_head=True)
    with torch.no_grad():
        found = opened_by_transformers(folder, complaints)(images(64).permute(0, 3, 1, 2)).logits
        assert (found - model(images(64)).tokens[:, 0]).abs().max() < 1e-4  # its classifier is the identity


@pytest.mark.parametrize("how", ["in shards", "modules' names"])
def test_what_transformers_writes_is_read(how, tmp_path):
    peer = randomised(transformers.ViTForImageClassification(transformers_config(**CLASSES)))
    path = tmp_path / "folder"
    if how == "modules' names":
        torch.save(peer.state_dict(), path := tmp_path / "state.bin")
    else:
        peer.save_pretrained(path, max_shard_size="40KB")
        assert len(list(path.glob("*.safetensors"))) > 1
        assert open_model(str(path)).class_names == NAMES
    notes: list[str] = []
    assert_equal_logits(loaded(described(TINY), path, notes), peer)
    assert notes == []


def test_the_headless_model_of_transformers(tmp_path):
    """Its names have no `vit.` before them, and its pooler is the dense layer of a pre-training head."""
    transformers.ViTModel(transformers_config()).save_pretrained(tmp_path / "folder")
    assert any("pooler" in note for note in open_model(str(tmp_path / "folder")).source.notes)
    with pytest.raises(CheckpointError, match=r"classifier\.weight(.|\n)*--drop-head"):
        loaded(described(TINY), tmp_path / "folder")


# ---- Strangers' folders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_args": {"depth": 12, "img_size": 64}}, "depth.*12.*2"),
        ({"model_args": {"embed_dim": 384}}, "embed_dim.*384.*192"),
        ({"model_args": {"num_heads": -3}}, "num_heads.*-3"),
        ({"model_args": {"num_heads": 10**400}}, "num_heads"),
        ({"model_args": {"act_layer": "relu"}}, "act_layer.*relu"),
        ({"model_args": {"norm_layer": ["a"]}}, "norm_layer"),
        ({"model_args": {"global_pool": "max"}}, "global_pool.*max"),
        ({"model_args": {"\x1b[2J" * 10**4: 1}}, "no such argument"),
        ({"architecture": "swin_tiny\x1b[2J"}, r"swin_tiny\\x1b.*--model"),
        ({"architecture": "x" * 10**5}, "--model"),
    ],
)
def test_a_config_that_lies(changes, words, tmp_path):
    saved_by_timm("vit_tiny_patch16_224", tmp_path)
    edited(tmp_path / "config.json", **changes)
    with pytest.raises((CheckpointError, RecipeError), match=words) as caught:
        open_model(str(tmp_path)).fit(report=lambda note: None)
    assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()


def test_what_a_folder_says_of_pictures_and_classes_is_bounded(tmp_path):
    saved_by_timm("vit_tiny_patch16_224", tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    content["label_names"] = {
        str(i): name for i, name in enumerate(["\x1b[31mred\n", "\u202eabc", "a" * 10**5, *"defg"])
    }
    content["pretrained_cfg"] |= {"mean": [0.5], "std": [0.5, float("nan"), 0.5], "input_size": [3, 10**9, 10**9]}
    path.write_text(json.dumps(content))
    found = open_model(str(tmp_path))
    assert all(name.isprintable() and len(name) <= 1000 for name in found.class_names or ["\n"])
    assert found.normalise is None and found.description is not None and found.description.image_size == 64
    content["label_names"] = NAMES[:3]  # of seven
    path.write_text(json.dumps(content))
    assert open_model(str(tmp_path)).class_names is None
    path.write_text(json.dumps(content) + " " * (65 << 20))
    with pytest.raises(CheckpointError, match="64 MiB"):
        open_model(str(tmp_path))


def test_many_stages_and_long_numbers_are_other_models(tmp_path):
    """Of a file of a few MB; what took time with the square of their number would take minutes."""
    stem = [f"patch_embed.backbone.stages.{i}.blocks.0.x" for i in [*range(16_000), "9" * 5000]]
    patches = {"patch_embed.proj.weight": torch.zeros(8, 3, 1, 1), "blocks.0.mlp.fc2.weight": torch.zeros(8, 8)}
    save_file(patches | dict.fromkeys(stem, torch.zeros(0)), tmp_path / "vit.safetensors")
    units = [f"stages.{i}.blocks.0.conv3.weight" for i in range(9999)]
    save_file(
        {"stem.conv.weight": torch.zeros(64, 3, 7, 7)} | dict.fromkeys(units, torch.zeros(0)),
        tmp_path / "r.safetensors",
    )
    for name in ("vit", "r"):
        with pytest.raises(RecipeError, match="does not name its model"):
            open_model(str(tmp_path / f"{name}.safetensors")).fit()


def test_a_folder_with_both_formats(tmp_path):
    """Safetensors are read, and a pickle beside them is not opened."""
    saved_by_timm("vit_tiny_patch16_224", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle")
    (tmp_path / "preprocessor_config.json").write_text("no JSON")  # transformers', in a folder of timm's
    assert open_model(str(tmp_path)).source.form == "timm"


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        ({"crop_pct": None}, False),
        ({"crop_pct": 1.5}, True),
        ({"crop_pct": 10**400}, True),
        ({"crop_mode": "border"}, True),
        ({"interpolation": "lanczos"}, True),
    ],
)
def test_timm_s_crop_is_done_or_told(changes, is_told, tmp_path):
    saved_by_timm("vit_tiny_patch16_224", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["pretrained_cfg"]
    edited(tmp_path / "config.json", pretrained_cfg=config | changes)
    description, _, notes = opened(tmp_path)
    assert any("preprocessing" in note for note in notes) == is_told
    if not is_told:
        asked = timm.data.resolve_model_data_config(timm.create_model(f"local-dir:{tmp_path}", pretrained=True))
        crop = description.eval_crop
        assert (crop.fraction, crop.resize, asked["crop_mode"]) == (asked["crop_pct"], "pil_bicubic", "center")


# ---- A run that begins with a folder, and what an export says --------------------------------------------------------


def test_a_run_takes_gelu_and_epsilon(tmp_path):
    peer = transformers.ViTForImageClassification(transformers.ViTConfig(**SIZED))
    peer.save_pretrained(tmp_path / "folder")
    run = run_of(tmp_path / "run", init={"from": str(tmp_path / "folder")})
    recipe = read_recipe(run / "recipe.yaml")
    settled, words = settle_functions(recipe, tmp_path / "new")
    assert (settled.model.mlp, settled.model.norm_eps) == ("exact_gelu", 1e-12)
    assert words is not None and "exact_gelu" in words
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "recipe.yaml").write_text(yaml.safe_dump(settled.dump()))
    (tmp_path / "folder").rename(tmp_path / "gone")
    assert settle_functions(recipe, tmp_path / "new") == (settled, None)
    explicit = override(recipe.dump(), ["model.mlp=gelu", "model.norm_eps=1e-6"], "test")
    assert settle_functions(explicit, tmp_path / "newer") == (explicit, None)
    assert model_of(**settled.dump()["model"]).shape().norm_eps == 1e-12


def test_the_model_card(tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    evil = "photos<script>|x](http://evil)\n---\nlicense: mit"
    run = run_of(tmp_path / "run", data={"train": evil})
    values = {"validation/top1": 0.75, "a|b\n# c": 0.5}
    line = {"step": 3} | {f"{OF_EVALUATIONS}{key}": value for key, value in values.items()}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    export(str(run), "timm", tmp_path / "out", licence="apache-2.0")
    local = run_of(tmp_path / "local", data={"train": "photos/train"})
    export(str(local), "timm", tmp_path / "of_photos")  # a folder here, and perhaps somebody's dataset on the hub
    assert huggingface_hub.ModelCard.load(tmp_path / "of_photos" / "README.md").data.datasets is None
    text = (tmp_path / "out" / "README.md").read_text()
    card = huggingface_hub.ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.license, card.data.library_name, card.data.datasets) == ("apache-2.0", "timm", None)
    assert card.data.pipeline_tag == "image-classification"
    assert "<script>" not in text and "](http" not in text and "\n---\nlicense: mit" not in text and "\n# c" not in text
    assert "| 3 of 3 |" in text and "| validation/top1 | 0.75 |" in text
    export("ViT-Ti/16", "hf", tmp_path / "fresh", num_classes=3, image_size=32)
    assert huggingface_hub.ModelCard.load(tmp_path / "fresh" / "README.md").data.license == "unknown"
