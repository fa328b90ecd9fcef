"""A contact sheet of the pairs nearest to the threshold: were the right ones removed, and the right ones kept?"""

import io
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from data_tools.dedup.matches import Pair
from data_tools.dedup.queries import PICTURE_SIDE as SIDE
from vitscale.data.shards.contact_sheet import fitted, shortened
from vitscale.ground.files.unpacked import most_pixels
from vitscale.ground.safe_text import printable

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
