"""`parallelism.overlap`: whoever is late, and by how much, every bit of every weight is the same."""

import json

import pytest
import torch
from exchange_ranks import run_late
from ranks import on_ranks

from vitscale.ground.errors import RecipeError
from vitscale.recipe import load_recipe
from vitscale.training.deepspeed.config import derive_config
from vitscale.training.deepspeed.exchange import in_buckets


def check(folder, world_size: int, stages: list[int], steps: int) -> None:
    on_ranks(world_size, run_late, folder, stages, steps)
    found = json.loads((folder / "late.json").read_text())
    assert sorted(found) == [str(stage) for stage in stages]
    for stage, (punctual, *late) in found.items():
        if stage == "3":
            by_deepspeed = late.pop()
            if world_size == 2:  # partitions are DeepSpeed's in this stage, and there is one order of a sum
                assert by_deepspeed == punctual
        assert all(other == punctual for other in late), f"ZeRO {stage}"
        if stage != "3":  # every rank has all weights
            assert all(of_rank["weights"] == punctual[0]["weights"] for of_rank in punctual), f"ZeRO {stage}"


def test_late_ranks_change_no_bit(tmp_path):
    check(tmp_path, 2, [1, 2], steps=15)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("world_size", "steps"), [(2, 300), (4, 100)])
def test_late_ranks_change_no_bit_in_thousands_of_steps(tmp_path, world_size, steps):
    check(tmp_path, world_size, [1, 2, 3], steps=steps)


def test_buckets_are_filled_from_the_end_and_keep_every_group_s_order():
    sizes = [5, 30, 4, 4, 100, 3, 3]
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    groups = [{"params": parameters[:5], "weight_decay": 0.1}, {"params": parameters[5:], "weight_decay": 0.0}]
    cut = in_buckets(groups, 40)
    assert [[each.numel() for each in group["params"]] for group in cut] == [[5], [30, 4, 4], [100], [3, 3]]
    assert [group["weight_decay"] for group in cut] == [0.1, 0.1, 0.1, 0.0]
    assert [id(each) for group in cut for each in group["params"]] == [id(each) for each in parameters]


@pytest.mark.parametrize("others", ["zero_stage: 0", "zero_stage: 2, offload: optimizer"])
def test_where_nothing_can_overlap_the_recipe_is_refused(others):
    with pytest.raises(RecipeError):
        load_recipe("b16_i1k", [f"parallelism={{{others}, overlap: true}}"])


@pytest.mark.parametrize(
    ("stage", "block", "key"),
    [
        (1, "zero_optimization: {overlap_comm: true}", "zero_optimization.overlap_comm"),
        (1, "zero_optimization: {reduce_scatter: false}", "zero_optimization.reduce_scatter"),
        (2, "zero_optimization: {contiguous_gradients: false}", "zero_optimization.contiguous_gradients"),
        (2, "zero_optimization: {offload_optimizer: {device: cpu}}", "zero_optimization.offload_optimizer"),
        (3, "zero_optimization: {offload_optimizer: {device: cpu}}", "zero_optimization.offload_optimizer"),
        (1, "data_types: {grad_accum_dtype: fp32}", "data_types.grad_accum_dtype"),
        (1, "prescale_gradients: true", "prescale_gradients"),
        (2, "gradient_predivide_factor: 2.0", "gradient_predivide_factor"),
        (3, "gradient_predivide_factor: 2.0", "gradient_predivide_factor"),
        (1, "comms_logger: {enabled: true}", "comms_logger"),
        (2, "torch_autocast: {enabled: true}", "torch_autocast"),
    ],
)
def test_what_overlap_would_ignore_is_refused(stage, block, key):
    settings = [f"parallelism={{overlap: true, zero_stage: {stage}}}", "precision=bf16", f"deepspeed={{{block}}}"]
    with pytest.raises(RecipeError, match=f"deepspeed.{key}"):
        derive_config(load_recipe("b16_i1k", settings), 2)


def test_one_rank_has_nobody_to_send_to():
    settings = (["precision=bf16", f"parallelism.overlap={on}"] for on in ("false", "true"))
    plain, overlapped = (derive_config(load_recipe("b16_i1k", each), 1) for each in settings)
    assert plain == overlapped
