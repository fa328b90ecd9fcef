"""Metrics against examples worked out by hand and scikit-learn."""

import json
import math

import numpy as np
import pytest
import torch
from commands import command
from messages import refusal
from pictures import encoded, make_picture
from toy_split import model, split

from vitscale.cli.convert import app
from vitscale.data.augmentation import EvalTransform
from vitscale.data.shards import Manifest
from vitscale.data.shards.generated import CLASS_NAMES, write_generated_dataset
from vitscale.data.shards.opening import sample_names
from vitscale.evaluation.metrics import (
    Calibration,
    MeanPerClass,
    ObjectNet,
    ReaL,
    Scores,
    TopK,
    columns_of,
    real_labels_of_timm,
)
from vitscale.ground.errors import DataError

K = 7


def of(metric, logits, labels, uids=None):
    """A metric of a few samples, summed in two parts."""
    logits, labels = torch.as_tensor(logits, dtype=torch.float32), torch.as_tensor(labels)
    uids = torch.arange(len(labels)) if uids is None else torch.as_tensor(uids)
    parts = [metric.sums(logits[rows], labels[rows], uids[rows]) for rows in (slice(0, 2), slice(2, None))]
    return metric.results(parts[0] + parts[1])


def random_logits(samples=500, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.choice(K, samples, p=np.arange(1, K + 1) / 28)
    logits = rng.normal(size=(samples, K)) * 2
    logits[np.arange(samples), labels] += 1
    return logits.astype(np.float32), labels


def test_accuracies_by_hand():
    logits = [[3, 2, 1], [3, 2, 1], [1, 3, 2], [0, 0, 0]]
    labels = [0, 1, 0, 2]  # right, second, third, last of equal ones
    assert of(TopK(1), logits, labels) == {"top1": 0.25}
    assert of(TopK(2), logits, labels) == {"top2": 0.5}
    assert of(MeanPerClass(3), logits, labels) == pytest.approx({"mean_per_class": (1 / 2 + 0 + 0) / 3})
    assert of(MeanPerClass(3), logits, [0, 0, 0, 0]) == {"mean_per_class": 0.75}  # other classes have no samples


def test_calibration_by_hand():
    # Confidences 0.9 (right), 0.9 (wrong), 0.6 (right): bins (13/15, 14/15] and (8/15, 9/15].
    p = [[0.9, 0.1], [0.9, 0.1], [0.4, 0.6]]
    found = of(Calibration(), np.log(p), [0, 1, 1])
    assert found["ece"] == pytest.approx((2 * abs(0.5 - 0.9) + abs(1 - 0.6)) / 3, abs=1e-6)
    assert found["nll"] == pytest.approx(-(math.log(0.9) + math.log(0.1) + math.log(0.6)) / 3, abs=1e-6)


def test_metrics_equal_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    logits, labels = random_logits()
    found = {**of(TopK(1), logits, labels), **of(TopK(5), logits, labels), **of(MeanPerClass(K), logits, labels)}
    found |= of(Calibration(), logits, labels)
    p = np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum(1, keepdims=True)
    assert found["top1"] == pytest.approx(metrics.accuracy_score(labels, logits.argmax(1)))
    assert found["top5"] == pytest.approx(metrics.top_k_accuracy_score(labels, logits, k=5))
    assert found["mean_per_class"] == pytest.approx(metrics.balanced_accuracy_score(labels, logits.argmax(1)))
    assert found["nll"] == pytest.approx(metrics.log_loss(labels, p))


def test_real_accepts_any_label_and_leaves_unlabelled_images_out():
    real = ReaL({10: [0, 2], 11: [], 12: [1], 13: [0]})
    logits = [[0, 0, 5], [5, 0, 0], [0, 0, 5], [5, 0, 0]]
    assert of(real, logits, [0, 0, 0, 0], [10, 11, 12, 13]) == {"real_top1": 2 / 3, "real_samples": 3}


def test_objectnet_by_both_protocols():
    # Two labels, mapped to classes {0, 1} and {3}; a third one to none. Class 2 is nobody's.
    accepted = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]], dtype=torch.bool)
    logits = [[0, 4, 1, 2], [0, 1, 4, 2], [4, 1, 0, 2], [9, 0, 0, 0]]
    # 1 is right by both; 2 is class 2, without it class 3; the third class 0 is wrong; the last one is not counted.
    found = of(ObjectNet(accepted), logits, [0, 1, 1, 2])
    assert found == {"objectnet_top1_of_all": 1 / 3, "objectnet_top1_of_mapped": 2 / 3, "objectnet_samples": 3}


def test_objectnet_is_mapped_by_name_or_number(tmp_path):
    manifest = write_generated_dataset(tmp_path / "data", [14], seed=0)
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"red": ["cat", 2], "blue": 1}))
    metric = ObjectNet.of(file, manifest, ["dog", "cat", "owl"], 3)
    logits = torch.eye(3)[[2, 1, 0]]
    labels = [CLASS_NAMES.index("red")] * 3
    assert of(metric, logits, labels)["objectnet_top1_of_all"] == pytest.approx(2 / 3)
    for content in ({"pink": 1}, {"red": "ant"}, {"red": 3}, {}, [1]):
        file.write_text(json.dumps(content))
        with pytest.raises(DataError):
            ObjectNet.of(file, manifest, ["dog", "cat", "owl"], 3)


def test_a_border_is_cut_off_before_the_crop():
    boxes = EvalTransform("central", 1.0, border=2).boxes(np.zeros(3), np.array([24, 14, 3]), np.array([30, 14, 1]))
    assert boxes.tolist() == [[2, 5, 20, 20], [2, 2, 10, 10], [1, 0, 1, 1]]


def test_a_subset_of_classes_leaves_the_others_out(tmp_path):
    manifest = write_generated_dataset(tmp_path / "data", [14], seed=0)
    names = ["black", *reversed(CLASS_NAMES)]
    columns, words = columns_of(manifest, names, len(names))
    assert [names[at] for at in columns] == list(CLASS_NAMES) and words == "7 of 8, by name"
    assert columns_of(manifest, CLASS_NAMES, K) == (None, "same")
    assert columns_of(manifest, None, K)[0] is None
    with pytest.raises(DataError, match=r"\b1 of\b.*\b7\b.*'violet'"):
        columns_of(manifest, CLASS_NAMES[:-1], K - 1)
    with pytest.raises(DataError, match="--class-names"):
        columns_of(manifest, None, K + 1)


def test_scores_count_every_sample_once_and_nothing_else():
    data = split(41, K, seed=1)
    logits = model(K)(data.images).logits
    expected = float((logits.argmax(1) == data.labels).double().mean())
    found = dict(Scores("data", data.loader(8), [TopK(1)], K, 41).run(model(K)))
    assert found == {"samples": 41, "top1": expected}
    with pytest.raises(DataError, match=r"\b41\b.*\b40\b"):
        dict(Scores("data", data.loader(8), [TopK(1)], K, 40).run(model(K)))
    columns = torch.tensor([6, 0, 3])  # the dataset's three classes are these of the model's
    data.labels %= 3
    found = dict(Scores("data", data.loader(8), [TopK(1)], 3, 41, columns).run(model(K)))
    assert found["top1"] == float((logits[:, columns].argmax(1) == data.labels).double().mean())
    data.labels[0] = -1
    with pytest.raises(DataError, match=r"\b1 of 41\b"):
        dict(Scores("data", data.loader(8), [TopK(1)], 3, 41).run(model(K)))


def test_real_labels_are_joined_by_name(tmp_path):
    """Four pictures that are called as images of ImageNet's validation set."""
    pytest.importorskip("timm")
    for number in (1, 2, 3, 50_000):
        path = tmp_path / "images" / f"n{number:08d}" / f"ILSVRC2012_val_{number:08d}.jpg"
        path.parent.mkdir(parents=True)
        path.write_bytes(encoded(make_picture(number % 256, 40, 40), quality=90))
    assert command(tmp_path / "images", tmp_path / "data", "--workers", 1, app=app).returncode == 0
    validation_set = Manifest.load(tmp_path / "data")
    real = ReaL.of(real_labels_of_timm(), validation_set)
    lists = json.loads(real_labels_of_timm().read_text())
    assert lists[0] == [] and lists[1] == [970, 795] and len(lists) == 50_000
    by_class = {name: lists[int(name[1:]) - 1] for name in validation_set.class_names}
    uids, names = zip(*sample_names(validation_set), strict=True)
    for name, uid in zip(names, uids, strict=True):
        expected = next(labels for folder, labels in by_class.items() if folder in name)
        if expected:
            logits = torch.nn.functional.one_hot(torch.tensor([expected[-1]]), 1000).float()
            assert real.results(real.sums(logits, torch.zeros(1).long(), torch.tensor([uid])))["real_top1"] == 1
    (tmp_path / "short.json").write_text("[[1]]")
    with pytest.raises(DataError, match="50,000"):
        ReaL.of(tmp_path / "short.json", validation_set)
    write_generated_dataset(tmp_path / "other", [7], seed=0)
    with refusal(DataError, "evaluation", "ReaL labels without the names of images", {tmp_path: "FOLDER"}):
        ReaL.of(real_labels_of_timm(), Manifest.load(tmp_path / "other"))
