"""Weights at another resolution: logits equal to the peer's on the same positions; how other rules resample."""

from pathlib import Path

import peers  # noqa: F401 (makes timm importable)
import pytest
import torch
from models.weights.exported import TINY, assert_equal_logits, described, loaded, transformers_config, write
from models.weights.test_weights_peers import TANH, prepared
from safetensors.torch import save_file

timm = pytest.importorskip("timm")
zoom = pytest.importorskip("scipy.ndimage").zoom
OLD, NEW, CLASSES = 64, 96, 7  # pixels: 8 x 8 and 12 x 12 patches


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
