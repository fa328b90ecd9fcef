"""Averages by name, and losses whose targets one of them makes, on real ranks: beside plain torch, and after stops."""

import copy
import json
import math
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from averaged_target import KIND
from outcomes import assert_same_run, checkpoint, column, everything, printed
from rank_faults import leave_out, replaced
from ranks import STEPS, batches, begun, job, launch, make_recipe
from safetensors.torch import load_file
from typer.testing import CliRunner

from vitscale.cli.main import app
from vitscale.data.batch import Batch
from vitscale.ground import extensions
from vitscale.ground.errors import CheckpointError, RecipeError

AVERAGES = [
    {"name": "ema", "decay": 0.5, "to": 1.0},
    {"name": "still", "every": {"steps": 2}, "from": {"steps": 1}, "of": "ema"},
    {"name": "slow", "decay": 0.9, "to": 0.8, "over": {"steps": 3}, "shape": "linear", "warmup": True},
]
RATE = 0.01
BEGIN = 2


def blocks(stage: int, micro: int = 4, **others: Any) -> dict[str, Any]:
    objective = {"kind": KIND, "pull": {"from": 1.0, "to": 2.0, "over": {"steps": 4}, "shape": "linear"}}
    return {
        **{"precision": "fp32", "batch": {"global": 16, "micro_max": micro}},
        "objective": {**objective, **others.pop("objective", {})},
        "optimizer": {
            **{"name": "sgd", "lr": RATE, "momentum": 0.5},
            "groups": [{"match": "^guess", "begin": {"steps": BEGIN}}],
        },
        **{"parallelism": {"zero_stage": stage, **others.pop("parallelism", {})}, "averages": AVERAGES},
        **{"evaluation": {"validation": None}, "checkpoint": {"every": {"steps": 1}, "keep": 20}},
        **others,
    }


@contextmanager
def trace_noted(trainer: Any) -> Any:
    """Leaves what DeepSpeed knows of the order of modules."""
    yield
    offload = trainer.learner.engine.deepspeed.optimizer.parameter_offload
    if trainer.world.is_main:
        is_complete = offload.get_param_coordinator().is_complete_trace()
        (trainer.run_dir.parent / "trace.json").write_text(json.dumps(is_complete))


@contextmanager
def swapped(trainer: Any) -> Any:
    """Has weights and average change places, again and again, while new weights are still on their way."""
    update = trainer.learner.update

    def updating(*arguments: Any, **named: Any) -> Any:
        made = update(*arguments, **named)
        for _ in range(17):
            with trainer.learner.evaluating():
                pass
        return made

    with replaced(trainer.learner, "update", updating):
        yield


@contextmanager
def poisoned(trainer: Any) -> Any:
    """The losses of one batch on one rank are not numbers."""
    learner, objective = trainer.learner, trainer.learner.objective
    update, losses, now = learner.update, objective.losses, []

    def updating(batch: Batch, *arguments: Any, **named: Any) -> Any:
        now[:] = [batch.position == 2 and trainer.world.rank == 1]
        return update(batch, *arguments, **named)

    def computed(*arguments: Any) -> Any:
        made = losses(*arguments)
        return made._replace(per_sample=made.per_sample * math.nan) if now[0] else made

    with replaced(learner, "update", updating), replaced(objective, "losses", computed):
        yield


SKIPPING = {"anomalies": {"non_finite": "skip"}}
WHOLE = {"check": {"audit_every": 1}}
TWO = {
    **{f"zero{stage}": blocks(stage, **WHOLE) for stage in range(4)},
    "zero1-whole": blocks(1, 8),
    "overlap": blocks(2, 8, parallelism={"overlap": True}),
    "bf16": blocks(2, 8, precision="bf16", parallelism={"overlap": True}),
    "dropout": blocks(0, model={"dropout": 0.5}),
}
ONE = {"alone": blocks(1, 16), "alone-parts": blocks(0, 8)}


@pytest.fixture(scope="module")
def root(root: Path) -> Path:
    (root / "runs").mkdir()
    jobs = [job(name, of_run) for name, of_run in TWO.items()]
    jobs += [job(f"zero{stage}-stopped", blocks(stage), 1, 4, None) for stage in (2, 3)]
    jobs += [job(f"swapped-{name}", TWO[name], faults=[swapped]) for name in ("overlap", "bf16")]
    jobs += [job("skipped", blocks(2, **SKIPPING), faults=[poisoned])]
    jobs += [job("left-out", blocks(2, **SKIPPING), faults=[partial(leave_out, ranges=[(2, 3)])])]
    continued = blocks(1, 8, averages=[{"name": "ema", "decay": 1.0}], init={"from": str(root / "runs" / "zero1")})
    jobs += [job("continued", continued, 2)]
    jobs += [job("traced", blocks(3, 8), 3, faults=[trace_noted])]
    launch(root, jobs, 2)
    launch(root, [job(name, of_run) for name, of_run in ONE.items()], 1)
    return root


@pytest.fixture(scope="module", autouse=True)
def _allowed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITSCALE_EXTENSIONS", "averaged_target")
        patch.setattr(extensions, "named", {})  # which other tests of this process would read in their messages
        yield


@pytest.fixture(scope="module")
def loop(root: Path) -> tuple[dict[str, dict[str, torch.Tensor]], list[float]]:
    """Weights and averages after the run by kind, and its losses: one process, whole batches, no DeepSpeed."""
    recipe = make_recipe(root, **blocks(1))
    student = begun(recipe).train()
    averages = {name: copy.deepcopy(student).eval() for name in ("ema", "still", "slow")}
    momenta, losses = {name: torch.zeros_like(each) for name, each in student.named_weights()}, []
    for step, (_, views) in enumerate(batches(recipe, STEPS)):
        teacher = averages["ema"]
        with torch.no_grad():
            features = torch.tanh(teacher.features(views))
            target = (features - features.mean(dim=0)) / features.abs().amax(dim=0) @ teacher.guess.weight.T
        guess = student.guess(student.features(views))
        loss = (1 + min(step / 4, 1)) * (guess - target).square().sum(dim=1).mean()
        student.zero_grad()
        loss.backward()
        losses.append(loss.item())
        rate = RATE * step / 2 if step < 2 else 1e-5 + (RATE - 1e-5) * (1 - (step - 2) / (STEPS - 2))
        done = step + 1
        shares = {
            "ema": 0.5 + 0.5 * (1 - math.cos(math.pi * step / STEPS)) / 2,
            "still": float(done not in (1, 3, 5)),
            "slow": min(0.9 - 0.1 * min(step / 3, 1), (1 + done) / (10 + done)),
        }
        with torch.no_grad():
            for name, weight in student.named_weights():
                momenta[name].mul_(0.5).add_(weight.grad)
                if done > BEGIN or name != "guess.weight":
                    weight -= rate * momenta[name]
            for name, average in averages.items():
                source = dict((averages["ema"] if name == "still" else student).named_weights())
                for key, value in average.named_weights():
                    value.copy_(shares[name] * value + (1 - shares[name]) * source[key])
    kinds = {"master": student, "momentum_buffer": momenta, "ema": averages["ema"]}
    kinds |= {f"ema.{name}": averages[name] for name in ("still", "slow")}
    return {
        kind: each if isinstance(each, dict) else {name: value.detach() for name, value in each.named_weights()}
        for kind, each in kinds.items()
    }, losses


@pytest.mark.parametrize("name", [name for name in (*TWO, *ONE) if name not in ("dropout", "bf16")])
def test_it_is_the_plain_loop_over_the_global_batch(root, loop, name):
    expected, losses = loop
    assert column(root, name, "loss") == pytest.approx(losses, rel=1e-5)
    found = everything(checkpoint(root, name))
    assert {key.partition("/")[0] for key in found} == expected.keys()
    for key, value in found.items():
        kind, _, parameter = key.partition("/")
        right = expected[kind][parameter]
        assert float((value - right).norm()) <= 1e-4 * float(right.norm()) + 1e-6, key


def test_the_first_pass_is_in_evaluation_mode_and_its_targets_the_same_whatever_the_dropout(root):
    assert column(root, "dropout", "prepared_training") == [0.0] * STEPS
    assert column(root, "dropout", "target")[0] == column(root, "zero0", "target")[0]
    assert column(root, "dropout", "loss")[0] != column(root, "zero0", "loss")[0]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_stopped_run_equals_the_uninterrupted_one_to_the_last_bit(root, stage):
    assert_same_run(root, f"zero{stage}-stopped", f"zero{stage}")


def test_what_continues_begins_as_it_was_loaded_with_what_the_objective_adds_anew(root):
    """An average that keeps everything is still what the run began with: the average of the other."""
    recipe, before, after = make_recipe(root, **blocks(1)), checkpoint(root, "zero1"), checkpoint(root, "continued", 2)
    anew = begun(recipe).guess.weight.detach()
    for name in before.index.shapes:
        expected = anew if name == "guess.weight" else before.parameter(name, "ema")
        assert torch.equal(after.parameter(name, "ema"), expected), name
    assert "guess initial" in printed(root, "continued")


def test_any_average_is_exported_by_its_name(root, tmp_path):
    command = ["export", str(root / "runs" / "zero1"), "--format", "safetensors", "--out"]
    for name, kind in (("ema", "ema"), ("still", "ema.still"), (None, "ema")):
        out = tmp_path / f"{name}.safetensors"
        assert CliRunner().invoke(app, [*command, str(out), *(["--average", name] if name else [])]).exit_code == 0
        stored = checkpoint(root, "zero1")
        assert all(torch.equal(value, stored.parameter(key, kind)) for key, value in load_file(out).items())
    refused = CliRunner().invoke(app, [*command, str(tmp_path / "none"), "--average", "gram"])
    assert isinstance(refused.exception, CheckpointError) and "still" in str(refused.exception)


REFUSED = [
    ({"averages": [{"name": "slow", "decay": 0.9}]}, "averages"),
    ({"parallelism": {"offload": "optimizer"}}, "offload"),
    ({"ema": {"decay": 0.9}}, "ema"),
    ({"averages": [{"name": "ema", "decay": 0.9, "of": "late"}, {"name": "late", "decay": 0.9}]}, "late"),
    ({"averages": [{"name": "ema", "decay": 0.9, "every": {"steps": 2}}]}, "every"),
    ({"averages": [{"name": "ema", "decay": 0.9, "from": {"steps": 2}}]}, "from"),
    ({"averages": [{"name": "ema", "decay": 0.9, "shape": "linear"}]}, "shape"),
    ({"averages": [{"name": "ema/still", "decay": 0.9}]}, "name"),
    ({"averages": [{"name": "ema", "decay": 0.9, "to": 1.1}]}, "to"),
]


@pytest.mark.parametrize(("changes", "key"), REFUSED)
def test_what_does_not_go_together_is_refused_by_its_key(root, changes, key):
    with pytest.raises(RecipeError, match=key):
        make_recipe(root, **blocks(1, **changes))


@pytest.mark.parametrize("name", ["overlap", "bf16"])
def test_weights_on_their_way_arrive_before_the_average_takes_their_place(root, name):
    assert_same_run(root, f"swapped-{name}", name)


def test_an_update_that_is_not_made_moves_no_average(root):
    assert_same_run(root, "skipped", "left-out")


def test_a_group_that_begins_later_keeps_its_values_while_its_moments_follow_the_gradients(root):
    start = begun(make_recipe(root, **blocks(0))).guess.weight.detach()
    for step in range(1, 4):
        reader = checkpoint(root, "zero3", step)
        assert torch.equal(reader.parameter("guess.weight"), start) == (step <= BEGIN)
        assert reader.parameter("guess.weight", "momentum_buffer").abs().max() > 0


def test_deepspeed_knows_the_order_of_modules_after_some_updates(root):
    assert json.loads((root / "runs" / "trace.json").read_text()) is True
