"""Gram anchoring on real ranks: beside plain torch, from the first copy of its average on, and after a stop."""

import copy
import math

import pytest
import torch
from outcomes import assert_same_run, checkpoint, column, everything, metrics
from ranks import STEPS, batches, begun, job, launch, make_recipe
from small_recipes import DINO

from vitscale.ground.ranks import Sums

VIEWS = [{"name": "first"}, {"name": "second"}, {"name": "local", "size": 16}]
OBJECTIVE = {**DINO, "teacher_temperature": {"from": 0.1, "to": 0.1}}
GRAM = {"weight": {"from": 20.0, "to": 40.0, "over": {"steps": 4}, "shape": "linear"}}
RATE, FIRST, TWO = 0.5, 2, [(1, 8), (3, 4)]


def blocks(stage, micro, **objective):
    """The average is copied after updates 2, 4 and 6."""
    return {
        "precision": "fp32",
        "model": {"registers": 1, "position": {"kind": "rope"}, "pool": "cls", "head": "linear", "dropout": 0.0},
        "data": {"views": VIEWS},
        "batch": {"micro_max": micro},
        "objective": {**OBJECTIVE, "gram": GRAM, **objective},
        "averages": [
            {"name": "ema", "decay": 0.9},
            {"name": "gram", "of": "ema", "from": {"steps": FIRST}, "every": {"steps": 2}},
        ],
        "optimizer": {"name": "sgd", "lr": RATE, "momentum": 0.0},
        "schedule": {"warmup": {"steps": 0}, "decay": "constant"},
        "parallelism": {"zero_stage": stage},
        "evaluation": {"validation": None},
        "checkpoint": {"every": {"steps": 1}, "keep": 9},
    }


@pytest.fixture(scope="module")
def root(root):
    jobs = [job(f"zero{stage}", {**blocks(stage, micro), "check": {"audit_every": 1}}) for stage, micro in TWO]
    jobs += [job(f"stopped{at}", blocks(3, 4), at, None) for at in (1, 3)]
    jobs.append(job("without", blocks(1, 8, gram=None), 3))
    launch(root, jobs, 2)
    return root


def anchored(root, name, key):
    return [line[key] for line in metrics(root, name)[FIRST:]]


def cosines(rows):
    return torch.stack([torch.stack([a @ b / (a.norm() * b.norm()) for b in rows]) for a in rows])


@pytest.fixture(scope="module")
def loop(root):
    """Losses, figures of Gram anchoring and weights: one process, whole batches, the Gram matrices pair by pair."""
    recipe = make_recipe(root, **blocks(1, 8, gram=None))
    student = begun(recipe).train()
    averages = {name: copy.deepcopy(student).eval() for name in ("ema", "gram")}
    losses, grams = [], []
    for step, (batch, views) in enumerate(batches(recipe, STEPS)):
        plan, teacher = student.plan(batch.keys.numpy(), batch.position), averages["ema"]
        student.scalars = teacher.scalars = {"teacher_temperature": 0.1}
        with torch.no_grad():
            first = [views[kind] for kind in teacher.prepared_kinds(len(views))]
            read = {name: dict(teacher.named_weights())[name] for name in teacher.settings.reads}
            agreed = teacher.agree(teacher.prepare(first, plan), batch.labels, Sums(), read)
        loss = student.losses(views, batch.labels, (*plan, *agreed.rows, *agreed.shared)).per_sample.mean()
        if step >= FIRST:
            mask, images = student.mask, torch.cat(views[:2], dim=1).flatten(0, 1)
            edit = [lambda x, is_=plan[0].flatten(0, 1)[..., None], mask=mask: torch.where(is_, mask, x)]
            found = student.backbone([images], edit=edit)[0].tokens[:, -16:].double()
            with torch.no_grad():
                wanted = averages["gram"].backbone([images])[0].tokens[:, -16:].double()
            each = [(cosines(a) - cosines(b)).square().sum() / 16**2 for a, b in zip(found, wanted, strict=True)]
            gram = torch.stack(each).mean()
            grams.append(gram.item())
            loss = loss + (20 + 20 * min(step / 4, 1)) * gram
        student.zero_grad()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for name, weight in student.named_weights():
                weight -= RATE * weight.grad
                mean = dict(averages["ema"].named_weights())[name]
                mean.copy_(0.9 * mean + 0.1 * weight)
                if step + 1 >= FIRST and (step + 1 - FIRST) % 2 == 0:
                    dict(averages["gram"].named_weights())[name].copy_(mean)
    weights = {"master": student, "ema": averages["ema"], "ema.gram": averages["gram"]}
    return losses, grams, {kind: dict(each.named_weights()) for kind, each in weights.items()}


@pytest.mark.parametrize("name", [f"zero{stage}" for stage, _ in TWO])
def test_it_is_the_plain_loop_with_matrices_pair_by_pair(root, loop, name):
    losses, grams, weights = loop
    assert column(root, name, "loss") == pytest.approx(losses, rel=1e-5)
    assert anchored(root, name, "gram") == pytest.approx(grams, rel=1e-4)
    for key, value in everything(checkpoint(root, name)).items():
        kind, _, parameter = key.partition("/")
        if kind in weights:
            right = weights[kind][parameter].detach()
            assert float((value - right).norm()) <= 2e-4 * float(right.norm()) + 1e-6, key


def test_before_the_first_copy_the_run_is_one_without(root):
    for step in range(1, FIRST + 2):
        one, other = (checkpoint(root, name, step) for name in ("zero1", "without"))
        pairs = [[each.parameter(name, "master") for each in (one, other)] for name in one.index.shapes]
        assert all(torch.equal(*pair) for pair in pairs) == (step <= FIRST)


@pytest.mark.parametrize("at", [1, 3])
def test_a_stopped_run_equals_the_uninterrupted_one_to_the_last_bit(root, at):
    """Before the first copy, and between two."""
    assert_same_run(root, f"stopped{at}", "zero3")


def test_the_course_begins_with_the_run(root):
    shown = [anchored(root, "zero1", key) for key in ("loss", "dino", "ibot", "koleo", "gram")]
    for step, (loss, dino, ibot, koleo, gram) in enumerate(zip(*shown, strict=True), FIRST):
        weight = 20 + 20 * min(step / 4, 1)
        assert math.isclose(loss, dino + ibot + 0.1 * koleo + weight * gram, rel_tol=1e-5)
