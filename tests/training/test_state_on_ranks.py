"""What a run's state is, on real DeepSpeed ranks: resumed exactly, averaged, moved to other worlds and ZeRO stages."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finished_runs import evaluate_run
from outcomes import assert_same_run, checkpoint, column, evaluations, everything
from rank_faults import save_at_once
from ranks import STEPS, asked, initial_weights, job, launch, make_recipe, quick_of

STAGES = range(4)
EVERY_STEP = {"every": {"steps": 1}, "keep": 20}
DECAY = 0.38
WITHOUT_WARMUP = "without-warmup"
FROZEN = r"^cls|blocks\.1\.(norm1|mlp)"
GROUPS = [{"match": FROZEN, "frozen": True}, {"match": "^head", "lr_factor": 2.0, "weight_decay": 0.01}]

# ---- Moved: world size and ZeRO stage of the first three steps, and of the others.
MOVES = {
    f"{precision}-{one[0]}x{one[1]}-to-{other[0]}x{other[1]}": (precision, one, other)
    for precision in ("bf16", "fp32")
    for worlds in ((2, 1), (1, 2), (1, 4), (3, 2), (4, 3))
    for stages in [(one, other) for one in STAGES for other in STAGES]
    for one, other in [((worlds[0], stages[0]), (worlds[1], stages[1]))]
}
QUICK_MOVES = ("bf16-2x1-to-1x3", "bf16-1x3-to-2x0", "bf16-3x0-to-2x2", "fp32-1x0-to-4x3")
# Sums are rounded in another order, nothing else. Seen are 1e-3 and 1e-6.
NOISE = {"bf16": 3e-3, "fp32": 1e-5}


def exact(stage: int, **others: Any) -> dict[str, Any]:
    """All that could be forgotten is on: dropout, accumulation, recomputed activations, average, groups."""
    return {
        **{"precision": "bf16", "model": {"dropout": 0.2}, "batch": {"micro_max": 4}},
        "optimizer": {"lr": 3e-3, "decay_exclude": "bias|norm", "layer_decay": 0.8, "groups": GROUPS},
        **{"parallelism": {"zero_stage": stage, "activation_checkpointing": 2}, "ema": {"decay": DECAY}},
        **{"evaluation": {"validation": None}, "checkpoint": EVERY_STEP},
        **others,
    }


# The steps after which a run of each stage is interrupted: each step in two stages, all of them in the one that divides
# everything.
INTERRUPTED = {0: (1, 4), 1: (2, 5), 2: (3,), 3: (1, 2, 3, 4, 5)}

# Evaluating exchanges weights and averages, comparing devices computes with the engine: both are to leave no trace.
DISTURBED = {
    "evaluation": {"validation": "test", "batch": 5, "every": {"steps": 2}},
    "check": {"replicas_every": 1, "recompute_every": 1},
}


def moved(precision: str, stage: int) -> dict[str, Any]:
    """12 samples a step divide among one to four ranks. No dropout, which is seeded by rank."""
    return {
        **{"precision": precision, "batch": {"global": 12, "micro_max": 4}},
        "optimizer": {"lr": 3e-3, "decay_exclude": "bias|norm", "groups": GROUPS},
        **{"parallelism": {"zero_stage": stage}, "ema": {"decay": DECAY, "warmup": False}},
        **{"evaluation": {"validation": None}, "checkpoint": {"keep": 20}},
    }


def source(precision: str, at: tuple[int, int]) -> str:
    return f"{precision}-{at[0]}x{at[1]}"


@pytest.fixture(scope="module")
def root(root: Path, request: pytest.FixtureRequest) -> Path:
    """Every training that the tests below look at."""
    parameters = asked(request)
    moves = [MOVES[name] for name in {params["move"]: None for params in parameters if "move" in params}]
    jobs = [job(WITHOUT_WARMUP, exact(1, ema={"decay": DECAY, "warmup": False}), 4)]
    for stage in STAGES:
        jobs.append(job(f"zero{stage}", exact(stage)))
        jobs.append(job(f"zero{stage}-disturbed", exact(stage, **DISTURBED), *INTERRUPTED[stage], None))
    jobs += [job(f"whole-{precision}", moved(precision, 1)) for precision in NOISE]
    launch(root, jobs, 2)
    # First where runs begin, then where they go on.
    for world in range(1, 5):
        begun = {(precision, one) for precision, one, _ in moves if one[0] == world}
        jobs = [job(source(precision, one), moved(precision, one[1]), 3) for precision, one in sorted(begun)]
        launch(root, jobs, world)
    for world in range(1, 5):
        jobs = [
            job(name, moved(precision, other[1]), None, begins_as=source(precision, one), faults=[save_at_once])
            for name, (precision, one, other) in MOVES.items()
            if (precision, one, other) in moves and other[0] == world
        ]
        launch(root, jobs, world)
    return root


@pytest.mark.parametrize("stage", STAGES)
def test_interrupted_evaluated_and_checked_it_equals_the_undisturbed_run(root, stage):
    assert_same_run(root, f"zero{stage}-disturbed", f"zero{stage}")
    assert [line["step"] for line in evaluations(root, f"zero{stage}-disturbed")] == [2, 4, 6]
    for step in range(1, STEPS):  # and at every step of the way
        one, other = (everything(checkpoint(root, name, step)) for name in (f"zero{stage}-disturbed", f"zero{stage}"))
        assert all(torch.equal(one[key], other[key]) for key in other)


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_frozen_stays_as_it_began_and_has_no_moments(root, stage):
    """Interrupted now and then, with the fp32 values that bf16 weights do not have."""
    reader = checkpoint(root, f"zero{stage}-disturbed")
    for name, before in initial_weights(make_recipe(root, **exact(stage))).items():
        is_unchanged = torch.equal(reader.parameter(name), before)
        has_moments = reader.index.shape_of("exp_avg", name) is not None
        is_frozen = re.search(FROZEN, name) is not None
        assert (is_unchanged, has_moments) == (is_frozen, not is_frozen), name
        assert not is_frozen or torch.equal(reader.parameter(name, "ema"), reader.parameter(name))


def averages_by_hand(root: Path, name: str, factors: list[float]) -> dict[str, np.ndarray]:
    """From the initial weights and the weights after each step, in float32; factors are those of the old average."""
    averages = {name: value.numpy() for name, value in initial_weights(make_recipe(root, **exact(0))).items()}
    for step, factor in enumerate(factors, 1):
        reader = checkpoint(root, name, step)
        for key in averages:
            averages[key] = np.float32(factor) * averages[key] + np.float32(1 - factor) * reader.parameter(key).numpy()
    return averages


# 2/11, 3/12, 4/13, 5/14, and then the decay itself.
WARM = [min(DECAY, (1 + update) / (10 + update)) for update in range(1, STEPS + 1)]
AVERAGED = [(f"zero{stage}", WARM) for stage in STAGES] + [(WITHOUT_WARMUP, [DECAY] * 4)]


@pytest.mark.parametrize(("name", "factors"), AVERAGED, ids=[name for name, _ in AVERAGED])
def test_the_average_is_that_of_the_saved_weights(root, name, factors):
    """To a few roundings of float32: the average is computed as one multiplication and addition a step."""
    expected = averages_by_hand(root, name, factors)
    reader = checkpoint(root, name, len(factors))
    for key, value in expected.items():
        found = reader.parameter(key, "ema").numpy()
        np.testing.assert_allclose(found, value, rtol=1e-6, atol=1e-7 * float(np.abs(value).max()), err_msg=key)
    assert any((reader.parameter(key) - reader.parameter(key, "ema")).abs().max() > 1e-4 for key in expected)


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_during_training_is_of_the_average(root, stage):
    run_dir, line = root / "runs" / f"zero{stage}-disturbed", evaluations(root, f"zero{stage}-disturbed")[1]
    _, average = evaluate_run(run_dir, step=line["step"])
    _, weights = evaluate_run(run_dir, step=line["step"], use_average=False)
    # In one process, in other batches: sums of losses are rounded in another order.
    assert average["validation/loss"] == pytest.approx(line["eval/validation/loss"], rel=1e-5)
    assert average["validation/top1"] == line["eval/validation/top1"]
    assert abs(weights["validation/loss"] - average["validation/loss"]) > 1e-3


@pytest.mark.parametrize("move", quick_of(MOVES, QUICK_MOVES))
def test_another_world_and_stage_take_over_every_bit_and_go_on(root, move):
    precision, (world, _), (other_world, _) = MOVES[move]
    written, again = checkpoint(root, source(*MOVES[move][:2]), 3), checkpoint(root, move, 3)
    assert (written.index.world_size, again.index.world_size) == (world, other_world)
    state, taken_over = everything(written), everything(again)
    assert state.keys() == taken_over.keys() and {key.split("/")[0] for key in state} == {
        *("master", "exp_avg", "exp_avg_sq", "ema")
    }
    for key, value in state.items():
        assert torch.equal(value, taken_over[key]), key
    assert again.index.optimizer_steps == written.index.optimizer_steps == 3

    whole = f"whole-{precision}"
    assert column(root, move, "world_size") == [world] * 3 + [other_world] * 3
    for key in ("step", "lr", "batch_digest"):
        assert column(root, move, key) == column(root, whole, key)
    assert column(root, move, "loss") == pytest.approx(column(root, whole, "loss"), rel=NOISE[precision])
