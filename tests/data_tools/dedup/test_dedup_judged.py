"""Proof by human judgement: CIFAR-10's near-duplicates as people listed them, and hand signs that only look alike."""

import pytest
from dedup_judged import deduplicate, listed_pairs

pytestmark = pytest.mark.slow


def test_near_duplicates_that_people_judged(data_root, tmp_path):
    cifar = data_root / "cifar10"
    judged = deduplicate("cifar10", cifar / "test_dev.tar.xz", cifar / "train.tar.xz", tmp_path)
    listed = listed_pairs(data_root)
    assert (judged.images, judged.test_images, len(listed)) == (50_000, 5_000, 149)
    assert len(listed.keys() & judged.removed_pairs.keys()) >= 0.6 * len(listed)
    assert judged.flagged <= 200


def test_signs_of_different_people_stay(data_root, tmp_path):
    signs = data_root / "signdigits"
    judged = deduplicate("signdigits", signs / "test_dev.tar.xz", signs / "train.tar.xz", tmp_path)
    assert judged.images == 1_450
    assert judged.removed <= 0.02 * judged.images  # all of them are photos of their own
    assert all(tier == "correlation" for tier, _, _ in judged.removed_pairs.values())
