"""What people do to photos before they put them into another collection. Shared by the recall table and its test."""

import io
from collections.abc import Callable
from functools import partial

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageFont

Edit = Callable[[Image.Image, np.random.Generator], bytes]

_QUALITY = 90


def edits() -> dict[str, Edit]:
    """Edits by name: an RGB picture and a source of randomness -> the bytes of a JPEG."""
    plain: dict[str, Callable[[Image.Image], Image.Image]] = {
        "longer side 256": lambda image: _longer_side(image, 256),
        "longer side 64": lambda image: _longer_side(image, 64),
        "twice the size": lambda image: image.resize((2 * image.width, 2 * image.height), Image.Resampling.BICUBIC),
        "squeezed to 224 x 224": lambda image: image.resize((224, 224), Image.Resampling.BICUBIC),
        "squeezed to 32 x 32": lambda image: image.resize((32, 32), Image.Resampling.BICUBIC),
        "gray": lambda image: image.convert("L").convert("RGB"),
        "brightness + 30 %": lambda image: ImageEnhance.Brightness(image).enhance(1.3),
        "contrast + 50 %": lambda image: ImageEnhance.Contrast(image).enhance(1.5),
        "saturation + 70 %": lambda image: ImageEnhance.Color(image).enhance(1.7),
        "blur of 2 pixels": lambda image: image.filter(ImageFilter.GaussianBlur(2)),
        "mirrored": _mirrored,
        "centre 98 %": lambda image: _crop(image, 0.98),
        "centre 95 %": lambda image: _crop(image, 0.95),
        "centre 90 %": lambda image: _crop(image, 0.9),
        "centre 85 %": lambda image: _crop(image, 0.85),
        "centre 80 %": lambda image: _crop(image, 0.8),
        "centre square": _centre_square,
        "shorter side 256, centre 224": _evaluation_crop,
        "mirrored, centre 90 %": lambda image: _crop(_mirrored(image), 0.9),
        "text across": _text,
        "white border of 2 %": lambda image: _bordered(image, 0.02, "white"),
        "white border of 5 %": lambda image: _bordered(image, 0.05, "white"),
        "black border of 5 %": lambda image: _bordered(image, 0.05, "black"),
        "white border of 10 %": lambda image: _bordered(image, 0.1, "white"),
        "turned by 3 degrees": lambda image: image.rotate(3, Image.Resampling.BICUBIC),
        "turned by 90 degrees": lambda image: image.transpose(Image.Transpose.ROTATE_90),
    }
    made: dict[str, Edit] = {f"JPEG quality {quality}": partial(_recoded, quality) for quality in (90, 50, 10)}
    made |= {name: partial(_plain, edit) for name, edit in plain.items()}
    made["centre 95 %, longer side 256, quality 75"] = lambda image, _: jpeg(_longer_side(_crop(image, 0.95), 256), 75)
    for share in (0.95, 0.9, 0.8):
        made[f"random crop of {100 * share:.0f} %"] = partial(_random_crop, share)
    return made


def jpeg(image: Image.Image, quality: int = _QUALITY) -> bytes:
    """A JPEG file."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def _plain(edit: Callable[[Image.Image], Image.Image], image: Image.Image, _: np.random.Generator) -> bytes:
    return jpeg(edit(image))


def _recoded(quality: int, image: Image.Image, _: np.random.Generator) -> bytes:
    return jpeg(image, quality)


def _random_crop(share: float, image: Image.Image, random: np.random.Generator) -> bytes:
    width, height = round(share * image.width), round(share * image.height)
    left, top = random.integers(image.width - width + 1), random.integers(image.height - height + 1)
    return jpeg(image.crop((int(left), int(top), int(left) + width, int(top) + height)))


def _crop(image: Image.Image, share: float) -> Image.Image:
    return _centred(image, round(share * image.width), round(share * image.height))


def _centred(image: Image.Image, width: int, height: int) -> Image.Image:
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def _centre_square(image: Image.Image) -> Image.Image:
    side = min(image.size)
    return _centred(image, side, side)


def _evaluation_crop(image: Image.Image) -> Image.Image:
    scale = 256 / min(image.size)
    size = round(image.width * scale), round(image.height * scale)
    return _centred(image.resize(size, Image.Resampling.BICUBIC), 224, 224)


def _longer_side(image: Image.Image, side: int) -> Image.Image:
    scale = side / max(image.size)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(size, Image.Resampling.BICUBIC)


def _mirrored(image: Image.Image) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def _text(image: Image.Image) -> Image.Image:
    image = image.copy()
    font = ImageFont.load_default(max(10, 0.06 * image.height))
    at = (0.1 * image.width, 0.45 * image.height)
    ImageDraw.Draw(image).text(at, "© a stock photo, 2021", fill="white", font=font)
    return image


def _bordered(image: Image.Image, share: float, colour: str) -> Image.Image:
    width = round(share * min(image.size))
    framed = Image.new("RGB", (image.width + 2 * width, image.height + 2 * width), colour)
    framed.paste(image, (width, width))
    return framed


# Of these no copy may be missed at the default level but one in a hundred.
CERTAIN = tuple(name for name in edits() if not name.startswith(("text", "random", "turned")) and "border" not in name)
BORDERS = ("white border of 5 %", "black border of 5 %")
