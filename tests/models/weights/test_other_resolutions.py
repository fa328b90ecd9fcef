"""Weights at another resolution: logits equal to the peer's on the same positions; how other rules resample."""

import re
from pathlib import Path

import numpy as np
import peers  # noqa: F401 (makes timm importable)
import pytest
import torch
from models.weights.exported import TINY, assert_equal_logits, described, loaded, transformers_config, write
from models.weights.test_weights_peers import TANH, prepared
from safetensors.torch import save_file
from torch.nn import functional as F

from vitscale.models.vit.positions import resample_positions

timm = pytest.importorskip("timm")
zoom = pytest.importorskip("scipy.ndimage").zoom
OLD, NEW, CLASSES = 64, 96, 7  # pixels: 8 x 8 and 12 x 12 patches
DOCS = Path(__file__).resolve().parents[3] / "docs" / "weights.md"


def zoomed(positions: torch.Tensor, new: int) -> torch.Tensor:
    """As the authors' code: (1, 1 + n * n, D) -> (1, 1 + new * new, D)."""
    side = round((positions.shape[1] - 1) ** 0.5)
    grid = positions[0, 1:].view(side, side, -1).numpy()
    larger = torch.from_numpy(zoom(grid, (new / side, new / side, 1), order=1))
    return torch.cat([positions[:, :1], larger.flatten(0, 1)[None]], 1)


def timm_peer(size: int) -> torch.nn.Module:
    arguments = {"embed_dim": TINY["width"], "depth": TINY["depth"], "num_heads": TINY["num_heads"], "mlp_ratio": 2}
    options = {"img_size": size, "patch_size": TINY["patch_size"], "num_classes": CLASSES} | TANH
    return timm.models.VisionTransformer(**arguments, **options).eval()


def of_timm(path: Path) -> torch.nn.Module:
    """A model of timm's with random values, saved at the old resolution; the same at the new one."""
    old = timm_peer(OLD)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in old.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    save_file(old.state_dict(), path / "weights.safetensors")
    return at_the_new_resolution(old.state_dict())


def of_google(path: Path) -> torch.nn.Module:
    """Google's file, read at the old resolution by timm's reader of such files."""
    description, model = prepared(TINY)
    old = timm_peer(OLD)
    old.load_pretrained(str(write(model, description, "npz", path)))
    return at_the_new_resolution(old.state_dict())


def at_the_new_resolution(state: dict[str, torch.Tensor]) -> torch.nn.Module:
    peer = timm_peer(NEW)
    peer.load_state_dict(state | {"pos_embed": zoomed(state["pos_embed"], NEW // TINY["patch_size"])})
    return peer


def of_transformers(path: Path) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    config = transformers_config(image_size=OLD, num_labels=CLASSES, initializer_range=0.2)
    old = transformers.ViTForImageClassification(config)
    old.save_pretrained(path / "weights")
    state = old.state_dict()
    (name,) = [name for name in state if name.endswith("position_embeddings")]
    config.image_size = NEW
    peer = transformers.ViTForImageClassification(config).eval()
    peer.load_state_dict(state | {name: zoomed(state[name], NEW // TINY["patch_size"])})
    return peer


@pytest.mark.parametrize("saved", [of_google, of_timm, of_transformers])
def test_logits_equal_the_peer_s_on_the_same_resampled_positions(saved, tmp_path):
    peer = saved(tmp_path)
    (path,) = tmp_path.iterdir()
    notes: list[str] = []
    model = loaded(described(TINY, NEW, CLASSES), path, notes)
    assert len(notes) == 1 and "resampled from (8, 8) to (12, 12)" in notes[0]
    assert_equal_logits(model, peer, NEW)


# ---- How others resample ---------------------------------------------------------------------------------------------


def timm_default(positions: torch.Tensor, new: int) -> torch.Tensor:
    return timm.layers.resample_abs_pos_embed(positions, [new, new])


def timm_from_npz(positions: torch.Tensor, new: int) -> torch.Tensor:
    return timm.layers.resample_abs_pos_embed(positions, [new, new], interpolation="bilinear", antialias=False)


def bicubic(positions: torch.Tensor, new: int, **options: float) -> torch.Tensor:
    """transformers' `interpolate_pos_encoding`."""
    side = round((positions.shape[1] - 1) ** 0.5)
    planes = positions[:, 1:].view(1, side, side, -1).permute(0, 3, 1, 2)
    size = {} if options else {"size": (new, new)}
    planes = F.interpolate(planes, mode="bicubic", align_corners=False, **size, **options)
    return torch.cat([positions[:, :1], planes.flatten(2).transpose(1, 2)], 1)


def dinov2(positions: torch.Tensor, new: int) -> torch.Tensor:
    side = round((positions.shape[1] - 1) ** 0.5)
    return bicubic(positions, new, scale_factor=(new + 0.1) / side)


RULES = {
    "timm's default": timm_default,
    "timm's reader of `.npz`": timm_from_npz,
    "transformers": bicubic,
    "DINOv2's code": dinov2,
}
GRIDS = ((14, 24), (16, 27), (16, 37))


def smooth(side: int) -> torch.Tensor:
    """A table of sines and cosines as MAE's, values from -1 to 1, places from 0 to 1: (1, 1 + side * side, 64)."""
    places = np.arange(side) / (side - 1)
    angles = 2 * np.pi * places[:, None] * 0.5 * np.arange(1, 17) / 4  # up to two turns over the picture
    waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    rows, columns = np.repeat(waves, side, axis=0), np.tile(waves, (side, 1))
    table = np.concatenate([rows, columns], axis=1)
    return torch.from_numpy(np.concatenate([np.zeros((1, table.shape[1])), table])).float()[None]


def largest_difference(name: str, old: int, new: int) -> float:
    positions = smooth(old)
    return (RULES[name](positions, new) - zoomed(positions, new)).abs().max().item()


@pytest.mark.parametrize("name", RULES)
def test_the_documented_differences_are_those_measured(name):
    """docs/weights.md has one row a rule; ours is the authors' zoom."""
    rows = [row for row in DOCS.read_text().splitlines() if row.startswith(f"| {name} ")]
    assert len(rows) == 1
    printed = [float(value) for value in re.findall(r"\| (\d\.\d\d) ", f"{rows[0]} ")]
    found = [largest_difference(name, *grids) for grids in GRIDS]
    print(name, found)
    assert printed == pytest.approx(found, abs=0.0051)


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_ours_is_the_authors_rule(old, new):
    positions = smooth(old)
    ours = resample_positions(positions, (old, old), (new, new))
    assert (ours - zoomed(positions, new)).abs().max() < 1e-5
