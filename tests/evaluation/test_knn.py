"""Nearest neighbours while training: scikit-learn's votes, what a recipe may say, and that they can decide."""

import json

import numpy as np
import pytest
from small_recipes import SMALL, small_recipe
from toy_split import model, split

from vitscale.data.shards.generated import write_generated_dataset
from vitscale.evaluation import FewShot, NearestNeighbours, build_evaluators, evaluate
from vitscale.evaluation.linear import LinearHeads
from vitscale.ground.errors import DataError, RecipeError
from vitscale.recipe import override, smoke_form

K = 7
CLASSES = list("abcdefg")


def make_recipe(root, *settings, **knn):
    data, evaluation = (
        {"train": "train", "root": str(root)},
        {"every": {"steps": 2}, "knn": {"train": "train", "test": "test"} | knn},
    )
    blocks = {"objective": {"kind": "masked_patches"}, "evaluation": evaluation, "schedule": {"duration": {"steps": 4}}}
    return small_recipe(SMALL | {"width": 16, "depth": 1, "mlp_dim": 16}, *settings, data=data, **blocks)


def test_accuracies_are_scikit_learn_s():
    neighbors = pytest.importorskip("sklearn.neighbors")
    train, test = split(150, K, seed=2), split(400, K, seed=3)
    found = evaluate([NearestNeighbours("knn", train.loader(8), test.loader(16), CLASSES, (20, 5))], model(K))
    assert list(found) == ["knn/20nn", "knn/5nn"]
    train_x, test_x = (model(K)(part.images).pooled.numpy() for part in (train, test))
    for k in (5, 20):
        peer = neighbors.KNeighborsClassifier(
            k, weights=lambda distance: np.exp((1 - distance) / 0.07), metric="cosine", algorithm="brute"
        )
        expected = peer.fit(train_x, train.labels.numpy()).score(test_x, test.labels.numpy())
        assert found[f"knn/{k}nn"] == pytest.approx(expected, abs=1 / 400 + 1e-9)
        assert found[f"knn/{k}nn"] > 2 / K


def test_more_neighbours_than_samples_and_unlabelled_samples_are_refused():
    train, test = split(19, K, seed=2), split(40, K, seed=3)
    with pytest.raises(DataError, match="20 neighbours of only 19"):
        evaluate([NearestNeighbours("knn", train.loader(8), test.loader(8), CLASSES)], model(K))
    test.labels[3] = -1
    with pytest.raises(DataError, match="nearest-neighbour evaluator"):
        evaluate([NearestNeighbours("knn", train.loader(8), test.loader(8), CLASSES, (5,))], model(K))


def test_what_cannot_vote_is_found_before_training_and_named_by_its_side(tmp_path):
    write_generated_dataset(tmp_path / "train", [24], seed=1)
    write_generated_dataset(tmp_path / "test", [12], seed=2)
    with pytest.raises(RecipeError, match=r"evaluation\.knn\.k 25: .*train.* 24 samples"):
        build_evaluators(make_recipe(tmp_path, "evaluation.knn.k=[5, 25]"), [])
    manifest = tmp_path / "train" / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["checksum"]
    manifest.write_text(json.dumps(content | {"class_names": []}))
    with pytest.raises(DataError, match=r"/train.* names no classes"):
        build_evaluators(make_recipe(tmp_path), [])
    train, test = split(40, K, seed=2), split(40, K, seed=3)
    train.labels[3] = -1
    with pytest.raises(DataError, match="1 training samples have a label"):
        evaluate([NearestNeighbours("knn", train.loader(8), test.loader(8), CLASSES, (5,))], model(K))


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


def test_a_recipe_asks_for_it_and_chooses_by_it(tmp_path):
    write_generated_dataset(tmp_path / "train", [24], seed=1)
    write_generated_dataset(tmp_path / "test", [12], seed=2)
    recipe = make_recipe(tmp_path, "selection={metric: knn/20nn, mode: max}")
    (evaluator,) = build_evaluators(recipe, [])
    assert (evaluator.name, list(evaluator.numbers)) == ("knn", [20])
    assert (evaluator.train_samples, evaluator.test_samples) == (24, 12)
    assert recipe.measured_on("knn/20nn") == ("test", recipe.evaluation.knn.crop)
    small = smoke_form(make_recipe(tmp_path, train="photos/a", test="photos/b"), tmp_path)
    assert (small.evaluation.knn.train, small.evaluation.knn.test) == ("train", "test")
    without = ["evaluation.knn=null", "evaluation.every=null", "selection=null"]
    assert "knn" not in override(recipe.dump(), without, "test").dump()["evaluation"]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["evaluation.knn.k=[20, 20]"], "evaluation.knn"),
        (["evaluation.knn.k=[]"], "evaluation.knn.k"),
        (["evaluation.knn.k=[0]"], "evaluation.knn.k"),
        (["selection={metric: knn/5nn, mode: max}"], "knn/20nn"),
        (["evaluation.knn=null"], "evaluation.every"),
    ],
)
def test_mistakes_name_their_key(settings, key, tmp_path):
    with pytest.raises(RecipeError) as caught:
        make_recipe(tmp_path, *settings)
    assert key in str(caught.value)
