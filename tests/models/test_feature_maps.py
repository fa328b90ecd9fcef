"""Feature maps for detection and segmentation: equal to those of the libraries that use our exports as backbones."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models.small_models import images, with_large_kernels
from models.weights.exported import LINEAR, TINY, described, finished_run, prepared, valued, write
from torch.nn import functional as F

from vitscale.ground.errors import RecipeError
from vitscale.models import Model, SimpleFeaturePyramid
from vitscale.models.weights import write_weights
from vitscale.recipe.families import ViTShape

timm = pytest.importorskip("timm")
SWIN = {"name": "Swin-T", "width": 32, "num_heads": 2, "blocks": [2, 2, 2, 2], "window": 2}
DINOV3 = TINY | {"position": {"kind": "rope", "base": 100.0}, "layer_scale": 1e-5, "registers": 4, "qkv_bias": "no_key"}


def seen_by(model: Model, layers=None) -> list[torch.Tensor]:
    with torch.no_grad():
        return model.feature_maps(images(model.image_size), layers)


BACKBONES = {  # the class, our block, the image size
    "swin": ("SwinBackbone", SWIN, 128),
    "swin_padded": ("SwinBackbone", SWIN | {"window": 3}, 150),
    "resnet": ("BitBackbone", {"name": "ResNet50x2", "blocks": [1, 2]}, 70),
    "vit": ("Dinov2Backbone", TINY, 64),
    "mae": ("Dinov2Backbone", TINY | {"position": {"kind": "sincos", "table": "mae"}, "pool": "normed_mean"}, 64),
    "gated": ("Dinov2Backbone", TINY | {"mlp": "swiglu", "mlp_dim": 128}, 70),
    "no_class_position": ("Dinov2Backbone", TINY | {"class_position": False}, 64),
    "registers": ("Dinov2WithRegistersBackbone", TINY | {"registers": 2, "layer_scale": 1e-5}, 64),
    "mean": ("VitDetBackbone", TINY | {"pool": "mean", "qkv_bias": "none"}, 64),
    "map": ("VitDetBackbone", TINY | {"pool": "map", "position": {"kind": "sincos"}}, 64),
    "dinov3": ("DINOv3ViTBackbone", DINOV3, 64),
}


def exported(block: dict, size: int, folder: Path) -> Model:
    """Our model, written to a folder as transformers' backbone."""
    description = described(block, size)
    model = with_large_kernels(valued(description))
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write_weights(folder, "hf", description, values.__getitem__, as_backbone=True)
    return model


@pytest.mark.parametrize("case", BACKBONES)
def test_maps_are_those_of_transformers_backbones(case, tmp_path, monkeypatch):
    """AutoBackbone asks the hub before it opens anything, so this is what it does with a folder that is there.

    Swin's have norms behind them, which begin with factors of one, and DINOv3's the final norm.
    """
    transformers = pytest.importorskip("transformers")
    name, block, size = BACKBONES[case]
    model = exported(block, size, tmp_path / "out")
    stages = range(1, 1 + (len(model.blocks) if isinstance(model.shape, ViTShape) else len(model.shape.blocks)))
    hub = SimpleNamespace(repo_exists=lambda where: True)
    monkeypatch.setattr("transformers.models.auto.auto_factory.hf_api", lambda: hub)
    peer, told = transformers.AutoBackbone.from_pretrained(
        str(tmp_path / "out"), out_features=[f"stage{stage}" for stage in stages], output_loading_info=True
    )
    missing = {key for key in told.pop("missing_keys") if not key.startswith("hidden_states_norms.")}
    assert type(peer).__name__ == name and not any(told.values()) and not missing
    side = model.anatomy().grid * model.anatomy().stride if isinstance(model.shape, ViTShape) else size
    with torch.no_grad():
        theirs = peer.eval()(images(size).permute(0, 3, 1, 2)[:, :, :side, :side]).feature_maps
        ours = seen_by(model, stages)
        if case == "dinov3":
            ours = [model.norm(each.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) for each in ours]
    if case.startswith("swin"):
        ours = [F.layer_norm(each.permute(0, 2, 3, 1), each.shape[1:2]).permute(0, 3, 1, 2) for each in ours]
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape and (one - other).abs().max() < 1e-4 * one.abs().max()


@pytest.mark.parametrize(
    ("block", "size", "why"),
    [
        (TINY | {"position": {"kind": "relative"}}, 64, "relative"),
        (TINY | {"pool": "mean", "layer_scale": 1e-5}, 64, "layer_scale"),
        (TINY | {"norm": "rms", "qk_norm": True}, 64, "norm: rms, qk_norm"),
        ({"name": "R50+ViT-B/16", "blocks": [1], "width": 48, "depth": 1, "mlp_dim": 96, "num_heads": 3}, 64, "ResNet"),
        ({"name": "AxialResNet50", "blocks": [1, 1]}, 64, "axial|3x3"),
        (SWIN | {"window": 4}, 128, "--image-size 256"),
    ],
)
def test_a_model_without_a_backbone_there_is_refused_with_the_reason(block, size, why, tmp_path):
    with pytest.raises(RecipeError, match=why):
        exported(block, size, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", ["swin", "resnet", "vit", "mean"])
def test_maps_are_those_of_timm_s_features_only(case, tmp_path):
    """Of a folder. Swin's have their channels last there; timm takes a ResNet's root for its first map."""
    _, block, _ = BACKBONES[case]
    description, model = prepared({"name": "ResNet50x1"} if case == "resnet" else block)
    folder = write(model, description, "timm", tmp_path, name="folder")
    chosen = {"resnet": (1, 2, 3, 4), "swin": (0, 1, 2, 3)}.get(case, (0, 1))
    peer = timm.create_model(f"local-dir:{folder}", pretrained=True, features_only=True, out_indices=chosen).eval()
    with torch.no_grad():
        theirs = peer(images(64).permute(0, 3, 1, 2))
    if case == "swin":
        theirs = [each.permute(0, 3, 1, 2) for each in theirs]
    for ours, other in zip(seen_by(model, range(1, len(theirs) + 1)), theirs, strict=True):
        assert ours.shape == other.shape
        assert (ours - other).abs().max() < 1e-4 * other.abs().max()


@pytest.mark.parametrize(
    "block",
    [
        {"name": "R50+ViT-B/16", "blocks": [1, 1], "width": 48, "depth": 2, "mlp_dim": 96, "num_heads": 3},
        TINY | {"registers": 3},
        TINY | {"pool": "normed_mean"},
        {"name": "AxialResNet50", "blocks": [1, 1]},
        SWIN,
    ],
)
def test_a_map_has_the_places_of_the_last_tokens(block):
    model = valued(described(block))
    (last,) = seen_by(model, [len(model.blocks) if isinstance(model.shape, ViTShape) else len(model.shape.blocks)])
    side = model.anatomy().grid
    channels = model.shape.width if isinstance(model.shape, ViTShape) else model.shape.channels
    assert last.shape == (2, channels, side, side)
    assert torch.equal(seen_by(model)[-1], last)
    for layers, named in (
        *(([0, 1, 9], "[0, 9]"), ([True, 1.0], "[True, 1.0]")),
        *(("1", "'1'"), (1, "1"), ([None], "None")),
    ):
        with pytest.raises(RecipeError, match=re.escape(named)):
            seen_by(model, layers)


# ---- The simple feature pyramid, against ViTDet's layers written out -------------------------------------------------


def written_out(x: torch.Tensor, values: list[torch.Tensor]) -> list[torch.Tensor]:
    """ViTDet's pyramid on a map (B, C, h, w); its weights in the order of the levels, from fine to coarse."""
    values = list(values)

    def take(count: int) -> list[torch.Tensor]:
        taken, values[:count] = values[:count], []
        return taken

    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        mean, variance = x.mean(dim=1, keepdim=True), x.var(dim=1, keepdim=True, correction=0)
        return (x - mean) / (variance + 1e-6).sqrt() * weight[:, None, None] + bias[:, None, None]

    found = []
    for scale in (4, 2, 1, 0.5):
        y = x
        if scale >= 2:
            y = F.conv_transpose2d(y, *take(2), stride=2)
        if scale == 4:
            y = F.conv_transpose2d(F.gelu(norm(y, *take(2))), *take(2), stride=2)
        if scale == 0.5:
            y = F.max_pool2d(y, 2)
        y = norm(F.conv2d(y, *take(1)), *take(2))
        found.append(norm(F.conv2d(y, *take(1), padding=1), *take(2)))
    assert not values
    return found


@pytest.mark.parametrize("block", [TINY, SWIN, {"name": "ResNet50x1", "blocks": [1, 1]}], ids=["vit", "swin", "resnet"])
def test_its_maps_are_those_of_its_layers_written_out(block):
    model = valued(described(block))
    pyramid = SimpleFeaturePyramid(model, 24)
    with torch.no_grad():
        for name, parameter in pyramid.levels.named_parameters():
            torch.nn.init.normal_(parameter, 0.1, 0.5, generator=torch.Generator().manual_seed(len(name)))
        pixels = torch.rand(2, 3, 64, 64)
        found = pyramid(pixels)
        last = model.feature_maps(pixels.permute(0, 2, 3, 1))[-1]
    expected = written_out(last, [parameter.detach() for parameter in pyramid.levels.parameters()])
    side = model.anatomy().grid
    assert [each.shape for each in found.values()] == [(2, 24, s, s) for s in (4 * side, 2 * side, side, side // 2)]
    for ours, theirs in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("model", "channels"), [(torch.nn.Identity(), 24), (None, 24), ("vit", 0), ("vit", "8")])
def test_what_it_cannot_be_made_of_is_told(model, channels):
    made = valued(described(TINY)) if model == "vit" else model
    with pytest.raises(RecipeError):
        SimpleFeaturePyramid(made, channels)


PAGE = Path(__file__).resolve().parents[2] / "docs" / "dense.md"


def boxes(count: int, size: float) -> torch.Tensor:
    corners = torch.rand(count, 2, 2).sort(dim=1).values * 0.8
    corners[:, 1] += 0.2
    return corners.flatten(1) * size


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_blocks_of_the_page_run_one_after_the_other(tmp_path, monkeypatch):
    """docs/dense.md, taken at its word: two pictures with random boxes train detectors on a run's weights."""
    pytest.importorskip("torchvision")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    finished_run(tmp_path / "runs/photos", valued(described(LINEAR)), LINEAR, precision="fp32")
    torch.manual_seed(0)
    pictures = [torch.rand(3, 90, 70), torch.rand(3, 50, 100)]
    said = {
        "pictures": pictures,
        "targets": [{"boxes": boxes(3, 50), "labels": torch.tensor([1, 5, 90])} for _ in pictures],
        "images": [(each.permute(1, 2, 0) * 255).byte().numpy() for each in pictures],
        "labels": [{"boxes": boxes(2, 0.5), "class_labels": torch.tensor([3, 90])} for _ in pictures],
    }
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 2
    for block in blocks:
        lines = [line for line in block.splitlines() if line and not line.startswith(("import ", "from ", "#"))]
        assert len(lines) <= 10
        exec(compile(block, str(PAGE), "exec"), said)
    assert sum(said["losses"].values()).isfinite() and said["loss"].isfinite()
    for trained in (said["model"].backbone.embedding.weight, *said["detr"].model.backbone.parameters()):
        if trained.requires_grad and trained.grad is not None:
            assert trained.grad.isfinite().all()
    assert said["model"].backbone.embedding.weight.grad.abs().sum() > 0
    assert said["detr"].model.backbone.model.embeddings.cls_token.grad.abs().sum() > 0
