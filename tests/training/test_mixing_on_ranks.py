"""Mixup, CutMix, repeated samples and kept patches on worlds of 1, 2 and 4; the first losses against dense targets."""

from pathlib import Path
from typing import Any

import pytest
import torch
from outcomes import column
from ranks import batches, begun, job, launch, make_recipe
from torch.nn import functional as F

from vitscale.objectives.mixing import partners_of

pytestmark = pytest.mark.slow

DRAWN_FOR = ("batch", "pair", "element")


def everything() -> dict[str, Any]:
    """All that is drawn for a sample, and that does not draw by rank."""
    of_pairs = blocks("pair")
    more = {"loss": "bce", "label_smoothing": 0.0, "threshold": 0.3, "keep": 0.5}
    return {**of_pairs, "objective": of_pairs["objective"] | more, "data": {"repeats": 3}}


def blocks(per: str) -> dict[str, Any]:
    mixing = {"mixup": 0.8, "cutmix": 1.0, "probability": 0.8, "per": per}
    return {
        "precision": "fp32",
        "objective": {"loss": "softmax", "label_smoothing": 0.1, "mixing": mixing},
        "batch": {"micro_max": 4},
        "parallelism": {"zero_stage": 1},
    }


@pytest.fixture(scope="module")
def root(root: Path) -> Path:
    for world in (1, 2, 4):
        jobs = [job(f"{per}-{world}", blocks(per)) for per in DRAWN_FOR]
        jobs.append(job(f"all-{world}", everything()))
        launch(root, jobs, world)
    return root


@pytest.mark.parametrize("per", [*DRAWN_FOR, "all"])
@pytest.mark.parametrize("world", [2, 4])
def test_every_world_mixes_the_same(root, world, per):
    one, other = f"{per}-1", f"{per}-{world}"
    assert column(root, one, "batch_digest") == column(root, other, "batch_digest")
    assert column(root, other, "loss") == pytest.approx(column(root, one, "loss"), rel=2e-5)
    assert column(root, other, "grad_norm") == pytest.approx(column(root, one, "grad_norm"), rel=1e-3)


@pytest.mark.parametrize("per", DRAWN_FOR)
def test_the_first_losses_are_those_of_dense_targets(root, per):
    """The weights are the initial ones up to the second update, whose learning rate is not 0."""
    recipe = make_recipe(root, **blocks(per))
    objective, losses = begun(recipe), []
    with torch.no_grad():
        for batch, (views,) in batches(recipe, 2):
            own, blend, boxes = objective.plan(batch.keys.numpy(), batch.position)
            images = views[:, 0]
            labels = F.one_hot(batch.labels, 7) * 0.9 + 0.1 / 7
            targets = own[:, None] * labels + (1 - own)[:, None] * partners_of(labels)
            mixed = images.clone()
            for row, (top, bottom, left, right) in enumerate(boxes.tolist()):
                mixed[row] = blend[row] * images[row] + (1 - blend[row]) * images[row ^ 1]
                mixed[row, top:bottom, left:right] = images[row ^ 1, top:bottom, left:right]
            losses.append(F.cross_entropy(objective.backbone(mixed).logits, targets).item())
    assert column(root, f"{per}-1", "loss")[:2] == pytest.approx(losses, rel=1e-5)
