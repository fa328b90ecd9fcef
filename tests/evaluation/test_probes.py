"""Nearest neighbours and the logistic probe against scikit-learn."""

import numpy as np
import pytest
import torch

from vitscale.evaluation.probes import TEMPERATURE, Splits, logistic_probe, neighbour_accuracies, solve, whitened

K = 4


def samples(count, seed, width=12):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, K, count)
    centres = np.random.default_rng(7).normal(size=(K, width))
    return (3 + 0.6 * centres[y] + rng.normal(size=(count, width))).astype(np.float32), y


def tensors(*arrays):
    return [torch.from_numpy(array) for array in arrays]


def test_neighbours_equal_scikit_learn():
    neighbors = pytest.importorskip("sklearn.neighbors")
    train_x, train_y = samples(150, seed=1)
    test_x, test_y = samples(2000, seed=2)
    found = neighbour_accuracies(Splits(*tensors(train_x, train_y, test_x, test_y), K))
    assert list(found) == [10, 20, 100]  # there are no 200
    for k, accuracy in found.items():
        peer = neighbors.KNeighborsClassifier(
            k, weights=lambda distance: np.exp((1 - distance) / TEMPERATURE), metric="cosine", algorithm="brute"
        )
        assert accuracy == pytest.approx(peer.fit(train_x, train_y).score(test_x, test_y), abs=5e-4)
    assert max(found.values()) > 0.4


@pytest.mark.parametrize("strength", [1e-3, 1.0, 100.0])
def test_the_optimum_is_scikit_learn_s(strength):
    linear_model = pytest.importorskip("sklearn.linear_model")
    train_x, train_y = samples(300, seed=1)
    x, _ = whitened(*tensors(train_x, train_x))
    ours = solve(x, torch.from_numpy(train_y), K, strength, tolerance=1e-9)
    peer = linear_model.LogisticRegression(C=strength, tol=1e-10, max_iter=10_000).fit(x.numpy(), train_y)
    np.testing.assert_allclose(ours.weight.numpy(), peer.coef_, atol=1e-4)
    shift = peer.intercept_ - ours.bias.numpy()  # a constant in all biases changes nothing
    np.testing.assert_allclose(shift, shift.mean(), atol=1e-4)


def test_the_path_ends_where_a_fresh_start_does():
    train_x, train_y = samples(200, seed=1)
    x, _ = whitened(*tensors(train_x, train_x))
    y = torch.from_numpy(train_y)
    start = None
    for strength in (1e-3, 1e-1, 10.0):
        start = solve(x, y, K, strength, start, tolerance=1e-9)
    torch.testing.assert_close(start.weight, solve(x, y, K, 10.0, tolerance=1e-9).weight, atol=1e-4, rtol=0)


def test_the_strength_is_chosen_on_the_development_part_alone():
    train_x, train_y, test_x, test_y = tensors(*samples(300, seed=1), *samples(1000, seed=2))
    development = torch.arange(300) % 10 == 0
    strengths = (1e-4, 1e-2, 1.0)
    chosen, share = logistic_probe(Splits(train_x, train_y, test_x, test_y, K), development, strengths)
    fit_x, held_x = whitened(train_x[~development], train_x[development])
    scores = [
        solve(fit_x, train_y[~development], K, strength).accuracy(held_x, train_y[development])
        for strength in strengths
    ]
    assert chosen == strengths[int(np.argmax(scores))]
    shuffled = logistic_probe(Splits(train_x, train_y, test_x, test_y.flip(0), K), development, strengths)
    assert shuffled[0] == chosen and shuffled[1] != share
    x, held = whitened(train_x, test_x)
    assert share == solve(x, train_y, K, chosen).accuracy(held, test_y)
