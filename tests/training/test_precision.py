"""`precision: auto`: what a run computes in where its recipe leaves it to the device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import vitscale
from vitscale.data.shards.generated import write_generated_dataset

# oneDNN's own way to do without an instruction, whatever processor the tests run on.
WITHOUT_BF16 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of processors; a CUDA device computes bf16")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("precision")
    write_generated_dataset(folder / "train", [32])
    content = {
        "model": {"patch_size": 8, "width": 16, "depth": 1, "mlp_dim": 16, "num_heads": 1, "head": "linear"},
        "data": {"train": "train", "root": str(folder), "image_size": 16},
        "batch": {"global": 4},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "schedule": {"duration": {"steps": 4}},
        "logging": {"tensorboard": False},
    }
    (folder / "small.yaml").write_text(yaml.safe_dump(content))
    return folder / "small.yaml"


def pretrain(recipe: Path, run_dir: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    script = Path(vitscale.__file__).with_name("pretrain.py")
    command = [sys.executable, str(script), "--recipe", str(recipe), "--run-dir", str(run_dir), *arguments]
    # Told not to use an instruction before the test, oneDNN is to use it again where the test does not say so.
    own = {key: value for key, value in os.environ.items() if key not in WITHOUT_BF16}
    return subprocess.run(command, env={**own, **environment}, capture_output=True, text=True, check=False)


def precision_of(run_dir: Path) -> str:
    """By the resolved recipe, and by that of the newest checkpoint, which have to be one."""
    index = max((run_dir / "checkpoints").glob("step-*/index.json"))
    written = json.loads(index.read_text())["recipe"]["precision"]
    assert yaml.safe_load((run_dir / "recipe.yaml").read_text())["precision"] == written
    return written


@pytest.mark.parametrize(
    ("precision", "environment"),
    [("fp32", {}), pytest.param("bf16", WITHOUT_BF16, marks=pytest.mark.slow)],
)
def test_without_bf16_a_run_computes_in_fp32_unless_told_otherwise_and_stays_so(
    recipe, tmp_path, precision, environment
):
    """On whatever processor it goes on, or on one that lacks the instructions as well."""
    told = [] if precision == "fp32" else ["--set", f"precision={precision}"]
    begun = pretrain(recipe, tmp_path / "run", "--stop-at", "2", *told, **WITHOUT_BF16)
    assert begun.returncode == 0, begun.stderr
    assert f"precision {precision}" in begun.stdout
    assert precision_of(tmp_path / "run") == precision
    resumed = pretrain(recipe, tmp_path / "run", **environment)
    assert resumed.returncode == 0, resumed.stderr
    assert precision_of(tmp_path / "run") == precision


def test_what_goes_with_bf16_alone_is_refused_where_auto_is_fp32(recipe, tmp_path):
    refused = pretrain(recipe, tmp_path / "run", "--set", "parallelism.reduce_dtype=bf16", **WITHOUT_BF16)
    assert refused.returncode == 2
    assert "reduce_dtype" in refused.stderr and not (tmp_path / "run").exists()
