"""docs/dense.md, taken at its word: two pictures with random boxes train detectors on a run's weights."""

import re
from pathlib import Path

import pytest
import torch
from models.weights.exported import LINEAR, described, finished_run, valued

PAGE = Path(__file__).resolve().parents[2] / "docs" / "dense.md"


def boxes(count: int, size: float) -> torch.Tensor:
    corners = torch.rand(count, 2, 2).sort(dim=1).values * 0.8
    corners[:, 1] += 0.2
    return corners.flatten(1) * size


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_blocks_of_the_page_run_one_after_the_other(tmp_path, monkeypatch):
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
