"""I-JEPA: what is seen and predicted, and the loss against plain torch, block by block."""

import pytest
import torch
from objectives.updates import assert_counted, sample_keys
from small_recipes import SMALL, small_recipe, with_initial_values
from torch.nn import functional as F

from vitscale.models.vit.positions import sincos_positions
from vitscale.objectives import build_objective

OBJECTIVE = {"kind": "ijepa", "predictor_width": 24, "predictor_depth": 2, "predictor_heads": 2}
RECIPE = {
    "model": SMALL | {"width": 32, "pool": "mean", "position": {"kind": "sincos", "table": "mae"}},
    "data": {"image_size": 64},
    "averages": [{"name": "ema", "decay": 0.99}],
}


def built(**changes):
    recipe = small_recipe(**RECIPE, objective=OBJECTIVE | changes)
    objective = with_initial_values(build_objective(recipe, 0), 3)
    return recipe, objective


def test_blocks_are_rectangles_and_what_is_seen_lies_outside():
    _, objective = built()
    sizes = set()
    for step in range(40):
        seen, blocks = objective.plan(sample_keys(32), step)
        assert seen.shape == (32, 16) and blocks.shape[:2] == (32, 4)
        rows, columns = blocks // 8, blocks % 8
        height, width = (int((each.amax(2) - each.amin(2) + 1).unique()) for each in (rows, columns))
        assert height * width == blocks.shape[2] and 0.1 < height * width / 64 < 0.25
        sizes.add((height, width))
        for image in range(32):
            inside, own = set(blocks[image].flatten().tolist()), seen[image].tolist()
            assert len(set(own)) == 16
            assert len(inside & set(own)) == max(16 - (64 - len(inside)), 0)
    assert len(sizes) > 2


def test_parts_of_a_batch_draw_alike():
    _, objective = built()
    whole = objective.plan(sample_keys(32), 3)
    parts = [objective.plan(sample_keys(32)[start : start + 8], 3) for start in range(0, 32, 8)]
    for number, each in enumerate(whole):
        assert torch.equal(each, torch.cat([part[number] for part in parts]))


def test_the_loss_is_that_of_blocks_predicted_one_by_one():
    _, objective = built()
    images, predictor = torch.randn(3, 64, 64, 3, generator=torch.Generator().manual_seed(0)), objective.predictor
    plan = objective.plan(sample_keys(3), 0)
    with torch.no_grad():
        targets = objective([images[:, None]], None, plan)
        found = objective([images[:, None]], torch.zeros(3).long(), (*plan, targets)).per_sample
        positions = sincos_positions(8, 24, images, "mae")[0]
        for image in range(3):
            teacher = objective.backbone(images[image : image + 1]).tokens[0]
            expected, seen = [], plan[0][image]
            context = objective.backbone(images[image : image + 1], kept=seen[None]).tokens
            for block in plan[1][image]:
                x = torch.cat([predictor.embedding(context)[0] + positions[seen], objective.mask[0] + positions[block]])
                for each in predictor.blocks:
                    x = each(x[None])[0]
                predicted = predictor.prediction(predictor.norm(x[len(seen) :]))
                expected.append(F.smooth_l1_loss(predicted, F.layer_norm(teacher[block], (32,))))
            assert found[image].item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-5)


def test_the_operations_counted_are_those_of_torch():
    recipe, objective = built(area=[0.17, 0.205])  # in the middle 12 patches
    step = next(step for step in range(100) if objective.plan(sample_keys(4), step)[1].shape[2] == 12)
    assert_counted(recipe, objective, 4, step)
