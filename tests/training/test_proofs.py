"""`vitscale prove`: engines as they are pass, on every stage, precision, world and objective; broken ones do not."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import children, is_alive, wait_until
from proof_ranks import (
    bucket,
    decay_of_all,
    dropped_micro_batch,
    late_weights,
    old_copies,
    old_weights,
    overlapped_bucket,
    prove_all,
    stuck,
    wrong_norm,
)
from ranks import asked, on_ranks, quick_of
from typer.testing import CliRunner

from vitscale.about.checks.comparison import Comparison
from vitscale.about.checks.oracle import Gradient, Oracle
from vitscale.about.checks.proving import MOST_ACCUMULATED, STEPS, small_form
from vitscale.cli.main import app
from vitscale.ground.errors import ProofError, RecipeError
from vitscale.recipe import load_recipe
from vitscale.training.deepspeed.fragments import GradientPiece

pytestmark = pytest.mark.timeout(3600)  # some cases are computed at a time; in emulated bf16 one may take minutes

OPTIMIZERS = {
    "adamw": [],
    "sgd": ["optimizer={name: sgd, lr: 0.03, momentum: 0.9, momentum_dtype: bf16, weight_decay: 0.1, clip_norm: 1.0}"],
    "lamb": ["optimizer={name: lamb, lr: 0.003, weight_decay: 0.1, decay_exclude: bias, clip_norm: 1.0}"],
    "adafactor": ["optimizer={name: adafactor, lr: 0.001, weight_decay: 0.1, decay_exclude: bias}"],
    "muon": ["optimizer={name: muon, lr: 0.003, weight_decay: 0.1, decay_exclude: bias, clip_norm: 1.0}"],
}
GROUPED = [
    "averages=[{name: ema, decay: 0.99, to: 0.9}, {name: still, every: {steps: 3}, of: ema}]",
    "optimizer.decay_exclude=bias",
    "optimizer.layer_decay=0.7",
    "optimizer.groups=[{match: norm1, frozen: true}, {match: ^head, lr_factor: 5.0, weight_decay: 0.2}, "
    "{match: ^cls, begin: {steps: 4}}]",
    "schedule.weight_decay={to: 0.01}",
    "schedule.momentum={to: 0.8}",
]
OBJECTIVES = {
    "classes": ("b32_i1k", []),
    "mixed": ("b32_i1k", ["objective={loss: softmax, label_smoothing: 0.1, mixing: {mixup: 0.8, cutmix: 1.0}}"]),
    "masked": ("b16_jft_masked", []),
    "mae": ("mae_b16_i1k", []),
    "nt_xent": ("simclr_s16_i1k", ["data.views=[{name: global, count: 2}, {name: local, size: 96}]"]),
    "lejepa": ("lejepa_l14_i1k", []),  # with local views and drop path
    "dino": ("dinov2_l16_i1k", []),
}
RECIPES = (
    *("b16_i1k", "h14_jft", "r50_b16_jft", "axial_b16_jft", "r50x1_sgd_jft", "deit_b16_i1k", "demo"),
    "deit_ti16_distilled_i1k",
)


def case(objective: str, precision: str, stage: int, optimizer: str = "adamw", *more: str) -> Any:
    stem, settings = OBJECTIVES[objective]
    settings = [*settings, *OPTIMIZERS[optimizer], f"precision={precision}", f"parallelism.zero_stage={stage}", *more]
    return stem, settings, STEPS, None


CASES = {
    f"{objective}-{precision}-zero{stage}": case(objective, precision, stage)
    for objective in OBJECTIVES
    for precision in ("fp32", "bf16")
    for stage in range(4)
}
CASES |= {
    f"{optimizer}-{precision}-zero{stage}": case("classes", precision, stage, optimizer)
    for optimizer in list(OPTIMIZERS)[1:]
    for precision, stage in (("fp32", 0), ("fp32", 3), ("bf16", 1), ("bf16", 2))
}
CASES |= {
    f"grouped-{precision}-zero{stage}": case("mixed", precision, stage, "adamw", *GROUPED)
    for precision in ("fp32", "bf16")
    for stage in range(4)
}
CASES |= {
    "offloaded-bf16-zero2": case("classes", "bf16", 2, "adamw", "parallelism.offload=optimizer"),
    "offloaded-fp32-zero3": case("classes", "fp32", 3, "adamw", "parallelism.offload=optimizer"),
    "bf16-exchanged-zero1": case("classes", "bf16", 1, "adamw", "parallelism.reduce_dtype=bf16"),
    "bf16-exchanged-zero3": case("classes", "bf16", 3, "adamw", "parallelism.reduce_dtype=bf16"),
    "recomputed-zero1": case("classes", "bf16", 1, "adamw", "parallelism.activation_checkpointing=1"),
    "one-micro-batch-zero0": case("classes", "bf16", 0, "adamw", "batch.micro_max=8192"),
    "one-micro-batch-zero2": case("classes", "bf16", 2, "adamw", "batch.micro_max=8192"),
    "mae-muon-zero0": case("mae", "fp32", 0, "muon"),  # momenta of which five steps enlarge what is small 490 times
    "mae-muon-zero1": case("mae", "bf16", 1, "muon"),
    "damaged-zero2": case("classes", "fp32", 2, "adamw", "data.bad_samples=mask"),
}
OVERLAP = "parallelism.overlap=true"
CASES |= {
    f"overlapped-{precision}-zero{stage}": case("mixed", precision, stage, "adamw", OVERLAP, *GROUPED)
    for precision in ("fp32", "bf16")
    for stage in (1, 2, 3)
}
CASES |= {
    f"overlapped-{optimizer}-zero{stage}": case("classes", "bf16", stage, optimizer, OVERLAP)
    for optimizer, stage in zip(list(OPTIMIZERS)[1:], (1, 2, 1, 2), strict=True)
}
CASES |= {
    "overlapped-exchanged-zero1": case("classes", "bf16", 1, "adamw", "parallelism.reduce_dtype=bf16", OVERLAP),
    "overlapped-exchanged-zero2": case("classes", "bf16", 2, "adamw", "parallelism.reduce_dtype=bf16", OVERLAP),
    "overlapped-recomputed": case("classes", "bf16", 2, "adamw", "parallelism.activation_checkpointing=1", OVERLAP),
    "overlapped-one-micro-batch": case("classes", "bf16", 1, "adamw", "batch.micro_max=8192", OVERLAP),
    "overlapped-damaged": case("classes", "fp32", 1, "adamw", "data.bad_samples=mask", OVERLAP),
    "overlapped-dino-zero1": case("dino", "fp32", 1, "adamw", OVERLAP),
    "overlapped-dino-zero2": case("dino", "fp32", 2, "adamw", OVERLAP),
    "overlapped-masked": case("masked", "bf16", 1, "adamw", OVERLAP),
}
HPZ = "parallelism.hpz_size=2"  # of four ranks: of two there is one node
CASES |= {
    "hpz-fp32": case("mixed", "fp32", 3, "adamw", HPZ, *GROUPED),
    "hpz-bf16": case("mixed", "bf16", 3, "adamw", HPZ, *GROUPED),
    "hpz-recomputed": case("classes", "bf16", 3, "adamw", HPZ, "parallelism.activation_checkpointing=1"),
    "hpz-dino": case("dino", "fp32", 3, "adamw", HPZ),
    "hpz-overlapped": case("classes", "bf16", 3, "muon", HPZ, OVERLAP),
}
CASES |= {stem: (stem, ["precision=bf16"], STEPS, None) for stem in RECIPES}
FAST = (
    *("grouped-bf16-zero1", "overlapped-bf16-zero2", "masked-fp32-zero3", "muon-bf16-zero2", "classes-bf16-zero0"),
    "lejepa-fp32-zero3",
)

FC1, HEAD = "blocks.1.mlp.fc1.weight", "head.weight"
# Where, and what else the recipe says; updates that it takes to be seen, what is broken, the aspect in which it shows,
# and a parameter that shows it.
FAULTS: dict[str, tuple[tuple[Any, ...], int, Any, str, str]] = {
    "a skipped bucket": (("bf16", 2), 1, partial(bucket, how="skipped"), "gradient", HEAD),
    "a skipped bucket of ZeRO 3": (("fp32", 3), 1, partial(bucket, how="skipped"), "gradient", HEAD),
    "a doubled bucket": (("bf16", 2), 1, partial(bucket, how="doubled"), "gradient", HEAD),
    "a stale bucket": (("bf16", 1), 2, partial(bucket, how="stale"), "gradient", HEAD),
    "a division by 65,536": (("bf16", 0), 1, partial(bucket, how="divided"), "gradient", HEAD),
    "another rank's part": (("fp32", 2), 1, partial(bucket, how="of another rank"), "gradient", HEAD),
    "a dropped micro-batch": (("bf16", 1), 1, dropped_micro_batch, "gradient", FC1),
    "clipping by the wrong norm": (("bf16", 2), 1, wrong_norm, "gradient", FC1),
    "old weights on a rank": (("fp32", 2), 3, old_weights, "gradient", FC1),
    "a master that is not updated": (("bf16", 1), 2, partial(stuck, kind="master", name=FC1), "update", FC1),
    "a moment that is not kept": (("bf16", 3), 1, partial(stuck, kind="exp_avg_sq", name=FC1), "moments", FC1),
    "an average that stands still": (("bf16", 2), 1, partial(stuck, kind="ema", name=FC1), "average", FC1),
    **{
        f"an overlapped bucket {how} in ZeRO {stage}": (
            (precision, stage, OVERLAP),
            2,
            partial(overlapped_bucket, how=how),
            "gradient",
            HEAD,
        )
        for how, precision, stage in (
            ("of the step before", "bf16", 1),
            ("read too early", "bf16", 2),
            ("sent too early", "fp32", 1),
            ("of the step before", "fp32", 3),
        )
    },
    "weights that nobody waits for": (("bf16", 1, OVERLAP), 3, late_weights, "gradient", FC1),
    "an overlapped micro-batch is dropped": (("bf16", 2, OVERLAP), 1, dropped_micro_batch, "gradient", FC1),
    "clipping an overlapped gradient wrongly": (("bf16", 1, OVERLAP), 2, wrong_norm, "gradient", FC1),
    "copies within nodes of the step before": (("fp32", 3, HPZ, "ema=null"), 3, old_copies, "gradient", FC1),
    "weight decay of all": (("bf16", 1), 2, decay_of_all, "update", "norm.bias"),
}


def world_of(fault: str) -> int:
    """The ranks that a fault takes."""
    return 4 if HPZ in FAULTS[fault][0] else 2


def broken(name: str) -> Any:
    (precision, stage, *more), updates, fault, *_ = FAULTS[name]
    settings = [
        *("ema={decay: 0.9, warmup: false}", "optimizer.decay_exclude=bias", "batch.global=8", "batch.micro_max=1"),
        *more,
    ]
    return *case("classes", precision, stage, "adamw", *settings)[:2], updates, fault


WORLDS = quick_of((1, 2, 4), [2])


Proofs = Callable[..., dict[str, Any]]
AT_ONCE = 10


@pytest.fixture(scope="module")
def proof_of(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Proofs:
    """What was proved of a case on so many ranks, for any that is asked for by this module's tests."""
    root, by_world = tmp_path_factory.mktemp("proofs"), {}
    for params in asked(request):
        if "name" in params:
            by_world.setdefault(params["world"], {})[params["name"]] = CASES[params["name"]]
        if "fault" in params:
            world = world_of(params["fault"])
            by_world.setdefault(world, {})[params["fault"]] = broken(params["fault"])

    def proof(name: str, world: int) -> dict[str, Any]:
        if name in (left := by_world[world]):
            some = [name, *(other for other in left if other != name)][:AT_ONCE]
            on_ranks(world, prove_all, root, {case: left.pop(case) for case in some})
        found: dict[str, Any] = json.loads((root / f"{name}-{world}.json").read_text())
        return found

    return proof


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", quick_of(CASES, FAST))
def test_the_engine_does_what_plain_torch_does(proof_of, name, world):
    found = proof_of(name, world)
    assert found["is_proven"], found["findings"]
    assert found["steps"] == STEPS and found["ranks"] == world
    trained = [group for group in found["groups"] if group["group"] != "frozen"]
    for group in trained:
        assert {"gradient", "update", "weights"} <= group.keys() and group["gradient"]["error"] > 0
        # Limits that a wrong gradient could keep would prove nothing.
        assert group["gradient"]["limit"] < (1e-4 if found["precision"] == "fp32" else 0.5)
        assert group["update"]["limit"] < (0.05 if found["optimizer"] in ("muon", "adafactor") else 1e-5)
    if name.startswith("grouped"):
        assert len(trained) > 5 and all("average" in group for group in trained)
        assert len(trained) == len(found["groups"]) - 1


@pytest.mark.parametrize("fault", quick_of(FAULTS, [fault for fault in FAULTS if world_of(fault) == 2]))
def test_what_is_broken_is_found_and_named(proof_of, fault):
    *_, aspect, parameter = FAULTS[fault]
    found = proof_of(fault, world_of(fault))
    assert not found["is_proven"]
    compared = [group[aspect] for group in found["groups"]]
    assert any(each["error"] is None or each["error"] > each["limit"] for each in compared)
    assert any(aspect in line and parameter in line for line in found["findings"])


# ---- Without ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("piece", "times", "passes"), [((0, 16), 1, True), ((0, 16), 3, False), ((16, 32), 1, False)])
def test_an_engine_may_be_as_far_off_as_plain_torch_in_its_format_is_there(piece, times, passes):
    """Rounding errors may lie in few of a gradient's elements, which are all that a rank has."""
    oracle = Oracle(load_recipe("b32_i1k", ["precision=bf16"]), 10, torch.bfloat16, torch.device("cpu"))
    noise, (start, stop) = torch.zeros(512), piece
    noise[:16] = 0.1
    expected = {FC1: Gradient(torch.zeros(512, dtype=torch.float64), 512**0.5, 4, noise)}
    comparison = Comparison(oracle, {FC1: [512]}, torch.bfloat16, 0)
    off = torch.zeros(512)
    off[start:stop] = times * 0.1
    pieces = [GradientPiece(FC1, at, off[at : at + 16]) for at in range(0, 512, 16)]
    comparison.gradients(1, expected, (1.0, 1.0), [pieces])
    assert (not comparison.findings) == passes


def test_the_small_form_keeps_the_engine(tmp_path):
    recipe = load_recipe(
        "h14_jft",
        ["model.dropout=0.1", "deepspeed={zero_optimization: {overlap_comm: true, reduce_bucket_size: 1000000}}"],
    )
    small = small_form(recipe, tmp_path, 4)
    for key in ("objective", "optimizer", "precision", "parallelism", "ema"):
        assert getattr(small, key) == getattr(recipe, key)
    assert small.split(4)[1] == min(recipe.split(4)[1], MOST_ACCUMULATED)
    assert small.schedule.decay == recipe.schedule.decay and small.schedule.duration.steps == STEPS
    zero = small.deepspeed["zero_optimization"]
    assert zero["overlap_comm"] is True and zero["reduce_bucket_size"] < 1_000_000
    assert not small.model.draws and recipe.model.draws


@pytest.mark.parametrize(
    ("stem", "ranks", "settings"),
    [("b16_i1k", 3, []), ("b16_i1k", 2, ["precision=fp8"]), ("b16_i1k", 2, ["deepspeed={zero_optimisation: {}}"])],
)
def test_what_cannot_be_proved_is_refused(tmp_path, stem, ranks, settings):
    with pytest.raises(RecipeError):
        small_form(load_recipe(stem, settings), tmp_path, ranks)


@pytest.mark.parametrize("stem", ["vit5_s16_i1k", "deit3_b16_i1k"])
def test_drop_path_stays_in_the_small_form(tmp_path, stem):
    recipe = load_recipe(stem)
    assert recipe.model.drop_path > 0
    assert small_form(recipe, tmp_path, 1).model.drop_path == recipe.model.drop_path


@pytest.mark.parametrize("arguments", [["nowhere"], ["demo", "--world", "3"], ["demo", "--set", "precision=fp8"]])
def test_mistakes_are_recipe_errors(arguments):
    assert isinstance(CliRunner().invoke(app, ["prove", *arguments]).exception, RecipeError)


def test_ctrl_c_ends_with_130_as_in_other_commands():
    command = [sys.executable, "-m", "vitscale", "prove", "b16_i1k", "--world", "2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: ranks_of(process) or process.poll() is not None, 120)
        ranks = ranks_of(process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130 and "Traceback" not in errors
    assert ranks and not any(is_alive(rank) for rank in ranks)


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    found = []
    for child in children(process.pid):
        with contextlib.suppress(OSError):
            if b"vitscale.about.checks.rank" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_the_command_proves_a_recipe(form):
    command = [sys.executable, "-m", "vitscale", "prove", "b16_i1k", "--world", "2", *form]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if form:
        assert json.loads(done.stdout)["is_proven"]
    else:
        assert "gradient" in done.stdout and "clipped" in done.stdout
    assert ProofError.exit_code not in (0, 1, RecipeError.exit_code)
