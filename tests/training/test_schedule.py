"""The closed forms of the schedule at the paper's own numbers."""

import math

import pytest

from vitscale.training.schedule import learning_rate

# ViT-B/16 on JFT-300M, 7 epochs (Table 3): base rate 8e-4, 10,000 steps of warmup, about 517,800 steps.
JFT = {"base": 8e-4, "total": 517_800, "warmup": 10_000}


@pytest.mark.parametrize("decay", ["linear", "cosine", "constant", "stairs"])
def test_warmup_starts_at_zero_and_reaches_the_base(decay):
    assert learning_rate(0, **JFT, decay=decay) == 0.0
    assert learning_rate(10_000, **JFT, decay=decay) == pytest.approx(8e-4, rel=1e-12)
    assert learning_rate(2_500, **JFT, decay=decay) == pytest.approx(2e-4, rel=1e-12)


def test_linear_ends_at_1e_5():
    assert learning_rate(517_800, **JFT, decay="linear") == pytest.approx(1e-5, rel=1e-12)
    assert learning_rate(263_900, **JFT, decay="linear") == pytest.approx((8e-4 + 1e-5) / 2, rel=1e-12)
    assert learning_rate(600_000, **JFT, decay="linear") == pytest.approx(1e-5, rel=1e-12)
    assert learning_rate(517_800, **JFT, decay="linear", end=0.0) == 0.0


def test_cosine_ends_at_zero():
    quarter = 10_000 + (517_800 - 10_000) / 4
    assert learning_rate(517_800, **JFT, decay="cosine") == pytest.approx(0.0, abs=1e-18)
    assert learning_rate(263_900, **JFT, decay="cosine") == pytest.approx(4e-4, rel=1e-12)
    assert learning_rate(int(quarter), **JFT, decay="cosine") == pytest.approx(4e-4 * (1 + math.sqrt(0.5)), rel=1e-9)


def test_stairs_fall_at_their_boundaries():
    # BiT-HyperRule, medium data sets: 0.003, warmup of 500, a tenth at 3,000, 6,000 and 9,000 of 10,000 steps.
    bit = {"base": 0.003, "total": 10_000, "warmup": 500, "decay": "stairs", "boundaries": (3000, 6000, 9000)}
    rates = [learning_rate(step, **bit) for step in (250, 500, 2999, 3000, 5999, 6000, 8999, 9000, 9999)]
    assert rates == pytest.approx([0.0015, 0.003, 0.003, 3e-4, 3e-4, 3e-5, 3e-5, 3e-6, 3e-6], rel=1e-9)
    assert learning_rate(3000, **{**bit, "factor": 0.5}) == pytest.approx(0.0015)


def test_without_warmup_the_first_update_has_the_base_rate():
    for decay in ("linear", "cosine", "constant"):
        assert learning_rate(0, base=0.1, total=100, warmup=0, decay=decay) == pytest.approx(0.1)


def test_a_run_that_is_all_warmup():
    assert learning_rate(5, base=0.1, total=10, warmup=10, decay="cosine") == pytest.approx(0.05)
    assert learning_rate(10, base=0.1, total=10, warmup=10, decay="linear") == pytest.approx(0.1)
