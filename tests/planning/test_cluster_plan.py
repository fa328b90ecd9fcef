"""Plans: what fits, the totals at an MFU, and the command as people type it."""

import json

import pytest
from commands import command
from messages import assert_messages
from toy_recipes import make_recipe

from vitscale.about.planning import Cluster, ClusterPlan, make_cluster, make_plan
from vitscale.flops.estimate import estimate
from vitscale.flops.hardware import find_device
from vitscale.ground.errors import RecipeError
from vitscale.training.beginning.memory import tensors_by_micro_batch
from vitscale.training.beginning.tensors import step_tensors

TINY = {"name": "ViT-Ti/16", "depth": 2, "num_classes": 10}
H100 = find_device("h100")


def plan_of(cluster: Cluster) -> ClusterPlan:
    recipe = make_recipe(TINY, 32, batch={"global": 64, "micro_max": 64})
    return make_plan(estimate("toy", recipe, 10_000), cluster)


def test_what_does_not_fit_is_never_the_best():
    roomy = plan_of(make_cluster(H100, 8))
    assert roomy.best is not None and roomy.best.micro_batch == 8 and roomy.best.parallelism.zero_stage == 1
    needs = sorted(choice.memory.device_bytes for choice in roomy.choices)
    tight = plan_of(make_cluster(H100, 8, memory=needs[len(needs) // 2] / 0.95))
    assert tight.best is not None
    assert tight.best.memory.device_bytes <= needs[len(needs) // 2]
    assert {choice.fits for choice in tight.choices} == {True, False}
    assert all(choice.fits or "does not fit" in choice.verdict for choice in tight.choices)
    assert sum(choice.verdict == "best" for choice in tight.choices) == 1
    assert plan_of(make_cluster(H100, 8, memory=1e6)).best is None


@pytest.mark.parametrize(("again", "depth"), [(0, 7), (1, 6), (2, 7)])
def test_tensors_of_few_blocks_and_batches_are_those_of_all(again, depth):
    recipe = make_recipe({"name": "ViT-Ti/16", "depth": depth}, 96, parallelism={"activation_checkpointing": again})
    between = tensors_by_micro_batch(recipe, 100, 16)
    for micro in (2, 16):
        exact = step_tensors(recipe, 100, micro, "cuda")
        assert between(micro).saved == exact.saved
        assert exact.transient <= between(micro).transient * 1.01


def test_the_command_says_what_it_assumes_and_costs_what_six_n_t_says():
    small = ["--set", "model.depth=2", "--set", "batch.global=64"]
    code, said = command("plan", "h14_jft", "--devices", 16, "--hardware", "H100", *small).answer
    assert code == 0, said
    for words in ("best", "Assumed:", "8 devices a node", "40% MFU", "kB a stored image", "On paper"):
        assert words in said
    arguments = ("--devices", 16, "--hardware", "h100", "--mfu", 0.3, "--price", 2, "--json")
    found = json.loads(command("plan", "h14_jft", *arguments, *small).stdout)
    assert {(one["zero_stage"], one["activation_checkpointing"]) for one in found["choices"]} == {
        (stage, again) for stage in range(4) for again in range(3)
    }
    assert found["choices"][found["best"]]["verdict"] == "best"
    totals, (tokens, width) = found["totals"], (257, 1280)
    block = 12 * width**2 * tokens + 2 * width * tokens**2  # multiply-adds
    flops = 6 * (2 * block + 14 * 14 * 3 * width * (tokens - 1)) * totals["images"]
    assert totals["days"] * 86400 == pytest.approx(flops / (16 * 0.3 * 989.4e12), rel=0.02)  # and the head
    assert totals["cost"] == pytest.approx(2 * 16 * 24 * totals["days"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("--devices", 8, "--hardware", "h101"),
        ("--devices", 7, "--hardware", "h100"),
        ("--devices", 8, "--hardware", "a100"),
        ("--devices", 8, "--hardware", "v100"),
        ("--devices", 16, "--hardware", "h100", "--nodes", 3),
        ("--devices", 8, "--hardware", "h100", "--mfu", 45),
        ("--devices", 8, "--hardware", "h100", "--memory", -1),
        ("--devices", 8, "--hardware", "h100", "--set", "precision=fp32"),
    ],
)
def test_mistakes_are_named(arguments):
    code, message = command("plan", "h14_jft", *arguments).answer
    assert code == RecipeError.exit_code
    assert_messages("cluster-plan", {" ".join(map(str, arguments)): message.splitlines()[0]})
