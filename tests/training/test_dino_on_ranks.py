"""Self-distillation through the trainer: the same on every world, stage and micro-batch, and after a stop."""

from pathlib import Path

import pytest
import torch
from outcomes import assert_same_run, checkpoint, column
from ranks import initial_weights, job, launch, make_recipe
from small_recipes import DINO

from vitscale.runs.checkpoint import MASTER

VIEWS = [
    {"name": "first", "operations": [{"kind": "color_jitter", "hue": 0.1}]},
    {"name": "second"},
    {"name": "local", "count": 2, "size": 16},
]
TEMPERATURE = {"from": 0.05, "to": 0.1, "over": {"steps": 4}, "shape": "linear"}
OBJECTIVE = {**DINO, "group": 2, "teacher_temperature": TEMPERATURE}
ROPE = {"kind": "rope", "rescale": 2.0, "jitter": 1.2}
IJEPA = {"kind": "ijepa", "predictor_width": 16, "predictor_depth": 1, "predictor_heads": 2}
PARTS = ("loss", "dino", "ibot", "koleo", "target_entropy")


def blocks(stage, micro, **others):
    """With SGD, as AdamW divides by second moments, which makes much of a rounding error."""
    return {
        "precision": "fp32",
        "model": {"drop_path": 0.2, "registers": 1, "position": ROPE, "pool": "cls", "head": "linear"},
        "data": {"views": VIEWS},
        "batch": {"micro_max": micro},
        "objective": OBJECTIVE,
        "averages": [{"name": "ema", "decay": 0.9, "to": 1.0}],
        "optimizer": {"name": "sgd", "lr": 0.5, "groups": [{"match": r"\.last\.", "begin": {"steps": 2}}]},
        "parallelism": {"zero_stage": stage},
        "evaluation": {"validation": None},
        "checkpoint": {"every": {"steps": 1}, "keep": 9},
        **others,
    }


@pytest.fixture(scope="module")
def root(root: Path) -> Path:
    jobs = [job(f"two-{micro}", blocks(stage, micro)) for stage, micro in ((1, 8), (2, 2))]
    jobs.append(job("two-4", blocks(3, 4), 3, None))
    adamw = {"optimizer": {"name": "adamw", "lr": 1e-3}, "precision": "bf16"}
    adamw["objective"] = {**OBJECTIVE, "ibot": {}}
    jobs.append(job("adamw", blocks(1, 4, **adamw, check={"audit_every": 2})))
    jobs.append(job("resumed", blocks(1, 4, **adamw), 3, None))
    jobs.append(job("overlap", blocks(2, 8, parallelism={"zero_stage": 2, "overlap": True})))
    ijepa = {"objective": IJEPA, "data": {}, "optimizer": {"name": "sgd", "lr": 0.1}}
    jobs.append(job("ijepa", blocks(1, 4, **ijepa), 3, None))
    launch(root, jobs, 2)
    launch(root, [job("alone", blocks(0, 16)), job("ijepa-alone", blocks(0, 16, **ijepa))], 1)
    return root


def test_a_stopped_run_equals_the_uninterrupted_one_to_the_last_bit(root):
    """Weights, moments and the teacher."""
    assert_same_run(root, "adamw", "resumed")
    assert "ema" in checkpoint(root, "resumed").index.kinds


def assert_same_update(root, one, other):
    """The first update's gradient, and the losses and weights of all."""
    for key in PARTS:
        assert column(root, other, key) == pytest.approx(column(root, one, key), rel=1e-5, abs=1e-6), key
    assert column(root, other, "batch_digest") == column(root, one, "batch_digest")
    first, second = checkpoint(root, one, 1), checkpoint(root, other, 1)
    pairs = [
        (first.parameter(name, "momentum_buffer"), second.parameter(name, "momentum_buffer"))
        for name in first.index.shapes
    ]
    error = sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5
    assert error <= 5e-7 * sum(float(a.square().sum()) for a, _ in pairs) ** 0.5
    last = [checkpoint(root, each, 6) for each in (one, other)]
    for kind in (MASTER, "ema"):
        for name in first.index.shapes:
            torch.testing.assert_close(*(each.parameter(name, kind) for each in last), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("other", ["two-2", "two-4", "alone", "overlap"])
def test_every_world_stage_and_micro_batch_computes_the_same(root, other):
    assert_same_update(root, "two-8", other)


def test_the_last_layers_stand_still_at_first_and_the_teacher_follows(root):
    begun = initial_weights(make_recipe(root, **blocks(1, 8)), 0)
    for name in ("dino.last.weight", "ibot.last.weight"):
        still, moved = checkpoint(root, "two-8", 2), checkpoint(root, "two-8", 3)
        assert torch.equal(still.parameter(name, MASTER), begun[name])
        assert still.parameter(name, "momentum_buffer").abs().max() > 0
        assert not torch.equal(moved.parameter(name, MASTER), begun[name])
    first = checkpoint(root, "two-8", 1)
    for name in ("dino.layers.0.weight", "blocks.0.mlp.fc1.weight", "mask"):
        expected = 0.9 * begun[name] + 0.1 * first.parameter(name, MASTER)
        torch.testing.assert_close(first.parameter(name, "ema"), expected, rtol=1e-5, atol=1e-7)


def test_a_stopped_run_of_ijepa_equals_one_on_another_world(root):
    assert column(root, "ijepa", "loss") == pytest.approx(column(root, "ijepa-alone", "loss"), rel=1e-5)
    assert column(root, "ijepa", "grad_norm") == pytest.approx(column(root, "ijepa-alone", "grad_norm"), rel=1e-4)


@pytest.mark.slow
def test_the_whole_mesh_of_worlds_and_micro_batches_computes_the_same(root):
    for world in (1, 2, 4):
        micros = (32 // world, 16 // world, 8 // world)
        batches = {micro: {"global": 32, "micro_max": micro} for micro in micros}
        launch(root, [job(f"wide-{world}-{micro}", blocks(1, micro, batch=batches[micro])) for micro in micros], world)
        for micro in micros:
            assert_same_update(root, "wide-1-32", f"wide-{world}-{micro}")
