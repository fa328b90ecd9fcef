"""The best checkpoint and the end of patience, against the definitions over the whole history."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale.recipe import schema
from vitscale.training.loop.state import SelectionState

METRIC = "validation/top1"
VALUES = st.lists(st.one_of(st.floats(0, 1), st.just(math.nan)), min_size=1, max_size=20)


def told(rule, values):
    """What is known after each evaluation; the steps are 10, 20 and so on."""
    known = [SelectionState()]
    for index, value in enumerate(values, 1):
        known.append(known[-1].after(rule, 10 * index, {METRIC: value}))
    return known[1:]


@given(VALUES, st.sampled_from(["max", "min"]), st.integers(1, 5))
def test_the_best_is_the_first_of_the_best_and_patience_counts_from_it(values, mode, patience):
    rule = schema.Selection(metric=METRIC, mode=mode, patience=patience)
    for count, selection in enumerate(told(rule, values), 1):
        seen = [value for value in values[:count] if not math.isnan(value)]
        best = (max if mode == "max" else min)(seen, default=None)
        first = None if best is None else 10 * (values.index(best) + 1)
        assert (selection.best, selection.best_step, selection.evaluated) == (best, first, 10 * count)
        assert selection.without_better == count - (0 if first is None else first // 10)
        assert selection.is_out_of_patience(rule) == (selection.without_better >= patience)
        assert SelectionState.of(json.loads(json.dumps(selection.state()))) == selection


def test_without_a_rule_nothing_is_selected():
    selection = SelectionState().after(None, 7, {METRIC: 0.5})
    assert selection == SelectionState(evaluated=7) and not selection.is_out_of_patience(None)


def test_a_best_step_that_cannot_be_saved_gives_way_to_the_one_before():
    rule = schema.Selection(metric=METRIC)
    first, second, third = told(rule, [0.1, 0.3, 0.2])
    assert third.without(20).best_step == 10 and third.without(20).best == pytest.approx(0.1)
    assert third.without(10) == third and first.without(10).best_step is None
    assert second.without(20).after(rule, 30, {METRIC: 0.2}).best_step == 30


def test_indices_of_before_do_not_say_what_was_evaluated():
    assert SelectionState.of({"best": 0.5, "best_step": 3, "without_better": 1}).evaluated == 0
