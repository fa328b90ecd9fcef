"""Masked patches, BEiT and MAE through the same trainer, on real ranks: interrupted, moved, begun with."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finished_runs import evaluate_run
from outcomes import assert_same_run, checkpoint, column, evaluations
from ranks import STEPS, batches, begun, initial_weights, job, launch, make_recipe
from safetensors.torch import save_file

from vitscale.cli.export import export
from vitscale.ground.errors import RecipeError
from vitscale.models import initial_value
from vitscale.models.weights import describe, open_weights
from vitscale.models.weights.foreign import table
from vitscale.objectives import Objective, build_objective
from vitscale.runs.checkpoint.opening import open_run
from vitscale.training.beginning.found_weights import find_weights
from vitscale.training.beginning.initial_weights import _Assignment, check_initial_weights

FIRST_STEP = {"duration": {"steps": STEPS}, "warmup": {"steps": 2}}  # of a learning rate of 0
DECODER = {"decoder_width": 16, "decoder_depth": 2, "decoder_heads": 2}
MAE_MODEL = {"mlp": "exact_gelu", "position": {"kind": "sincos", "table": "mae"}}
SPLITS = {"train": "train", "test": "test"}
KINDS: dict[str, dict[str, Any]] = {
    "masked": {
        "objective": {"kind": "masked_patches", "target": "mean_colour"},
        "evaluation": {
            "validation": None,
            "batch": 16,
            "fewshot": {"tasks": [{"name": "toy", **SPLITS}], "shots": [2]},
        },
    },
    "mae": {
        "objective": {"kind": "mae", **DECODER},
        "model": MAE_MODEL,
        "data": {"normalise": {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}},
        "evaluation": {"validation": None, "batch": 16, "every": {"steps": 2}, "knn": {**SPLITS, "k": [5, 20]}},
        "selection": {"metric": "knn/5nn"},
    },
}


def blocks(kind: str, stage: int, precision: str = "fp32", **others: Any) -> dict[str, Any]:
    """Two micro-batches a rank, averages, recomputation: all that has a state, for the objectives have none."""
    return {
        "precision": precision,
        "batch": {"micro_max": 4},
        "parallelism": {"zero_stage": stage, "activation_checkpointing": 2},
        "ema": {"decay": 0.9},
        "checkpoint": {"every": {"steps": 2}, "keep": 9},
        **KINDS["masked" if kind == "beit" else kind],
        **others,
    }


def beit(root: Path, stage: int) -> dict[str, Any]:
    """Numbers of a tokenizer, blocks of patches."""
    targets = {"kind": "tokenizer", "path": "transformers:FlavaImageCodebook", "from": str(root / "codebook")}
    targets |= {"vocabulary": 60, "image_size": 32}
    objective = {"kind": "masked_patches", "masks": "blocks", "share": 0.4, "targets": targets}
    return blocks("beit", stage, objective=objective, evaluation={"validation": None})


def write_tokenizer(folder: Path) -> None:
    """One with random weights that tells colours apart."""
    from transformers import FlavaImageCodebook, FlavaImageCodebookConfig

    torch.manual_seed(0)
    tokenizer = FlavaImageCodebook(FlavaImageCodebookConfig(hidden_size=8, vocab_size=60, num_blocks_per_group=1))
    with torch.no_grad():
        for parameter in tokenizer.parameters():
            parameter.normal_(0, 0.5)
    tokenizer.save_pretrained(folder)


def begins(source: Path, **others: Any) -> dict[str, Any]:
    """MAE that begins with weights, and changes none of them in its first step."""
    others |= {"evaluation": {"validation": None}, "selection": None}
    return blocks("mae", 3, init={"from": str(source)}, ema=None, schedule=FIRST_STEP, **others)


def mae_of(root: Path) -> Objective:
    return build_objective(make_recipe(root, **blocks("mae", 0)), 0)


def values(objective: Objective, seed: int) -> dict[str, torch.Tensor]:
    """Values of all parameters of an objective, as of a run with this seed."""
    return {name: initial_value(objective, name, each.shape, seed) for name, each in objective.named_weights()}


@pytest.fixture(scope="module")
def root(root: Path) -> Path:
    write_tokenizer(root / "codebook")
    of_kind = {kind: [blocks(kind, stage) for stage in (1, 3, 0)] for kind in KINDS}
    of_kind["beit"] = [beit(root, stage) for stage in (1, 3, 0)]
    jobs = []
    for kind, (one, *moved) in of_kind.items():
        jobs += [job(f"{kind}-two", one), job(f"{kind}-moved", moved, 3, None)]
    stopped = {
        "masked-bf16": blocks("masked", 3, "bf16", model={"dropout": 0.1}),
        "mae-bf16": blocks("mae", 3, "bf16"),
        "mae-factored": blocks("mae", 2, "bf16", optimizer={"name": "adafactor", "lr": 1e-3}),
    }
    for name, content in stopped.items():
        jobs += [job(name, content), job(f"{name}-resumed", content, 3, None)]
    for each in ("cell_colours", "pixels"):
        jobs.append(job(each, blocks("masked", 2, objective={"kind": "masked_patches", "target": each})))
    of_masked = {"init": {"from": str(root / "runs" / "masked-bf16"), "head": "zero"}, "schedule": FIRST_STEP}
    jobs.append(job("classes-of-masked", {**of_masked, "model": {"head": "linear"}}, 1))
    objective = mae_of(root)
    others = values(objective, seed=1)
    there = {
        key: part.contiguous()
        for rule in (*table(objective.backbone, "timm"), *objective.rules("timm"))
        if rule.ours in others
        for key, part in zip(rule.theirs, rule.split(others[rule.ours]), strict=True)
    }
    save_file(there, root / "whole.safetensors")
    encoder = {key: there[key] for key in there if not key.startswith(("mask", "decoder"))}
    save_file(encoder, root / "encoder.safetensors")
    jobs += [job(name, begins(root / f"{name}.safetensors"), 1) for name in ("whole", "encoder")]
    fine_tuned = {"objective": {"loss": "softmax"}, "model": MAE_MODEL | {"head": "linear", "pool": "normed_mean"}}
    jobs.append(job("continued", begins(root / "runs" / "mae-bf16"), 1))
    jobs.append(job("classes", begins(root / "runs" / "mae-bf16") | fine_tuned, 1))
    jobs.append(job("classes-of-file", begins(root / "whole.safetensors") | fine_tuned, 1))
    launch(root, jobs, 2)
    launch(root, [job(f"{kind}-alone", one) for kind, (one, *_) in of_kind.items()], 1)
    return root


@pytest.mark.parametrize("name", ["masked-bf16", "mae-bf16", "mae-factored"])
def test_an_interrupted_run_equals_the_uninterrupted_one_to_the_last_bit(root, name):
    assert_same_run(root, name, f"{name}-resumed")


@pytest.mark.parametrize("way", ["moved", "alone"])
@pytest.mark.parametrize("kind", ["masked", "beit", "mae"])
def test_every_stage_and_world_computes_the_same(root, kind, way):
    """Sums are rounded in another order, nothing else: patches drawn by rank would change every digit."""
    shares = {"masked": ["colour_accuracy"], "beit": ["token_accuracy"], "mae": []}[kind]
    for key, within in (("loss", 2e-5), ("grad_norm", 1e-3), *((share, 2e-5) for share in shares)):
        assert column(root, f"{kind}-{way}", key) == pytest.approx(column(root, f"{kind}-two", key), rel=within)
    assert all(0 <= value <= 1 for share in shares for value in column(root, f"{kind}-{way}", share))


def test_nearest_neighbours_are_the_same_on_every_world_and_decide(root):
    of_runs = {}
    for name in ("mae-two", "mae-moved", "mae-alone", "mae-bf16", "mae-bf16-resumed"):
        lines = evaluations(root, name)
        of_runs[name] = [(line["step"], line["eval/knn/5nn"], line["eval/knn/20nn"]) for line in lines]
        chosen = checkpoint(root, name).index.selection
        assert chosen["best"] == max(of_five for step, of_five, _ in of_runs[name] if step <= chosen["evaluated"])
    assert [step for step, _, _ in of_runs["mae-alone"]] == [2, 4, 6]
    assert of_runs["mae-bf16-resumed"] == of_runs["mae-bf16"]
    assert of_runs["mae-two"] == of_runs["mae-moved"] == of_runs["mae-alone"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_losses_equal_those_of_one_process(root, kind):
    """The weights are the initial ones up to the second update, whose learning rate is not 0."""
    recipe = make_recipe(root, **blocks(kind, 0))
    objective, losses = begun(recipe, 0), []
    with torch.no_grad():
        for batch, views in batches(recipe, 2):
            plan = objective.plan(batch.keys.numpy(), batch.position)
            losses.append(objective(views, batch.labels, plan).per_sample.mean().item())
    assert column(root, f"{kind}-two", "loss")[:2] == pytest.approx(losses, rel=1e-5)
    assert kind == "mae" or losses == pytest.approx([np.log(512)] * 2)


def test_a_tokenizer_is_in_no_checkpoint(root):
    index = checkpoint(root, "beit-moved").index
    assert index.shapes["prediction.weight"] == [60, 32] and not any("blocks.input" in name for name in index.shapes)
    assert "model.safetensors" in index.data["teacher"]["files"]


@pytest.mark.parametrize("name", ["masked-two", "cell_colours", "pixels", "beit-moved", "mae-two"])
def test_something_is_learned(root, name):
    losses = column(root, name, "loss")
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.01


@pytest.mark.parametrize(("name", "kind"), [("masked-bf16", "masked"), ("mae-moved", "mae")])
def test_every_parameter_learns_and_there_is_no_head_of_classes(root, name, kind):
    trained, initial = checkpoint(root, name), initial_weights(make_recipe(root, **blocks(kind, 0)), 0)
    assert trained.index.shapes.keys() == initial.keys() and "mask" in initial and "head.weight" not in initial
    assert [each for each, before in initial.items() if torch.equal(trained.parameter(each), before)] == []


@pytest.mark.parametrize(("name", "prefixes"), [("whole", ()), ("encoder", ("mask", "decoder."))])
def test_a_file_gives_what_it_holds_and_the_rest_begins_as_ever(root, name, prefixes):
    of_file, initial, found = values(mae_of(root), 1), values(mae_of(root), 0), checkpoint(root, name, 1)
    for each in initial:
        expected = initial[each] if each.startswith(prefixes or "nothing") else of_file[each]
        assert torch.equal(found.parameter(each), expected), each


def test_a_run_continues_with_its_decoder_and_classes_begin_with_its_encoder(root):
    source = checkpoint(root, "mae-bf16")
    continued, classes = checkpoint(root, "continued", 1), checkpoint(root, "classes", 1)
    for name in source.index.shapes:
        assert torch.equal(continued.parameter(name), source.parameter(name, "ema")), name
    own = {name for name in source.index.shapes if name.startswith(("mask", "decoder."))}
    assert classes.index.shapes.keys() - {"head.weight", "head.bias"} == source.index.shapes.keys() - own
    of_file, of_classes = values(mae_of(root), 1), checkpoint(root, "classes-of-file", 1)
    for name in source.index.shapes.keys() - own:
        assert torch.equal(classes.parameter(name), source.parameter(name, "ema")), name
        assert torch.equal(of_classes.parameter(name), of_file[name]), name


def test_what_it_has_learned_is_evaluated_exported_and_begun_with(root, tmp_path):
    run_dir = root / "runs" / "masked-bf16"
    step, metrics = evaluate_run(run_dir)
    assert step == STEPS and 0 <= metrics["fewshot/toy/2shot"] <= 1
    export(str(run_dir), "safetensors", tmp_path / "weights.safetensors")
    assert describe(open_weights(tmp_path / "weights.safetensors")).num_classes is None
    _, reader = open_run(run_dir)
    classes = checkpoint(root, "classes-of-masked", 1)
    taken = [name for name in classes.index.shapes if not name.startswith(("head.", "pre_logits."))]
    assert len(taken) == len(classes.index.shapes) - 2
    for name in taken:
        assert torch.equal(classes.parameter(name), reader.parameter(name, "ema")), name


@pytest.mark.parametrize("changes", [{"decoder_heads": 4}, {"norm_pix": True}, {"norm_pix": False}])
def test_another_decoder_is_refused_and_one_of_other_targets_told_of(root, changes):
    recipe = make_recipe(root, **begins(root / "runs" / "mae-bf16", objective={"kind": "mae", **DECODER, **changes}))
    if "decoder_heads" in changes:
        with pytest.raises(RecipeError, match=r"objective\.decoder_heads is 4"):
            check_initial_weights(recipe, [], root / "runs" / "none")
    else:
        found = _Assignment(recipe, [], find_weights(recipe.init))
        assert any("norm_pix" in note for note in found.notes) == (not changes["norm_pix"])
