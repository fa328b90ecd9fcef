"""What decides about a pair, in which order, and what is not even asked for."""

from dataclasses import dataclass

import numpy as np
import pytest
from dedup_data import candidate, index_of, make_photo, source_of
from PIL import Image, ImageOps
from planted_copies import jpeg

from data_tools.dedup.fingerprint import fingerprint
from data_tools.dedup.matching import Matcher
from data_tools.dedup.queries import Candidate

EQUAL = 300


@dataclass(eq=False)
class Unseen(Candidate):
    """An image of which nobody may ask how it looks: at `find` it would have to be decoded."""

    def luma(self, trimmed: bool) -> np.ndarray:
        raise AssertionError("asked for")

    @property
    def inside(self) -> None:
        raise AssertionError("asked for")


def unseen(content: bytes) -> Unseen:
    return Unseen(**vars(candidate(content)))


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Matcher:
    """A test set in which one image is hundreds of times, as scans of blank pages are; and one other image."""
    folder = tmp_path_factory.mktemp("many") / "tests"
    folder.mkdir()
    content = jpeg(make_photo(1, 96, 128))
    for i in range(EQUAL):
        (folder / f"{i:03d}.jpg").write_bytes(content)
    (folder / "other.jpg").write_bytes(jpeg(make_photo(2, 96, 128)))
    index = index_of(folder.parent / "index", [source_of(folder, preset="photo", level=1)])
    return Matcher([index])


def test_equal_bytes_and_pixels_need_no_look(many):
    """Some hundred equal test images: each is told, none is laid over the query."""
    before = many.findings.correlations[0].sum()
    same, commented = jpeg(make_photo(1, 96, 128)), jpeg(make_photo(1, 96, 128), comment=b"mine")
    for content, tier in ((same, "bytes"), (commented, "pixels")):
        (matches,) = many.match([unseen(content)])
        assert [match.key for match in matches] == [f"{i:03d}.jpg" for i in range(EQUAL)]
        for match in matches:
            assert (match.tier, match.distance, match.removed) == (tier, 0, True)
            assert match.correlation is match.cosine is match.variant is None
    assert many.findings.correlations[0].sum() == before
    # Strangers are not looked at either: their hashes are far.
    assert many.match([unseen(jpeg(make_photo(3, 96, 128)))]) == [[]]


def test_an_edited_copy_of_many_equal_ones_is_each_ones(many):
    (matches,) = many.match([candidate(jpeg(make_photo(1, 96, 128), 40))])
    assert len(matches) == EQUAL
    assert {(match.tier, match.distance, match.correlation) for match in matches} == {
        ("hash", matches[0].distance, matches[0].correlation)
    }
    assert matches[0].correlation > 0.98


def test_equal_to_one_and_near_to_another(tmp_path):
    """Each test image is told by what decides about it, the certain ones first."""
    folder = tmp_path / "tests"
    folder.mkdir()
    photo = make_photo(4)
    (folder / "b.jpg").write_bytes(jpeg(photo))
    (folder / "c.jpg").write_bytes(jpeg(photo, comment=b"theirs"))
    (folder / "a.jpg").write_bytes(jpeg(photo, 50))
    matcher = Matcher([index_of(tmp_path / "index", [source_of(folder, preset="photo", level=1)])])
    (matches,) = matcher.match([candidate(jpeg(photo))])
    assert [(match.key, match.tier) for match in matches] == [
        ("b.jpg", "bytes"),
        ("c.jpg", "pixels"),
        ("a.jpg", "hash"),
    ]
    assert [match.correlation is None for match in matches] == [True, True, False]
    # The image is one of those removed, not three.
    assert matcher.findings.removed == 1


def test_borders_in_a_fingerprint():
    photo = make_photo(5, 100, 150)
    without = fingerprint(np.asarray(photo))
    assert without.inside is without.pdq_trimmed is without.luma_trimmed is None
    found = fingerprint(np.asarray(ImageOps.expand(photo, (10, 20, 40, 30), "white")))
    assert found.inside == pytest.approx((20 / 150, 10 / 200, 100 / 150, 150 / 200))
    assert found.pdq_trimmed == without.pdq
    np.testing.assert_array_equal(found.luma_trimmed, without.luma)


def test_nothing_within_a_border_has_no_hash():
    """What a hash of it would say is noise: two framed blank pages are no copies of one another."""
    blank = Image.fromarray(np.random.default_rng(0).integers(120, 123, (100, 150, 3), np.uint8))
    found = fingerprint(np.asarray(ImageOps.expand(blank, 20, "black")))
    assert found.inside is not None and found.luma_trimmed is not None
    assert found.pdq_trimmed is None
    assert found.quality >= 50  # of the frame
