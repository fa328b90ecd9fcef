"""Every registered model through every format, and the refusal of the formats that cannot hold it."""

import shutil

import pytest
from models.small_models import count, on_meta, shallow
from models.weights.exported import TINY, described, differing, valued, write

from vitscale.ground.errors import RecipeError
from vitscale.models.weights import describe, load_weights, open_weights
from vitscale.recipe.families import REGISTRY, ResNetShape, SwinShape, ViTShape, architecture

FORMATS = ("safetensors", "npz", "timm", "hf")
SUPPORTED = {
    "ViT": {"safetensors", "npz", "timm", "hf"},
    "R+ViT": {"safetensors", "npz", "timm"},
    "R26+ViT": {"safetensors", "npz", "timm"},
    "R50+ViT": {"safetensors", "npz", "timm"},
    "ResNet": {"safetensors", "npz", "timm"},
    "Axial": {"safetensors"},
    "AxialResNet": {"safetensors"},
    "DINOv2": {"safetensors"},
    "DINOv3": {"safetensors"},
    "EVA02": {"safetensors", "timm"},
    "Swin": {"safetensors", "timm", "hf"},
}


def family(name: str) -> str:
    if name.startswith("DINO"):
        return name.partition("-")[0]
    return "AxialResNet" if name.startswith("Axial") and "ViT" not in name else name.rstrip("0123456789x").split("-")[0]


def block_of(name: str, largest: float) -> dict:
    """The model block of a registered model; of one with more parameters one block, or a few narrow ones a stage."""
    if count(on_meta(name)) < largest:
        return {"name": name}
    shape = shallow(name)
    if isinstance(shape, ResNetShape):
        return {"name": name, "blocks": list(shape.blocks), "width_factor": 1}
    if isinstance(shape, SwinShape):  # windows that fit into every stage's map
        return {"name": name, "width": 32, "num_heads": 1, "blocks": list(shape.blocks), "window": 2}
    stem = {} if shape.stem is None else {"blocks": list(shape.stem.blocks)}
    return {"name": name, "depth": shape.depth} | stem


def test_every_format_is_in_the_table():
    assert {family(name) for name in REGISTRY} == SUPPORTED.keys()


@pytest.mark.parametrize("largest", [10e6, pytest.param(100e6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", REGISTRY)
def test_every_model_through_every_format(name, largest, tmp_path):
    description = described(block_of(name, largest))
    model = valued(description)
    for form in FORMATS:
        if form not in SUPPORTED[family(name)]:
            with pytest.raises(RecipeError, match=rf"\b{form}\b"):
                write(model, description, form, tmp_path)
            assert list(tmp_path.iterdir()) == []
            continue
        path = write(model, description, form, tmp_path)
        again = description.build().to_empty(device="cpu")
        load_weights(again, open_weights(path))
        assert differing(model, again) == []
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize(
    ("options", "formats"),
    [
        ({"head": "pretrain"}, {"safetensors", "npz"}),
        ({"pool": "mean"}, {"safetensors", "npz", "timm"}),
        ({"position": {"kind": "2d"}}, {"safetensors"}),
        ({"position": {"kind": "1d", "at": "every_layer"}}, {"safetensors"}),
        ({"position": {"kind": "2d", "at": "shared"}}, {"safetensors"}),
        ({"position": {"kind": "relative"}}, {"safetensors"}),
        ({"position": {"kind": "none"}}, {"safetensors"}),
        ({"attention": "axial"}, {"safetensors"}),
    ],
)
def test_variants_of_the_transformer(options, formats, tmp_path):
    description = described(TINY | options)
    model = valued(description)
    for form in FORMATS:
        if form not in formats:
            with pytest.raises(RecipeError, match=rf"\b{form}\b"):
                write(model, description, form, tmp_path)
            continue
        again = description.build().to_empty(device="cpu")
        load_weights(again, open_weights(write(model, description, form, tmp_path)))
        assert differing(model, again) == []


def test_post_activation_resnets_are_ours_and_timm_s(tmp_path):
    description = described({"blocks": [1, 1], "variant": "v1"})
    model = valued(description)
    with pytest.raises(RecipeError, match=r"\bnpz\b.*\btimm\b"):
        write(model, description, "npz", tmp_path)
    for form in ("safetensors", "timm"):
        again = description.build().to_empty(device="cpu")
        load_weights(again, open_weights(write(model, description, form, tmp_path)))
        assert differing(model, again) == []
        (tmp_path / f"{form}.safetensors").unlink()


@pytest.mark.parametrize("name", ["ViT-Ti/16", "R+ViT-Ti/16", "ResNet50x1"])
@pytest.mark.parametrize("form", FORMATS)
def test_a_name_and_the_keys_say_what_a_file_is(name, form, tmp_path):
    if form not in SUPPORTED[family(name)]:
        return
    pool = "mean" if name == "ViT-Ti/16" and form != "hf" else None
    description = described({"name": name, "depth": None, "pool": pool}, image_size=96, num_classes=11)
    source = open_weights(write(valued(description), description, form, tmp_path))
    found = describe(source, {"name": name})
    shape = architecture(name)
    # A ResNet's files do not tell the size of its images, unless we have written a description into them.
    assert found.image_size == (96 if isinstance(shape, ViTShape) or form in ("safetensors", "timm") else 224)
    assert found.num_classes == 11 and found.model.get("pool") == pool
    assert source.form == form


def test_our_own_file_says_it_all(tmp_path):
    names = [f"class {i} ü" for i in range(7)]
    description = described(TINY | {"pool": "mean", "position": {"kind": "2d"}}, class_names=names)
    model = valued(description)
    source = open_weights(write(model, description, "safetensors", tmp_path))
    found = describe(source)
    assert (found.image_size, found.num_classes, found.class_names) == (64, 7, names)
    again = found.build().to_empty(device="cpu")
    load_weights(again, source)
    assert differing(model, again) == []
    with pytest.raises(RecipeError, match="width 48, not 768"):
        describe(source, {"name": "ViT-B/16"})
