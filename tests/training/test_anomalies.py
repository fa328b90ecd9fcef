"""What is left out, and which loss is a leap: against definitions written out in other words."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale.recipe import Anomalies, Spike
from vitscale.training.watching.anomalies import AnomalyRecord, SkippedData

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)).map(lambda at: [at[0], sum(at)]), max_size=8)
LOSSES = st.lists(st.floats(-1e6, 1e6), min_size=5, max_size=40)


@given(RANGES, st.integers(0, 60))
def test_skipped_positions_are_a_set(ranges, position):
    data, left_out = SkippedData(), set()
    for start, stop in ranges:
        data = data.adding((start, stop))
        left_out |= set(range(start, stop))
    assert {at for start, stop in data.ranges for at in range(start, stop)} == left_out
    assert list(data.ranges) == sorted(data.ranges)
    assert all(one[1] < other[0] for one, other in zip(data.ranges, data.ranges[1:], strict=False))

    start, border = data.next_stretch(position)
    kept = [at for at in range(position, 100) if at not in left_out]
    assert start == kept[0]
    later = [at for at in sorted(left_out) if at > start]
    assert border == (later[0] if later else None)


@given(LOSSES, st.integers(5, 20), st.floats(0.5, 20))
def test_the_limit_is_the_median_and_its_deviation_of_the_last_losses(losses, window, factor):
    settings = Anomalies(spike=Spike(window=window, factor=factor))
    record = AnomalyRecord()
    for count, loss in enumerate(losses):
        last = np.array(losses[max(0, count - window) : count])
        if len(last) < window:
            assert record.limit(settings) == math.inf
        else:
            deviation = np.median(np.abs(last - np.median(last)))
            # 1.4826 is 1 / Phi^-1(3/4), by which the deviation of a normal distribution is its standard deviation.
            noise = max(1.4826 * deviation, 1e-3 * abs(np.median(last)))
            assert record.limit(settings) == pytest.approx(np.median(last) + factor * noise, rel=1e-12, abs=1e-6)
        record = record.after(loss, settings)


def test_nobody_watches_unless_asked():
    assert AnomalyRecord(losses=(1.0,) * 9).limit(Anomalies()) is None
    assert AnomalyRecord().after(1.0, Anomalies()).losses == ()


@given(LOSSES, RANGES)
def test_the_record_survives_json_to_the_last_bit(losses, ranges):
    settings = Anomalies(spike=Spike(window=5))
    record = AnomalyRecord(count=3)
    for start, stop in ranges:
        record = record.leaving_out(start, stop)
    for loss in losses:
        record = record.after(loss, settings)
    again = AnomalyRecord.of(json.loads(json.dumps(record.state())))
    assert again == record
    assert again.limit(settings) == record.limit(settings)


def test_a_record_of_the_past_takes_over_what_is_known_since():
    settings = Anomalies(limit=4, non_finite="rewind", spike=Spike(window=5, policy="skip"))
    past = AnomalyRecord.of({"skipped": [[2, 4]], "count": 1}).after(1.0, settings)
    present = AnomalyRecord(count=3).leaving_out(2, 4).leaving_out(7, 9)
    past = past.knowing(present)
    assert past.skipped.ranges == ((2, 4), (7, 9)) and past.count == 3 and past.losses == (1.0,)
    assert past.policy("non-finite", settings) == "rewind" and past.policy("spike", settings) == "skip"
    past = replace(past, count=past.count + 1)
    assert past.policy("non-finite", settings) == past.policy("spike", settings) == "stop"
