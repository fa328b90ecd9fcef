"""The report: its numbers against what was planted, its pictures by what can be seen in them."""

import io
import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dedup_data import candidate, index_of, source_of
from pictures import encoded
from PIL import Image
from planted_copies import jpeg, photo, write_images
from rich.console import Console

from data_tools.dedup.index import FingerprintIndex
from data_tools.dedup.matches import Findings, Match, Pair
from data_tools.dedup.matching import Matcher
from data_tools.dedup.report import described, pair_sheet, tables, write_report
from data_tools.dedup.settings import Settings

COLUMNS = 110


@pytest.fixture(scope="module")
def index_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of `birds`, photos, and `scans`, of which only equal bytes and pixels count; five images each."""
    root = tmp_path_factory.mktemp("report")
    sources = []
    for number, (name, preset) in enumerate((("birds", "photo"), ("scans", "exact"))):
        images = {f"{i}.jpg": jpeg(photo(10 * number + i)) for i in range(5)}
        sources.append(source_of(write_images(root / name, images), name, preset, level=1))
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


def renamed(folder: Path, out: Path, names: list[str]) -> Path:
    """A copy of an index, its test sets called otherwise."""
    shutil.copytree(folder, out)
    content = json.loads((folder / "index.json").read_text())
    for test_set, name in zip(content["test_sets"], names, strict=True):
        test_set["name"] = name
    (out / "index.json").write_text(json.dumps(content))
    return out


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
    assert (
        birds["settings"]["distance"] == 31
        and birds["level"] == 1
        and birds["index"] == FingerprintIndex(index_folder).sha256
    )
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


def test_table_of_large_counts_fits_the_terminal(index_folder: Path, tmp_path: Path) -> None:
    names = ["a test set with a name of quite some length", "[bold]鸟🐟\n\x1b[31m"]
    matcher = Matcher([FingerprintIndex(renamed(index_folder, tmp_path / "index", names))])
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


def test_equal_inputs_give_equal_files(index_folder: Path, tmp_path: Path) -> None:
    first = write_report(tmp_path / "a", *matched(index_folder))
    second = write_report(tmp_path / "b", *matched(index_folder))
    assert first == second == ["report.json", "birds.pairs.png"]
    for name in first:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(first)  # nothing half-written is left
    for name in first[1:]:
        with Image.open(tmp_path / "a" / name) as image:
            image.load()
            assert image.width > 900 and not image.info.keys() & {"Software", "Creation Time"}


@pytest.mark.parametrize(
    "names",
    [["a/b", "a:b"], ["../../etc", "..\\..\\ETC"], ["\U0001f41f $x_$ \\frac", "鸟"], [".", ""], ["x" * 400, "x" * 401]],
)
def test_any_names_make_files_of_their_own(index_folder: Path, tmp_path: Path, names: list[str]) -> None:
    index = FingerprintIndex(renamed(index_folder, tmp_path / "index", names))
    index.test_sets = tuple(replace(one, settings=Settings()) for one in index.test_sets)
    matcher = Matcher([index])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written = write_report(tmp_path / "report", matcher, Findings(names))
    assert len({name.lower() for name in written}) == len(written) == 3
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == sorted(written)
    assert json.loads((tmp_path / "report" / "report.json").read_text())["test_sets"][0]["name"] == names[0]


def test_damage_of_an_earlier_report_is_overwritten(index_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("cut off")
    matcher, findings = matched(index_folder)
    write_report(tmp_path, matcher, findings)
    assert json.loads((tmp_path / "report.json").read_text())["images"] == 6


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


def test_sheet_grows_with_its_pairs() -> None:
    empty, some, more = (pair_sheet("birds", [(pair(True), b"")] * count, []) for count in (0, 4, 24))
    assert empty.width == some.width == more.width
    assert empty.height < some.height < more.height
