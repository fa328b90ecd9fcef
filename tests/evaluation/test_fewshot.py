"""Ridge and logistic regression against scikit-learn's, and which samples few-shot evaluation draws."""

import numpy as np
import pytest
import torch
from toy_split import model, split

from vitscale.evaluation import PAPER_L2S, FewShot, SharedL2FewShot
from vitscale.evaluation.fewshot import select_shots
from vitscale.evaluation.probes import Splits, logistic_probe, solve, whitened
from vitscale.evaluation.ridge import RidgePath, best_shared_l2, fewshot_accuracy

K = 4
L2S = [2.0**-10, 1.0, 2.0**10, 2.0**19]


def features(samples, width, seed):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, K, samples)
    centres = np.random.default_rng(7).normal(size=(K, width))
    return (3 + 0.6 * centres[y] + rng.normal(size=(samples, width))).astype(np.float32), y


# More samples than features is the primal form, fewer the dual one.
@pytest.mark.parametrize(("samples", "width"), [(9000, 12), (60, 12), (13, 12), (12, 12), (9, 40)])
def test_weights_and_accuracies_equal_scikit_learn_s(samples, width):
    linear_model = pytest.importorskip("sklearn.linear_model")
    (train_x, train_y), (test_x, test_y) = features(samples, width, seed=1), features(500, width, seed=2)
    train_x[:, 3] = test_x[:, 3] = 5.0  # a constant does no harm
    splits = Splits(*map(torch.from_numpy, (train_x, train_y, test_x, test_y)), K)
    path = RidgePath(splits.train_x, splits.train_y, K)
    mean, std = train_x.astype(float).mean(0), train_x.astype(float).std(0) + 1e-5
    white, test_white = (np.column_stack([(x - mean) / std, np.full(len(x), 100.0)]) for x in (train_x, test_x))
    np.testing.assert_allclose(path.whitened(splits.train_x).numpy(), white, atol=1e-9)
    accuracies = fewshot_accuracy(splits, L2S)
    for l2, accuracy in zip(L2S, accuracies, strict=True):
        ridge = linear_model.Ridge(alpha=l2, fit_intercept=False, solver="svd").fit(white, 2 * np.eye(K)[train_y] - 1)
        np.testing.assert_allclose(path.weights(l2).numpy(), ridge.coef_.T, atol=1e-6)
        assert accuracy == np.mean(ridge.predict(test_white).argmax(1) == test_y)
    assert max(accuracies) > 0.4  # chance is 0.25


def test_the_optimum_is_scikit_learn_s_from_anew_and_from_a_weaker_one():
    linear_model = pytest.importorskip("sklearn.linear_model")
    train_x, train_y = features(300, 12, seed=1)
    x, _ = whitened(torch.from_numpy(train_x), torch.from_numpy(train_x))
    y, start = torch.from_numpy(train_y), None
    for strength in (1e-3, 1.0, 100.0):
        peer = linear_model.LogisticRegression(C=strength, tol=1e-10, max_iter=10_000).fit(x.numpy(), train_y)
        start = solve(x, y, K, strength, start, tolerance=1e-9)
        for ours in (start, solve(x, y, K, strength, tolerance=1e-9)):
            np.testing.assert_allclose(ours.weight.numpy(), peer.coef_, atol=1e-4)
            shift = peer.intercept_ - ours.bias.numpy()  # a constant in all biases changes nothing
            np.testing.assert_allclose(shift, shift.mean(), atol=1e-4)


def test_the_strength_is_chosen_on_the_development_part_alone():
    arrays = *features(300, 12, seed=1), *features(1000, 12, seed=2)
    train_x, train_y, test_x, test_y = map(torch.from_numpy, arrays)
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


def test_shared_l2_has_the_best_mean_rank():
    # The middle strength is nobody's best and the best for all together; a mean of accuracies would choose the first.
    assert best_shared_l2(torch.tensor([[0.90, 0.20, 0.10], [0.30, 0.32, 0.31], [0.50, 0.52, 0.53]])) == 1
    assert best_shared_l2(torch.tensor([[0.5, 0.5]])) == 0
    assert best_shared_l2(torch.tensor([[0.90, 0.20, 0.10], [0.30, 0.32, 0.31], [0.50, 0.52, 0.53]]), leave_out=1) == 0
    assert best_shared_l2(torch.tensor([[0.5, 0.5, 0.6]])) == 2


def test_draws_depend_on_seed_and_uid_alone_and_nest():
    data = split(200, K, seed=1)

    def drawn(shots, seed, order=slice(None)):
        labels, uids = data.labels[order], data.uids[order]
        rows = select_shots(labels, uids, shots, K, seed)
        assert torch.bincount(labels[rows], minlength=K).tolist() == [shots] * K
        return set(uids[rows].tolist())

    shuffled = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    assert drawn(5, seed=0) == drawn(5, seed=0, order=shuffled)
    assert drawn(1, seed=0) < drawn(5, seed=0) < drawn(10, seed=0)
    assert drawn(5, seed=0) != drawn(5, seed=1)


def test_draws_are_even():
    # Each of 50 samples of one class should be among 10 drawn in about a fifth of the seeds.
    labels, uids = torch.zeros(50, dtype=torch.int64), torch.arange(50)
    hits = torch.zeros(50)
    for seed in range(500):
        hits[select_shots(labels, uids, 10, 1, seed)] += 1
    assert (hits / 500 - 0.2).abs().max() < 0.08  # 4.5 standard deviations


def fewshot(name="one", train_seed=1, class_names="abcd", **options):
    train, test = split(80, K, seed=train_seed), split(120, K, seed=2)
    return FewShot(name, train.loader(16), test.loader(16), list(class_names), **options), train, test


def test_a_shared_strength_is_chosen_for_all_tasks_and_reported():
    tasks = [fewshot(name, seed, shots=(1, 5))[0] for name, seed in (("one", 1), ("two", 4))]
    found = dict(SharedL2FewShot("fewshot", tasks).run(model(K)))
    assert list(found) == ["one/1shot", "two/1shot", "l2_1shot", "one/5shot", "two/5shot", "l2_5shot"]
    assert found["l2_5shot"] in PAPER_L2S
    fixed = dict(fewshot("one", 1, shots=(5,), l2=found["l2_5shot"])[0].run(model(K)))
    assert found["one/5shot"] == fixed["5shot"]


def test_a_class_with_fewer_samples_gives_what_it_has():
    evaluator, train, _ = fewshot(class_names=["robin", "jay", "crow", "wren", "owl"], shots=(2, 30))
    counts = torch.bincount(train.labels, minlength=5)
    rows = select_shots(train.labels, train.uids, 30, 5, seed=0)
    assert torch.equal(torch.bincount(train.labels[rows], minlength=5), counts.clamp(max=30))
    found = dict(evaluator.run(model(K)))
    assert found["2shot_scarce"] == 1 and found["30shot_scarce"] == int((counts < 30).sum())
