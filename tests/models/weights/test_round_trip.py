"""Every registered model through every format, and the refusal of the formats that cannot hold it."""

import shutil
from pathlib import Path

import pytest
from models.test_every_model import BLOCKS
from models.weights.exported import TINY, described, differing, loaded, valued, write, written

from vitscale.ground.errors import RecipeError
from vitscale.models.weights import describe, open_weights
from vitscale.recipe.families import REGISTRY, ViTShape, architecture

FORMATS = ("safetensors", "npz", "timm", "hf")
SUPPORTED = {
    **{"ViT": {"safetensors", "npz", "timm", "hf"}, "R+ViT": {"safetensors", "npz", "timm"}},
    **{"R26+ViT": {"safetensors", "npz", "timm"}, "R50+ViT": {"safetensors", "npz", "timm"}},
    **{"ResNet": {"safetensors", "npz", "timm"}, "Axial": {"safetensors"}, "AxialResNet": {"safetensors"}},
    **{"DINOv2": {"safetensors"}, "DINOv3": {"safetensors"}, "EVA02": {"safetensors", "timm"}},
    "Swin": {"safetensors", "timm", "hf"},
}


def family(name: str) -> str:
    if name.startswith("DINO"):
        return name.partition("-")[0]
    return "AxialResNet" if name.startswith("Axial") and "ViT" not in name else name.rstrip("0123456789x").split("-")[0]


def test_every_format_is_in_the_table():
    assert {family(name) for name in REGISTRY} == SUPPORTED.keys()


def check(block: dict, formats: set[str], folder: Path, size: int = 64) -> None:
    """Every format gives the values back, or refuses and leaves nothing."""
    description = described(block, size)
    model = valued(description)
    for form in FORMATS:
        if form not in formats:
            with pytest.raises(RecipeError, match=rf"\b{form}\b"):
                write(model, description, form, folder)
            assert list(folder.iterdir()) == []
            continue
        path = write(model, description, form, folder)
        assert differing(model, loaded(description, path)) == []
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("block_of", BLOCKS)
@pytest.mark.parametrize("name", REGISTRY)
def test_every_model_through_every_format(name, block_of, tmp_path):
    # Of smaller pictures Swin's last windows are smaller, which transformers has not.
    check(block_of(name), SUPPORTED[family(name)], tmp_path, 224 if family(name) == "Swin" else 64)


@pytest.mark.parametrize(
    ("block", "formats"),
    [
        (TINY | {"head": "pretrain"}, {"safetensors", "npz"}),
        (TINY | {"pool": "mean"}, {"safetensors", "npz", "timm"}),
        *((TINY | {"position": {"kind": kind}}, {"safetensors"}) for kind in ("2d", "relative", "none")),
        (TINY | {"position": {"kind": "1d", "at": "every_layer"}}, {"safetensors"}),
        (TINY | {"position": {"kind": "2d", "at": "shared"}}, {"safetensors"}),
        (TINY | {"attention": "axial"}, {"safetensors"}),
        ({"blocks": [1, 1], "variant": "v1"}, {"safetensors", "timm"}),
    ],
)
def test_variants(block, formats, tmp_path):
    check(block, formats, tmp_path)


@pytest.mark.parametrize("name", ["ViT-Ti/16", "R+ViT-Ti/16", "ResNet50x1"])
@pytest.mark.parametrize("form", FORMATS)
def test_a_name_and_the_keys_say_what_a_file_is(name, form, tmp_path):
    if form not in SUPPORTED[family(name)]:
        return
    pool = "mean" if name == "ViT-Ti/16" and form != "hf" else None
    block = {"name": name, "depth": None, "pool": pool}
    source = open_weights(written(tmp_path, form, block, 96, num_classes=11)[0])
    found = describe(source, {"name": name})
    shape = architecture(name)
    # A ResNet's files do not tell the size of its images, unless we have written a description into them.
    assert found.image_size == (96 if isinstance(shape, ViTShape) or form in ("safetensors", "timm") else 224)
    assert found.num_classes == 11 and found.model.get("pool") == pool
    assert source.form == form


def test_our_own_file_says_it_all(tmp_path):
    names = [f"class {i} ü" for i in range(7)]
    block = TINY | {"pool": "mean", "position": {"kind": "2d"}}
    path, model, _ = written(tmp_path, "safetensors", block, class_names=names)
    found = describe(open_weights(path))
    assert (found.image_size, found.num_classes, found.class_names) == (64, 7, names)
    assert differing(model, loaded(found, path)) == []
    with pytest.raises(RecipeError, match="width 48, not 768"):
        describe(open_weights(path), {"name": "ViT-B/16"})
