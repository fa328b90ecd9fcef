import io

import numpy as np
import pytest
from pictures import encoded, make_picture
from PIL import Image

from data_tools import images
from data_tools.images import Reject, StoredImage, store_image
from vitscale.shards import jpeg

REJECTED = {
    "broken.png": "not an image that Pillow knows",
    "broken_data_stream.png": "unrecognized data stream",
    "decompression_bomb.gif": "decompression bomb",
    "monkey12.jpg": "not an image that Pillow knows",  # 12 bits
    "png_decompression_dos.png": "Decompressed data too large",
    "truncated_end_chunk.png": "Truncated",
    "truncated_image.png": "truncated",
    "truncated_jpeg.jpg": "truncated",
    "ultrahdr.jpg": "truncated",
    "zero_width.gif": "not an image that Pillow knows",
}
PASSED_THROUGH = (
    "hopper.jpg hopper_gray.jpg hopper_16bit_qtables.jpg app13-multiple.jpg icc_profile_big.jpg exif_typeerror.jpg "
    "jfif_unit_cm.jpg Portrait_1.jpg sugarshack.mpo"
)


def pixels(stored) -> np.ndarray:
    """As Pillow, which is not what the converter decodes with in the end, sees them."""
    assert isinstance(stored, StoredImage), stored
    with Image.open(io.BytesIO(stored.jpeg)) as image:
        assert image.format in ("JPEG", "MPO") and image.size == (stored.width, stored.height)
        return np.asarray(image.convert("RGB")).astype(int)


def distance(a, b) -> float:
    """Root mean square over pixels of 0 to 255."""
    return float(np.sqrt(np.mean((a - b) ** 2)))


@pytest.fixture(scope="module")
def oddities(data_root):
    return {path.name: path.read_bytes() for path in sorted((data_root / "oddities" / "files").iterdir())}


def test_every_oddity_has_an_outcome(oddities, capfd):
    outcomes = {name: store_image(data) for name, data in oddities.items()}
    assert len(outcomes) == 60
    assert {name for name, outcome in outcomes.items() if isinstance(outcome, Reject)} == set(REJECTED)
    for name, outcome in outcomes.items():
        if isinstance(outcome, Reject):
            assert REJECTED[name] in outcome.reason and "0x" not in outcome.reason
        else:
            assert jpeg.decode(outcome.jpeg, outcome.height, outcome.width)[0] == 0
            assert outcome.passed_through == (outcome.jpeg == oddities[name])
            pixels(outcome)
    assert [name for name in PASSED_THROUGH.split() if not outcomes[name].passed_through] == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", [*(f"hopper_orientation_{i}.jpg" for i in range(2, 9)), "hopper_orientation_6.webp"])
def test_turned_images_are_upright(oddities, name):
    stored = store_image(oddities[name])
    assert not stored.passed_through
    assert distance(pixels(stored), pixels(store_image(oddities["hopper.jpg"]))) < 12


def test_portraits_are_upright(oddities):
    assert {
        (stored.height, stored.width) for stored in (store_image(oddities[f"Portrait_{i}.jpg"]) for i in (1, 3, 6, 8))
    } == {(1800, 1200)}


@pytest.mark.parametrize("name", ["hopper.bmp", "hopper.tif", "hopper.ppm", "hopper.webp", "hopper.avif", "hopper.gif"])
def test_other_formats_show_the_same_picture(oddities, name):
    assert distance(pixels(store_image(oddities[name])), pixels(store_image(oddities["hopper.jpg"]))) < 12


def test_cmyk(oddities):
    with Image.open(io.BytesIO(oddities["pil_sample_cmyk.jpg"])) as image:
        expected = np.asarray(image.convert("RGB")).astype(int)
    stored = store_image(oddities["pil_sample_cmyk.jpg"])
    assert not stored.passed_through and distance(pixels(stored), expected) < 6


def test_alpha_becomes_white():
    picture = make_picture(0, 40, 40).convert("RGBA")
    picture.paste((255, 0, 0, 0), (0, 0, 20, 40))
    for kind, options in (("PNG", {}), ("WEBP", {"lossless": True, "exact": True})):
        found = pixels(store_image(encoded(picture, kind, **options)))
        assert found[:, :12].min() > 245
        assert distance(found[:, 28:], np.asarray(picture.convert("RGB")).astype(int)[:, 28:]) < 4
    palette = make_picture(0, 40, 40).quantize(16)
    palette.paste(3, (0, 0, 20, 40))
    assert pixels(store_image(encoded(palette, "PNG", transparency=3)))[:, :12].min() > 245


def test_sixteen_bits_are_scaled():
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(32, 0)
    found = pixels(store_image(encoded(Image.fromarray(ramp), "PNG")))
    assert np.abs(found[:, :, 0] - np.arange(256)).max() <= 3


def test_first_frame_of_an_animation():
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("blue", "red", "lime")]
    found = pixels(store_image(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])))
    assert np.abs(found - (0, 0, 255)).max() < 8


def test_transcoding_is_deterministic_and_carries_no_metadata():
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 3, "private note"
    source = encoded(make_picture(1, 30, 40), exif=exif, comment=b"private note", icc_profile=b"profile" * 10)
    stored = store_image(source)
    assert stored == store_image(source)
    assert b"private note" not in stored.jpeg and b"profileprofile" not in stored.jpeg
    with Image.open(io.BytesIO(stored.jpeg)) as image:
        assert image.getexif() == {} and image.layer[0][1:3] == (1, 1)  # 4:4:4


def test_passes_through_only_what_the_decoder_takes(photos):
    assert store_image(photos[0]) == StoredImage(photos[0], 40, 64, True)
    assert isinstance(store_image(photos[0][: len(photos[0]) // 2]), Reject)


def test_limits(monkeypatch):
    assert store_image(b"") == Reject("empty file (0 bytes)")
    monkeypatch.setattr(images, "MAX_PIXELS", 99)
    assert store_image(encoded(Image.new("RGB", (10, 10)), "PNG")) == Reject("10 x 10 pixels; at most 99 are taken")
    monkeypatch.undo()
    assert "floating-point" in store_image(encoded(Image.new("F", (4, 4)), "TIFF")).reason
    assert "32-bit" in store_image(encoded(Image.new("I", (4, 4), 70000), "TIFF")).reason
    assert isinstance(store_image(encoded(Image.new("L", (70000, 1)), "PNG")), Reject)


def test_random_damage_never_raises():
    rng = np.random.default_rng(0)
    for kind in ("JPEG", "PNG", "GIF", "TIFF", "WEBP", "BMP"):
        data = encoded(make_picture(3, 20, 20), kind)
        for _ in range(40):
            damaged = bytearray(data)
            for position in rng.integers(0, len(data), 8):
                damaged[position] = rng.integers(256)
            assert isinstance(store_image(bytes(damaged[: rng.integers(1, len(data) + 1)])), StoredImage | Reject)
