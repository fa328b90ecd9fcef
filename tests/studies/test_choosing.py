"""Which candidate wins."""

import pytest

from vitscale.studies.choosing import choose
from vitscale.studies.schema import Selection


@pytest.mark.parametrize(
    ("mode", "scores", "winner"),
    [
        ("max", {"a": [0.5], "b": [0.7], "c": [0.6]}, "b"),
        ("min", {"a": [0.5], "b": [0.7], "c": [0.4]}, "c"),
        ("max", {"a": [0.9, 0.1], "b": [0.6, 0.5]}, "b"),
        ("max", {"a": [0.5], "b": [0.5]}, "a"),
        ("max", {"a": [0.9, None], "b": [0.1, 0.1]}, "b"),
        ("min", {"a": [float("nan")], "b": [3.0]}, "b"),
        ("max", {"a": [None], "b": [None, 0.1]}, None),
    ],
)
def test_the_winner(mode, scores, winner):
    assert choose(Selection(mode=mode), scores) == winner
