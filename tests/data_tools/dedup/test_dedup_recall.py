"""Proof on real photos: which edited copies are found, that no stranger is taken for one, and what people judged."""

from itertools import pairwise

import pytest
from dedup_judged import deduplicate, listed_pairs
from dedup_recall import CROSSED, Photo, index_of, photos, recall, spread, strangers
from photo_edits import BORDERS, CERTAIN

from data_tools.dedup.variants import DEFAULT_LEVEL, LEVELS

HIGHEST = len(LEVELS) - 1
COLLECTIONS = ("grocery", "clothing")


def photos_of_both(data_root, count):
    return [photo for name in COLLECTIONS for photo in spread(photos(data_root, name), count)]


def check_default_level(found):
    for name in CERTAIN:
        assert found[name] >= 0.99, name
    for name in BORDERS:
        assert found[name] >= 0.8, name


def test_edited_copies_are_found_at_the_default_level(data_root, tmp_path):
    some = photos_of_both(data_root, 12)
    table = recall(some, [index_of(some, DEFAULT_LEVEL, tmp_path, workers=1)])
    check_default_level({name: found for name, (found,) in table.items()})


def test_strangers_are_no_copies(data_root, tmp_path):
    grocery, clothing = (spread(photos(data_root, name), 100) for name in COLLECTIONS)
    index = index_of(grocery, DEFAULT_LEVEL, tmp_path, workers=1)
    images, _, false = strangers(clothing, index, CROSSED[:1])
    assert images == 2 * 100 * 100
    assert not false


@pytest.mark.slow
def test_recall_of_every_level(data_root, tmp_path):
    some = photos_of_both(data_root, 150)
    indexes = [index_of(some, level, tmp_path, workers=2) for level in range(len(LEVELS))]
    table = recall(some, indexes)
    check_default_level({name: found[DEFAULT_LEVEL] for name, found in table.items()})
    check_default_level({name: found[HIGHEST] for name, found in table.items()})
    assert table["random crop of 90 %"][HIGHEST] >= 0.9
    assert table["random crop of 80 %"][HIGHEST] >= 0.5
    for name, found in table.items():
        assert all(a <= b + 0.01 for a, b in pairwise(found)), name  # more variants, more found


@pytest.mark.slow
@pytest.mark.parametrize("level", [DEFAULT_LEVEL, HIGHEST])
def test_no_stranger_among_ten_million_pairs(data_root, tmp_path, level):
    grocery = [photo for part in ("train", "test_dev") for photo in photos(data_root, "grocery", part)]
    clothing = [photo for part in ("train", "validation") for photo in photos(data_root, "clothing", part)]
    grocery = [Photo(f"{number:05d}.jpg", photo.content) for number, photo in enumerate(grocery)]
    images, _, false = strangers(clothing, index_of(grocery, level, tmp_path, workers=2), CROSSED)
    assert images >= 1e7
    assert not false


@pytest.mark.slow
def test_near_duplicates_that_people_judged(data_root, tmp_path):
    cifar = data_root / "cifar10"
    judged = deduplicate("cifar10", cifar / "test_dev.tar.xz", cifar / "train.tar.xz", tmp_path)
    listed = listed_pairs(data_root)
    assert (judged.images, judged.test_images, len(listed)) == (50_000, 5_000, 149)
    assert len(listed.keys() & judged.removed_pairs.keys()) >= 0.6 * len(listed)
    assert judged.flagged <= 200


@pytest.mark.slow
def test_signs_of_different_people_stay(data_root, tmp_path):
    signs = data_root / "signdigits"
    judged = deduplicate("signdigits", signs / "test_dev.tar.xz", signs / "train.tar.xz", tmp_path)
    assert judged.images == 1_450
    assert judged.removed <= 0.02 * judged.images  # all of them are photos of their own
    assert all(tier == "correlation" for tier, _, _ in judged.removed_pairs.values())
