"""Failures on paper, against a simulation of the same cluster that knows events alone, and what is published."""

import heapq
import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from vitscale.about.planning.failures import Failures, Saving, make_failures
from vitscale.cli.main import app
from vitscale.ground.errors import RecipeError

HOUR = 3600.0


CHAOS_RESTARTS = (5.5, 5.6, 8.3, 9.3, 10.6, 11.2, 11.5)
"""Seconds that restarts took in `make chaos MINUTES=8 SEED=3`, as `plan --restart-of` reads them (docs/LOG.md)."""


def simulate(
    failures: Failures, saving: Saving, every: float, spares: int, count: int, restarts: tuple[float, ...] = ()
) -> float:
    """The useful share over so many failures: nodes fail, are repaired and wait; checkpoints complete or are lost.

    Restarts take `failures.restart`, or any of `restarts`.
    """
    rng = np.random.default_rng(0)
    restart_s = np.random.default_rng(1).choice(restarts or (failures.restart,), count)
    now = saved = 0.0
    in_repair: list[float] = []  # when each comes back
    for failure in range(count):
        while in_repair and in_repair[0] <= now:
            heapq.heappop(in_repair)
        while len(in_repair) > spares:
            now = heapq.heappop(in_repair)
        fails = now + rng.exponential(failures.mtbf / failures.nodes)
        computing = fails - (now + restart_s[failure])
        begins = every
        while begins + saving.write <= computing:
            saved += every
            begins += saving.stall + every
        now = fails
        heapq.heappush(in_repair, now + rng.exponential(failures.repair))
    return saved / now


@pytest.mark.parametrize(
    ("failures", "saving", "spares"),
    [
        (Failures(8, 1000 * HOUR, 120, 0), Saving(0.5, 30), 0),
        (Failures(8, 100 * HOUR, 600, 8 * HOUR), Saving(60, 60), 0),
        (Failures(8, 100 * HOUR, 600, 8 * HOUR), Saving(60, 60), 1),
        (Failures(64, 100 * HOUR, 600, 2 * HOUR), Saving(5, 200), 2),
        (Failures(1000, 500 * HOUR, 300, HOUR), Saving(20, 100), 4),
    ],
)
def test_useful_time_and_the_best_interval_are_those_of_a_simulated_cluster(failures, saving, spares):
    best = failures.best_interval(saving)
    assert best >= saving.write
    shares = {}
    for factor in (0.25, 1, 4):
        every = max(best * factor, saving.write)
        shares[factor] = simulate(failures, saving, every, spares, 10_000)
        assert failures.useful(every, saving, spares) == pytest.approx(shares[factor], rel=0.02)
    assert shares[1] == max(shares.values())


@pytest.mark.parametrize("mtbf_hours", [2000, 50, 5])
def test_restarts_as_long_as_those_of_chaos_are_planned_by_their_median(mtbf_hours):
    failures = make_failures(64, mtbf_hours, repair=0, restarts=CHAOS_RESTARTS)
    saving = Saving(0.5, 4)
    best = failures.best_interval(saving)
    shares = {
        factor: simulate(failures, saving, factor * best, 0, 10_000, CHAOS_RESTARTS)
        for factor in (0.25, 0.7, 1, 1.4, 4)
    }
    for factor, share in shares.items():
        assert failures.useful(factor * best, saving) == pytest.approx(share, rel=0.02)
    assert shares[1] > max(shares[0.25], shares[4])
    young = math.sqrt(2 * saving.stall / failures.rate)
    assert best == pytest.approx(max(young, saving.write), rel=0.05)


def test_rare_failures_leave_the_published_rules():
    rare = Failures(16, 5e4 * HOUR, 100, 0)
    saving = Saving(10, 10)
    mean = 1 / rare.rate
    young = math.sqrt(2 * saving.stall * mean)
    assert rare.best_interval(saving) == pytest.approx(young, rel=0.01)
    # Daly's estimate of higher order (2006).
    often = Failures(16, 40 * HOUR, 100, 0)
    mean = 1 / often.rate
    scaled = math.sqrt(saving.stall / (2 * mean))
    daly = math.sqrt(2 * saving.stall * mean) * (1 + scaled / 3 + scaled**2 / 9) - saving.stall
    assert often.best_interval(saving) == pytest.approx(daly, rel=1e-4)
    never = Failures(1, 1e15, 100, HOUR)
    assert never.useful(600, saving) == pytest.approx(600 / 610, rel=1e-6)


def test_what_cannot_end_has_no_useful_time():
    hopeless = Failures(100_000, HOUR, 600, HOUR)
    assert hopeless.useful(600, Saving(60, 60)) == 0
    assert Failures(1000, 10 * HOUR, 0, 10 * HOUR).waiting(0) == pytest.approx(1000 / 1001)


def test_interruptions_of_a_published_run():
    """Llama 3 (Dubey et al. 2024, 3.3.4): 419 in 54 days of 16,384 GPUs, over 90 % of the time useful."""
    failures = Failures(2048, 54 * 24 * HOUR * 2048 / 419, 10 * 60, 0)
    assert 1 / failures.rate == pytest.approx(3.09 * HOUR, rel=0.01)
    assert 0.9 < failures.useful(failures.best_interval(Saving(1, 30)), Saving(1, 30)) < 0.97


def run(*arguments: object):
    return CliRunner().invoke(app, ["plan", "b16_jft", "--devices", "64", "--hardware", "h100", *map(str, arguments)])


def test_the_command_says_what_failures_take_and_what_spares_give():
    small = ("--set", "model.depth=2", "--samples", 300_000_000)
    result = run("--mtbf", 500, "--repair", 12, *small, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    goodput, totals = found["goodput"], found["totals"]
    assert totals["steps"] == 7 * (300_000_000 // 4096), "whole batches of each epoch"
    assert goodput["failure_every_s"] == pytest.approx(500 * HOUR / 8)
    assert goodput["useful"] <= goodput["by_spares"][0]["useful"] + 1e-6
    step = found["choices"][found["best"]]["step_s"]
    assert goodput["best_every_s"] == pytest.approx(goodput["best_every_steps"] * step)
    days = [row["days"] for row in goodput["by_spares"]]
    assert days == sorted(days, reverse=True) and days[-1] > totals["days"]
    assert [row["spares"] for row in goodput["by_spares"]] == [0, 1, 2, 3]
    assert goodput["by_spares"][1]["device_hours"] == pytest.approx(24 * days[1] * 9 * 8)
    assert json.loads(run(*small, "--json").output)["goodput"] is None


@pytest.mark.parametrize(
    "arguments", [("--mtbf", 0), ("--mtbf", "nan"), ("--restart", 5), ("--mtbf", 5, "--repair", -1)]
)
def test_mistakes_are_told(arguments):
    assert isinstance(run(*arguments).exception, RecipeError)
