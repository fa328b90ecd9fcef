"""The logistic probe against scikit-learn; nearest neighbours are in test_learning_evaluators.py."""

import numpy as np
import pytest
import torch

from vitscale.evaluation.probes import Splits, logistic_probe, solve, whitened

K = 4


def samples(count, seed, width=12):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, K, count)
    centres = np.random.default_rng(7).normal(size=(K, width))
    return (3 + 0.6 * centres[y] + rng.normal(size=(count, width))).astype(np.float32), y


def tensors(*arrays):
    return [torch.from_numpy(array) for array in arrays]


def test_the_optimum_is_scikit_learn_s_from_anew_and_from_a_weaker_one():
    linear_model = pytest.importorskip("sklearn.linear_model")
    train_x, train_y = samples(300, seed=1)
    x, _ = whitened(*tensors(train_x, train_x))
    y, start = torch.from_numpy(train_y), None
    for strength in (1e-3, 1.0, 100.0):
        peer = linear_model.LogisticRegression(C=strength, tol=1e-10, max_iter=10_000).fit(x.numpy(), train_y)
        start = solve(x, y, K, strength, start, tolerance=1e-9)
        for ours in (start, solve(x, y, K, strength, tolerance=1e-9)):
            np.testing.assert_allclose(ours.weight.numpy(), peer.coef_, atol=1e-4)
            shift = peer.intercept_ - ours.bias.numpy()  # a constant in all biases changes nothing
            np.testing.assert_allclose(shift, shift.mean(), atol=1e-4)


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
