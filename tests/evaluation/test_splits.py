"""What two datasets have in common, against sets of what is in them."""

import shutil

import pytest
from training.ranks import BASE

import vitscale as vs
from data_tools.views import parse_parts, write_parts, write_subset
from vitscale.data.shards import Manifest
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.data.shards.info import overlap
from vitscale.data.shards.opening import open_shard
from vitscale.evaluation.splits import check_splits
from vitscale.ground.errors import DataError
from vitscale.recipe import validate_recipe


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two datasets, parts and subsets of the first, a folder with one of its shards, and a copy of the second."""
    root = tmp_path_factory.mktemp("splits")
    whole = write_generated_dataset(root / "whole", [30, 41, 9], seed=1)
    write_generated_dataset(root / "other", [13, 24], seed=2)
    write_parts(str(root / "whole"), str(root), parse_parts("large=80,small=20", str(root / "whole")))
    write_subset(str(root / "whole"), str(root / "first50"), 50)
    shutil.copytree(root / "other", root / "moved")
    (root / "mixed").mkdir()
    shards = [entry.model_copy(update={"path": f"../whole/{entry.path}"}) for entry in whole.shards[:1]]
    whole.model_copy(update={"num_samples": 30, "shards": tuple(shards)}).save(root / "mixed")
    return root


def contents(folder):
    """(shard's digest, slot) -> bytes of each sample."""
    manifest, found = Manifest.load(folder), {}
    for index, entry in enumerate(manifest.shards):
        with open_shard(manifest, index, with_keys=False) as shard:
            found |= {(entry.sha256, int(slot)): shard.image(slot) for slot in shard.slots}
    return found


@pytest.mark.parametrize("a", ["whole", "large", "small", "first50", "mixed", "other", "moved"])
@pytest.mark.parametrize("b", ["whole", "large", "small", "first50", "other"])
def test_common_samples_are_counted(root, a, b):
    ours, theirs = contents(root / a), contents(root / b)
    stored = ours.keys() & theirs.keys()
    equal = [key for key in ours.keys() - stored if ours[key] in theirs.values()]
    assert overlap(Manifest.load(root / a), Manifest.load(root / b)) == (len(stored), len(equal))


def test_equal_bytes_in_other_shards_are_found(root, tmp_path):
    """Two pictures of the second dataset, stored again."""
    manifest, folder = Manifest.load(root / "other"), tmp_path / "images" / "kind"
    folder.mkdir(parents=True)
    with open_shard(manifest, 0, with_keys=False) as shard:
        for slot in (3, 7):
            (folder / f"{slot}.jpg").write_bytes(shard.image(slot))
    again = vs.convert(folder.parent, tmp_path / "data", workers=1).manifest
    assert overlap(again, manifest) == (0, 2) and overlap(manifest, again) == (0, 2)
    assert overlap(again, Manifest.load(root / "whole")) == (0, 0)


def recipe(root, train, **evaluation):
    data = BASE["data"] | {"root": str(root), "train": train}
    return validate_recipe(BASE | {"data": data, "evaluation": evaluation}, "test")


def test_every_split_that_a_recipe_evaluates_on_is_compared(root):
    def lines(train, **evaluation):
        return check_splits(recipe(root, train, **evaluation), Manifest.load(root / train))

    few = {"tasks": [{"name": "toy", "train": "large", "test": "small"}], "shots": [1]}
    assert lines("large", validation="small") == lines("large", fewshot=few) == lines("whole") == []
    small = Manifest.load(root / "small").num_samples
    for evaluation in ({"validation": "small"}, {"fewshot": few}, {"knn": {"train": "large", "test": "small"}}):
        with pytest.raises(DataError, match=rf"\b{small} of\b.*\b{small}\b"):
            lines("whole", **evaluation)
        (line,) = lines("whole", **evaluation, overlap="allow")
        assert "whole" in line and "small" in line
    few["tasks"][0]["train"] = "whole"
    with pytest.raises(DataError, match=r"\btoy\b"):
        lines("other", fewshot=few)
