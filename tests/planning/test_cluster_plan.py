"""Plans: limits that a model of a step's time must keep, and the command as people type it."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from messages import assert_messages
from toy_recipes import make_recipe
from typer.testing import CliRunner

from vitscale.about.planning.cluster import Cluster, make_cluster
from vitscale.about.planning.communication import communication
from vitscale.about.planning.plan import ClusterPlan, make_plan
from vitscale.about.planning.step_time import StepTime, step_time
from vitscale.cli.main import app
from vitscale.flops.accounting import mfu, training_flops_per_image
from vitscale.flops.estimate import estimate
from vitscale.flops.hardware import find_device
from vitscale.flops.work import recipe_work
from vitscale.ground.errors import RecipeError
from vitscale.training.beginning.memory import tensors_by_micro_batch
from vitscale.training.beginning.tensors import model_parameters, step_tensors

MODEL = {"name": "ViT-B/16", "num_classes": 1000}
TINY = {"name": "ViT-Ti/16", "depth": 2, "num_classes": 10}
H100 = find_device("h100")
# Stage, recomputation and micro-batch: each value with every other at least once.
WAYS = [(0, 0, 1), (0, 1, 8), (0, 2, 1), (1, 0, 8), (1, 1, 1), (1, 2, 8), (2, 0, 1), (2, 1, 8), (2, 2, 1), (3, 0, 8)]
WAYS += [(3, 1, 1), (3, 2, 8)]


def time_of(cluster: Cluster, stage: int, again: int, micro: int, **blocks) -> tuple[StepTime, float]:
    """The time of a step, and its MFU."""
    recipe = make_recipe(
        MODEL,
        batch={"global": 1024, "micro_max": micro},
        parallelism={"zero_stage": stage, "activation_checkpointing": again},
        **blocks,
    )
    work, parameters = recipe_work(recipe, 1000), model_parameters(recipe, 1000)
    _, accumulation = recipe.batch.split(cluster.devices)
    messages = communication(recipe, parameters, cluster.devices, accumulation)
    time = step_time(recipe, work, parameters, cluster, messages)
    utilisation = mfu(1024 / time.total, work.macs, cluster.devices, cluster.peak)
    assert utilisation is not None
    return time, utilisation


@pytest.mark.parametrize("way", WAYS)
def test_more_devices_are_faster_but_never_perfectly(way):
    """While their network grows with them: through one narrow adapter, more nodes may well be slower."""
    totals = []
    for count in (1, 8, 16, 64):
        cluster = make_cluster(H100, count, network=450e9)
        time, utilisation = time_of(cluster, *way)
        assert utilisation <= cluster.efficiency
        totals.append((count, time.total))
    for (few, slow), (many, fast) in pairwise(totals):
        assert fast < slow <= fast * many / few * 1.0001


@pytest.mark.parametrize("way", WAYS)
def test_with_an_endless_network_only_computing_and_latencies_are_left(way):
    device = replace(H100, name="unheard of")  # no bandwidth is known: no time for the update
    cluster = replace(make_cluster(device, 64, memory=80e9, efficiency=0.5), network=1e30, link=1e30)
    time, utilisation = time_of(cluster, *way)
    _, again, _ = way
    flops = training_flops_per_image(recipe_work(make_recipe(MODEL), 1000).macs)
    assert time.compute == pytest.approx(1024 / 64 * flops / (0.5 * 989.4e12))
    assert time.network == pytest.approx(time.latency) and time.waiting <= time.latency and time.update == 0
    # One pass of three, of a block all but its last product: 8 of 12 D x D a token, and attention's 2 T.
    D, T = 768, 197
    share = (8 * D + 2 * T) / (12 * D + 2 * T) / 3 / again if again else 0
    assert time.recompute == pytest.approx(share * time.compute, rel=0.01)
    assert utilisation == pytest.approx(0.5 / (1 + share + time.waiting / time.compute), rel=0.01)


@pytest.mark.parametrize("stage", range(4))
def test_the_slowest_link_of_a_ring_bounds_it(stage):
    slow, fast = (time_of(make_cluster(H100, 64, network=rate), stage, 0, 8)[0] for rate in (1e9, 1e10))
    assert slow.network - slow.latency == pytest.approx(10 * (fast.network - fast.latency), rel=0.1)  # or another way
    assert slow.waiting > fast.waiting
    assert make_cluster(H100, 8).ring_rate == 450e9
    assert make_cluster(H100, 16).ring_rate == 400e9  # eight adapters of 400 Gbit/s
    assert make_cluster(H100, 16, network=900e9).ring_rate == 450e9
    assert make_cluster(find_device("l40s"), 16).ring_rate == 32e9
    assert time_of(make_cluster(H100, 1), stage, 0, 8)[0].network == 0


def test_what_is_hidden_is_not_waited_for():
    overlapped = {"deepspeed": {"zero_optimization": {"overlap_comm": True}}}
    cluster = make_cluster(H100, 8)
    for stage in (1, 2):
        assert time_of(cluster, stage, 0, 8, **overlapped)[0].waiting < time_of(cluster, stage, 0, 8)[0].waiting
    assert time_of(cluster, 0, 0, 8, **overlapped) == time_of(cluster, 0, 0, 8)


def plan_of(cluster: Cluster) -> ClusterPlan:
    recipe = make_recipe(TINY, 32, batch={"global": 64, "micro_max": 64})
    return make_plan(estimate("toy", recipe, 10_000), cluster)


def test_a_model_that_gathers_nothing_in_the_passes_of_stage_3_has_a_time():
    """All of its parameters are below DeepSpeed's threshold, so every rank keeps them."""
    small = {"patch_size": 8, "width": 32, "depth": 2, "mlp_dim": 32, "num_heads": 2}
    recipe = make_recipe(small, image_size=32, parallelism={"zero_stage": 3})
    cluster, parameters = make_cluster(H100, 2), model_parameters(recipe, 3)
    sent = communication(recipe, parameters, cluster.devices, 1)
    assert not [each for each in sent if each.phase == "passes"]
    assert step_time(recipe, recipe_work(recipe, 3), parameters, cluster, sent).total > 0


def test_what_does_not_fit_is_never_the_best():
    roomy = plan_of(make_cluster(H100, 8))
    assert roomy.best is not None and roomy.totals is not None and roomy.totals.days is not None
    assert roomy.totals.days * roomy.best.images_per_s * 86400 == pytest.approx(roomy.totals.images)
    needs = sorted(choice.memory.device_bytes for choice in roomy.choices)
    tight = plan_of(make_cluster(H100, 8, memory=needs[len(needs) // 2] / 0.95))
    assert tight.best is not None
    assert tight.best.memory.device_bytes <= needs[len(needs) // 2]
    assert {choice.fits for choice in tight.choices} == {True, False}
    assert all(choice.fits or "does not fit" in choice.verdict for choice in tight.choices)
    assert sum(choice.is_best for choice in tight.choices) == 1
    nothing = plan_of(make_cluster(H100, 8, memory=1e6))
    assert nothing.best is None and nothing.totals is None


@pytest.mark.parametrize(("again", "depth"), [(0, 7), (1, 6), (2, 7)])
def test_tensors_of_few_blocks_and_batches_are_those_of_all(again, depth):
    recipe = make_recipe({"name": "ViT-Ti/16", "depth": depth}, 96, parallelism={"activation_checkpointing": again})
    between = tensors_by_micro_batch(recipe, 100, 16)
    for micro in (2, 16):
        exact = step_tensors(recipe, 100, micro, "cuda")
        assert between(micro).saved == exact.saved
        assert exact.transient <= between(micro).transient * 1.01


def run(*arguments: object):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_the_command_says_what_it_assumes():
    small = ["--set", "model.depth=2", "--set", "batch.global=64"]
    result = run("h14_jft", "--devices", 16, "--hardware", "H100", *small)
    assert result.exit_code == 0, result.output
    for words in ("best", "Assumed:", "400 GB/s of network", "40% of the peak", "kB a stored image", "On paper"):
        assert words in result.output
    found = json.loads(run("h14_jft", "--devices", 16, "--hardware", "h100", "--mfu", 0.3, "--json", *small).output)
    assert {(one["zero_stage"], one["activation_checkpointing"]) for one in found["choices"]} == {
        (stage, again) for stage in range(4) for again in range(3)
    }
    best = found["choices"][found["best"]]
    assert best["verdict"] == "best" and best["mfu"] <= 0.3
    assert best["sent_bytes"] == pytest.approx(sum(one["bytes"] for one in best["sent"]))
    assert best["time_s"]["network"] == pytest.approx(sum(one["seconds"] for one in best["sent"]))
    assert best["time_s"]["latency"] == pytest.approx(sum(one["latency_s"] for one in best["sent"]))
    assert best["step_s"] == pytest.approx(
        sum(best["time_s"][part] for part in ("compute", "recompute", "update", "waiting"))
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("--devices", 8, "--hardware", "h101"),
        ("--devices", 7, "--hardware", "h100"),
        ("--devices", 8, "--hardware", "a100"),
        ("--devices", 8, "--hardware", "v100"),
        ("--devices", 16, "--hardware", "h100", "--nodes", 3),
        ("--devices", 16, "--hardware", "h100", "--nodes", 2, "--devices-per-node", 4),
        ("--devices", 8, "--hardware", "h100", "--mfu", 45),
        ("--devices", 8, "--hardware", "h100", "--network", -1),
        ("--devices", 8, "--hardware", "h100", "--set", "precision=fp32"),
        ("--devices", 8, "--hardware", "h100", "--set", "precision=fp8", "--set", "parallelism.zero_stage=1"),
    ],
)
def test_mistakes_are_named(arguments):
    result = run("h14_jft", *arguments)
    assert isinstance(result.exception, RecipeError)
    assert_messages("cluster-plan", {" ".join(map(str, arguments)): str(result.exception).splitlines()[0]})
