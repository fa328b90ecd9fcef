"""The report: its numbers against what was planted, its pictures, and expected false removals of known histograms."""

import io
import json
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dedup_data import candidate, index_of, source_of
from pictures import encoded
from PIL import Image
from planted_copies import jpeg, photo
from rich.console import Console
from small_files import write_files

from data_tools.dedup.index import FingerprintIndex
from data_tools.dedup.matches import Findings, Match, Pair
from data_tools.dedup.matching import Matcher
from data_tools.dedup.report import described, pair_sheet, tables, write_report
from data_tools.dedup.settings import COUNTED, PRESETS, Settings
from data_tools.dedup.tail import expected_false

COLUMNS = 110


@pytest.fixture(scope="module")
def index_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of `birds`, photos, and `scans`, of which only equal bytes and pixels count; five images each."""
    root = tmp_path_factory.mktemp("report")
    sources = []
    for number, (name, preset) in enumerate((("birds", "photo"), ("scans", "exact"))):
        images = {f"{i}.jpg": jpeg(photo(10 * number + i)) for i in range(5)}
        sources.append(source_of(write_files(root / name, *images.items()), name, preset, level=1))
    return index_of(root / "index", sources).folder


def matched(folder: Path) -> tuple[Matcher, Findings]:
    """Four copies and two other images, compared with an index."""
    images = {
        "bytes.jpg": jpeg(photo(0)),
        "recompressed.jpg": jpeg(photo(1), 35),
        "recompressed-again.jpg": jpeg(photo(1), 60),
        "scan.jpg": jpeg(photo(12)),
        "other.jpg": jpeg(photo(800)),
        "another.jpg": jpeg(photo(801)),
    }
    matcher = Matcher([FingerprintIndex(folder)])
    matcher.match([candidate(content, key=key) for key, content in images.items()])
    return matcher, matcher.findings


def renamed(folder: Path, names: list[str]) -> FingerprintIndex:
    """The index, its test sets called otherwise."""
    index = FingerprintIndex(folder)
    index.test_sets = tuple(replace(one, name=name) for one, name in zip(index.test_sets, names, strict=True))
    return index


def shown(matcher: Matcher, findings: Findings) -> list[str]:
    out = io.StringIO()
    for table in tables(matcher, findings):
        Console(file=out, width=COLUMNS).print(table)
    return out.getvalue().splitlines()


def test_numbers_are_those_of_what_was_planted(index_folder: Path, tmp_path: Path) -> None:
    matcher, findings = matched(index_folder)
    write_report(tmp_path / "report", matcher, findings)
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report == described(matcher, findings)
    assert (report["images"], report["removed"]) == (6, 4)
    birds, scans = report["test_sets"]
    assert birds["removed"] == {"bytes": 1, "pixels": 0, "hash": 2, "correlation": 0, "embedding": 0}
    assert scans["removed"] == {"bytes": 1, "pixels": 0, "hash": 0, "correlation": 0, "embedding": 0}
    assert birds["contaminated"] == {"images": 2, "percent": 40.0}
    assert scans["contaminated"] == {"images": 1, "percent": 20.0}
    assert (birds["settings"]["distance"], birds["level"]) == (31, 1)
    assert birds["index"] == FingerprintIndex(index_folder).sha256
    assert sum(birds["distances"][:32]) == 3 and len(birds["distances"]) == 91 and len(birds["correlations"]) == 100
    assert scans["expected_false"]["total"] == {"expected": 0, "at_most": 0}
    # Nothing was removed by the correlation, and no more can be wrong than was removed.
    assert birds["expected_false"]["correlation"] == {"expected": 0, "at_most": 0, "fit": None}
    assert birds["expected_false"]["hash"] == {"expected": None, "at_most": 2, "fit": None}


def test_table_shows_them(index_folder: Path) -> None:
    matcher, findings = matched(index_folder)
    lines = shown(matcher, findings)
    birds, scans, total = (next(line.split() for line in lines if name in line) for name in ("birds", "scans", "all "))
    assert birds == ["birds", "5", "2", "(40.0%)", "3", "1", "0", "2", "0", "?"]
    assert scans == ["scans", "5", "1", "(20.0%)", "1", "1", "0", "0", "0", "0"]
    assert total == ["all", "10", "3", "(30.0%)", "4", "?"]
    assert any("6 images compared, 4 of them copies of test images (66.667%)" in line for line in lines)
    assert not any("embedding" in line for line in lines)


def test_table_of_large_counts_fits_the_terminal(index_folder: Path) -> None:
    names = ["a test set with a name of quite some length", "[bold]鸟🐟\n\x1b[31m"]
    matcher = Matcher([renamed(index_folder, names)])
    matcher.indexes[0].embedding = {"side": 224}  # as one made with a user's model has it: a column more
    findings = Findings(names)
    findings.images, findings.removed = 300_000_000, 1_234_567
    for number in range(2):
        findings.tiers[number].update(bytes=123_456, pixels=12_345, hash=654_321, correlation=234_567, embedding=9_876)
        findings.contaminated[number].update(range(5))
    findings.distances[0] = (1e9 * np.exp(0.3 * (np.arange(91) - 90))).astype(int)
    lines = shown(matcher, findings)
    assert max(len(line) for line in lines) <= COLUMNS
    text = "\n".join(lines)
    assert "1,034,565" in text and "654,321" in text and "of quite" in text and "[bold]" in text
    assert "\x1b" not in text
    assert "9,876" in text and "Nor is what the embedding decided" in text


@pytest.mark.parametrize(
    "names",
    [["a/b", "a:b"], ["../../etc", "..\\..\\ETC"], ["\U0001f41f $x_$ \\frac", "鸟"], [".", ""], ["x" * 400, "x" * 401]],
)
def test_any_names_make_files_of_their_own(index_folder: Path, tmp_path: Path, names: list[str]) -> None:
    index = renamed(index_folder, names)
    index.test_sets = tuple(replace(one, settings=Settings()) for one in index.test_sets)
    matcher = Matcher([index])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written = write_report(tmp_path / "report", matcher, Findings(names))
    assert len({name.lower() for name in written}) == len(written) == 3
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == sorted(written)
    assert json.loads((tmp_path / "report" / "report.json").read_text())["test_sets"][0]["name"] == names[0]


def pair(removed: bool, key: str = "train/0.jpg", colour: str = "red", picture: bytes | None = None) -> Pair:
    content = encoded(Image.new("RGB", (40, 30), colour)) if picture is None else picture
    return Pair(Match(0, "test/3.jpg", 3, "correlation", 60, 0.9, removed=removed), key, content)


def test_sheet_has_the_image_left_and_the_test_image_right_and_removed_ones_above() -> None:
    blue = encoded(Image.new("RGB", (30, 40), "blue"))
    sheet = np.asarray(pair_sheet("birds", [(pair(True), blue)], [(pair(False, colour="lime"), blue)])).astype(int)
    places = {}
    for name, channel in (("red", 0), ("lime", 1), ("blue", 2)):
        others = [other for other in range(3) if other != channel]
        hits = np.argwhere((sheet[..., channel] > 230) & (sheet[..., others].max(-1) < 60))
        places[name] = hits.min(0), hits.max(0)
    assert (places["red"][1] - places["red"][0] + 1).tolist() == [96, 128]  # 40 x 30 pixels, as large as fits
    assert places["red"][1][1] < places["blue"][0][1]
    assert places["red"][1][0] < places["lime"][0][0]


@pytest.mark.parametrize("picture", [b"", b"\xff\xd8\xff\xe0 no picture"])
def test_sheet_without_pictures_still_has_the_facts(picture: bytes) -> None:
    keys = ["\U0001f41f" * 300, "שלום/鸟/́\udcff\x00\n", ""]
    sheet = pair_sheet("\udcff\U0001f41f", [(pair(True, key, picture=picture), picture) for key in keys], [])
    assert np.asarray(sheet).min() < 60  # text


_BITS = np.arange(COUNTED + 1)
_NO_CORRELATIONS = np.zeros(100, np.int64)
_REMOVED = round(100 * Settings().correlation)  # the first bin of correlations that are reached


def _even(density: np.ndarray) -> np.ndarray:
    """Two PDQ hashes have as many ones, so they differ in an even number of bits."""
    return np.where(_BITS % 2 == 0, density, 0.0)


def _copies(rng: np.random.Generator, count: int, farthest: int) -> np.ndarray:
    """Of which most are near."""
    distances = np.minimum(2 * rng.geometric(4 / farthest, count), farthest)
    return np.bincount(distances, minlength=COUNTED + 1)


@pytest.mark.parametrize("slope", [0.25, 0.35, 0.46])  # 0.46: a hundredfold in ten bits, as unrelated photos have it
@pytest.mark.parametrize(("copies", "farthest"), [(0, 40), (300, 40), (5000, 64)])
def test_geometric_tail_is_followed_to_the_threshold(slope: float, copies: int, farthest: int) -> None:
    rng = np.random.default_rng(int(slope * 100) + copies)
    tail = _even(1e5 * np.exp(slope * (_BITS - COUNTED)))
    expected = expected_false(rng.poisson(tail) + _copies(rng, copies, farthest), _NO_CORRELATIONS, Settings())
    truth = tail[:32].sum()
    assert expected.hash.expected is not None
    assert truth / 2 < expected.hash.expected < truth * 2
    assert expected.hash.fit is not None
    assert expected.hash.fit.slope == pytest.approx(slope, rel=0.05)


def test_small_counts_are_not_undersold() -> None:
    inside = known = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        tail = _even(rng.uniform(30, 300) * np.exp(rng.uniform(0.25, 0.5) * (_BITS - COUNTED)))
        expected = expected_false(rng.poisson(tail) + _copies(rng, 40, 50), _NO_CORRELATIONS, Settings())
        known += expected.hash.expected is not None
        inside += tail[:32].sum() <= expected.hash.at_most
    assert known >= 55
    assert inside >= 54  # of 60: two standard errors, less what the choice of the range adds


def test_plateau_of_look_alikes_is_no_tail() -> None:
    # CIFAR-10's training images against 5,000 of its test images, two bits a number from 50 on.
    seen = [28, 25, 26, 26, 25, 24, 39, 40, 45, 61, 76, 127, 214, 385, 753, 1599, 3614, 8627, 20872, 51450, 127652]
    counts = np.zeros(COUNTED + 1, np.int64)
    counts[50::2] = seen
    counts[10:50:2] = 15
    fit = expected_false(counts, _NO_CORRELATIONS, PRESETS["small"]).hash.fit
    assert fit is not None
    assert fit.first >= 66
    assert 0.38 < fit.slope < 0.46  # log(127,652 / 1,599) / 10 is 0.438


@pytest.mark.parametrize("copies", [0, 150, 3000])
def test_correlation_of_candidates_is_followed_to_the_threshold(copies: int) -> None:
    rng = np.random.default_rng(copies)
    middles = (np.arange(100) + 0.5) / 100
    tail = np.where(middles < 0.3, 1600.0, 1600 * np.exp(-14 * (middles - 0.3)))
    near_one = np.minimum(99, (100 * (1 - rng.exponential(0.02, copies))).astype(int))
    correlations = rng.poisson(tail) + np.bincount(near_one, minlength=100)
    distances = rng.poisson(_even(1e7 * np.exp(0.4 * (_BITS - COUNTED))))
    expected = expected_false(distances, correlations, Settings())
    truth = tail[_REMOVED:].sum()
    assert expected.correlation.expected is not None
    assert truth / 2 < expected.correlation.expected < truth * 2
    assert truth <= expected.correlation.at_most * 1.2


def test_few_candidates_cannot_be_more_wrong_than_the_tail_allows() -> None:
    rng = np.random.default_rng(0)
    tail = _even(1e4 * np.exp(0.46 * (_BITS - COUNTED)))
    correlations = np.zeros(100, np.int64)
    correlations[[20, 35, 95, 97, 99]] = 1
    expected = expected_false(rng.poisson(tail), correlations, Settings())
    assert expected.correlation.expected is None
    assert tail[32:81].sum() * 0.8 < expected.correlation.at_most < tail[32:81].sum() * 2


def test_nothing_counted_is_nothing_known() -> None:
    expected = expected_false(np.zeros(COUNTED + 1, np.int64), _NO_CORRELATIONS, Settings())
    assert expected.hash.expected is None and expected.correlation.expected is None
    assert expected.hash.at_most == expected.correlation.at_most == 3  # none seen: fewer than three, with 95 %


def test_no_histogram_and_no_setting_is_too_odd() -> None:
    rng = np.random.default_rng(5)
    for _ in range(60):
        distances = rng.poisson(10 ** rng.uniform(-3, 15) * rng.uniform(0, 1, COUNTED + 1) ** rng.integers(0, 60))
        correlations = rng.poisson(10 ** rng.uniform(-3, 15) * rng.uniform(0, 1, 100) ** rng.integers(0, 60))
        candidates = int(rng.integers(0, COUNTED + 1))
        correlation = float(rng.choice([0, 0.02, 0.03, 0.5, 0.99, 1]))
        settings = Settings(True, int(rng.integers(0, candidates + 1)), candidates, correlation)
        expected = expected_false(distances, correlations, settings)
        for estimate in (expected.hash, expected.correlation):
            assert np.isfinite(estimate.at_most) and estimate.at_most >= 0
            assert estimate.expected is None or 0 <= estimate.expected <= estimate.at_most
