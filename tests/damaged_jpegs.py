"""Small JPEGs of every usual kind, and the same damaged at random: equal numbers give equal bytes.

As a program it writes them to a folder, for what is not written in Python (`make sanitize`, a fuzzer's first corpus):

    python tests/damaged_jpegs.py FOLDER COUNT
"""

import random
import struct
import sys
from pathlib import Path

from pictures import encoded, make_picture

HEIGHT, WIDTH = 40, 56


def small_jpegs() -> dict[str, bytes]:
    """Name -> a sound JPEG of 40 x 56 pixels."""
    picture = make_picture(7, HEIGHT, WIDTH)
    exif = b"Exif\0\0" + encoded(make_picture(1, 16, 16))
    plain = encoded(picture, subsampling=2)
    return {
        "4:4:4": encoded(picture, subsampling=0),
        "4:2:2": encoded(picture, subsampling=1),
        "4:2:0": plain,
        "gray": encoded(picture.convert("L")),
        "progressive": encoded(picture, subsampling=2, progressive=True),
        "progressive gray": encoded(picture.convert("L"), progressive=True),
        "restart markers": encoded(picture, subsampling=2, restart_marker_rows=1),
        "optimized": encoded(picture, quality=30, optimize=True),
        "EXIF with a thumbnail": plain[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + plain[2:],
        "CMYK": encoded(picture.convert("CMYK")),
    }


def damaged(jpeg: bytes, seed: int) -> bytes:
    """The same with bits flipped, a part cut out or off, markers exchanged, or bytes put in: one to three of these."""
    draw = random.Random(seed)
    content = bytearray(jpeg)
    for _ in range(draw.choice((1, 1, 2, 3))):
        draw.choice(_DAMAGES)(content, draw)
    return bytes(content)


def damaged_jpegs(count: int) -> list[bytes]:
    """So many damaged files, in turn of each of the small JPEGs."""
    sound = list(small_jpegs().values())
    return [damaged(sound[number % len(sound)], number) for number in range(count)]


def _flip(content: bytearray, draw: random.Random) -> None:
    for _ in range(draw.randint(1, 4)):
        if content:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def _cut_off(content: bytearray, draw: random.Random) -> None:
    del content[draw.randint(0, len(content)) :]


def _cut_out(content: bytearray, draw: random.Random) -> None:
    start = draw.randint(0, len(content))
    del content[start : start + draw.randint(1, 40)]


def _put_in(content: bytearray, draw: random.Random) -> None:
    start = draw.randint(0, len(content))
    content[start:start] = draw.randbytes(draw.randint(1, 20))


def _markers(content: bytearray) -> list[int]:
    """Where a marker's second byte lies."""
    return [i + 1 for i in range(len(content) - 1) if content[i] == 0xFF and content[i + 1] not in (0, 0xFF)]


def _exchange_markers(content: bytearray, draw: random.Random) -> None:
    places = _markers(content)
    if len(places) > 1:
        one, other = draw.sample(places, 2)
        content[one], content[other] = content[other], content[one]


def _other_marker(content: bytearray, draw: random.Random) -> None:
    if places := _markers(content):
        content[draw.choice(places)] = draw.randint(1, 0xFE)


def _near_a_marker(content: bytearray, draw: random.Random) -> None:
    """Lengths, sizes, sampling factors and numbers of tables stand behind markers."""
    if places := _markers(content):
        at = draw.choice(places) + draw.randint(1, 12)
        if at < len(content):
            content[at] = draw.choice((0, 1, 2, 0xFF, draw.randrange(256)))


_DAMAGES = (_flip, _cut_off, _cut_out, _put_in, _exchange_markers, _other_marker, _near_a_marker)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for number, content in enumerate([*small_jpegs().values(), *damaged_jpegs(int(sys.argv[2]))]):
        (folder / f"{number:05d}.jpg").write_bytes(content)
