"""The closed forms of the schedule at the paper's own numbers."""

import math

import pytest
import torch

from vitscale.training.optimizers.schedule import course, learning_rate

# ViT-B/16 on JFT-300M, 7 epochs (Table 3): base rate 8e-4, 10,000 steps of warmup, about 517,800 steps.
JFT = {"base": 8e-4, "total": 517_800, "warmup": 10_000}


@pytest.mark.parametrize("decay", ["linear", "cosine", "constant", "stairs"])
def test_warmup_starts_at_zero_and_reaches_the_base(decay):
    assert learning_rate(0, **JFT, decay=decay) == 0.0
    assert learning_rate(10_000, **JFT, decay=decay) == pytest.approx(8e-4, rel=1e-12)
    assert learning_rate(2_500, **JFT, decay=decay) == pytest.approx(2e-4, rel=1e-12)


@pytest.mark.parametrize(
    ("step", "how", "expected"),
    [
        (517_800, {"decay": "linear"}, 1e-5),
        (263_900, {"decay": "linear"}, (8e-4 + 1e-5) / 2),
        (600_000, {"decay": "linear"}, 1e-5),
        (517_800, {"decay": "linear", "end": 0.0}, 0.0),
        (517_800, {"decay": "cosine"}, 0.0),
        (517_800, {"decay": "cosine", "floor": 1e-6}, 1e-6),
        (263_900, {"decay": "cosine", "floor": 1e-6}, 4e-4 + 5e-7),
        (263_900, {"decay": "cosine"}, 4e-4),
        (136_950, {"decay": "cosine"}, 4e-4 * (1 + math.sqrt(0.5))),
        # Without warmup the first update has the base rate; a run may be all warmup.
        *((0, {"warmup": 0, "decay": decay}, 8e-4) for decay in ("linear", "cosine", "constant")),
        (5, {"total": 10, "warmup": 10, "decay": "cosine"}, 4e-4),
        (10, {"total": 10, "warmup": 10, "decay": "linear"}, 8e-4),
    ],
)
def test_linear_and_cosine(step, how, expected):
    assert learning_rate(step, **JFT | how) == pytest.approx(expected, rel=1e-12, abs=1e-18)


@pytest.mark.parametrize(
    ("warmup", "boundaries", "total"),
    [(100, (200, 300, 400), 500), (500, (3000, 6000, 9000), 10_000), (500, (6000, 12_000, 18_000), 20_000)],
)
def test_stairs_are_those_of_bit_hyperrule(warmup, boundaries, total):
    """Its schedules of small, medium and large data sets: a tenth once the step is beyond a boundary, not at it."""
    bit = {"base": 0.003, "total": total, "warmup": warmup, "decay": "stairs", "boundaries": boundaries}
    for step in range(total):
        passed = len([boundary for boundary in boundaries if boundary < step])
        expected = 0.003 * step / warmup if step < warmup else 0.003 / 10**passed
        assert learning_rate(step, **bit) == pytest.approx(expected, rel=1e-9), step
    assert learning_rate(boundaries[0] + 1, **{**bit, "factor": 0.5}) == pytest.approx(0.0015)


def big_vision(step, *, base, total, warmup, decay, timescale=10_000, cooldown=0):
    """`create_learning_rate_schedule` of big_vision, of what it calls const and rsqrt, as its page has the formulas."""
    rate = base / math.sqrt(1 + (step - warmup) / timescale) if decay == "rsqrt" and step >= warmup else base
    rate *= min(1.0, step / warmup)
    return rate * min(1.0, (total - step) / cooldown) if cooldown else rate


STEPS = [0, 1, 5_000, 9_999, 10_000, 10_001, 100_000, 467_799, 467_800, 467_801, 500_000, 517_799, 517_800]


@pytest.mark.parametrize("cooldown", [0, 50_000])
def test_rsqrt_and_wsd_are_big_visions_rsqrt_and_const_with_cooldown(cooldown):
    how = JFT | {"timescale": 20_000, "cooldown": cooldown}
    for ours, theirs in (("rsqrt", "rsqrt"), ("wsd", "const")):
        expected = [big_vision(step, **how, decay=theirs) for step in STEPS]
        assert [learning_rate(step, **how, decay=ours) for step in STEPS] == pytest.approx(
            expected, rel=1e-12, abs=1e-18
        )


def test_the_other_decay_of_wsd_falls_by_the_root_of_the_time_since():
    wsd = {**JFT, "decay": "wsd", "cooldown": 40_000, "cooldown_shape": "1-sqrt"}
    rates = [learning_rate(517_800 - 40_000 + part, **wsd) / 8e-4 for part in (-1, 0, 400, 10_000, 22_500, 40_000)]
    assert rates == pytest.approx([1, 1, 0.9, 0.5, 0.25, 0], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(("cycle_factor", "restart_factor"), [(1.0, 1.0), (2.0, 1.0), (1.0, 0.5), (1.5, 0.8)])
def test_warm_restarts_are_timms(cycle_factor, restart_factor):
    schedulers = pytest.importorskip("timm.scheduler")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = schedulers.CosineLRScheduler(
        optimizer,
        t_initial=100,
        cycle_mul=cycle_factor,
        cycle_decay=restart_factor,
        cycle_limit=100,
        warmup_t=10,
        warmup_prefix=True,
        t_in_epochs=False,
    )
    ours = {"base": 0.3, "total": 1000, "warmup": 10, "decay": "restarts", "cycle": 100}
    # Where a cycle begins, timm finds its number by a logarithm, which rounding may leave below it.
    for step in [0, 5, 9, 10, 11, 60, 109, 111, 150, 309, 311, 400, 999]:
        expected = theirs._get_lr(step)[0]
        found = learning_rate(step, **ours, cycle_factor=cycle_factor, restart_factor=restart_factor)
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-15), step


def test_restarts_begin_at_the_top():
    ours = {"base": 0.3, "total": 1000, "warmup": 10, "decay": "restarts", "cycle": 100, "restart_factor": 0.5}
    assert [learning_rate(step, **ours) for step in (10, 110, 210)] == pytest.approx([0.3, 0.15, 0.075])
    longer = {**ours, "cycle_factor": 2.0}
    assert [learning_rate(step, **longer) for step in (10, 110, 310, 710)] == pytest.approx([0.3, 0.15, 0.075, 0.0375])


def test_what_else_changes():
    dino = {"start": 0.04, "end": 0.4, "steps": 100}
    cosine = [course(step, **dino, shape="cosine") for step in (0, 50, 100, 200)]
    assert cosine == pytest.approx([0.04, 0.22, 0.4, 0.4], rel=1e-12)
    assert course(25, **dino, shape="cosine") == pytest.approx(0.4 - 0.36 * 0.5 * (1 + math.sqrt(0.5)), rel=1e-12)
    assert [course(step, **dino, shape="linear") for step in (0, 25, 100)] == pytest.approx([0.04, 0.13, 0.4])
