"""Filters, positions, alignment and colours, against scikit-learn and whole-batch formulas."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from vitscale.evaluation.inspection.representation import (
    alignment,
    colours,
    filter_components,
    gram,
    principal_components,
    similarity,
)

DRAWN = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=DRAWN)


def test_components_are_those_of_scikit_learn_but_for_their_signs():
    filters = drawn(96, 4, 4, 3) * torch.linspace(1, 9, 48).view(4, 4, 3) + 2
    ours = filter_components(filters)
    theirs = PCA(28).fit(filters.flatten(1).double().numpy())
    products = (ours.filters.flatten(1).numpy() * theirs.components_).sum(axis=1)
    np.testing.assert_allclose(abs(products), 1, atol=1e-9)
    np.testing.assert_allclose(ours.shares, theirs.explained_variance_ratio_, rtol=1e-9)
    assert ours.filters.shape == (28, 4, 4, 3)
    largest = ours.filters.flatten(1).numpy()
    assert (largest.max(axis=1) == abs(largest).max(axis=1)).all()  # the sign that is chosen


def test_small_models_have_fewer_components():
    assert filter_components(drawn(6, 4, 4, 3)).filters.shape == (5, 4, 4, 3)
    assert filter_components(drawn(60, 2, 2, 3)).filters.shape == (12, 2, 2, 3)


def test_similarity_is_the_cosine():
    positions = drawn(9, 5)
    expected = np.corrcoef(np.concatenate([positions, -positions], axis=1))  # rows of mean 0: correlation is the cosine
    np.testing.assert_allclose(similarity(positions), expected, atol=1e-6)


def whole_batch_alignment(one: np.ndarray, other: np.ndarray) -> float:
    """Unbiased linear CKA by Song et al.'s estimator as sums over tuples of different images: no matrix identity."""
    K, L = one @ one.T, other @ other.T
    n = len(K)

    def estimate(a, b):
        pairs = [a[i, j] * b[i, j] for i, j in itertools.permutations(range(n), 2)]
        triples = [a[i, j] * b[i, k] for i, j, k in itertools.permutations(range(n), 3)]
        fours = [a[i, j] * b[k, m] for i, j, k, m in itertools.permutations(range(n), 4)]
        return np.mean(pairs) - 2 * np.mean(triples) + np.mean(fours)

    return estimate(K, L) / np.sqrt(estimate(K, K) * estimate(L, L))


def test_alignment_is_that_of_the_whole_batch():
    one, other = drawn(8, 6) + 3, drawn(8, 4)
    other[:, 0] += one[:, 0]
    expected = whole_batch_alignment(one.double().numpy(), other.double().numpy())
    assert alignment([[gram(one)]], [[gram(other)]]).item() == pytest.approx(expected, rel=1e-5)


def test_the_estimate_over_all_minibatches_is_that_of_the_whole_batch():
    """It is unbiased: every minibatch of 5 of 8 images once."""
    one, other = drawn(8, 6), drawn(8, 6)
    other = other + one
    batches = list(map(list, itertools.combinations(range(8), 5)))
    grams = ([[gram(of[rows]) for rows in batches]] for of in (one, other))
    expected = alignment([[gram(one)]], [[gram(other)]])
    torch.testing.assert_close(alignment(*grams), expected, rtol=1e-4, atol=0)


def test_alignment_sees_rotation_and_scale_as_the_same_and_noise_as_nothing():
    tokens = drawn(64, 5, 8)
    turned = 7 * tokens.flatten(1) @ torch.linalg.qr(drawn(40, 40)).Q + 3
    layers = [gram(tokens)], [gram(turned)], [gram(drawn(64, 400))]
    found = alignment(layers, layers)
    torch.testing.assert_close(found.diagonal(), torch.ones(3, dtype=torch.float64))
    assert found[0, 1] == pytest.approx(1, abs=1e-4) and abs(found[0, 2]) < 0.05


def test_colours_are_components_of_all_pictures_together():
    tokens = drawn(3, 16, 10)
    tokens[1] += 4
    values, shares = colours(tokens)
    theirs = PCA(3).fit(tokens.reshape(48, 10).double().numpy())
    projected = theirs.transform(tokens.reshape(48, 10).double().numpy())
    for channel in range(3):
        assert abs(np.corrcoef(values.reshape(48, 3)[:, channel], projected[:, channel])[0, 1]) > 0.99  # ends are cut
    np.testing.assert_allclose(shares, theirs.explained_variance_ratio_, rtol=1e-9)
    assert values.min() == 0 and values.max() == 1


def test_a_model_of_two_channels_has_two_colours():
    values, shares = colours(drawn(2, 9, 2))
    assert values.shape == (2, 9, 3) and (values[..., 2] == 0).all() and shares[2] == 0


def test_signs_are_the_same_for_rows_in_any_order():
    rows = drawn(40, 12)
    first, *_ = principal_components(rows, 5)
    second, *_ = principal_components(rows.flip(0), 5)
    torch.testing.assert_close(first, second)
