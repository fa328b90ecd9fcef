"""Three real ranks look around before a run: each job of one launch has something wrong with it."""

import json
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from preflight_ranks import run_jobs
from ranks import make_data, start

import vitscale
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.training.watching.preflight import code_fingerprint

HOST = socket.gethostname()
B16 = {"model": {"name": "ViT-B/16", "patch_size": 16, "width": 768, "depth": 12, "mlp_dim": 3072, "num_heads": 12}}
LARGE = {**B16, "data": {"image_size": 224}, "batch": {"global": 3 * 4096, "micro_max": 4096}}
HUGE = {"model": {"width": 2**14, "depth": 64, "mlp_dim": 2**16, "num_heads": 64}}
JOBS: list[dict[str, Any]] = [
    {"name": "good"},
    {"name": "manifest", "manifest": "other"},
    {"name": "recipe", "other": {"optimizer": {"name": "sgd", "lr": 0.25}}},
    {"name": "code", "code": "# one more line\n"},
    {"name": "folder", "run_dir": "elsewhere/run"},
    {"name": "full", "checkpoint_bytes": 10**18},
    {"name": "micro-batch", "recipe": LARGE},
    {"name": "model", "recipe": HUGE},
    {"name": "remote", "recipe": {"checkpoint": {"dir": "memory://bucket/runs"}}, "run_dir": "elsewhere/run"},
    {"name": "tokens", "tokens": [10**6, 2**60]},
    {"name": "trackers", "recipe": {"logging": {"trackers": ["tensorboard", "comet_ml", "clearml"]}}},
    {"name": "float8", "recipe": {"precision": "fp8"}, "without": ["torchao"]},
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each job came to, rank by rank."""
    root = tmp_path_factory.mktemp("preflight")
    make_data(root)
    write_generated_dataset(root / "other", [24], seed=7)
    shutil.copytree(Path(vitscale.__file__).parent, root / "code" / "vitscale")
    shutil.copytree(root / "code", root / "other-code")
    # Twice this fits, three times does not.
    tight = {"name": "tight", "checkpoint_bytes": int(shutil.disk_usage(root).free / 2.2)}
    jobs = [*JOBS, tight]
    (root / "run/checkpoints/.building-step-00000007").mkdir(parents=True)  # of a save that was killed
    found = preflight_on(3, root, jobs)
    leftovers = [path.name for path in (root / "run/checkpoints").iterdir()]
    assert leftovers == []
    return found | preflight_on(6, root, [{"name": "good on six"}])


def preflight_on(ranks: int, root: Path, jobs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    start(run_jobs, root, jobs, ranks)
    names = [job["name"] for job in jobs]
    return {name: [json.loads((root / f"{name}-{rank}.json").read_text()) for rank in range(ranks)] for name in names}


def error_of(outcomes: dict[str, list[dict[str, Any]]], name: str) -> str:
    """The message, which all ranks raise alike."""
    assert len({outcome["error"] for outcome in outcomes[name]}) == 1
    assert all(outcome["on_all_ranks"] for outcome in outcomes[name])
    return outcomes[name][0]["error"]


def warnings_of(outcomes: dict[str, list[dict[str, Any]]], name: str) -> list[str]:
    """What stands before the summary, without what this machine's processor and load add."""
    *warnings, summary = outcomes[name][0]["lines"]
    assert summary.startswith("preflight: 3 ranks on 1 host agree; ")
    return [line for line in warnings if "instructions" not in line]


def test_a_good_launch_is_told_in_one_line(outcomes):
    assert warnings_of(outcomes, "good") == []
    pattern = (
        r"preflight: 3 ranks on 1 host agree; 1 thread each; \d+ MiB of [\d.]+ GiB a rank expected, "
        r"checkpoints 0.0 MB each of [\d.]+ GB free \([\d.]+ s\)"
    )
    assert re.fullmatch(pattern, outcomes["good"][0]["lines"][-1])


def test_one_record_a_rank_is_gathered_whatever_their_number(outcomes):
    """What all ranks get grows with their number, and no faster."""
    of_three, of_six = ([outcome["gathered"] for outcome in outcomes[name]] for name in ("good", "good on six"))
    for record, sees_the_folder in of_three + of_six:
        assert sees_the_folder < 16 and record == pytest.approx(of_three[0][0], abs=16) and record < 2000
    # Where the ranks differ, a third: their recipes, to tell how.
    assert [len(outcome["gathered"]) for outcome in outcomes["recipe"]] == [2, 2, 2]


@pytest.mark.parametrize(
    ("name", "patterns", "absent"),
    [
        (
            "manifest",
            [rf"manifest of data.train \(sha256\): \w{{16}} on rank 2 on {HOST}, \w{{16}} on 2 "],
            "code|recipe",
        ),
        (
            "recipe",
            [f"on rank 2 on {HOST}", "optimizer.lr: 0.25, elsewhere 0.003", "optimizer.name", "'sgd'", "'adamw'"],
            None,
        ),
        ("code", [rf"code of vitscale \(sha256\): \w{{16}} on rank 2 on {HOST}"], "recipe"),
        ("folder", ["run/checkpoints", f"rank 2 on {HOST}"], None),
        ("full", [r"[\d.]+ GB free, .*checkpoint.* 1000000000.0 GB"], None),
        ("model", ["weights, gradients and optimizer"], None),
        ("trackers", ["pip install comet-ml clearml"], None),
        ("float8", [rf"^precision fp8: rank 2 on {HOST} cannot import torchao \(.*\): pip install torchao"], None),
    ],
)
def test_what_cannot_go_well_is_refused_with_what_differs(outcomes, name, patterns, absent):
    message = error_of(outcomes, name)
    assert all(re.search(pattern, message) for pattern in patterns), message
    assert absent is None or not re.search(absent, message)


def test_checkpoints_at_a_url_need_no_shared_folder(outcomes):
    assert warnings_of(outcomes, "remote") == []
    assert "checkpoints" not in outcomes["remote"][0]["lines"][-1]


@pytest.mark.parametrize(
    ("name", "patterns"),
    [
        ("tight", ["3 more checkpoints"]),
        ("micro-batch", ["with 4096 images", r"batch.micro_max \d+ should fit"]),
        ("tokens", ["evaluation.evaluators", f"rank 0 on {HOST}", "1073741824.0 GiB"]),
    ],
)
def test_what_may_go_wrong_is_a_warning(outcomes, name, patterns):
    (warning,) = warnings_of(outcomes, name)
    assert all(re.search(pattern, warning) for pattern in patterns), warning


def test_a_fingerprint_is_of_names_and_contents(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "a.py").write_text("a = 1\n")
    first = code_fingerprint(tmp_path)
    (tmp_path / "part" / "notes.txt").write_text("no code")
    assert code_fingerprint(tmp_path) == first
    (tmp_path / "part" / "a.py").rename(tmp_path / "part" / "b.py")
    renamed = code_fingerprint(tmp_path)
    (tmp_path / "part" / "view.so").write_bytes(b"compiled")
    assert len({first, renamed, code_fingerprint(tmp_path)}) == 3
