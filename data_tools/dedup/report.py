"""The de-duplication report: what was removed, by which tier, and how much of it probably in error.

Contact sheets show the pairs nearest to the threshold: were the right ones removed, and the right ones kept?
"""

import io
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from rich import box
from rich.table import Table
from rich.text import Text

from data_tools.dedup.matches import TIERS, Findings, Pair, Tier
from data_tools.dedup.matching import Matcher
from data_tools.dedup.queries import PICTURE_SIDE as SIDE
from data_tools.dedup.tail import Estimate, Expected, amount, expected_false
from vitscale.data.shards.contact_sheet import fitted, shortened
from vitscale.ground.files.durable import durable_file
from vitscale.ground.files.unpacked import most_pixels
from vitscale.ground.safe_text import printable
from vitscale.ground.wording import counted

REPORT_NAME = "report.json"
_LONGEST = 60  # characters of a test set's name in a file name
_SHOWN = 20  # in a line of the table
_HEADINGS: dict[Tier, str] = {
    "bytes": "by\nbytes",
    "pixels": "by\npixels",
    "hash": "by\nhash",
    "correlation": "by cor-\nrelation",
    "embedding": "by em-\nbedding",
}
_COLUMNS = 4  # pairs side by side
_GAP, _BETWEEN = 18, 4
_TITLE_SIZE, _HEAD_SIZE, _TEXT_SIZE = 20, 15, 12
_LINE = 16
_WIDTH = 2 * SIDE + _BETWEEN  # of one pair
_STEP_X, _STEP_Y = _WIDTH + _GAP, SIDE + 3 * _LINE + _GAP
_HEAD = 44  # pixels of a block's heading
_TOP = 40
_BACKGROUND, _MARGIN, _TEXT, _FAINT = "white", "#ececec", "black", "#666666"
_REMOVED, _KEPT = "#b02a25", "#22703a"


def write_report(folder: Path, matcher: Matcher, findings: Findings) -> list[str]:
    """Write `report.json`, and `NAME.pairs.png` for each test set that is compared by more than bytes and pixels.

    Equal inputs give equal bytes.

    Returns the names of the files. Raises OSError, and DataError for an index that cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with durable_file(folder / REPORT_NAME) as file:
        # ASCII with escapes: names may contain bytes that are not text.
        file.write((json.dumps(described(matcher, findings), indent=1) + "\n").encode("ascii"))
    written = [REPORT_NAME]
    for number, stem in enumerate(_stems(findings.names)):
        if not matcher.test_sets[number].settings.near:
            continue
        sides = [_with_pictures(matcher, findings.pairs(number, removed)) for removed in (True, False)]
        written.append(f"{stem}.pairs.png")
        with durable_file(folder / written[-1]) as file:
            pair_sheet(printable(findings.names[number]), *sides).save(file, "PNG")
    return written


def described(matcher: Matcher, findings: Findings) -> dict[str, Any]:
    """The report as plain values, as `report.json` has them.

    `expected_false` estimates how many pairs were removed by hash or correlation though they are not copies but near by
    chance: `expected` (null: too few pairs to tell) and `at_most`, see `tail.Estimate`; and the line that was fitted to
    the counts, see `tail.Fit`.
    """
    return {
        "images": findings.images,
        "removed": findings.removed,
        "test_sets": [_of_test_set(matcher, findings, number) for number in range(len(findings.names))],
    }


def tables(matcher: Matcher, findings: Findings) -> list[Table]:
    """The report as a terminal shows it, at most 110 columns wide."""
    report = described(matcher, findings)
    test_sets = report["test_sets"]
    with_model = any(index.embedding is not None for index in matcher.indexes)
    tiers = [tier for tier in TIERS if with_model or tier != "embedding"]
    caption = Text(_caption(report, with_model))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption, caption_justify="left", caption_style="")
    table.add_column("test set", max_width=_SHOWN, overflow="fold")  # the only column that may shrink
    for heading in (
        "its\nimages",
        "contami-\nnated",
        "copies\nfound",
        *(_HEADINGS[tier] for tier in tiers),
        "wrongly,\nexpected",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in test_sets:
        removed = one["removed"]
        table.add_row(
            Text(printable(one["name"])),
            f"{one['images']:,}",
            _share(one["contaminated"]["images"], one["images"]),
            f"{sum(removed.values()):,}",
            *(f"{removed[tier]:,}" for tier in tiers),
            _wrongly(one["expected_false"]["total"]),
        )
    if len(test_sets) > 1:
        images, contaminated = (
            sum(values) for values in zip(*((s["images"], s["contaminated"]["images"]) for s in test_sets), strict=True)
        )
        table.add_section()
        # An image that matches several test sets is removed once, so the tiers cannot be summed.
        blanks = [""] * len(tiers)
        total = _sum([one["expected_false"]["total"] for one in test_sets])
        row = ["all", f"{images:,}", _share(contaminated, images), f"{report['removed']:,}", *blanks, _wrongly(total)]
        table.add_row(*row)
    return [table]


def _of_test_set(matcher: Matcher, findings: Findings, number: int) -> dict[str, Any]:
    test_set, index = matcher.test_sets[number], matcher.index_of(number)
    removed = {tier: findings.tiers[number][tier] for tier in TIERS}
    contaminated = len(findings.contaminated[number])
    expected = _expected(matcher, findings, number)
    parts = {"hash": _described_estimate(expected.hash), "correlation": _described_estimate(expected.correlation)}
    return {
        "name": test_set.name,
        "source": test_set.source,
        "index": index.sha256,
        "preset": test_set.preset,
        "level": test_set.level,
        "settings": asdict(test_set.settings),
        "images": test_set.images,
        "unreadable": test_set.unreadable,
        "contaminated": {"images": contaminated, "percent": _rounded(100 * contaminated / max(1, test_set.images))},
        "removed": removed,
        "distances": findings.distances[number].tolist(),
        "correlations": findings.correlations[number].tolist(),
        "expected_false": {**parts, "total": _sum(list(parts.values()))},
    }


def _expected(matcher: Matcher, findings: Findings, number: int) -> Expected:
    """The estimates as fitted, limited to the number of pairs that were removed."""
    counts = findings.distances[number], findings.correlations[number]
    expected = expected_false(*counts, matcher.test_sets[number].settings)
    removed = findings.tiers[number]
    return Expected(_limited(expected.hash, removed["hash"]), _limited(expected.correlation, removed["correlation"]))


def _limited(estimate: Estimate, removed: int) -> Estimate:
    expected = 0.0 if removed == 0 else estimate.expected
    return replace(
        estimate, expected=None if expected is None else min(expected, removed), at_most=min(estimate.at_most, removed)
    )


def _described_estimate(estimate: Estimate) -> dict[str, Any]:
    fit = estimate.fit
    return {
        "expected": None if estimate.expected is None else _rounded(estimate.expected),
        "at_most": _rounded(estimate.at_most),
        "fit": None if fit is None else {name: _rounded(value) for name, value in asdict(fit).items()},
    }


def _sum(estimates: Sequence[dict[str, Any]]) -> dict[str, Any]:
    known = [one["expected"] for one in estimates]
    return {
        "expected": None if None in known else _rounded(sum(known)),
        "at_most": _rounded(sum(one["at_most"] for one in estimates)),
    }


def _rounded(value: float) -> float:
    """Four digits: further ones may differ between processors."""
    return float(f"{value:.4g}")


def _with_pictures(matcher: Matcher, pairs: list[Pair]) -> list[tuple[Pair, bytes]]:
    if not pairs:
        return []
    pictures = matcher.index_of(pairs[0].match.test_set).pictures([pair.match.image for pair in pairs])
    return list(zip(pairs, pictures, strict=True))


def _stems(names: Sequence[str]) -> list[str]:
    """File names for test sets, whose names are arbitrary: all different, even if case is ignored."""
    stems: list[str] = []
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:_LONGEST] or "test-set"
        stem, count = plain, 1
        while stem.lower() in {taken.lower() for taken in stems}:
            count += 1
            stem = f"{plain}-{count}"
        stems.append(stem)
    return stems


def _share(count: int, total: int) -> str:
    """Count and percentage, in the form of BiT (the paper's predecessor), Table 7."""
    return f"{count:,} ({count / max(1, total):.1%})"


def _wrongly(estimate: dict[str, Any]) -> str:
    expected, at_most = estimate["expected"], estimate["at_most"]
    if at_most == 0:
        return "0"
    if expected is None:
        return "?"
    shown, most = amount(expected), amount(at_most)
    return shown if shown == most else f"{shown} (<= {most})"


def _caption(report: dict[str, Any], with_model: bool) -> str:
    images, removed = report["images"], report["removed"]
    lines = [
        f"{counted(images, 'image')} compared, {removed:,} of them copies of test images "
        f"({removed / max(1, images):.3%}).",
        "wrongly: expected by chance alone, estimated from the counts of near misses; <=: at most (95 %);",
        "?: too few pairs are nearly alike to tell, which is no sign that any is wrong.",
        "Look-alikes are not in that number: see the contact sheets.",
    ]
    if with_model:
        lines.append("Nor is what the embedding decided.")
    return "\n".join(lines)


def pair_sheet(name: str, removed: Sequence[tuple[Pair, bytes]], kept: Sequence[tuple[Pair, bytes]]) -> Image.Image:
    """A test set's pairs in two blocks: removed ones, the least alike first, and kept ones, the most alike first.

    `name`, the test set's, is plain text. Each pair comes with the small JPEG of its test image.
    """
    blocks = (
        ("removed, the least alike first", "nothing was removed by its hash or its picture", _REMOVED, removed),
        ("kept, the most alike first", "nothing that was kept comes near", _KEPT, kept),
    )
    rows = sum(-(-len(pairs) // _COLUMNS) for _, _, _, pairs in blocks)
    size = _COLUMNS * _STEP_X + _GAP, _TOP + len(blocks) * _HEAD + rows * _STEP_Y + _GAP
    sheet = Image.new("RGB", size, _BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    title = shortened(f"{name}: left an image, right the test image", _font(_TITLE_SIZE), sheet.width - 2 * _GAP)
    draw.text((_GAP, _TOP / 2 + 4), title, fill=_TEXT, font=_font(_TITLE_SIZE), anchor="lm")
    y = _TOP
    for heading, nothing, colour, pairs in blocks:
        text = heading if pairs else nothing
        draw.line((_GAP, y + 10, sheet.width - _GAP, y + 10), fill=colour, width=2)
        draw.text((_GAP, y + 26), text, fill=colour, font=_font(_HEAD_SIZE), anchor="lm")
        y += _HEAD
        for i, (pair, test_picture) in enumerate(pairs):
            at = _GAP + i % _COLUMNS * _STEP_X, y + i // _COLUMNS * _STEP_Y
            _paste_pair(sheet, draw, at, pair, test_picture)
        y += -(-len(pairs) // _COLUMNS) * _STEP_Y
    return sheet


def _paste_pair(
    sheet: Image.Image, draw: ImageDraw.ImageDraw, at: tuple[int, int], pair: Pair, test_picture: bytes
) -> None:
    x, y = at
    for left, jpeg in ((x, pair.picture), (x + SIDE + _BETWEEN, test_picture)):
        draw.rectangle((left, y, left + SIDE - 1, y + SIDE - 1), fill=_MARGIN)
        picture = _picture(jpeg)
        if picture is not None:
            sheet.paste(picture, (left + (SIDE - picture.width) // 2, y + (SIDE - picture.height) // 2))
    match = pair.match
    facts = f"correlation {match.correlation:.3f}, {match.distance} bits"
    facts += "" if match.cosine is None else f", cosine {match.cosine:.2f}"
    facts += f", by {match.tier}" if match.removed else ""
    y += SIDE + _LINE // 2 + 2
    for text, colour in ((facts, _TEXT), (printable(pair.train_key), _FAINT), (printable(match.key), _FAINT)):
        draw.text((x, y), shortened(text, _font(_TEXT_SIZE), _WIDTH), fill=colour, font=_font(_TEXT_SIZE), anchor="lm")
        y += _LINE


def _picture(jpeg: bytes) -> Image.Image | None:
    """The picture, scaled to fit; None if it cannot be decoded."""
    try:
        with Image.open(io.BytesIO(jpeg)) as image:
            picture = image.convert("RGB") if image.width * image.height <= most_pixels(len(jpeg)) else None
    except Exception:  # Pillow raises nearly anything on damaged files; the pair's facts stay
        picture = None
    return None if picture is None else fitted(picture, SIDE)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
