"""Audits on real DeepSpeed ranks: faults are found and named, what is right is not doubted, no bit changes."""

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import engine_faults as faults
import pytest
from engine_faults import FROM
from outcomes import column, error_of, metrics, printed
from rank_faults import poison
from ranks import asked, job, launch, make_data, quick_of

STEPS = 4
EVERY = 2
STAGES = range(4)


def content(stage: int, **others: Any) -> dict[str, Any]:
    """Two micro-batches on each of two ranks, several buckets, clipping that acts."""
    extra: dict[str, Any] = {"reduce_bucket_size": 6000} if stage else {}
    if stage == 3:
        extra["stage3_param_persistence_threshold"] = 100
    return {
        **{"precision": "bf16", "model": {"depth": 2}, "batch": {"global": 16, "micro_max": 4}},
        **{"parallelism": {"zero_stage": stage}, "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "clip_norm": 0.5}},
        **{"schedule": {"duration": {"steps": STEPS}, "warmup": {"steps": 1}}, "evaluation": {"validation": None}},
        **{"check": {"audit_every": EVERY}, "deepspeed": {"zero_optimization": extra} if extra else {}},
        **others,
    }


# Fault -> the stages that can have it, and what tells of it.
FAULTS: dict[str, tuple[tuple[int, ...], str]] = {
    "skipped_bucket": ((2, 1, 3), "without the part of any rank"),
    "doubled_bucket": ((3, 1, 2), "gradient of rank"),
    "master_not_updated": ((1, 2, 3), "update of rank 1"),
    "dtype_bug": ((0, 1), "gradient of rank"),
    "use_lost": ((2, 1), "gradient of rank"),
    "wrong_norm": ((1, 2, 3), "norm of rank"),
    "old_weights": ((3, 0, 1, 2), "weights of rank 1"),
    "moment_left_out": ((2, 0, 1, 3), "checkpoint of rank"),
}
# Stage 1 has one optimizer for one micro-batch, and another for several, into which these faults go.
OF_SEVERAL = ("dtype_bug", "old_weights")
# Of each fault one stage, and of the others when there is time.
CASES = [
    pytest.param(fault, stage, id=f"{fault}-{stage}", marks=[] if stage == stages[0] else [pytest.mark.slow])
    for fault, (stages, _) in FAULTS.items()
    for stage in stages
]

OPTIMIZERS = {
    "sgd": {"name": "sgd", "lr": 0.1, "weight_decay": 1e-2, "clip_norm": 1.0},
    "sgd-bf16": {"name": "sgd", "lr": 0.1, "momentum_dtype": "bf16", "weight_decay": 1e-2},
    "lamb": {"name": "lamb", "lr": 3e-3, "weight_decay": 0.05, "decay_exclude": "bias|norm"},
    "adafactor": {"name": "adafactor", "lr": 1e-3, "weight_decay": 0.1, "clip_norm": 1.0},
    "muon": {"name": "muon", "lr": 1e-3, "weight_decay": 0.1},
}
GROUPS = [{"match": "^cls", "frozen": True}, {"match": "^head", "lr_factor": 2.0, "weight_decay": 0.01}]
RIGHT: dict[str, dict[str, Any]] = {
    **{name: content(1 + at % 3, optimizer=optimizer) for at, (name, optimizer) in enumerate(OPTIMIZERS.items())},
    "groups": content(
        2,
        model={"depth": 2, "dropout": 0.2},
        optimizer={"lr": 3e-3, "weight_decay": 0.1, "decay_exclude": "bias", "layer_decay": 0.8, "groups": GROUPS},
        parallelism={"zero_stage": 2, "activation_checkpointing": 2},
        ema={"decay": 0.9},
        schedule={"duration": {"steps": STEPS}, "warmup": {"steps": 1}, "weight_decay": {"to": 0.3}},
    ),
    **{f"overlap-{stage}": content(stage, parallelism={"zero_stage": stage, "overlap": True}) for stage in (1, 2, 3)},
    "offload": content(2, parallelism={"zero_stage": 2, "offload": "optimizer"}),
    "reduced-in-bf16": content(2, parallelism={"zero_stage": 2, "reduce_dtype": "bf16"}),
    "fp32": content(0, precision="fp32"),
    "used-twice": content(2),
    "unused-fp32": content(0, precision="fp32"),
    "unused-bf16": content(0),
    "unused-overlap": content(1, parallelism={"zero_stage": 1, "overlap": True}),
    "with-a-batch-left-out": content(2, check={"audit_every": 1}, anomalies={"non_finite": "skip"}),
}
ODD = {
    "used-twice": [faults.used_twice],
    **{f"unused-{name}": [faults.unused] for name in ("fp32", "bf16", "overlap")},
    "with-a-batch-left-out": [partial(poison, positions={1: "nan"})],
}


@pytest.fixture(scope="module")
def root(root: Path, request: pytest.FixtureRequest) -> Path:
    """Every training on two ranks that the tests below look at."""
    jobs, parameters = [], asked(request)
    for fault, stage in ((params["fault"], params["stage"]) for params in parameters if "fault" in params):
        whole = {"batch": {"global": 16, "micro_max": 8}} if stage == 1 and fault not in OF_SEVERAL else {}
        jobs.append(job(f"{fault}-{stage}", content(stage, **whole), faults=[getattr(faults, fault)]))
    for name in (params["name"] for params in parameters if "name" in params):
        jobs.append(job(f"right-{name}", RIGHT[name], faults=ODD.get(name, [])))
    warned = content(2, check={"audit_every": EVERY, "audit": "warn"})
    jobs.append(job("warned", warned, faults=[faults.skipped_bucket]))
    for stage in (params["audited"] for params in parameters if "audited" in params):
        jobs.append(job(f"audited-{stage}", content(stage)))
        jobs.append(job(f"unaudited-{stage}", content(stage, check={"audit_every": None})))
    launch(root, jobs, 2)
    return root


@pytest.mark.parametrize(("fault", "stage"), CASES)
def test_a_fault_is_found_by_the_first_audit(root, fault, stage):
    error = error_of(root, f"{fault}-{stage}")
    assert error["kind"] == "AuditError" and error["code"] == 75
    assert f"step {FROM}: " in error["message"] and FAULTS[fault][1] in error["message"], error["message"]
    assert len(metrics(root, f"{fault}-{stage}")) == FROM - 1  # the steps before, audited as well, are right


def test_the_rank_is_named_whose_part_came_twice(root):
    assert "twice the part of rank 1" in error_of(root, "doubled_bucket-3")["message"]


# Overlap of stage 1 is that of "unused-overlap" and of stage 2, "fp32" that of its unused.
@pytest.mark.parametrize("name", quick_of(RIGHT, set(RIGHT) - {"sgd-bf16", "overlap-1", "fp32", "unused-bf16"}))
def test_a_right_update_is_not_doubted(root, name):
    assert len(metrics(root, f"right-{name}")) == STEPS


def test_a_recipe_may_want_it_said_only(root):
    assert len(metrics(root, "warned")) == STEPS
    said = [line for line in printed(root, "warned").splitlines() if "gradient of rank" in line]
    assert len(said) == 1 and all("WARNING" in line for line in said)


@pytest.mark.parametrize("audited", quick_of(STAGES, (0, 1, 3)))  # 1 and 2 are one optimizer of DeepSpeed's
def test_an_audit_changes_no_bit(root, audited):
    for key in ("loss", "grad_norm", "batch_digest"):
        assert column(root, f"audited-{audited}", key) == column(root, f"unaudited-{audited}", key)
    assert files(root, f"audited-{audited}") == files(root, f"unaudited-{audited}")


def files(root: Path, name: str) -> dict[str, str]:
    """SHA-256 of what each rank has written."""
    written = sorted((root / "runs" / name / "checkpoints").rglob("*.safetensors"))
    assert len(written) == 2
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in written}


WORLDS = (1, 2, 4)
MANY = 85  # steps of each stage, world and precision: 2,040 in all


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_thousands_of_right_updates_are_not_doubted(tmp_path, world):
    """Every step is audited, with four, two and one micro-batches; an alarm would end the run."""
    make_data(tmp_path)
    runs = {
        f"{precision}-{stage}": content(
            stage,
            precision=precision,
            model={"depth": 1},
            batch={"global": 8, "micro_max": 2},
            schedule={"duration": {"steps": MANY}, "warmup": {"steps": 5}},
            logging={"every": 1, "trackers": []},
            check={"audit_every": 1},
        )
        for precision in ("bf16", "fp32")
        for stage in STAGES
    }
    launch(tmp_path, [job(name, blocks) for name, blocks in runs.items()], world)
    for name in runs:
        assert len(metrics(tmp_path, name)) == MANY, error_of(tmp_path, name)
