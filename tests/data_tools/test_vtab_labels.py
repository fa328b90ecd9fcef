"""The label rules of VTAB-1k on made examples, with values at their thresholds."""

from dataclasses import replace

import numpy as np
import pytest
from test_tfrecord import encode, write

from data_tools.sources.source import SourceOptions
from data_tools.sources.tfrecord import LabelRule, open_tfrecords
from data_tools.vtab.tasks import (
    CLEVR_METRES,
    KITTI_METRES,
    clevr_count,
    clevr_distance,
    dsprites_location,
    dsprites_orientation,
    kitti_distance,
    stated,
)
from vitscale.ground.errors import DataError


@pytest.mark.parametrize(("objects", "label"), [(3, 0), (4, 1), (9, 6), (10, 7)])
def test_clevr_counts_from_three(objects, label):
    assert clevr_count(np.zeros(objects, np.int64)) == label


@pytest.mark.parametrize(
    ("distances", "types", "label"),
    [
        ([8.0, 30.0], [0, 0], 0),
        ([8.01, 30.0], [1, 0], 1),
        ([20.0], [2], 1),
        ([20.5], [2], 2),
        ([3.0, 25.0], [3, 0], 2),  # a pedestrian is nearer than the car
        ([3.0, 4.0], [3, 5], 3),
        ([], [], 3),
        ([-1.5], [0], 0),
    ],
)
def test_kitti_looks_at_cars_vans_and_trucks(distances, types, label):
    locations = np.array([[-7.0, 1.5, distance] for distance in distances], np.float32).reshape(-1)
    assert kitti_distance(np.array(types, np.int64), locations) == label


def test_distances_as_the_original_computes_them():
    """There: the last i for which thresholds[i] - distance < 0, in fp32."""
    rng = np.random.default_rng(0)
    for value in np.concatenate([rng.uniform(0.1, 30, 500), CLEVR_METRES[1:], KITTI_METRES[1:]]).astype(np.float32):
        for thresholds, mine in (
            (CLEVR_METRES, lambda d: clevr_distance(np.array([1, 2, d + 3, 300, 2, d, 5, 6, d + 1], np.float32))),
            (KITTI_METRES, lambda d: kitti_distance(np.array([0]), np.array([0, 0, d], np.float32))),
        ):
            assert mine(value) == np.where(np.array(thresholds, np.float32) - value < 0)[0].max()


def test_bins_of_dsprites():
    assert [dsprites_location(np.array([label])) for label in range(32)] == [label // 2 for label in range(32)]
    bins = [dsprites_orientation(np.array([label])) for label in range(40)]
    assert bins[:10] == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3] and bins[-1] == 15
    assert np.bincount(bins).tolist() == [3, 2] * 8


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        (dsprites_location, [[32]]),
        (dsprites_orientation, [[40]]),
        (dsprites_location, [[-1]]),
        (clevr_distance, [[]]),
        (clevr_distance, [[0.0, 0.0, 0.0]]),
        (clevr_distance, [[0.0, 0.0, float("nan")]]),
        (kitti_distance, [[0], [1.0, 1.0, -100.0]]),
        (stated, [[1, 2]]),
        (stated, [[]]),
    ],
)
def test_what_has_no_class(rule, values):
    with pytest.raises(ValueError):
        rule(*map(np.array, values))


CLOSEST = LabelRule(("objects/type", "objects/location"), kitti_distance)
SCENES = [([0, 3], [1.0, 2.0, 9.5, 0.0, 0.0, 1.0]), ([3], [1.0, 2.0, 4.0]), ([], [])]


def labels_of(source):
    return [item.labels for item in source.items(0, {})]


def test_rules_over_records(tmp_path):
    records = [encode(image=["x"], label=[7], objects__type=t, objects__location=xyz) for t, xyz in SCENES]
    source = open_tfrecords("source", [write(tmp_path / "train-0", *records)], SourceOptions(unlabelled=True))
    assert labels_of(replace(source, rule=CLOSEST)) == [("1",), ("3",), ("3",)]
    assert labels_of(replace(source, rule=LabelRule(("label",), stated))) == [("7",)] * 3
    with pytest.raises(DataError, match="label_x"):
        labels_of(replace(source, rule=LabelRule(("label_x",), stated)))
    uneven = encode(image=["x"], objects__type=[0, 1], objects__location=[1.0, 2.0, 3.0])
    other = open_tfrecords("source", [write(tmp_path / "train-1", uneven)], SourceOptions(unlabelled=True))
    with pytest.raises(DataError, match="record 0"):
        labels_of(replace(other, rule=CLOSEST))
    with pytest.raises(DataError, match="record 2"):
        labels_of(replace(source, rule=LabelRule(("objects/location",), clevr_distance)))
