"""Batches that must not be trained on, on two real DeepSpeed ranks: what is left out leaves no trace.

Each run is compared, to the last bit of losses, weights, moments and averages, with one that was told beforehand which
positions of the order to leave out, and that never saw a bad loss.
"""

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from outcomes import assert_same_run, checkpoint, column, error_of, printed, store
from rank_faults import leave_out, poison, write_slowly
from ranks import SHARDS, STEPS, asked, job, launch

from vitscale.data.order import TrainOrder

SPIKE_STEPS = 9


ADAMW, SGD = {"lr": 3e-3, "decay_exclude": "bias|norm"}, {"name": "sgd", "lr": 0.05, "decay_exclude": "bias|norm"}


def blocks(
    stage: int,
    precision: str,
    *,
    steps: int = STEPS,
    optimizer: Any = ADAMW,
    offload: str = "none",
    overlap: bool = False,
    **anomalies: Any,
) -> dict[str, Any]:
    """All that keeps state is on: dropout, two micro-batches a step, the average, two groups of parameters."""
    return {
        **{"precision": precision, "model": {"dropout": 0.2}, "batch": {"micro_max": 4}, "optimizer": optimizer},
        "schedule": {"duration": {"steps": steps}, "warmup": {"steps": 2}},
        "parallelism": {"zero_stage": stage, "activation_checkpointing": 2, "offload": offload, "overlap": overlap},
        **{"ema": {"decay": 0.9}, "checkpoint": {"every": {"steps": 2}, "keep": 20}},
        **{"evaluation": {"validation": None}, "anomalies": anomalies},
    }


@dataclass(frozen=True)
class Case:
    """A run with bad losses at some positions, and the ranges of positions that it leaves out in the end.

    `policy` is that of losses that are not finite; with `spike`, that of leaps, the run is longer.
    """

    policy: str
    positions: dict[int, str | float]
    skipped: list[list[int]]
    stage: int = 1
    precision: str = "bf16"
    spike: str | None = None
    row: tuple[int, int] = (1, 5)  # rank, and row of its batch: by default in the second micro-batch
    stops: tuple[int | None, ...] = (None,)
    is_slow: bool = False
    optimizer: str = "adamw"
    offload: str = "none"
    overlap: bool = False

    @property
    def steps(self) -> int:
        return STEPS if self.spike is None else SPIKE_STEPS

    @property
    def reference(self) -> str:
        ranges = "-".join(f"{start}to{stop}" for start, stop in self.skipped)
        how = f"zero{self.stage}-{self.precision}-{self.optimizer}-{self.offload}-{self.overlap}"
        return f"without-{ranges}-{how}-{self.steps}"

    def jobs(self, name: str) -> list[dict[str, Any]]:
        rank, row = self.row
        bad = partial(poison, positions=self.positions, rank=rank, row=row)
        known = partial(leave_out, ranges=self.skipped)
        watch = {} if self.spike is None else {"spike": {"policy": self.spike, "window": 5, "factor": 10}}
        anomalies = {"non_finite": self.policy, **watch}
        optimizer = SGD if self.optimizer == "sgd" else ADAMW
        how = {"steps": self.steps, "optimizer": optimizer, "offload": self.offload, "overlap": self.overlap}
        content = blocks(self.stage, self.precision, **how, **anomalies)
        return [job(name, content, *self.stops, faults=[bad]), job(self.reference, content, faults=[known])]


# Others of these are met in every run of the tests by the cases below.
QUICK = {"skip-zero0-bf16", "skip-zero3-bf16", "skip-spike-zero0-fp32", "skip-offload-zero2-bf16"}
CASES = {
    name: Case(policy, {3: "nan"}, skipped, stage, precision, is_slow=name not in QUICK)
    for policy, skipped in (("skip", [[3, 4]]), ("rewind", [[2, 4]]))
    for stage in range(4)
    for precision in ("bf16", "fp32")
    for name in [f"{policy}-zero{stage}-{precision}"]
}
CASES |= {
    name: Case("stop", {7: 1e4}, skipped, stage, precision, spike=policy, is_slow=name not in QUICK)
    for policy, skipped in (("skip", [[7, 8]]), ("rewind", [[6, 8]]))
    for stage in range(4)
    for precision in ("bf16", "fp32")
    for name in [f"{policy}-spike-zero{stage}-{precision}"]
}
CASES |= {
    # ---- which batch
    "skip-first": Case("skip", {0: "nan"}, [[0, 1]], is_slow=True),
    "skip-last": Case("skip", {5: "inf"}, [[5, 6]], is_slow=True),
    "skip-two-in-a-row": Case("skip", {5: "inf", 6: "nan"}, [[5, 7]]),  # the second begins the next epoch
    "skip-two": Case("skip", {1: "nan", 4: "inf"}, [[1, 2], [4, 5]], 3, is_slow=True),
    "rewind-first": Case("rewind", {0: "nan"}, [[0, 1]], is_slow=True),
    "rewind-before-any-checkpoint": Case("rewind", {1: "nan"}, [[0, 2]]),
    "rewind-last": Case("rewind", {5: "nan"}, [[4, 6]], is_slow=True),
    "rewind-two": Case("rewind", {3: "nan", 7: "nan"}, [[2, 4], [6, 8]], is_slow=True),
    "rewind-twice-to-one-checkpoint": Case("rewind", {3: "nan", 5: "inf"}, [[2, 6]], 3, is_slow=True),
    # ---- which sample, and what of it
    "first-micro-batch": Case("skip", {3: "nan"}, [[3, 4]], row=(0, 1)),
    "first-micro-batch-zero2": Case("skip", {3: "inf"}, [[3, 4]], 2, row=(0, 1), is_slow=True),
    "first-micro-batch-zero3": Case("skip", {3: "inf"}, [[3, 4]], 3, row=(0, 1), is_slow=True),
    "gradient-only": Case("skip", {3: "gradient"}, [[3, 4]], is_slow=True),
    "loss-only": Case("skip", {3: "value"}, [[3, 4]]),
    "loss-only-plain": Case("skip", {3: "value"}, [[3, 4]], 0, "fp32", is_slow=True),
    "infinite-loss-is-no-leap": Case("skip", {7: "value"}, [[7, 8]], 0, "fp32", spike="stop"),
    # ---- another optimizer, and another place for its state
    **{
        f"skip-sgd-{name}": Case("skip", {0: "nan", 3: "nan"}, [[0, 1], [3, 4]], *how, is_slow=True, optimizer="sgd")
        for name, how in {
            "plain": (0, "fp32"),
            "zero0": (0, "bf16"),
            "zero2": (2, "bf16"),
            "zero3": (3, "fp32"),
        }.items()
    },
    **{
        name: Case(policy, {3: "nan"}, skipped, stage, precision, is_slow=name not in QUICK, offload="optimizer")
        for policy, skipped in (("skip", [[3, 4]]), ("rewind", [[2, 4]]))
        for stage, precision in ((1, "bf16"), (2, "bf16"), (3, "bf16"), (2, "fp32"), (3, "fp32"))
        for name in [f"{policy}-offload-zero{stage}-{precision}"]
    },
    # ---- sent while something is computed
    **{
        name: Case(policy, {3: "nan"}, skipped, stage, overlap=True, is_slow=name != "rewind-overlap-zero1")
        for policy, skipped in (("skip", [[3, 4]]), ("rewind", [[2, 4]]))
        for stage in (1, 2, 3)
        for name in [f"{policy}-overlap-zero{stage}"]
    },
    "skip-spike-overlap": Case("stop", {7: 1e4}, [[7, 8]], 2, spike="skip", overlap=True, is_slow=True),
    # ---- interrupted before, at and after it
    "skip-resumed": Case("skip", {3: "nan"}, [[3, 4]], stops=(3, 4, None)),
    "rewind-resumed": Case("rewind", {3: "nan"}, [[2, 4]], 2, stops=(1, 2, 5, None)),
    "skip-spike-resumed": Case("stop", {7: 1e4}, [[7, 8]], spike="skip", stops=(4, 7, 8, None), is_slow=True),
    "rewind-spike-resumed": Case("stop", {7: 1e4}, [[6, 8]], 2, spike="rewind", stops=(3, 6, 8, None)),
}
ENDS: dict[str, tuple[dict[str, Any], dict[int, str | float]]] = {
    "stop": (blocks(2, "bf16"), {4: "nan"}),
    "stop-spike": (blocks(1, "bf16", steps=SPIKE_STEPS, spike={"window": 5}), {6: 1e4}),
    "limit-skip": (blocks(1, "bf16", non_finite="skip", limit=2), {1: "nan", 3: "nan", 5: "nan"}),
    "limit-rewind": (blocks(0, "fp32", non_finite="rewind", limit=1), {1: "inf", 3: "inf"}),
}
BAD_RANK, BAD_ROW = 1, 6
SKIP = blocks(1, "bf16", non_finite="skip")


@pytest.fixture(scope="module")
def root(root: Path, request: pytest.FixtureRequest) -> Path:
    """Every training that the tests below look at."""
    cases = {"skip-resumed", *(params["case"] for params in asked(request) if "case" in params)}
    jobs = {each["name"]: each for name, case in CASES.items() if name in cases for each in case.jobs(name)}
    for name, (content, positions) in ENDS.items():
        bad = partial(poison, positions=positions, rank=BAD_RANK, row=BAD_ROW)
        jobs[name] = job(name, content, faults=[bad, partial(write_slowly, seconds=0.2)])
    moved = job("moved", SKIP, 4, faults=[partial(poison, positions={3: "nan"})])
    launch(root, [*jobs.values(), moved], 2)
    launch(root, [job("moved-on", SKIP, directory="moved")], 1)
    return root


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] if case.is_slow else []) for name, case in CASES.items()]
)
def test_what_is_left_out_leaves_no_trace(root, case):
    expected = CASES[case]
    assert_same_run(root, case, expected.reference, expected.steps)
    index, reference = (checkpoint(root, name, expected.steps).index for name in (case, expected.reference))
    assert index.anomalies["skipped"] == expected.skipped
    assert index.anomalies["count"] == len(expected.positions)
    assert index.anomalies.get("losses") == reference.anomalies.get("losses")
    assert (
        index.position == reference.position == expected.steps + sum(stop - start for start, stop in expected.skipped)
    )
    assert len(list((root / "runs" / case / "anomalies").iterdir())) == len(expected.positions)


def uids_at(position: int) -> list[list[int]]:
    """Of each of two ranks, by the order alone: shards are whole, and uids count their slots."""
    order, uids = TrainOrder(SHARDS, 16, 0), []
    for first in (0, 8):
        slots = order.batch(position, first, first + 8)
        uids.append([sum(SHARDS[:shard]) + slot for shard, slot in zip(slots.shard, slots.position, strict=True)])
    return uids


def report(root: Path, name: str, step: int) -> dict[str, Any]:
    """What is written of an anomaly; JSON without the NaN that Python's reader takes too."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    (path,) = (root / "runs" / name / "anomalies").glob(f"step-{step:08d}-*.json")
    return json.loads(path.read_text(), parse_constant=refuse)


def test_stopping_names_the_sample_and_saves_nothing_of_the_step(root):
    error, found = error_of(root, "stop"), report(root, "stop", 5)
    bad = uids_at(4)[BAD_RANK][BAD_ROW]
    assert error["kind"] == "NonFiniteError" and error["code"] == 4
    for words in ("step 5:", f"not finite on rank {BAD_RANK} (uids {bad})", "newest checkpoint is that of step 4"):
        assert words in error["message"]
    assert "anomalies.non_finite" in error["message"] and "optimizer.lr" in error["message"]
    assert [rank["uids"] for rank in found["ranks"]] == uids_at(4)
    losses = [loss for rank in found["ranks"] for loss in rank["losses"]]
    assert [index for index, loss in enumerate(losses) if loss is None] == [8 * BAD_RANK + BAD_ROW]
    assert found["kind"] == "non-finite" and found["policy"] == "stop" and found["position"] == 4
    assert found["loss"] is None and found["grad_norm"] is None and found["lr"] > 0
    assert column(root, "stop", "step") == [1, 2, 3, 4] and not (root / "runs" / "stop" / "DONE").exists()


def test_a_save_under_way_is_complete_when_the_run_stops(root):
    """The writing of step 4 takes longer than the step that fails."""
    assert error_of(root, "stop")["saved"] == store(root, "stop").steps() == [2, 4]
    assert checkpoint(root, "stop", 4).index.position == 4


def test_a_leap_that_stops_says_how_far(root):
    error, found = error_of(root, "stop-spike"), report(root, "stop-spike", 7)
    assert error["code"] == 4 and "anomalies.spike.policy" in error["message"]
    assert all(part in error["message"] for part in ("step 7:", f"{found['loss']:.6g}"))
    losses = [loss for rank in found["ranks"] for loss in rank["losses"]]
    assert math.fsum(losses) / 16 == pytest.approx(found["loss"], rel=1e-6)
    assert max(losses) == losses[8 * BAD_RANK + BAD_ROW] > 1e3 * min(losses)
    assert column(root, "stop-spike", "step") == list(range(1, 7)) and error["saved"] == [2, 4, 6]


@pytest.mark.parametrize(("name", "limit", "saved"), [("limit-skip", 2, [2]), ("limit-rewind", 1, [])])
def test_a_run_ends_at_the_limit(root, name, limit, saved):
    error = error_of(root, name)
    assert error["kind"] == "NonFiniteError" and error["code"] == 4
    assert f"{limit} of anomalies.limit {limit}" in error["message"]
    assert printed(root, name).count("WARNING: step") == limit
    assert f"({limit} of anomalies.limit {limit})" in printed(root, name)
    assert error["saved"] == saved


def test_a_skipped_batch_stays_skipped_on_another_world(root):
    """Two ranks to step 4, and then one; the sums of bf16 products are rounded in another order."""
    whole = CASES["skip-resumed"].reference
    assert column(root, "moved", "world_size") == [2, 2, 2, 2, 1, 1]
    for key in ("step", "lr", "batch_digest"):
        assert column(root, "moved", key) == column(root, whole, key)
