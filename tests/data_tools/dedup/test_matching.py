"""What decides about a pair, in which order; and pictures in frames, most of what a hash of a pale picture sees."""

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from dedup_data import candidate, index_of, make_photo, source_of
from PIL import Image, ImageOps
from planted_copies import jpeg
from small_files import write_files

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
    content, other = jpeg(make_photo(1, 96, 128)), jpeg(make_photo(2, 96, 128))
    files = *((f"{i:03d}.jpg", content) for i in range(EQUAL)), ("other.jpg", other)
    folder = write_files(tmp_path_factory.mktemp("many") / "tests", *files)
    return Matcher([index_of(folder.parent / "index", [source_of(folder, preset="photo", level=1)])])


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
    ((tier, _, correlation),) = {(match.tier, match.distance, match.correlation) for match in matches}
    assert tier == "hash" and correlation > 0.98


def test_equal_to_one_and_near_to_another(tmp_path):
    """Each test image is told by what decides about it, the certain ones first."""
    photo = make_photo(4)
    files = ("b.jpg", jpeg(photo)), ("c.jpg", jpeg(photo, comment=b"theirs")), ("a.jpg", jpeg(photo, 50))
    folder = write_files(tmp_path / "tests", *files)
    matcher = Matcher([index_of(tmp_path / "index", [source_of(folder, preset="photo", level=1)])])
    (matches,) = matcher.match([candidate(jpeg(photo))])
    told = [(match.key, match.tier, match.correlation is None) for match in matches]
    assert told == [("b.jpg", "bytes", True), ("c.jpg", "pixels", True), ("a.jpg", "hash", False)]
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


SIDE = 200
PICTURES = 40  # half of them are the test set


class Frame(NamedTuple):
    """How pictures are framed: contrast and brightness of what is inside, widths (left, top, right, bottom), colour."""

    contrast: float
    brightness: float
    widths: tuple[int, int, int, int]
    colour: str

    def around(self, picture: Image.Image) -> Image.Image:
        return ImageOps.expand(self.inside(picture), self.widths, self.colour)

    def inside(self, picture: Image.Image) -> Image.Image:
        return picture.point(lambda value: int(value * self.contrast + self.brightness))


def all_around(share: float) -> tuple[int, int, int, int]:
    return (round(share * SIDE),) * 4


TOP_AND_BOTTOM = (0, 46, 0, 46)  # 23 %
CROOKED = [(30, 50, 14, 22), (15, 60, 70, 25)]  # of these a hash has all of its frequencies
FRAMES = [
    *(Frame(contrast, 0, all_around(share), "white") for contrast in (0.3, 0.5, 1) for share in (0.12, 0.25)),
    *(Frame(contrast, 255 * (1 - contrast), all_around(0.25), "black") for contrast in (0.3, 0.6)),
    *(Frame(contrast, 255 * (1 - contrast), all_around(0.12), "black") for contrast in (0.3, 1)),
    Frame(0.3, 0, TOP_AND_BOTTOM, "white"),
    Frame(0.6, 100, TOP_AND_BOTTOM, "black"),
    Frame(1, 0, (46, 0, 46, 0), "white"),
    Frame(0.3, 0, CROOKED[0], "white"),
]


@pytest.fixture(scope="module")
def made() -> list[Image.Image]:
    return [make_photo(7000 + i, SIDE, SIDE) for i in range(PICTURES)]


@pytest.fixture(scope="module")
def groceries(data_root: Path) -> list[Image.Image]:
    """Photos of shelves, squeezed into one size so that their frames are equal."""
    with tarfile.open(data_root / "grocery" / "test_dev.tar") as archive:
        members = [member for member in archive.getmembers() if member.name.endswith(".jpg")]
        some = [members[i] for i in np.linspace(0, len(members) - 1, PICTURES).astype(int)]
        files = [io.BytesIO(archive.extractfile(member).read()) for member in some]
    return [Image.open(file).convert("RGB").resize((SIDE, SIDE)) for file in files]


@pytest.fixture(scope="module")
def pictures(request: pytest.FixtureRequest) -> list[Image.Image]:
    return request.getfixturevalue(request.param)


def indexed(pictures: list[Image.Image], folder: Path) -> Matcher:
    write_files(folder, *((f"{i:02d}.jpg", jpeg(picture)) for i, picture in enumerate(pictures)))
    return Matcher([index_of(folder.with_suffix(".index"), [source_of(folder, preset="photo")])])


def removed(matcher: Matcher, pictures: list[Image.Image], quality: int = 92) -> list[set[str]]:
    """The test images of which each picture is removed as a copy."""
    found = matcher.match([candidate(jpeg(picture, quality)) for picture in pictures])
    return [{match.key for match in matches if match.removed} for matches in found]


OWN = [{f"{i:02d}.jpg"} for i in range(PICTURES // 2)]  # each test image's own copy, and no other with it
NONE = [set() for _ in OWN]


def smaller(picture: Image.Image) -> Image.Image:
    return picture.resize((picture.width * 2 // 3, picture.height * 2 // 3), Image.Resampling.LANCZOS)


@pytest.mark.parametrize(
    ("pictures", "frame"),
    [
        *(pytest.param("made", frame, marks=[] if i % 3 == 1 else pytest.mark.slow) for i, frame in enumerate(FRAMES)),
        *(("groceries", frame) for frame in FRAMES[::4]),
    ],
    indirect=["pictures"],
    ids=str,
)
def test_strangers_in_one_kind_of_frame_stay_and_copies_are_found(pictures, frame, tmp_path):
    framed = [frame.around(picture) for picture in pictures]
    matcher = indexed(framed[: len(OWN)], tmp_path / "framed")
    assert removed(matcher, framed, 50) == OWN + NONE
    for edit in (smaller, ImageOps.mirror):
        assert removed(matcher, [edit(picture) for picture in framed], 90) == OWN + NONE, edit


@pytest.mark.parametrize("pictures", ["made", "groceries"], indirect=True)
@pytest.mark.parametrize(
    "frame",
    [Frame(0.1, 0, CROOKED[1], "white"), Frame(0.1, 230, CROOKED[0], "black"), Frame(0.2, 0, CROOKED[1], "white")],
    ids=str,
)
def test_hashes_that_a_frame_makes_decide_nothing(pictures, frame, tmp_path):
    """So pale that the frame alone is the hash: of many pairs of strangers it differs in a bit or ten."""
    framed = [frame.around(picture) for picture in pictures]
    matcher = indexed(framed[: len(OWN)], tmp_path / "framed")
    assert removed(matcher, framed[len(OWN) :]) == NONE
    assert matcher.findings.distances[0][:32].sum() > 0
    assert removed(matcher, framed[: len(OWN)], 85) == OWN


@pytest.mark.parametrize(("pictures", "contrast"), [("made", 0.5), ("groceries", 1)], indirect=["pictures"])
def test_copies_are_found_in_another_frame_or_none(pictures, contrast, tmp_path):
    """And the other way round: in a frame, of a test image without."""
    thick, thin = Frame(contrast, 0, all_around(0.25), "white"), Frame(contrast, 0, all_around(0.12), "white")
    bars, black = thick._replace(widths=TOP_AND_BOTTOM), thick._replace(brightness=60, colour="black")
    none = thick._replace(widths=all_around(0))
    for number, (of_tests, others) in enumerate(((thick, (thin, bars, black, none)), (none, (thick, bars, black)))):
        matcher = indexed([of_tests.around(picture) for picture in pictures[: len(OWN)]], tmp_path / str(number))
        for other in others:
            assert removed(matcher, [other.around(picture) for picture in pictures], 80) == OWN + NONE, other
