"""What only a CUDA device can show, in processes that see one.

    pytest -m "gpu and not slow" tests/gpu      under 4 minutes, first: kernels, memory, a compiled run that is audited
    pytest -m gpu tests/gpu                     all

What needs more than one device, or more time, and so has no test:

- NCCL in training/exchange.py: `deepspeed --num_gpus 2 vitscale/pretrain.py --recipe b16_i1k --smoke` with
  `parallelism.overlap` on and off in stages 1 and 2, and `check.audit_every=1`: equal digests, losses near each other;
- no false alarm of the ranks' comparison: the same with `check.recompute_every=1`;
- threads and cores of ranks near their device: `taskset -p` of each rank, on a machine with two NUMA nodes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import on_a_gpu
import pytest
import torch
import yaml
from training.ranks import BASE, STEPS, make_data

ROOT = Path(__file__).resolve().parents[2]
SEEN = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
if "VITSCALE_TEST_DEVICES" in SEEN:
    SEEN["CUDA_VISIBLE_DEVICES"] = SEEN["VITSCALE_TEST_DEVICES"]
ENVIRONMENT = {
    **SEEN,
    "PYTHONPATH": os.pathsep.join(
        [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "planning"), str(ROOT / "benchmarks")]
    ),
}
LATER = ("float8", "speed")  # the first needs torchao
SLOW = pytest.mark.slow


def has_device() -> bool:
    if torch.version.cuda is None and torch.version.hip is None:
        return False  # this torch knows none
    command = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    return subprocess.run(command, env=ENVIRONMENT).returncode == 0


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_device(), reason="no CUDA device here")]


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW if name in LATER else ()) for name in on_a_gpu.CHECKS])
def test_kernels_and_memory(name):
    outcome = subprocess.run([sys.executable, on_a_gpu.__file__, name], env=ENVIRONMENT, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("gpu")
    make_data(place)
    (place / "toy.yaml").write_text(yaml.safe_dump(BASE))
    return place


def train(place: Path, name: str, *settings: str, stop_at: int | None = None) -> list[dict[str, Any]]:
    """One rank; the lines of metrics of its steps."""
    command = [sys.executable, str(ROOT / "vitscale" / "pretrain.py"), "--recipe", str(place / "toy.yaml")]
    command += ["--run-dir", str(place / name), *(() if stop_at is None else ("--stop-at", str(stop_at)))]
    for setting in (f"data.root={place}", *settings):
        command += ["--set", setting]
    outcome = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=500)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    lines = map(json.loads, (place / name / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def column(lines: list[dict[str, Any]], key: str) -> list[Any]:
    return [line[key] for line in lines]


def test_a_run_that_is_left_to_the_device_is_audited(place):
    """`auto` everywhere: compiled, and every update that of DeepSpeed's and torch's own rules."""
    lines = train(place, "auto", "parallelism.compile=auto", "check.audit_every=1", stop_at=3)
    assert len(lines) == 3
    settled = yaml.safe_load((place / "auto" / "recipe.yaml").read_text())["parallelism"]
    assert settled["zero_stage"] < 3 and settled["compile"] is True and settled["overlap"] is False


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_every_stage_trains_as_the_first(place, precision):
    runs = [
        train(place, f"{precision}-{stage}", f"precision={precision}", f"parallelism.zero_stage={stage}", stop_at=2)
        for stage in range(4)
    ]
    for run in runs[1:]:
        assert column(run, "batch_digest") == column(runs[0], "batch_digest")
        assert column(run, "loss") == pytest.approx(column(runs[0], "loss"), rel=1e-3 if precision == "bf16" else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_a_resumed_run_goes_on_exactly(place, stage):
    """To the last bit, where two runs that nothing happens to are equal to the last bit."""
    blocks = (f"parallelism.zero_stage={stage}", "model.dropout=0.2", "batch.micro_max=4")
    whole, again = (train(place, f"{name}-{stage}", *blocks) for name in ("whole", "again"))
    train(place, f"resumed-{stage}", *blocks, stop_at=3)
    resumed = train(place, f"resumed-{stage}", *blocks)
    assert len(whole) == len(resumed) == STEPS
    assert column(resumed, "batch_digest") == column(whole, "batch_digest")
    if column(again, "loss") == column(whole, "loss"):
        assert column(resumed, "loss") == column(whole, "loss")
    assert column(resumed, "loss") == pytest.approx(column(whole, "loss"), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled", [False, True])
def test_float8_trains_as_bf16(place, is_compiled):
    blocks = (f"parallelism.compile={is_compiled}", "parallelism.activation_checkpointing=1")
    runs = (train(place, f"{name}-{is_compiled}", f"precision={name}", *blocks) for name in ("bf16", "fp8"))
    bf16, fp8 = (column(lines, "loss") for lines in runs)
    assert fp8 == pytest.approx(bf16, rel=0.05) and fp8 != bf16


def test_compiled_blocks_train_as_eager_ones(place):
    eager, compiled = (train(place, f"compile-{on}", f"parallelism.compile={on}") for on in ("false", "true"))
    assert column(compiled, "loss") == pytest.approx(column(eager, "loss"), rel=1e-2)
