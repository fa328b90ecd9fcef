"""Linear heads while training: chosen without the test set, beside scikit-learn, and asked for in recipes."""

import pytest
import torch
from small_recipes import SMALL, small_recipe
from toy_split import model, split

from vitscale.data.shards import Manifest
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.evaluation import build_evaluators, evaluate
from vitscale.evaluation.heads import RATES
from vitscale.evaluation.linear import AttentiveHeads, LinearHeads
from vitscale.evaluation.splits import check_splits
from vitscale.ground.errors import DataError, RecipeError
from vitscale.models import Outputs
from vitscale.recipe import override, smoke_form

K = 7
CLASSES = list("abcdefg")
LINEAR = {"kind": "linear", "train": "train", "test": "test"}


def make_recipe(root, *settings, **linear):
    data, evaluation = {"train": "train", "root": str(root)}, {"every": {"steps": 2}, "evaluators": [LINEAR | linear]}
    blocks = {"objective": {"kind": "masked_patches"}, "evaluation": evaluation, "schedule": {"duration": {"steps": 4}}}
    return small_recipe(SMALL | {"width": 16, "depth": 1, "mlp_dim": 16}, *settings, data=data, **blocks)


def scaled(images):
    """The toy's outputs, at a scale at which these rates learn."""
    outputs = model(K)(images)
    return outputs._replace(pooled=outputs.pooled / 4)


def test_accuracy_is_near_scikit_learn_s_and_the_test_set_chooses_nothing():
    linear_model = pytest.importorskip("sklearn.linear_model")
    train, test = split(400, K, seed=2), split(400, K, seed=3)
    found = evaluate([LinearHeads("linear", train.loader(8), test.loader(16), CLASSES)], scaled)
    assert list(found) == ["linear/top1", "linear/lr"] and found["linear/lr"] in RATES
    x, y = (scaled(part.images).pooled.numpy() for part in (train, test))
    peer = linear_model.LogisticRegression(C=1e3, max_iter=5000).fit(x, train.labels.numpy())
    assert found["linear/top1"] == pytest.approx(peer.score(y, test.labels.numpy()), abs=0.04)
    assert found["linear/top1"] > 3 / K
    test.labels = test.labels.flip(0)
    other = evaluate([LinearHeads("linear", train.loader(8), test.loader(16), CLASSES)], scaled)
    assert other["linear/lr"] == found["linear/lr"] and other["linear/top1"] != found["linear/top1"]


def test_attentive_heads_learn_from_tokens_as_linear_ones_from_a_representation():
    """One token, the representation: what attention sees is the token, and the answer a linear function of it."""
    train, test = split(400, K, seed=2), split(400, K, seed=3)
    found = evaluate([AttentiveHeads("attentive", train.loader(8), test.loader(16), CLASSES, 400)], scaled)
    linear = evaluate([LinearHeads("linear", train.loader(8), test.loader(16), CLASSES)], scaled)
    assert list(found) == ["attentive/top1", "attentive/lr"]
    assert found["attentive/top1"] == pytest.approx(linear["linear/top1"], abs=0.04)


def test_attentive_heads_see_patches_alone_and_memory_is_bounded(tmp_path):
    write_generated_dataset(tmp_path / "train", [24], seed=1)
    write_generated_dataset(tmp_path / "test", [12], seed=2)
    attentive = {"kind": "attentive", "steps": 2}
    recipe = make_recipe(tmp_path, "selection={metric: attentive/top1, mode: max}", "model.registers=3", **attentive)
    (evaluator,) = build_evaluators(recipe, [])
    patches, width = (recipe.data.image_size // recipe.model.patch_size) ** 2, 16
    seen = []
    tokens = torch.arange(4 + patches).float()[None, :, None].expand(64, -1, width)
    assert recipe.model.num_tokens(recipe.data.image_size) == 4 + patches

    def looked_at(task):
        seen.append(task.train.features)
        return 0.0, 0.0

    evaluator.measured(lambda images: Outputs(tokens[: len(images)], tokens[: len(images), 0], None), looked_at)
    assert torch.equal(seen[0][0], tokens[0, 4:])
    needed = 36 * patches * width * 4 / 1e9
    build_evaluators(make_recipe(tmp_path, **attentive, limit_gb=needed * 1.0001), [])
    with pytest.raises(DataError, match="room for 35 images"):
        build_evaluators(make_recipe(tmp_path, **attentive, limit_gb=needed * 0.999), [])


@pytest.mark.parametrize(
    ("model", "tokens", "width"),
    [({"name": "Swin-T"}, 4, 768), ({"name": "ResNet50x1"}, 4, 2048), (SMALL | {"registers": 2}, 64, 24)],
)
def test_room_is_asked_for_before_training_whatever_the_family(model, tokens, width, tmp_path):
    """What rank 0 has to hold is known by the shapes, before anything is computed."""
    write_generated_dataset(tmp_path / "train", [24], seed=1)
    write_generated_dataset(tmp_path / "test", [12], seed=2)
    needed = 4 * 36 * tokens * width

    def evaluators(limit_gb):
        blocks = {"evaluation": {"evaluators": [LINEAR | {"kind": "attentive", "limit_gb": limit_gb}]}}
        data = {"train": "train", "root": str(tmp_path), "image_size": 64}
        return build_evaluators(small_recipe(model, data=data, **blocks), [])

    (evaluator,) = evaluators(needed * 1.0001 / 1e9)
    assert evaluator.host_bytes == needed
    with pytest.raises(DataError, match="room for 35 images"):
        evaluators(needed * 0.999 / 1e9)


def test_asking_for_room_fills_none(tmp_path):
    """A stranger's recipe of 39 billion parameters and images of 4,096 patches: computed, it would take 150 GB."""
    for seed, name in enumerate(("train", "test")):
        write_generated_dataset(tmp_path / name, [20], seed=seed)
    model = {"patch_size": 16, "width": 8192, "depth": 48, "mlp_dim": 32768, "num_heads": 64}
    data = {"train": "train", "root": str(tmp_path), "image_size": 1024}
    heads = LINEAR | {"kind": "attentive", "limit_gb": 1}
    with pytest.raises(DataError, match="room for 7 images"):
        build_evaluators(small_recipe(model, data=data, evaluation={"evaluators": [heads]}), [])


def test_fewer_samples_than_settings_need_are_refused():
    few = split(9, K, seed=2)
    with pytest.raises(DataError, match="9 training samples"):
        evaluate([LinearHeads("linear", few.loader(8), few.loader(8), CLASSES, 5)], model(K))


@pytest.mark.parametrize("kind", ["linear", "attentive"])
def test_they_are_refused_before_training(tmp_path, kind):
    write_generated_dataset(tmp_path / "train", [9], seed=1)
    write_generated_dataset(tmp_path / "test", [12], seed=2)
    with pytest.raises(DataError, match=f"{kind} evaluator '{kind}': 9 training samples"):
        build_evaluators(make_recipe(tmp_path, kind=kind), [])


def test_a_recipe_asks_for_it_and_chooses_by_it(tmp_path):
    write_generated_dataset(tmp_path / "train", [24], seed=1)
    write_generated_dataset(tmp_path / "test", [12], seed=2)
    recipe = make_recipe(tmp_path, "selection={metric: linear/top1, mode: max}")
    (evaluator,) = build_evaluators(recipe, [])
    assert (evaluator.name, evaluator.train_samples, evaluator.test_samples) == ("linear", 24, 12)
    assert recipe.measured_on("linear/top1") == ("test", recipe.evaluation.evaluators[0].crop)
    assert recipe.measured_on("validation/top1") == (None, None)
    for settings, split_of_run in (({"test": "train"}, "train"), ({"train": "test"}, "train"), ({}, "test")):
        with pytest.raises(DataError, match=r"evaluation\.evaluators\.0\.test"):
            check_splits(make_recipe(tmp_path, **settings), Manifest.load(tmp_path / split_of_run))
    assert check_splits(recipe, Manifest.load(tmp_path / "train")) == []
    small = smoke_form(make_recipe(tmp_path, train="photos/a", test="photos/b"), tmp_path).evaluation.evaluators[0]
    assert (small.train, small.test, small.steps) == ("train", "test", 10)


@pytest.mark.parametrize(
    ("settings", "linear", "key"),
    [
        ([], {"steps": 0}, "evaluation.evaluators.0.steps"),
        ([], {"epochs": 3}, "evaluation.evaluators.0.epochs"),
        ([], {"name": "a\nERROR: b"}, "evaluation.evaluators.0.name"),
        ([], {"name": "a" * 201}, "evaluation.evaluators.0.name"),
        ([], {"name": "a/b"}, "evaluators.0.name"),
        ([], {"name": "validation"}, "evaluators.0.name"),
        ([], {"kind": "attentive", "limit_gb": 0}, "evaluation.evaluators.0.limit_gb"),
        ([], {"limit_gb": 1}, "evaluation.evaluators.0.limit_gb"),
        ([], {"kind": "linea"}, "evaluation.evaluators.0.kind"),
        (["selection={metric: linear/top5, mode: max}"], {}, "linear/top1"),
    ],
)
def test_mistakes_name_their_key(settings, linear, key, tmp_path):
    with pytest.raises(RecipeError) as caught:
        make_recipe(tmp_path, *settings, **linear)
    assert key in str(caught.value)


def test_two_of_one_name_are_refused(tmp_path):
    write_generated_dataset(tmp_path / "train", [24], seed=1)
    write_generated_dataset(tmp_path / "test", [12], seed=2)
    twice = make_recipe(tmp_path).dump()
    twice["evaluation"]["evaluators"] *= 2
    with pytest.raises(RecipeError, match="'linear'"):
        build_evaluators(override(twice, [], "test"), [])


def test_what_it_learns_is_no_part_of_the_run():
    """Training goes on with the random numbers that it had."""
    part = split(40, K, seed=2)
    before = torch.get_rng_state()
    evaluate([LinearHeads("linear", part.loader(8), part.loader(8), CLASSES, 5)], model(K))
    assert torch.equal(torch.get_rng_state(), before)
