"""Which candidate wins, and what its run must tell for that."""

import json

import pytest
import yaml

from vitscale.about.studies.outcomes import choose, read_outcome
from vitscale.about.studies.reading import Selection
from vitscale.ground.errors import DataError
from vitscale.recipe import load_recipe


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


def test_a_finished_run_that_has_lost_its_best_evaluation_does_not_pass_for_a_diverged_one(tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(load_recipe("s16_i1k_90ep").dump()))
    done = {"step": 6, "best_step": 4, "exaflops": 1.0, "evaluation": {"validation/top1": 0.5}}
    (tmp_path / "DONE").write_text(json.dumps(done))
    line = json.dumps({"step": 4, "eval/validation/top1": 0.9})
    for left in ("", line[:-5] + "\n"):
        (tmp_path / "metrics.jsonl").write_text(left)
        with pytest.raises(DataError):
            read_outcome(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    assert read_outcome(tmp_path).metrics == {"validation/top1": 0.9}
    assert read_outcome(tmp_path).step == 4
