"""What we tell DeepSpeed, and what a recipe may add to it."""

import contextlib

import pytest
from ranks import make_recipe

from vitscale.ground.errors import RecipeError
from vitscale.training.deepspeed.config import derive_config


def test_defaults_of_deepspeed_that_change_results_are_set(tmp_path):
    recipe = make_recipe(tmp_path, parallelism={"zero_stage": 3}, batch={"global": 16, "micro_max": 4})
    config = derive_config(recipe, world_size=2)
    assert config["train_batch_size"] == 16
    assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 2 == 16
    assert config["zero_optimization"]["memory_efficient_linear"] is False
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["communication_data_type"] == "fp32"
    assert config["bf16"]["check_grad_overflow"] is True
    assert config["gradient_clipping"] == 1.0


def test_without_accumulation_gradients_stay_in_bf16(tmp_path):
    assert "data_types" not in derive_config(make_recipe(tmp_path), world_size=2)


def test_one_rank_sums_in_fp32_what_it_accumulates_and_nothing_else(tmp_path):
    """Whatever the recipe says of it, and repeats in its own block."""
    block = {"deepspeed": {"communication_data_type": "fp32"}}
    whole = make_recipe(tmp_path, batch={"global": 16, "micro_max": 16}, **block)
    accumulated = make_recipe(tmp_path, batch={"global": 16, "micro_max": 8}, **block)
    assert derive_config(whole, world_size=1)["communication_data_type"] == "bf16"
    assert derive_config(accumulated, world_size=1)["communication_data_type"] == "fp32"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"zero_optimisation": {}}, ["deepspeed.zero_optimisation", "did you mean 'zero_optimization'"]),
        ({"foo_bar": 1}, ["deepspeed.foo_bar", "zero_optimization"]),
        ({"train_batch_size": 32}, ["deepspeed.train_batch_size", "32", "contradicts", "16"]),
        ({"zero_optimization": {"stage": 2}}, ["deepspeed.zero_optimization.stage", "contradicts"]),
        ({"zero_optimization": {"overlap_com": True}}, ["deepspeed.zero_optimization.overlap_com"]),
        ({"bf16": {"enabled": False}}, ["deepspeed.bf16.enabled", "contradicts"]),
        ({"zero_optimization": None}, ["deepspeed.zero_optimization", "None", "contradicts"]),
        ({"aio": 5}, ["deepspeed.aio", "5", "block"]),
        ({"elasticity": {}}, ["deepspeed.elasticity"]),
        ({"flops_profiler": {"output_file": "thesis"}}, ["deepspeed.flops_profiler.output_file"]),
        ({"zero_optimization": {"offload_param": {"nvme_path": "disk"}}}, ["offload_param.nvme_path"]),
        ({"torch_autocast": {"lower_precision_safe_modules": ["a.B"]}}, ["lower_precision_safe_modules.0", "a.B"]),
    ],
)
def test_what_contradicts_the_recipe_or_does_not_exist_is_refused(tmp_path, extra, words):
    with pytest.raises(RecipeError) as caught:
        derive_config(make_recipe(tmp_path, deepspeed=extra), world_size=2)
    assert all(word in str(caught.value) for word in words), caught.value


def test_cosines_in_half_precision_are_refused(tmp_path):
    """With targets of DINO up to a third of which would be other prototypes'."""
    compares = {"objective": {"kind": "contrastive"}, "data": {"views": [{"name": "global", "count": 2}]}}
    compares["evaluation"] = {"validation": None}
    for blocks in ({}, compares):
        recipe = make_recipe(tmp_path, **blocks, deepspeed={"torch_autocast": {"enabled": True}})
        with pytest.raises(RecipeError, match="torch_autocast") if blocks else contextlib.nullcontext():
            derive_config(recipe, world_size=1)


def test_additions_are_passed_on(tmp_path):
    extra = {"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 1000}, "wall_clock_breakdown": True}
    extra |= {"torch_autocast": {"lower_precision_safe_modules": ["torch.nn.Linear"], "dtype": "bfloat16"}}
    extra |= {"flops_profiler": {"enabled": True, "output_file": None}}
    config = derive_config(make_recipe(tmp_path, deepspeed=extra), world_size=2)
    added = {"overlap_comm": True, "reduce_bucket_size": 1000}
    assert added.items() <= config["zero_optimization"].items()
    assert config["wall_clock_breakdown"] is True
