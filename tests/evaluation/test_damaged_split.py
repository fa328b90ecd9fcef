"""Evaluation of a split with damaged samples is that of the split without them; `test_two_ranks.py` has two ranks."""

import pytest
import stored_split
import torch
from toy_split import model

from vitscale.evaluation import evaluate
from vitscale.evaluation.fewshot import extract_features
from vitscale.ground.errors import DataError

K = 7


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("split")
    stored_split.write(root)
    return root


def figures(folder, policy="error"):
    return evaluate(stored_split.evaluators(folder, policy), model(K))


# In evaluation no sample stands in for another: "substitute" leaves it out too.
@pytest.mark.parametrize("policy", ["mask", "substitute"])
def test_figures_are_those_of_the_split_without_what_is_damaged(root, policy):
    without, found = figures(root / "without"), figures(root / "damaged", policy)
    assert set(found) == {"stored/loss", "stored/top1", "stored/top5", "stored-few/1shot", "stored-few/5shot"}
    # A loss is computed in fp32, and its last bit depends on where in a batch the sample stands.
    loss = without.pop("stored/loss")
    assert found.pop("stored/loss") == pytest.approx(loss, rel=1e-7) and found == without
    assert figures(root / "sound")["stored/loss"] != pytest.approx(loss, rel=1e-4)


def test_features_are_those_of_the_split_without_what_is_damaged(root):
    """Rows that are left out leave no gap."""
    split = {
        name: extract_features(stored_split.loader(root / name, policy), model(K))
        for name, policy in (("sound", "error"), ("damaged", "mask"), ("without", "error"))
    }
    gone = [0, 30 + 7, 30 + 20]
    assert split["without"].uids.tolist() == [uid for uid in range(sum(stored_split.SHARDS)) if uid not in gone]
    for name in ("features", "labels", "uids"):
        expected = getattr(split["without"], name)
        assert torch.equal(getattr(split["damaged"], name), expected)
        assert torch.equal(getattr(split["sound"], name)[split["without"].uids], expected)


def test_damage_is_an_error_unless_the_recipe_says_otherwise(root):
    with pytest.raises(DataError, match=r"shard-0000[01]\.beton"):
        figures(root / "damaged")
