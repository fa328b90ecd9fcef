"""Every objective through the trainer: one update on every world, stage and micro-batch, and after every stop."""

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finished_runs import evaluate_run
from outcomes import assert_same_run, checkpoint, column, error_of, evaluations, everything, metrics, printed
from PIL import Image
from ranks import STEPS, asked, batches, begun, initial_weights, job, launch, make_recipe, quick_of
from safetensors.torch import save_file
from small_recipes import DINO, with_initial_values
from typer.testing import CliRunner

from vitscale.about.checks.seen import History
from vitscale.cli.export import export
from vitscale.cli.main import app
from vitscale.ground.errors import RecipeError
from vitscale.ground.ranks import Sums
from vitscale.models.weights import describe, open_weights
from vitscale.models.weights.table import table
from vitscale.objectives import build_objective
from vitscale.recipe import Recipe
from vitscale.runs.checkpoint import MASTER
from vitscale.training.beginning.found_weights import Named, find_weights
from vitscale.training.beginning.initial_weights import _Assignment, check_initial_weights

# With SGD, as AdamW divides by second moments, which makes much of a rounding error.
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9}
TWO_VIEWS = [
    {"name": "one", "count": 2, "operations": [{"kind": "color_jitter", "hue": 0.1}]},
    {"name": "other", "crop": {"kind": "inception"}, "operations": [{"kind": "random_erasing"}]},
]
OF_DINO = [
    {"name": "first", "operations": [{"kind": "color_jitter", "hue": 0.1}]},
    {"name": "second"},
    {"name": "local", "count": 2, "size": 16},
]
NT_XENT = {"kind": "contrastive", "group": 4, "hidden": 16, "outputs": 8}
TEMPERATURE = {"from": 0.05, "to": 0.1, "over": {"steps": 4}, "shape": "linear"}
TAUGHT = {"averages": [{"name": "ema", "decay": 0.9, "to": 1.0}]}
ROPE = {"kind": "rope", "rescale": 2.0, "jitter": 1.2}
MIXING = {"mixup": 0.8, "cutmix": 1.0, "probability": 0.8}
NEIGHBOURS = {"train": "train", "test": "test", "k": [5, 20]}
MAE = {
    "model": {"mlp": "exact_gelu", "position": {"kind": "sincos", "table": "mae"}},
    "data": {"normalise": {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}},
    "objective": {"kind": "mae", "decoder_width": 16, "decoder_depth": 2, "decoder_heads": 2},
    "evaluation": {"validation": None, "every": {"steps": 2}, "knn": NEIGHBOURS},
    "selection": {"metric": "knn/5nn"},
    "ema": {"decay": 0.9},
}
FIRST = 2  # the update after which Gram anchoring begins
ANCHORED = {
    "model": {"registers": 1, "position": {"kind": "rope"}, "pool": "cls", "head": "linear"},
    "data": {"views": [{"name": "first"}, {"name": "second"}, {"name": "local", "size": 16}]},
    "objective": {
        **{**DINO, "teacher_temperature": {"from": 0.1, "to": 0.1}},
        "gram": {"weight": {"from": 20.0, "to": 40.0, "over": {"steps": 4}, "shape": "linear"}},
    },
    "averages": [
        {"name": "ema", "decay": 0.9},
        {"name": "gram", "of": "ema", "from": {"steps": FIRST}, "every": {"steps": 2}},
    ],
    "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.0},
    "schedule": {"warmup": {"steps": 0}, "decay": "constant"},
    "check": {"audit_every": 1},
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "nt_xent": {"data": {"views": TWO_VIEWS}, "objective": NT_XENT},
    "global nt_xent": {
        "data": {"views": TWO_VIEWS},
        "objective": {**NT_XENT, "group": "global"},
        "check": {"audit_every": 1},
    },
    "lejepa": {
        "model": {"drop_path": 0.5},
        "data": {"views": [TWO_VIEWS[0], {"name": "local", "size": 16}]},
        "objective": {"kind": "lejepa", "hidden": 16, "outputs": 8, "directions": 16, "center": ["one"]},
    },
    "dino": {
        "model": {"drop_path": 0.2, "registers": 1, "position": ROPE, "pool": "cls", "head": "linear"},
        "data": {"views": OF_DINO},
        "objective": {**DINO, "group": 2, "teacher_temperature": TEMPERATURE},
        "optimizer": {"name": "sgd", "lr": 0.5, "groups": [{"match": r"\.last\.", "begin": {"steps": 2}}]},
        **TAUGHT,
    },
    "gram": ANCHORED,
    "ijepa": {
        "model": {"pool": "cls", "head": "linear", "position": ROPE},
        "objective": {"kind": "ijepa", "predictor_width": 16, "predictor_depth": 1, "predictor_heads": 2},
        **TAUGHT,
    },
    "mae": MAE,
    "masked": {"objective": {"kind": "masked_patches"}, "parallelism": {"activation_checkpointing": 2}},
    "tokens": {"objective": {"kind": "masked_patches", "masks": "blocks", "share": 0.4}},
    "mixed": {
        "data": {"repeats": 3},
        "objective": {"loss": "bce", "threshold": 0.3, "keep": 0.5, "mixing": {**MIXING, "per": "pair"}},
    },
    **{
        f"mixed by {per}": {"objective": {"loss": "softmax", "label_smoothing": 0.1, "mixing": {**MIXING, "per": per}}}
        for per in ("batch", "element")
    },
}
QUICK = [name for name in OBJECTIVES if not name.startswith("mixed by")]
# The smallest micro-batches that part no group and no pair.
SMALLEST = {"nt_xent": 4, "gram": 4, "dino": 2} | {name: 2 for name in OBJECTIVES if "mixed" in name}
# In bf16 and by AdamW, with all that has a state: stopped, they are to go on to the last bit.
ADAMW = {"precision": "bf16", "optimizer": {"name": "adamw", "lr": 3e-3, "weight_decay": 0.1, "clip_norm": 1.0}}
FEWSHOT = {"tasks": [{"name": "toy", "train": "train", "test": "test"}], "shots": [2]}
STOPPED: dict[str, tuple[int, dict[str, Any]]] = {
    "global nt_xent": (1, {"model": {"dropout": 0.1}}),
    "dino": (1, {"objective": {**OBJECTIVES["dino"]["objective"], "ibot": {}}, "check": {"audit_every": 2}}),
    "mae": (3, {"parallelism": {"activation_checkpointing": 2}}),
    "masked": (0, {"model": {"dropout": 0.1}, "ema": {"decay": 0.9}, "evaluation": {"fewshot": FEWSHOT}}),
    "mixed": (2, {"model": {"drop_path": 0.3}}),
}
FACTORED = {"optimizer": {"name": "adafactor", "lr": 1e-3}}  # which sees the heads of MAE's decoder


def blocks(root: Path, name: str, stage: int, micro: int, **others: Any) -> dict[str, Any]:
    """The recipe of an objective; `others` replace fields of its blocks."""
    content: dict[str, Any] = {
        **{"precision": "fp32", "optimizer": SGD, "evaluation": {"validation": None}},
        "checkpoint": {"every": {"steps": 1}, "keep": 9},
        **OBJECTIVES[name],
        "batch": {"micro_max": micro},
    }
    content["parallelism"] = {**content.get("parallelism", {}), "zero_stage": stage}
    if name == "tokens":
        targets = {"kind": "tokenizer", "path": "transformers:FlavaImageCodebook", "from": str(root / "codebook")}
        targets |= {"vocabulary": 60, "image_size": 32}
        content["objective"] = {**content["objective"], "targets": targets}
    for key, value in others.items():
        both = isinstance(value, dict) and isinstance(content.get(key), dict) and key not in ("objective", "optimizer")
        content[key] = {**content[key], **value} if both else value
    return content


def stopped(root: Path, name: str) -> dict[str, Any]:
    stage, others = STOPPED[name]
    return blocks(root, name, stage, 4, **ADAMW, **others)


def begins(root: Path, source: str, **others: Any) -> dict[str, Any]:
    """A run in fp32 that begins with weights; its first update has a learning rate of 0."""
    without = {"evaluation": {"validation": None}, "selection": None, "ema": None}
    schedule = {"duration": {"steps": STEPS}, "warmup": {"steps": 2}}
    return blocks(root, "mae", 3, 4, init={"from": str(root / source)}, schedule=schedule) | without | others


@pytest.fixture(scope="module")
def root(root: Path, request: pytest.FixtureRequest) -> Path:
    """Every training that the tests below look at."""
    write_tokenizer(root / "codebook")
    write_mae(root)
    jobs, of_meshes = [], [params for params in asked(request) if "other" in params]
    names = list(dict.fromkeys([*QUICK, *(params["name"] for params in of_meshes)]))
    for name in names:
        jobs.append(job(name, blocks(root, name, 1, 8)))
        jobs.append(job(f"{name}-parts", blocks(root, name, 3, max(SMALLEST.get(name, 1), 2)), 3, None))
    for name in STOPPED:
        jobs += [job(f"{name}-bf16", stopped(root, name)), job(f"{name}-bf16-stopped", stopped(root, name), 3, None)]
    factored = blocks(root, "mae", 2, 4, **FACTORED)
    jobs += [job("factored", factored), job("factored-stopped", factored, 3, None)]
    jobs += [job(f"gram-stopped{at}", blocks(root, "gram", 1, 8), at, None) for at in (1, 4)]
    without = {key: value for key, value in ANCHORED["objective"].items() if key != "gram"}
    jobs.append(job("gram-without", blocks(root, "gram", 1, 8, objective=without)))
    for target in ("cell_colours", "pixels"):
        objective = {"kind": "masked_patches", "target": target}
        jobs.append(job(target, blocks(root, "masked", 2, 8, **ADAMW, objective=objective)))
    jobs += [job(name, begins(root, f"{name}.safetensors"), 1) for name in ("whole", "encoder")]
    classes = {"objective": {"loss": "softmax"}, "model": MAE["model"] | {"head": "linear", "pool": "normed_mean"}}
    jobs.append(job("continued", begins(root, "runs/mae-bf16"), 1))
    jobs.append(job("classes", begins(root, "runs/mae-bf16", **classes), 1))
    jobs.append(job("classes-of-file", begins(root, "whole.safetensors", **classes), 1))
    of_masked = {"init": {"from": str(root / "runs" / "masked-bf16"), "head": "zero"}, "model": {"head": "linear"}}
    jobs.append(job("classes-of-masked", {**of_masked, "checkpoint": {"keep": 9}}, 1))
    jobs.append(job("parted", blocks(root, "mixed", 1, 1)))
    launch(root, jobs, 2)
    alone = [job(f"{name}-alone", blocks(root, name, 0, 16)) for name in names]
    collapsing = blocks(root, "global nt_xent", 1, 16, optimizer={"name": "adamw", "lr": 10.0})
    launch(root, [*alone, job("collapsed", collapsing)], 1)
    of_four = [params["name"] for params in of_meshes if params["other"] == "four"]
    launch(root, [job(f"{name}-four", blocks(root, name, 1, SMALLEST.get(name, 1))) for name in of_four], 4)
    return root


def write_tokenizer(folder: Path) -> None:
    """One with random weights that tells colours apart."""
    from transformers import FlavaImageCodebook, FlavaImageCodebookConfig

    torch.manual_seed(0)
    tokenizer = FlavaImageCodebook(FlavaImageCodebookConfig(hidden_size=8, vocab_size=60, num_blocks_per_group=1))
    with torch.no_grad():
        for parameter in tokenizer.parameters():
            parameter.normal_(0, 0.5)
    tokenizer.save_pretrained(folder)


def write_mae(root: Path) -> None:
    """`whole` and `encoder`, in the names of MAE's authors, with other values than a run begins with."""
    objective = with_initial_values(build_objective(make_recipe(root, **MAE), 0), 2.0)
    values = {name: parameter.detach() for name, parameter in objective.named_weights()}
    there = {
        key: part.contiguous()
        for rule in (*table(objective.backbone, "timm"), *objective.rules("timm"))
        if rule.ours in values
        for key, part in zip(rule.theirs, rule.split(values[rule.ours]), strict=True)
    }
    save_file(there, root / "whole.safetensors")
    encoder = {key: there[key] for key in there if not key.startswith(("mask", "decoder"))}
    save_file(encoder, root / "encoder.safetensors")


# ---- The same everywhere ---------------------------------------------------------------------------------------------

OF_THE_MACHINE = {
    *("time", "images_per_s", "data_wait_s", "step_time_s", "world_size", "peak_memory_bytes", "mfu"),
    *("slowest_rank", "slowest_rank_s", "median_rank_s", "checkpoint_stall_s"),
}


@pytest.mark.parametrize("other", ["parts", "alone", pytest.param("four", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", quick_of(OBJECTIVES, QUICK))
def test_every_world_stage_and_micro_batch_computes_the_same(root, name, other):
    """Sums are rounded in another order, nothing else: what is drawn by rank or micro-batch would change every digit.

    All figures of every update, the gradient of the first one, and weights and averages after the last.
    """
    other = f"{name}-{other}"
    for expected, found in zip(metrics(root, name), metrics(root, other), strict=True):
        assert found.keys() - OF_THE_MACHINE == expected.keys() - OF_THE_MACHINE
        for key in expected.keys() - OF_THE_MACHINE - {"batch_digest"}:
            within = 1e-3 if key == "grad_norm" else 2e-5
            assert found[key] == pytest.approx(expected[key], rel=within, abs=1e-6), (key, found["step"])
    assert column(root, other, "batch_digest") == column(root, name, "batch_digest")
    first, second = (everything(checkpoint(root, each, 1)) for each in (name, other))
    gradients = [key for key in first if key.startswith("momentum_buffer/")]
    error = sum(float((first[key] - second[key]).square().sum()) for key in gradients) ** 0.5
    assert error <= 2e-6 * sum(float(first[key].square().sum()) for key in gradients) ** 0.5
    last, others = (everything(checkpoint(root, each)) for each in (name, other))
    assert last.keys() == others.keys()
    for key, value in last.items():
        torch.testing.assert_close(others[key], value, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", ["mae", "masked", "mixed"])
def test_the_first_losses_equal_those_of_one_process(root, name):
    """The weights are the initial ones up to the second update, whose learning rate is not 0."""
    recipe = make_recipe(root, **blocks(root, name, 0, 16))
    objective, losses = begun(recipe).train(), []
    with torch.no_grad():
        for batch, views in batches(recipe, 2):
            plan = objective.plan(batch.keys.numpy(), batch.position)
            losses.append(objective(views, batch.labels, plan).per_sample.mean().item())
    assert column(root, name, "loss")[:2] == pytest.approx(losses, rel=1e-5)
    if name == "masked":
        assert losses == pytest.approx([math.log(512)] * 2)


@pytest.mark.parametrize(
    ("whole", "again"),
    [
        *((f"{name}-bf16", f"{name}-bf16-stopped") for name in STOPPED),
        ("factored", "factored-stopped"),
        *(("gram", f"gram-stopped{at}") for at in (1, 4)),  # before the first copy, right after one
    ],
)
def test_a_stopped_run_equals_the_uninterrupted_one_to_the_last_bit(root, whole, again):
    assert_same_run(root, whole, again)
    assert evaluations(root, whole) == evaluations(root, again)


def test_micro_batches_that_part_pairs_end_the_run_at_its_start(root):
    error = error_of(root, "parted")
    assert (error["kind"], error["saved"]) == ("RecipeError", []) and "batch.micro_max" in error["message"]


# ---- Views -----------------------------------------------------------------------------------------------------------


def test_a_run_warns_of_collapse_once(root):
    assert column(root, "collapsed", "spread")[-1] < 0.05
    assert printed(root, "collapsed").count("has collapsed") == 1
    assert "has collapsed" not in printed(root, "global nt_xent-alone")


def test_the_very_pixels_of_all_views_are_found_again_and_written_as_pictures(root, tmp_path):
    batch, _ = next(batches(make_recipe(root, **blocks(root, "nt_xent", 1, 8)), 1))
    history = History(root / "runs" / "nt_xent")
    [place] = history.find([int(batch.uids[3])])
    seen = [each for each in history.sightings([place])[0] if each.batch == 0]
    assert [each.view for each in seen] == [0, 1, 2] and {each.slot for each in seen} == {3}
    again = history.pixels(seen[0])
    for kind, views in zip(again.views, batch.views, strict=True):
        assert torch.equal(kind[0], views[3])
    assert len({each.box for each in seen}) == 3
    out, run = tmp_path / "out", root / "runs" / "nt_xent"
    done = CliRunner().invoke(app, ["seen", str(place.uid), "--run", str(run), "--out", str(out)])
    assert done.exit_code == 0, done.output
    pictures = sorted(out.iterdir())
    assert len(pictures) % 3 == 0 and {path.stem[-5:] for path in pictures} == {"view0", "view1", "view2"}
    assert np.asarray(Image.open(pictures[0])).shape == (32, 32, 3)


# ---- Teachers --------------------------------------------------------------------------------------------------------


def test_the_last_layers_stand_still_at_first_and_the_teacher_follows(root):
    initial = initial_weights(make_recipe(root, **blocks(root, "dino", 1, 8)), 0)
    for name in ("dino.last.weight", "ibot.last.weight"):
        still, moved = checkpoint(root, "dino", 2), checkpoint(root, "dino", 3)
        assert torch.equal(still.parameter(name, MASTER), initial[name])
        assert still.parameter(name, "momentum_buffer").abs().max() > 0
        assert not torch.equal(moved.parameter(name, MASTER), initial[name])
    first = checkpoint(root, "dino", 1)
    for name in ("dino.layers.0.weight", "blocks.0.mlp.fc1.weight", "mask"):
        expected = 0.9 * initial[name] + 0.1 * first.parameter(name, MASTER)
        torch.testing.assert_close(first.parameter(name, "ema"), expected, rtol=1e-5, atol=1e-7)


def cosines(rows: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.stack([a @ b / (a.norm() * b.norm()) for b in rows]) for a in rows])


@pytest.fixture(scope="module")
def loop(root):
    """Losses, figures of Gram anchoring and weights: one process, whole batches, the Gram matrices pair by pair."""
    without = {key: value for key, value in ANCHORED["objective"].items() if key != "gram"}
    recipe = make_recipe(root, **blocks(root, "gram", 1, 8, objective=without))
    student = begun(recipe).train()
    averages = {name: copy.deepcopy(student).eval() for name in ("ema", "gram")}
    losses, grams = [], []
    for step, (batch, views) in enumerate(batches(recipe, STEPS)):
        plan, teacher = student.plan(batch.keys.numpy(), batch.position), averages["ema"]
        student.scalars = teacher.scalars = {"teacher_temperature": 0.1}
        with torch.no_grad():
            read = {name: dict(teacher.named_weights())[name] for name in teacher.settings.reads}
            agreed = teacher.agree(teacher.prepare(views, plan), batch.labels, Sums(), read)
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
                weight -= 0.5 * weight.grad
                mean = dict(averages["ema"].named_weights())[name]
                mean.copy_(0.9 * mean + 0.1 * weight)
                if step + 1 >= FIRST and (step + 1 - FIRST) % 2 == 0:
                    dict(averages["gram"].named_weights())[name].copy_(mean)
    weights = {"master": student, "ema": averages["ema"], "ema.gram": averages["gram"]}
    return losses, grams, {kind: dict(each.named_weights()) for kind, each in weights.items()}


def test_gram_anchoring_is_the_plain_loop_with_matrices_pair_by_pair(root, loop):
    losses, grams, weights = loop
    assert column(root, "gram", "loss") == pytest.approx(losses, rel=1e-5)
    anchored = metrics(root, "gram")[FIRST:]
    assert [line["gram"] for line in anchored] == pytest.approx(grams, rel=1e-4)
    for key, value in everything(checkpoint(root, "gram")).items():
        kind, _, parameter = key.partition("/")
        if kind in weights:
            right = weights[kind][parameter].detach()
            assert float((value - right).norm()) <= 2e-4 * float(right.norm()) + 1e-6, key
    for step, line in enumerate(anchored, FIRST):  # the course of its weight begins with the run
        weight = 20 + 20 * min(step / 4, 1)
        parts = line["dino"] + line["ibot"] + 0.1 * line["koleo"] + weight * line["gram"]
        assert math.isclose(line["loss"], parts, rel_tol=1e-5)


def test_before_the_first_copy_the_run_is_one_without(root):
    for step in range(1, FIRST + 2):
        one, other = (checkpoint(root, name, step) for name in ("gram", "gram-without"))
        pairs = [[each.parameter(name) for each in (one, other)] for name in one.index.shapes]
        assert all(torch.equal(*pair) for pair in pairs) == (step <= FIRST)


# ---- Masks -----------------------------------------------------------------------------------------------------------


def test_nearest_neighbours_are_the_same_on_every_world_and_decide(root):
    for name in ("mae", "mae-parts", "mae-alone", "mae-bf16-stopped"):
        lines = evaluations(root, name)
        assert [line["step"] for line in lines] == [2, 4, 6]
        chosen = checkpoint(root, name).index.selection
        assert chosen["best"] == max(line["eval/knn/5nn"] for line in lines if line["step"] <= chosen["evaluated"])
        assert lines == evaluations(root, "mae") or "bf16" in name


@pytest.mark.parametrize("name", ["mae-bf16", "masked-bf16", "cell_colours", "pixels"])
def test_something_is_learned(root, name):
    losses = column(root, name, "loss")
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.01
    assert "head.weight" not in checkpoint(root, name).index.shapes


def recipe_of(root: Path, name: str) -> Recipe:
    return make_recipe(root, **stopped(root, name))


@pytest.mark.parametrize("name", ["mae", "masked"])
def test_every_parameter_is_trained(root, name):
    trained, initial = checkpoint(root, f"{name}-bf16"), initial_weights(recipe_of(root, name), 0)
    assert trained.index.shapes.keys() == initial.keys()
    assert [each for each in initial if torch.equal(trained.parameter(each), initial[each])] == []


def test_a_tokenizer_is_in_no_checkpoint(root):
    index = checkpoint(root, "tokens").index
    assert index.shapes["prediction.weight"] == [60, 32] and not any("blocks.input" in name for name in index.shapes)
    assert "model.safetensors" in index.data["teacher"]["files"]


def test_what_masked_patches_have_taught_is_evaluated_exported_and_begun_with(root, tmp_path):
    run_dir = root / "runs" / "masked-bf16"
    step, found = evaluate_run(run_dir)
    assert step == STEPS and 0 <= found["fewshot/toy/2shot"] <= 1
    export(str(run_dir), "safetensors", tmp_path / "weights.safetensors")
    assert describe(open_weights(tmp_path / "weights.safetensors")).num_classes is None
    source, classes = checkpoint(root, "masked-bf16"), checkpoint(root, "classes-of-masked", 1)
    taken = [name for name in classes.index.shapes if not name.startswith(("head.", "pre_logits."))]
    assert len(taken) == len(classes.index.shapes) - 2
    for name in taken:
        assert torch.equal(classes.parameter(name), source.parameter(name, "ema")), name


@pytest.mark.parametrize(("name", "prefixes"), [("whole", ()), ("encoder", ("mask", "decoder."))])
def test_a_file_gives_what_it_holds_and_the_rest_begins_as_ever(root, name, prefixes):
    initial, found = initial_weights(recipe_of(root, "mae"), 0), checkpoint(root, name, 1)
    for each, value in initial.items():
        expected = value if each.startswith(prefixes or "nothing") else 2 * value
        assert torch.equal(found.parameter(each), expected), each


def test_a_run_continues_with_its_decoder_and_classes_begin_with_its_encoder(root):
    source, initial = checkpoint(root, "mae-bf16"), initial_weights(recipe_of(root, "mae"), 0)
    continued, classes = checkpoint(root, "continued", 1), checkpoint(root, "classes", 1)
    for name in source.index.shapes:
        assert torch.equal(continued.parameter(name), source.parameter(name, "ema")), name
    own = {name for name in source.index.shapes if name.startswith(("mask", "decoder."))}
    assert classes.index.shapes.keys() - {"head.weight", "head.bias"} == source.index.shapes.keys() - own
    of_classes = checkpoint(root, "classes-of-file", 1)
    for name in source.index.shapes.keys() - own:
        assert torch.equal(classes.parameter(name), source.parameter(name, "ema")), name
        assert torch.equal(of_classes.parameter(name), 2 * initial[name]), name


def test_a_decoder_with_other_heads_is_refused_and_one_of_other_targets_told_of(root):
    def recipe(**changes: Any) -> Recipe:
        return make_recipe(root, **begins(root, "runs/mae-bf16", objective={**MAE["objective"], **changes}))

    with pytest.raises(RecipeError, match=r"objective\.decoder_heads is 4"):
        check_initial_weights(recipe(decoder_heads=4), [], root / "runs" / "none")
    for norm_pix in (True, False):
        continued = recipe(norm_pix=norm_pix)
        notes = _Assignment(continued, [], find_weights(Named.by_init(continued.init))).notes
        assert any("norm_pix" in note for note in notes) == (not norm_pix)
