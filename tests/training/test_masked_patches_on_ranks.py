"""Masked patch prediction through the same trainer: every ZeRO stage on two real ranks, interrupted, killed, moved."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finished_runs import evaluate_run
from outcomes import assert_same_run, checkpoint, column
from ranks import STEPS, asked, batches, begun, initial_weights, job, launch, make_recipe, quick_of

from vitscale.cli.export import export
from vitscale.models.weights import describe, open_weights
from vitscale.runs.checkpoint.opening import open_run

# The objective has no state of its own: whole parameters and parts of them stand for all stages in `make test`.
STAGES = quick_of(range(4), (0, 3))
OTHERS = quick_of(("zero0", "zero2", "zero3", "moved", "alone"), ("zero3", "moved", "alone"))
FEWSHOT = {"tasks": [{"name": "toy", "train": "train", "test": "test"}], "shots": [2]}
FIRST_STEP = {"duration": {"steps": STEPS}, "warmup": {"steps": 2}}  # of a learning rate of 0


def blocks(stage: int, precision: str = "bf16", target: str = "mean_colour", **others: Any) -> dict[str, Any]:
    """Two micro-batches a rank, dropout, averages and recomputation: all that has a state."""
    return {
        "precision": precision,
        "objective": {"kind": "masked_patches", "target": target},
        "model": {"dropout": 0.1 if precision == "bf16" else 0.0},
        "batch": {"micro_max": 4},
        "parallelism": {"zero_stage": stage, "activation_checkpointing": 2},
        "ema": {"decay": 0.9},
        "checkpoint": {"every": {"steps": 2}, "keep": 9},
        "evaluation": {"validation": None, "fewshot": FEWSHOT},
        **others,
    }


@pytest.fixture(scope="module")
def root(root: Path, request: pytest.FixtureRequest) -> Path:
    jobs, parameters = [], asked(request)
    for stage in sorted({3, *(params["stage"] for params in parameters if "stage" in params)}):
        jobs.append(job(f"zero{stage}", blocks(stage)))
        jobs.append(job(f"zero{stage}-resumed", blocks(stage), 3, None))
    for name in {"zero1", *(params["other"] for params in parameters if "other" in params)} - {"moved", "alone"}:
        jobs.append(job(f"{name}-fp32", fp32(int(name[-1]))))
    jobs.append(job("moved-fp32", [fp32(3), fp32(0)], 3, None))
    jobs += [job(each, blocks(2, target=each)) for each in ("cell_colours", "pixels")]
    begins = {"init": {"from": str(root / "runs" / "zero3"), "head": "zero"}}
    jobs.append(job("classes", {**begins, "model": {"head": "linear"}, "schedule": FIRST_STEP}, 1))
    write_tokenizer(root / "codebook")
    jobs.append(job("tokenizer", [named(root, 3), named(root, 0)], 3, None))
    launch(root, jobs, 2)
    launch(root, [job("alone-fp32", fp32(1)), job("tokenizer-alone", named(root, 1))], 1)
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


def named(root: Path, stage: int) -> dict[str, Any]:
    """BEiT: numbers of a tokenizer, blocks of patches."""
    targets = {"kind": "tokenizer", "path": "transformers:FlavaImageCodebook", "from": str(root / "codebook")}
    targets |= {"vocabulary": 60, "image_size": 32}
    return fp32(stage) | {"objective": {"kind": "masked_patches", "masks": "blocks", "share": 0.4, "targets": targets}}


def fp32(stage: int) -> dict[str, Any]:
    return blocks(stage, "fp32", evaluation={"validation": None})


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupted_run_equals_the_uninterrupted_one_to_the_last_bit(root, stage):
    assert_same_run(root, f"zero{stage}", f"zero{stage}-resumed")
    accuracies = column(root, f"zero{stage}", "colour_accuracy")
    assert accuracies == column(root, f"zero{stage}-resumed", "colour_accuracy")
    assert all(0 <= value <= 1 for value in accuracies)


@pytest.mark.parametrize("other", OTHERS)
def test_every_stage_and_world_computes_the_same(root, other):
    """Sums are rounded in another order, nothing else: a mask that depended on the rank would change every digit."""
    for key, within in (("loss", 2e-5), ("colour_accuracy", 2e-5), ("grad_norm", 1e-3)):
        assert column(root, f"{other}-fp32", key) == pytest.approx(column(root, "zero1-fp32", key), rel=within)


def test_the_first_losses_equal_those_of_one_process(root):
    """The weights are the initial ones up to the second update, whose learning rate is not 0."""
    recipe = make_recipe(root, **blocks(0, "fp32"))
    objective, losses = begun(recipe, 0), []
    with torch.no_grad():
        for batch, views in batches(recipe, 2):
            plan = objective.plan(batch.keys.numpy(), batch.position)
            losses.append(objective(views, batch.labels, plan).per_sample.mean().item())
    assert column(root, "zero1-fp32", "loss")[:2] == pytest.approx(losses, rel=1e-5)
    assert losses == pytest.approx([np.log(512)] * 2)


def test_a_tokenizer_names_the_same_on_every_world_and_is_in_no_checkpoint(root):
    for key, within in (("loss", 2e-5), ("token_accuracy", 2e-5), ("grad_norm", 1e-3)):
        assert column(root, "tokenizer", key) == pytest.approx(column(root, "tokenizer-alone", key), rel=within)
    index = checkpoint(root, "tokenizer").index
    assert index.shapes["prediction.weight"] == [60, 32] and not any("blocks.input" in name for name in index.shapes)
    assert "model.safetensors" in index.data["teacher"]["files"]


@pytest.mark.parametrize("name", ["zero1-fp32", "zero3", "cell_colours", "pixels", "tokenizer"])
def test_something_is_learned(root, name):
    losses = column(root, name, "loss")
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.01
    trained = checkpoint(root, name)
    own = {"mask", "prediction.weight", "prediction.bias"}
    assert own <= trained.index.shapes.keys() and "head.weight" not in trained.index.shapes
    if name == "zero3":
        for each, before in initial_weights(make_recipe(root, **blocks(0)), 0).items():
            assert not torch.equal(trained.parameter(each), before), each


def test_what_it_has_learned_is_evaluated_exported_and_begun_with(root, tmp_path):
    run_dir = root / "runs" / "zero3"
    step, metrics = evaluate_run(run_dir)
    assert step == STEPS and 0 <= metrics["fewshot/toy/2shot"] <= 1
    export(str(run_dir), "safetensors", tmp_path / "weights.safetensors")
    found = describe(open_weights(tmp_path / "weights.safetensors"))
    assert found.num_classes is None
    _, reader = open_run(run_dir)
    begun = checkpoint(root, "classes", 1)
    taken = [name for name in begun.index.shapes if not name.startswith(("head.", "pre_logits."))]
    assert len(taken) == len(begun.index.shapes) - 2
    for name in taken:
        assert torch.equal(begun.parameter(name), reader.parameter(name, "ema")), name
