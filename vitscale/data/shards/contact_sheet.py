"""The first samples of a dataset for people to look at: their facts, and a contact sheet of their pictures."""

from collections.abc import Iterator
from math import ceil, sqrt
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from vitscale.data.shards.manifest import Manifest
from vitscale.data.shards.opening import open_shard
from vitscale.ground.safe_text import printable

_SIDE = 160  # pixels of a picture at most
_GAP = 12
_TEXT_SIZE = 13
_LINE = 18
_BACKGROUND, _MARGIN, _TEXT, _FAINT = "white", "#ececec", "black", "#666666"


class Sample(NamedTuple):
    """One sample: its uid, its key if known, its classes' names, its size in pixels and bytes, and a small picture."""

    uid: int
    key: str | None
    class_names: tuple[str, ...]
    height: int
    width: int
    bytes: int
    picture: Image.Image


def first_samples(manifest: Manifest, count: int) -> Iterator[Sample]:
    """The first `count` selected samples, in stored order. Raises DataError (damage) and StorageError."""
    names = manifest.class_names
    for index in range(len(manifest.shards)):
        if count <= 0:
            return
        with open_shard(manifest, index) as shard:
            for slot in shard.slots[:count].tolist():
                pixels = shard.pixels(slot)
                classes = [names[label] if label < len(names) else f"class {label}" for label in shard.labels(slot)]
                yield Sample(
                    uid=int(shard.file.uid[slot]),
                    key=None if shard.keys is None else shard.keys[slot],
                    class_names=tuple(classes),
                    height=pixels.shape[0],
                    width=pixels.shape[1],
                    bytes=int(shard.file.size[slot]),
                    picture=fitted(Image.fromarray(pixels), _SIDE),
                )
                count -= 1


def contact_sheet(samples: list[Sample]) -> Image.Image:
    """Pictures side by side with their aspect ratios kept, with the class and uid below each."""
    columns = ceil(sqrt(max(1, len(samples))))
    rows = max(1, ceil(len(samples) / columns))
    step_x, step_y = _SIDE + _GAP, _SIDE + 2 * _LINE + _GAP
    sheet = Image.new("RGB", (columns * step_x + _GAP, rows * step_y + _GAP), _BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(_TEXT_SIZE)
    for i, sample in enumerate(samples):
        x, y = _GAP + (i % columns) * step_x, _GAP + (i // columns) * step_y
        draw.rectangle((x, y, x + _SIDE - 1, y + _SIDE - 1), fill=_MARGIN)
        picture = sample.picture
        sheet.paste(picture, (x + (_SIDE - picture.width) // 2, y + (_SIDE - picture.height) // 2))
        classes = printable(", ".join(sample.class_names) if sample.class_names else "no label")
        for line, (text, colour) in enumerate(((classes, _TEXT), (f"uid {sample.uid}", _FAINT))):
            at = (x + _SIDE / 2, y + _SIDE + line * _LINE + _LINE / 2 + 1)
            draw.text(at, shortened(text, font, _SIDE), fill=colour, font=font, anchor="mm")
    return sheet


def shortened(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """`text`, without its middle if it is wider than `width`: file names begin alike and end differently."""
    text = text if len(text) <= width else text[: width // 2] + text[-(width // 2) :]  # a letter has at least one pixel
    whole, keep = text, len(text)
    while keep > 1 and font.getlength(text) > width:
        keep -= 1
        text = f"{whole[: keep // 3]}…{whole[len(whole) - (keep - keep // 3) :]}"
    return text


def fitted(picture: Image.Image, side: int) -> Image.Image:
    """A picture of which the longer side has this many pixels."""
    scale = side / max(picture.size)
    size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    return picture.resize(size, Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST)
