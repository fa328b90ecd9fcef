"""Classifiers of a model's features while training: beside scikit-learn, and what recipes may ask for."""

import json

import numpy as np
import pytest
import torch
from small_recipes import SMALL, small_recipe
from toy_split import model, split

from data_tools.views import write_view
from vitscale.data.shards import Manifest
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.evaluation import FewShot, NearestNeighbours, build_evaluators, evaluate
from vitscale.evaluation.heads import RATES
from vitscale.evaluation.linear import AttentiveHeads, LinearHeads
from vitscale.evaluation.splits import check_splits
from vitscale.ground.errors import DataError, RecipeError
from vitscale.models import Outputs
from vitscale.recipe import override, smoke_form

K = 7
CLASSES = list("abcdefg")
ON_TEST = {"train": "train", "test": "test"}
KNN = {"knn": ON_TEST}


def heads(**changes):
    """The block `evaluation` of a recipe with linear heads, or what is changed of them."""
    return {"evaluators": [{"kind": "linear", **ON_TEST} | changes]}


def make_recipe(root, evaluation, *settings):
    data, evaluation = {"train": "train", "root": str(root)}, {"every": {"steps": 2}} | evaluation
    blocks = {"objective": {"kind": "masked_patches"}, "evaluation": evaluation, "schedule": {"duration": {"steps": 4}}}
    return small_recipe(SMALL | {"width": 16, "depth": 1, "mlp_dim": 16}, *settings, data=data, **blocks)


@pytest.fixture
def sets(tmp_path):
    write_generated_dataset(tmp_path / "train", [24], seed=1)
    write_generated_dataset(tmp_path / "test", [12], seed=2)
    return tmp_path


def test_votes_of_neighbours_are_scikit_learn_s():
    neighbors = pytest.importorskip("sklearn.neighbors")
    train, test = split(150, K, seed=2), split(2000, K, seed=3)
    found = evaluate([NearestNeighbours("knn", train.loader(8), test.loader(16), CLASSES, (20, 5, 100))], model(K))
    assert list(found) == ["knn/20nn", "knn/5nn", "knn/100nn"]
    train_x, test_x = (model(K)(part.images).pooled.numpy() for part in (train, test))
    for k in (5, 20, 100):
        peer = neighbors.KNeighborsClassifier(
            k, weights=lambda distance: np.exp((1 - distance) / 0.07), metric="cosine", algorithm="brute"
        )
        expected = peer.fit(train_x, train.labels.numpy()).score(test_x, test.labels.numpy())
        assert found[f"knn/{k}nn"] == pytest.approx(expected, abs=5e-4)
        assert found[f"knn/{k}nn"] > 2 / K


def test_what_cannot_vote_is_found_before_training_and_named_by_its_side(sets):
    with pytest.raises(RecipeError, match=r"evaluation\.knn\.k 25: .*train.* 24 samples"):
        build_evaluators(make_recipe(sets, KNN, "evaluation.knn.k=[5, 25]"), [])
    manifest = sets / "train" / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["checksum"]
    manifest.write_text(json.dumps(content | {"class_names": []}))
    with pytest.raises(DataError, match=r"/train.* names no classes"):
        build_evaluators(make_recipe(sets, KNN), [])
    few = split(19, K, seed=2).loader(8)
    with pytest.raises(DataError, match="20 neighbours of only 19"):
        evaluate([NearestNeighbours("knn", few, few, CLASSES)], model(K))


@pytest.mark.parametrize("side", ["training", "test"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_representations_that_are_not_finite_have_no_votes(side, value):
    train, test = split(40, K, seed=2), split(40, K, seed=3)
    (train if side == "training" else test).images[7] = 255

    def predict(images):
        outputs = model(K)(images)
        outputs.pooled[(images == 255).flatten(1).all(dim=1)] = value
        return outputs

    for evaluator in (NearestNeighbours, FewShot, LinearHeads):
        with pytest.raises(DataError, match=f"1 {side} samples is not finite"):
            evaluate([evaluator("a", train.loader(8), test.loader(8), CLASSES, (5,))], predict)


def test_few_shot_done_again_reads_what_it_drew_alone_and_finds_what_a_whole_pass_finds(tmp_path):
    whole = write_generated_dataset(tmp_path / "whole", [40, 25, 60], seed=1)
    left_out = [np.arange(7), np.array([], int), np.array([3, 59])]
    kept = ((index, np.setdiff1d(whole.slots(index), slots)) for index, slots in enumerate(left_out))
    write_view(whole, str(tmp_path / "train"), kept)
    write_generated_dataset(tmp_path / "test", [45], seed=2)
    task, seen = {"name": "it", **ON_TEST}, []
    few = {"fewshot": {"tasks": [task], "seeds": 2}}

    def predict(images):
        seen.append(len(images))
        colours = images.double().mean(dim=(1, 2))
        return Outputs(colours[:, None], colours, colours)

    def measured(policy, shots):
        few["fewshot"]["shots"] = shots
        seen.clear()
        evaluators = build_evaluators(
            make_recipe(tmp_path, few, f"data.bad_samples={policy}", "evaluation.batch=1"), []
        )
        first, of_first = evaluate(evaluators, predict), len(seen)
        seen.clear()
        assert evaluate(evaluators, predict) == evaluate(evaluators, predict) == first
        again = len(seen) / 2
        assert of_first == (125 - 9 + again if policy == "error" else again)  # after a whole pass of training
        return first, again - 45

    found, _ = measured("error", [1, 3, 16])
    assert found["fewshot/it/3shot"] > 0.5 and found["fewshot/it/16shot_scarce"] > 0
    assert measured("mask", [1, 3, 16]) == (found, 125 - 9)  # any sample may be damaged, and is not counted then
    assert 7 * 3 <= measured("error", [3, 1])[1] <= 7 * 3 * 2


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
    # Of one token, the representation, attentive heads learn the same.
    attentive = evaluate([AttentiveHeads("attentive", train.loader(8), test.loader(16), CLASSES, 400)], scaled)
    assert list(attentive) == ["attentive/top1", "attentive/lr"]
    assert attentive["attentive/top1"] == pytest.approx(found["linear/top1"], abs=0.04)
    test.labels = test.labels.flip(0)
    other = evaluate([LinearHeads("linear", train.loader(8), test.loader(16), CLASSES)], scaled)
    assert other["linear/lr"] == found["linear/lr"] and other["linear/top1"] != found["linear/top1"]


def test_attentive_heads_see_patches_alone(sets):
    asked = heads(kind="attentive", steps=2)
    recipe = make_recipe(sets, asked, "selection={metric: attentive/top1, mode: max}", "model.registers=3")
    (evaluator,) = build_evaluators(recipe, [])
    patches, width = (recipe.data.image_size // recipe.model.patch_size) ** 2, 16
    tokens = torch.arange(4 + patches).float()[None, :, None].expand(64, -1, width)
    assert recipe.model.num_tokens(recipe.data.image_size) == 4 + patches

    def predict(images):
        return Outputs(tokens[: len(images)], tokens[: len(images), 0], None)

    assert evaluator.measured(predict, lambda task: task.train.features[0].tolist()) == tokens[0, 4:].tolist()


@pytest.mark.parametrize(
    ("model", "tokens", "width"),
    [({"name": "Swin-T"}, 4, 768), ({"name": "ResNet50x1"}, 4, 2048), (SMALL | {"registers": 2}, 64, 24)],
)
def test_room_is_asked_for_before_training_whatever_the_family(model, tokens, width, sets):
    needed = 4 * 36 * tokens * width

    def evaluators(limit_gb):
        data = {"train": "train", "root": str(sets), "image_size": 64}
        asked = heads(kind="attentive", limit_gb=limit_gb)
        return build_evaluators(small_recipe(model, data=data, evaluation=asked), [])

    (evaluator,) = evaluators(needed * 1.0001 / 1e9)
    assert evaluator.host_bytes == needed
    with pytest.raises(DataError, match="room for 35 images"):
        evaluators(needed * 0.999 / 1e9)


def test_asking_for_room_fills_none(sets):
    """A stranger's recipe of 39 billion parameters and images of 4,096 patches: computed, it would take 150 GB."""
    model = {"patch_size": 16, "width": 8192, "depth": 48, "mlp_dim": 32768, "num_heads": 64}
    data = {"train": "train", "root": str(sets), "image_size": 1024}
    asked = heads(kind="attentive", limit_gb=1)
    with pytest.raises(DataError, match="room for 7 images"):
        build_evaluators(small_recipe(model, data=data, evaluation=asked), [])


@pytest.mark.parametrize("kind", ["linear", "attentive"])
def test_fewer_samples_than_settings_need_are_refused_also_before_training(sets, kind):
    write_generated_dataset(sets / "few", [9], seed=1)
    with pytest.raises(DataError, match=f"{kind} evaluator '{kind}': 9 training samples"):
        build_evaluators(make_recipe(sets, heads(kind=kind, train="few")), [])
    few = split(9, K, seed=2).loader(8)
    with pytest.raises(DataError, match="9 training samples"):
        evaluate([LinearHeads("linear", few, few, CLASSES, 5)], model(K))


def test_a_recipe_asks_for_them_and_chooses_by_them(sets):
    for metric in ("knn/20nn", "linear/top1"):
        recipe = make_recipe(sets, KNN | heads(), f"selection={{metric: {metric}, mode: max}}")
        for name, built in zip(("knn", "linear"), build_evaluators(recipe, []), strict=True):
            assert (built.name, built.train_samples, built.test_samples) == (name, 24, 12)
            assert name == "linear" or list(built.numbers) == [20]
    assert recipe.measured_on("knn/20nn") == ("test", recipe.evaluation.knn.crop)
    assert recipe.measured_on("linear/top1") == ("test", recipe.evaluation.evaluators[0].crop)
    assert recipe.measured_on("validation/top1") == (None, None)
    for changes, split_of_run in (({"test": "train"}, "train"), ({"train": "test"}, "train"), ({}, "test")):
        with pytest.raises(DataError, match=r"evaluation\.evaluators\.0\.test"):
            check_splits(make_recipe(sets, heads(**changes)), Manifest.load(sets / split_of_run))
    assert check_splits(recipe, Manifest.load(sets / "train")) == []
    away = {"train": "photos/a", "test": "photos/b"}
    small = smoke_form(make_recipe(sets, {"knn": away} | heads(**away)), sets).evaluation
    assert [(one.train, one.test) for one in (small.knn, *small.evaluators)] == [("train", "test")] * 2
    assert small.evaluators[0].steps == 10
    without = override(make_recipe(sets, KNN).dump(), ["evaluation.knn=null", "evaluation.every=null"], "test")
    assert "knn" not in without.dump()["evaluation"]


@pytest.mark.parametrize(
    ("evaluation", "settings", "key"),
    [
        (KNN, ["evaluation.knn.k=[20, 20]"], "evaluation.knn"),
        (KNN, ["evaluation.knn.k=[]"], "evaluation.knn.k"),
        (KNN, ["evaluation.knn.k=[0]"], "evaluation.knn.k"),
        (KNN, ["selection={metric: knn/5nn, mode: max}"], "knn/20nn"),
        (KNN, ["evaluation.knn=null"], "evaluation.every"),
        (heads(steps=0), [], "evaluation.evaluators.0.steps"),
        (heads(epochs=3), [], "evaluation.evaluators.0.epochs"),
        *((heads(name=name), [], "evaluation.evaluators.0.name") for name in ("a\nERROR: b", "a" * 201)),
        *((heads(name=name), [], "evaluators.0.name") for name in ("a/b", "validation")),
        (heads(kind="attentive", limit_gb=0), [], "evaluation.evaluators.0.limit_gb"),
        (heads(limit_gb=1), [], "evaluation.evaluators.0.limit_gb"),
        (heads(kind="linea"), [], "evaluation.evaluators.0.kind"),
        (heads(), ["selection={metric: linear/top5, mode: max}"], "linear/top1"),
    ],
)
def test_mistakes_name_their_key(evaluation, settings, key, tmp_path):
    with pytest.raises(RecipeError) as caught:
        make_recipe(tmp_path, evaluation, *settings)
    assert key in str(caught.value)


def test_two_of_one_name_are_refused(sets):
    twice = {"evaluators": 2 * heads()["evaluators"]}
    with pytest.raises(RecipeError, match="'linear'"):
        build_evaluators(make_recipe(sets, twice), [])


def test_what_it_learns_is_no_part_of_the_run():
    part = split(40, K, seed=2)
    before = torch.get_rng_state()
    evaluate([LinearHeads("linear", part.loader(8), part.loader(8), CLASSES, 5)], model(K))
    assert torch.equal(torch.get_rng_state(), before)
