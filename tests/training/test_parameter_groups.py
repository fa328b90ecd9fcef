"""Groups of parameters against torch's optimizers, on two ranks in every ZeRO stage; mistakes in them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from known_gradients import GROUP_UPDATES, SIZES, VECTORS, LinearLoss, rate, update_groups
from outcomes import put_together
from ranks import make_recipe, on_ranks

from vitscale.ground.errors import RecipeError
from vitscale.recipe import validate_recipe
from vitscale.runs.directory import check_recipe
from vitscale.training.deepspeed.engine import build_optimizer

RANKS = 2
ADAMW = {"name": "adamw", "lr": 1.0, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}
SGD = {"name": "sgd", "lr": 1.0, "momentum": 0.9, "weight_decay": 0.1}
SGD_BF16 = {**SGD, "momentum_dtype": "bf16"}
GROUPED = {
    "decay_exclude": "bias$",
    "layer_decay": 0.5,
    "groups": [
        {"match": r"blocks\.0\.bias", "frozen": True},
        {"match": "norm", "frozen": True},
        {"match": "^head", "lr_factor": 10.0, "weight_decay": 0.3},
        {"match": "head|1.weight", "lr_factor": 3.0},
    ],
}
FROZEN = ["blocks.0.bias", "norm.weight", "norm.bias"]
# By the text above, by hand: (factor of the learning rate, weight decay).
HOW = {
    "embedding.weight": (0.125, 0.1),
    "embedding.bias": (0.125, 0.0),
    "blocks.0.weight": (0.25, 0.1),
    "blocks.1.weight": (1.5, 0.1),
    "blocks.1.bias": (0.5, 0.0),
    "head.weight": (10.0, 0.3),
    "head.bias": (10.0, 0.3),
}
# Weight decay from 0.1 to 0.5 in four updates, momentum from 0.9 or 0.8 to 0.5 in two.
CHANGING = {
    "weight_decay": {"to": 0.5, "over": {"steps": 4}, "shape": "linear"},
    "momentum": {"to": 0.5, "over": {"steps": 2}, "shape": "cosine"},
}
CASES = [
    (f"{name}-{precision}-zero{stage}", settings, precision, stage)
    for name, settings in (("adamw", ADAMW), ("sgd", SGD), ("sgd-bf16", SGD_BF16))
    for precision in ("fp32", "bf16")
    for stage in range(4)
]
CASES += [
    (f"{settings['name']}-changing-zero{stage}", settings, "fp32", stage)
    for settings in (ADAMW, SGD)
    for stage in range(4)
]


def content(case: str, settings: dict[str, Any], precision: str, stage: int) -> dict[str, Any]:
    return {
        **{"schedule": CHANGING if "changing" in case else {}, "precision": precision, "model": {"depth": 2}},
        **{"batch": {"global": RANKS, "micro_max": 1}, "optimizer": {**settings, **GROUPED}},
        "parallelism": {"zero_stage": stage},
    }


def gradient(step: int, name: str) -> np.ndarray:
    return sum(VECTORS.numbers(name, step, rank).astype(np.float64) for rank in range(RANKS)) / RANKS


def by_torch(settings: dict[str, Any], name: str, *, changes: bool) -> dict[str, np.ndarray]:
    """A parameter and its moments after the updates, by torch's optimizer in double precision."""
    (factor, base), weights = HOW[name], torch.nn.Parameter(torch.from_numpy(VECTORS.initial(name)).double())
    is_adamw = settings["name"] == "adamw"
    first = settings["betas"][0] if is_adamw else settings["momentum"]
    optimizer = torch.optim.AdamW([weights], eps=ADAMW["eps"]) if is_adamw else torch.optim.SGD([weights])
    for step in range(GROUP_UPDATES):
        decay, momentum = base, first
        if changes:
            decay, momentum = base * (1 + step), (first, (first + 0.5) / 2, 0.5)[min(step, 2)]
        how = {"betas": (momentum, settings["betas"][1])} if is_adamw else {"momentum": momentum}
        optimizer.param_groups[0] |= how | {"lr": rate(step) * factor, "weight_decay": decay}
        weights.grad = torch.from_numpy(gradient(step, name))
        optimizer.step()
    kept = {kind: value.numpy() for kind, value in optimizer.state[weights].items() if kind != "step"}
    return kept | {"master": weights.detach().numpy()}


def sgd_in_bf16_by_hand(name: str) -> dict[str, np.ndarray]:
    """In fp32, for bf16 rounds what is near to a border between two numbers as its last digits are."""
    factor, decay = (np.float32(value) for value in HOW[name])
    weights = VECTORS.initial(name)
    kept = np.zeros_like(weights)
    for step in range(GROUP_UPDATES):
        velocity = kept * np.float32(0.9) + gradient(step, name).astype(np.float32) + decay * weights
        weights = weights - np.float32(rate(step)) * factor * velocity
        kept = torch.from_numpy(velocity).bfloat16().float().numpy()
    return {"master": weights, "momentum_buffer": kept}


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("groups")
    cases = {case[0]: content(*case) for case in CASES}
    on_ranks(RANKS, update_groups, root, cases)
    return root


@pytest.mark.parametrize(("case", "settings", "precision", "stage"), CASES, ids=[case[0] for case in CASES])
def test_every_stage_updates_groups_as_torch_and_as_the_schedule_says(updated, case, settings, precision, stage):
    found = put_together(updated / f"{case}-{rank}.npz" for rank in range(RANKS))
    if settings is SGD_BF16:
        by_name = {name: sgd_in_bf16_by_hand(name) for name in HOW}
    else:
        by_name = {name: by_torch(settings, name, changes="changing" in case) for name in HOW}
    expected = {(kind, name): value for name in HOW for kind, value in by_name[name].items()}
    assert found.keys() == expected.keys() | {("master", name) for name in FROZEN}
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=2e-6, atol=2e-6, err_msg=str(key))
    weights = np.load(updated / f"{case}.frozen.npz")
    assert sorted(weights.files) == sorted(FROZEN)
    for name in FROZEN:
        assert np.array_equal(found["master", name], VECTORS.initial(name)), "also the digits that bf16 does not have"
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        assert np.array_equal(weights[name], torch.from_numpy(VECTORS.initial(name)).to(dtype).float().numpy())


def groups(tmp_path: Path, **settings: Any) -> dict[str, tuple[float, float]]:
    """Parameter -> (factor of the learning rate, weight decay), in the order in which the optimizer has them."""
    model = LinearLoss(VECTORS)
    optimizer = build_optimizer(make_recipe(tmp_path, model={"depth": 2}, optimizer={**ADAMW, **settings}), model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: (group["lr_factor"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def test_parameters_are_divided_as_the_recipe_says(tmp_path):
    assert groups(tmp_path, **GROUPED) == HOW


def test_without_groups_the_order_is_that_of_checkpoints_before_there_were_groups(tmp_path):
    weights, biases = ([f"{layer}.{kind}" for layer in SIZES] for kind in ("weight", "bias"))
    assert list(groups(tmp_path, decay_exclude="bias")) == weights + biases
    assert list(groups(tmp_path, decay_exclude="bias", weight_decay=0.0)) == weights + biases
    assert groups(tmp_path) == dict.fromkeys(VECTORS.shapes, (1.0, 0.1))
    assert list(groups(tmp_path)) == list(VECTORS.shapes)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"decay_exclude": "nothing"}, ["optimizer.decay_exclude"]),
        ({"groups": [{"match": "nothing"}]}, ["optimizer.groups.0.match", "'nothing'", "none of the model's"]),
        (
            {"groups": [{"match": "head"}, {"match": "head.bias", "frozen": True}]},
            ["optimizer.groups.1.match", "'head.bias'", "groups before it"],
        ),
        ({"groups": [{"match": "", "frozen": True}]}, ["every parameter is frozen"]),
    ],
)
def test_a_group_without_effect_and_nothing_to_train_are_refused(tmp_path, given, words):
    with pytest.raises(RecipeError) as caught:
        groups(tmp_path, **given)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("blocks", "key"),
    [
        ({"optimizer": {**ADAMW, "groups": [{"match": "a(b"}]}}, "optimizer.groups.0.match"),
        ({"optimizer": {**ADAMW, "groups": [{"lr_factor": 2.0}]}}, "optimizer.groups.0.match"),
        ({"optimizer": {**ADAMW, "groups": [{"match": "a", "lr_factor": 0.0}]}}, "optimizer.groups.0.lr_factor"),
        ({"optimizer": {**ADAMW, "groups": [{"match": "a", "lr_factor": 2.0**31}]}}, "optimizer.groups.0.lr_factor"),
        ({"optimizer": {**SGD, "groups": [{"match": "a", "frozen": True, "lr_factor": 2.0}]}}, "optimizer.groups.0"),
        ({"optimizer": {**SGD, "groups": [{"match": "a", "frozn": True}]}}, "did you mean 'optimizer.groups.0.frozen'"),
        ({"optimizer": {**SGD, "layer_decay": 1.5}}, "optimizer.layer_decay"),
        ({"optimizer": {**SGD_BF16, "momentum": 0.0}}, "momentum_dtype"),
        ({"optimizer": {**ADAMW, "momentum_dtype": "bf16"}}, "momentum_dtype"),
        ({"optimizer": {"name": "muon", "lr": 1.0, "matrices": "a(b"}}, "optimizer.matrices"),
        ({"optimizer": {"name": "lamb", "lr": 1.0, "momentum": 0.9}}, "optimizer.momentum"),
        ({"optimizer": {"name": "adafactor", "lr": 1.0, "momentum": 0.0}}, "optimizer.momentum"),
        ({"optimizer": {"name": "muon", "lr": 1.0}, "parallelism": {"offload": "optimizer"}}, "and this is muon"),
        ({"optimizer": {**SGD, "layer_decay": 0.7}, "model": {"name": "ResNet50x1"}}, "optimizer.layer_decay"),
    ],
)
def test_mistakes_name_their_key(tmp_path, blocks, key):
    with pytest.raises(RecipeError) as caught:
        make_recipe(tmp_path, **{"model": {"name": "ViT-B/16"}, **blocks})
    assert key in str(caught.value)


def test_a_run_from_before_there_were_groups_goes_on_and_with_others_does_not(tmp_path):
    recipe = make_recipe(tmp_path, optimizer=ADAMW)
    before = recipe.dump()
    for key in ("groups", "layer_decay"):
        del before["optimizer"][key]
    began_with = validate_recipe(before, "the run's recipe")
    check_recipe(began_with, recipe, "the run")
    frozen = make_recipe(tmp_path, optimizer={**ADAMW, "groups": [{"match": "head", "frozen": True}]})
    with pytest.raises(RecipeError, match=r"optimizer\.groups"):
        check_recipe(began_with, frozen, "the run")
