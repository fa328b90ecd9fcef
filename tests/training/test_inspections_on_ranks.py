"""`evaluation.inspect` on two real DeepSpeed ranks: figures in the tracker, and not a bit of training changed."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from outcomes import assert_same_run
from PIL import Image
from ranks import job, launch, make_recipe
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vitscale.evaluation.finished import FinishedModel
from vitscale.evaluation.inspection.figures import inspection_figures
from vitscale.evaluation.inspection.looking import look
from vitscale.ground.errors import RecipeError
from vitscale.ground.page import standalone

pytest.importorskip("matplotlib")
INSPECT = {"every": {"steps": 3}, "images": "test", "count": 23}
DRAWN = {"attention_distance", "attention_entropy", "filters", "token_norms"}
RUNS: dict[str, dict[str, Any]] = {
    "zero1": {"parallelism": {"zero_stage": 1}, "ema": {"decay": 0.5}},
    "zero3": {"parallelism": {"zero_stage": 3}, "model": {"dropout": 0.2}},
}


def blocks(name: str, inspect: dict | None) -> dict[str, Any]:
    evaluation = {"validation": "test", "batch": 5, "inspect": inspect}
    return {"precision": "fp32", "evaluation": evaluation, "logging": {"tensorboard": inspect is not None}} | RUNS[name]


@pytest.fixture(scope="module")
def root(root: Path) -> Path:
    jobs = [job(f"{name}-plain", blocks(name, None)) for name in RUNS]
    launch(root, [*jobs, *(job(name, blocks(name, INSPECT)) for name in RUNS)], 2)
    return root


def pictures(root: Path, name: str) -> dict[str, dict[int, np.ndarray]]:
    events = EventAccumulator(str(root / "runs" / name / "tensorboard"), size_guidance={"images": 0}).Reload()
    return {
        tag.removeprefix("inspect/").removesuffix("/image/0"): {
            event.step: np.asarray(Image.open(io.BytesIO(event.encoded_image_string)).convert("RGB"))
            for event in events.Images(tag)
        }
        for tag in events.Tags()["images"]
    }


@pytest.mark.parametrize("name", RUNS)
def test_training_is_the_same_to_the_last_bit(root, name):
    assert_same_run(root, name, f"{name}-plain")


@pytest.mark.parametrize("name", RUNS)
def test_the_tracker_has_what_the_checkpoint_shows(root, name):
    """All 23 images of the dataset once, of both ranks, by the average of the weights where there is one."""
    found = pictures(root, name)
    assert set(found) == DRAWN and all(set(steps) == {3, 6} for steps in found.values())
    model = FinishedModel(root / "runs" / name)
    images = torch.cat([batch.images[batch.mask] for batch in model.loader(model.dataset("test"))()])
    expected = look(model.backbone, model.predict, images, "", ["filters", "norms", "attention"], pictures=0)
    for figure in inspection_figures({"": expected}):
        png = standalone(figure.put, "png", width=figure.width, height=figure.height)
        array = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
        assert abs(found[figure.key][6] - array).mean() < 0.03, figure.key
        if figure.key == "token_norms":  # of other weights: what moves most
            assert abs(found[figure.key][3] - array).mean() > 0.1


def test_without_trackers_there_is_nowhere_to_draw(tmp_path):
    with pytest.raises(RecipeError, match=r"logging\.trackers"):
        make_recipe(tmp_path, evaluation={"inspect": INSPECT}, logging={"tensorboard": False})
    recipe = make_recipe(tmp_path, evaluation={"inspect": INSPECT}, logging={"tensorboard": True})
    assert json.loads(json.dumps(recipe.dump()))["evaluation"]["inspect"]["count"] == 23
