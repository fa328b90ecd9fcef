"""Validation figures against a plain numpy computation, with fillers, ties and NaN; what evaluators refuse."""

import numpy as np
import pytest
import torch
from messages import refusal
from torch.nn import functional as F
from toy_split import Split, model, split

from vitscale.evaluation import FewShot, NearestNeighbours, SharedL2FewShot, Validation
from vitscale.evaluation.linear import LinearHeads
from vitscale.ground.errors import DataError
from vitscale.models import Outputs
from vitscale.objectives.classification import CrossEntropy

SOFTMAX = CrossEntropy("softmax").per_sample_loss


def constant_logits(logits):
    """A model that answers with the next rows of a matrix, whatever the image."""
    position = 0

    def predict(images):
        nonlocal position
        rows = torch.arange(position, position + len(images)).clamp(max=len(logits) - 1)
        position += len(images)
        return Outputs(torch.zeros(len(images), 1, 1), torch.zeros(len(images), 1), logits[rows])

    return predict


def blank(labels):
    return Split(torch.zeros(len(labels), 4, 4, 3, dtype=torch.uint8), torch.tensor(labels), torch.arange(len(labels)))


@pytest.mark.parametrize(("samples", "batch_size"), [(37, 8), (32, 8), (5, 64)])
def test_accuracy_and_loss_equal_numpy(samples, batch_size):
    data, predict = split(samples, 5 if samples < 7 else 7, seed=1), model(7)
    logits, labels = predict(data.images).logits, data.labels
    ranked = np.argsort(-logits.numpy(), axis=1)
    found = dict(Validation("val", data.loader(batch_size), SOFTMAX, samples).run(predict))
    assert found["top1"] == np.mean(ranked[:, 0] == labels.numpy())
    assert found["top5"] == np.mean((ranked[:, :5] == labels.numpy()[:, None]).any(axis=1))
    assert found["loss"] == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)


@pytest.mark.parametrize("num_classes", [2, 5])
def test_no_top5_among_five_classes(num_classes):
    data = split(20, num_classes, seed=2)
    assert set(dict(Validation("val", data.loader(8), SOFTMAX).run(model(num_classes)))) == {"loss", "top1"}


def test_equal_logits_are_one_answer_and_not_all():
    found = dict(Validation("val", blank([0, 4, 5, 6]).loader(4), SOFTMAX).run(constant_logits(torch.zeros(4, 7))))
    assert (found["top1"], found["top5"]) == (0.25, 0.5)


def test_nan_is_a_wrong_answer():
    logits = torch.eye(6)[torch.tensor([0, 1])]
    logits[1, 1] = torch.nan
    found = dict(Validation("val", blank([0, 1]).loader(2), SOFTMAX).run(constant_logits(logits)))
    assert found["top1"] == 0.5 and np.isnan(found["loss"])


def test_an_empty_split_is_an_error():
    with refusal(DataError, "evaluation", "no samples"):
        dict(Validation("val", lambda: [], SOFTMAX).run(model(7)))


@pytest.mark.parametrize(
    ("label", "samples", "words"),
    [(-1, 60, r"\b1\b.*0\.\.6"), (7, 60, r"\b1\b.*0\.\.6"), (0, 59, "59.*60"), (0, 61, "61.*60"), (0, 0, "no samples")],
)
@pytest.mark.parametrize("which", ["training", "test"])
def test_every_evaluator_refuses_samples_that_are_mislabelled_lost_or_counted_twice(which, label, samples, words):
    spoilt, classes, count = split(samples or 60, 7, seed=3), list("abcdefg"), 60 if samples else None
    spoilt.labels[4] = label
    of_spoilt = spoilt.loader(8) if samples else list
    train, test = (of_spoilt if side == which else split(60, 7, seed=3).loader(8) for side in ("training", "test"))
    counts = {"train_samples": count, "test_samples": count}
    few = FewShot("it", train, test, classes, shots=(1,), **counts)
    evaluators = [few, SharedL2FewShot("it", [few]), LinearHeads("it", train, test, classes, 5, **counts)]
    evaluators.append(NearestNeighbours("it", train, test, classes, (5,), **counts))
    if which == "test":
        evaluators.append(Validation("it", test, SOFTMAX, count))
    for evaluator in evaluators:
        with pytest.raises(DataError, match=rf"'it'.*{words}"):
            dict(evaluator.run(model(7)))
