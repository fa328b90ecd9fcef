"""Two real DeepSpeed ranks: every ZeRO stage, resumed exactly, against a plain PyTorch loop."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from finished_runs import evaluate_run
from outcomes import assert_same_run, checkpoint, column, error_of, everything, store
from rank_faults import note_set_up
from ranks import SHARDS, STEPS, asked, batches, begun, job, launch, make_recipe, quick_of
from torch.nn import functional as F

from vitscale.data.shards.generated import write_generated_dataset

DROPOUT = {"dropout": 0.2}
BLOCKS: dict[str, dict[str, Any]] = {
    f"zero{stage}-{precision}": {
        "precision": precision,
        "model": DROPOUT if precision == "bf16" else {},
        "parallelism": {"zero_stage": stage, "activation_checkpointing": 2 if precision == "bf16" else 0},
        "batch": {"micro_max": 4},
    }
    for stage in range(4)
    for precision in ("bf16", "fp32")
}
BLOCKS |= {
    f"overlap{stage}": {
        "model": DROPOUT,
        "parallelism": {"zero_stage": stage, "overlap": True, "activation_checkpointing": 2},
        "batch": {"micro_max": 4},
        "deepspeed": {"zero_optimization": {"reduce_bucket_size": 4000}},  # some to a block
    }
    for stage in (1, 2, 3)
}
BLOCKS["sgd"] = {"optimizer": {"name": "sgd", "lr": 0.05}, "parallelism": {"zero_stage": 1}}
BLOCKS["offload"] = {"parallelism": {"zero_stage": 2, "offload": "optimizer"}}
BLOCKS["no-decay-group"] = {"optimizer": {"decay_exclude": r"bias|norm|cls|pos"}, "parallelism": {"zero_stage": 3}}
# What `make test` compares and interrupts. test_state_on_ranks.py interrupts every stage of bf16, with more that has a
# state; stages 1 and 2 overlap by the same code.
COMPARED = ["zero0-bf16", "zero1-bf16", "zero2-bf16", "zero3-bf16", "zero0-fp32", "zero1-fp32"]
OVERLAPPED = ["overlap1", "overlap2", "overlap3"]
INTERRUPTED = ["zero0-fp32", "sgd", "overlap2", "overlap3"]
if find_spec("torchao") is not None:
    BLOCKS["fp8"] = BLOCKS["zero2-bf16"] | {"precision": "fp8"}
    INTERRUPTED.append("fp8")


@pytest.fixture(scope="module")
def root(root: Path, request: pytest.FixtureRequest) -> Path:
    """Every training that the tests below look at."""
    write_generated_dataset(root / "other" / "train", SHARDS, seed=3)
    write_generated_dataset(root / "other" / "test", [13, 10], seed=2)
    parameters = asked(request)
    interrupted = [params["interrupted"] for params in parameters if "interrupted" in params]
    overlapped = [params["name"] for params in parameters if "name" in params]
    late = [params["late"] for params in parameters if "late" in params]
    whole = dict.fromkeys([*COMPARED, *interrupted, *late, *(["fp8"] if "fp8" in BLOCKS else [])])
    jobs = [job(name, BLOCKS[name]) for name in whole]
    jobs += [job(f"{name}-resumed", BLOCKS[name], 3, None) for name in interrupted]
    for name in overlapped:  # a norm depends on how parameters are grouped, in its last bits, and clipping on the norm
        unclipped = {**BLOCKS[name], "optimizer": {"clip_norm": None}}
        jobs.append(job(f"{name}-unclipped", unclipped))
        jobs.append(job(f"{name}-by-deepspeed", unclipped | without_overlap(name)))
    for name in late:
        jobs.append(job(f"{name}-late", [BLOCKS[name] | without_overlap(name), BLOCKS[name]], 3, None))
    jobs += [
        job("plain", PLAIN, faults=[note_set_up]),
        job("impatient", IMPATIENT),
        job("other-data", [{}, {"data": {"root": str(root / "other")}}], 2, None),
        job("fewshot", FEWSHOT),
    ]
    launch(root, jobs, 2)
    return root


PLAIN = {"precision": "fp32", "parallelism": {"zero_stage": 2}, "batch": {"micro_max": 4}}
IMPATIENT = {
    "optimizer": {"lr": 1e-12},
    "schedule": {"duration": {"steps": 40}, "end_lr": 0.0},
    "evaluation": {"every": {"steps": 2}, "validation": "test", "batch": 8},
    "selection": {"metric": "validation/top1", "patience": 2},
}
FEWSHOT = {
    "parallelism": {"zero_stage": 3},
    "evaluation": {
        "every": {"steps": 3},
        "validation": "test",
        "fewshot": {"tasks": [{"name": "toy", "train": "train", "test": "test"}], "shots": [1, 5], "seeds": 2},
    },
}


def without_overlap(name: str) -> dict[str, Any]:
    return {"parallelism": {**BLOCKS[name]["parallelism"], "overlap": False}}


@pytest.mark.parametrize("interrupted", quick_of(BLOCKS, INTERRUPTED))
def test_an_interrupted_run_equals_the_uninterrupted_one_to_the_last_bit(root, interrupted):
    assert set(column(root, interrupted, "world_size")) == {2}
    assert_same_run(root, interrupted, f"{interrupted}-resumed")


@pytest.mark.parametrize("name", quick_of(OVERLAPPED, ["overlap2", "overlap3"]))
def test_what_is_sent_while_computing_is_what_deepspeed_sends(root, name):
    """On two ranks every sum is the same to the last bit, as there is one order only.

    torch's fused AdamW rounds the last elements of a tensor otherwise than those before, and tensors are cut elsewhere.
    """
    assert column(root, f"{name}-unclipped", "loss") == column(root, f"{name}-by-deepspeed", "loss")
    ours, theirs = (everything(checkpoint(root, f"{name}-{way}")) for way in ("unclipped", "by-deepspeed"))
    assert ours.keys() == theirs.keys()
    for key, values in ours.items():
        torch.testing.assert_close(values, theirs[key], rtol=2.0**-22, atol=0.0, msg=key)
        assert (values != theirs[key]).sum() <= 8, key


@pytest.mark.parametrize("late", quick_of(OVERLAPPED, ["overlap2"]))
def test_a_run_may_begin_without_and_go_on_with_it(root, late):
    """Buckets are of no concern to a checkpoint."""
    assert column(root, f"{late}-late", "loss") == pytest.approx(column(root, late, "loss"), rel=1e-5)


def test_all_stages_compute_the_same(root):
    """Sums are rounded in another order, nothing else: fp32 to 1e-5, bf16 to a few steps of its 8 bits."""
    for precision, tolerance in (("bf16", 3e-3), ("fp32", 1e-5)):
        runs = [name for name in BLOCKS if name.endswith(precision) and (root / "runs" / name).exists()]
        assert len(runs) > 1
        for other in runs[1:]:
            assert column(root, other, "loss") == pytest.approx(column(root, runs[0], "loss"), rel=tolerance), other
            norms = column(root, other, "grad_norm")
            assert norms == pytest.approx(column(root, runs[0], "grad_norm"), rel=10 * tolerance), other
    assert column(root, "zero1-fp32", "loss") == pytest.approx(column(root, "plain", "loss"), rel=1e-5)


@pytest.mark.skipif("fp8" not in BLOCKS, reason="needs torchao")
def test_products_in_float8_are_near_those_of_bf16_and_not_the_same(root):
    ours, other = column(root, "fp8", "loss"), column(root, "zero2-bf16", "loss")
    assert ours == pytest.approx(other, rel=0.02)
    assert ours[1:] != other[1:]
    assert column(root, "fp8", "batch_digest") == column(root, "zero2-bf16", "batch_digest")


def test_losses_equal_those_of_a_plain_loop_with_the_optimizer_written_out(root):
    """fp32, ZeRO-2, two ranks, two micro-batches each, against one process, the authors' AdamW and schedule by hand."""
    recipe = make_recipe(root, precision="fp32")
    objective = begun(recipe)
    parameters = list(objective.parameters())
    first, second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    losses = []
    for t, (batch, (images,)) in enumerate(batches(recipe, STEPS)):
        logits = objective.backbone(images[:, 0]).logits
        targets = F.one_hot(batch.labels, 7).float()
        loss = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=1).mean()
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, parameters)
        norm = torch.sqrt(sum((g.double() ** 2).sum() for g in gradients)).item()
        factor = min(1.0, 1.0 / (norm + 1e-6))
        progress = min(max((t - 2) / (STEPS - 2), 0.0), 1.0)
        rate = (1e-5 + (3e-3 - 1e-5) * (1 - progress)) * min(1.0, t / 2)
        with torch.no_grad():
            for p, g, m, v in zip(parameters, gradients, first, second, strict=True):
                g = g * factor
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g * g)
                step = (m / (1 - 0.9 ** (t + 1))) / ((v / (1 - 0.999 ** (t + 1))).sqrt() + 1e-8)
                p.sub_(rate * 0.1 * p + rate * step)
        assert column(root, "plain", "lr")[t] == pytest.approx(rate, rel=1e-9, abs=1e-12)
        assert column(root, "plain", "grad_norm")[t] == pytest.approx(norm, rel=1e-3)
    assert column(root, "plain", "loss") == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < losses[0] - 0.1, "too small a change to tell one optimizer from another"


def test_few_shot_evaluation_on_schedule_under_zero_3_and_alone(root):
    lines = [json.loads(line) for line in (root / "runs" / "fewshot" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "eval/fewshot/toy/5shot" in line]
    assert [line["step"] for line in evaluations] == [3, 6]
    _, alone = evaluate_run(root / "runs" / "fewshot")
    for metric in ("fewshot/toy/1shot", "fewshot/toy/5shot", "validation/top1"):
        assert alone[metric] == evaluations[-1][f"eval/{metric}"]
    assert alone["fewshot/toy/5shot"] > 0.5, "seven colours are told apart by any representation"


def test_a_run_without_progress_stops_early_and_keeps_its_best(root):
    done = json.loads((root / "runs" / "impatient" / "DONE").read_text())
    assert done["stopped_early"] and done["step"] == 6  # best at 2, then two evaluations without a better one
    assert done["best_step"] == 2
    assert store(root, "impatient").steps() == [2, 6]


def test_every_process_group_has_our_time_out_and_nothing_is_compiled(root):
    for rank in (0, 1):
        set_up = json.loads((root / "runs" / f"set-up-{rank}.json").read_text())
        assert len(set_up["timeouts"]) >= 2 and set(set_up["timeouts"]) == {660.0, 7200.0}
        assert set_up["shm_op"] is False


def test_other_data_under_a_run_are_refused(root):
    error = error_of(root, "other-data")
    assert error["kind"] == "CheckpointError" and "manifest_sha256" in error["message"]
