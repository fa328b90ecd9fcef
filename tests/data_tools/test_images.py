import csv
import io
import shutil
import warnings
from pathlib import Path

import cv2
import numpy as np
import pytest
from datasets_on_disk import run
from pictures import encoded, make_picture
from PIL import Image, ImageOps

from vitscale.data.shards import images
from vitscale.data.shards.images import ImageOptions, Reject, StoredImage, store_image
from vitscale.ground.errors import RecipeError
from vitscale.ground.images import decode

# What becomes of the files of oddities/manifest.csv; all others are transcoded.
PASSED_THROUGH = {
    *("Portrait_1.jpg", "app13-multiple.jpg", "exif_typeerror.jpg", "hopper.jpg", "hopper_16bit_qtables.jpg"),
    *("hopper_gray.jpg", "icc-after-SOF.jpg", "icc_profile_big.jpg", "invalid-exif.jpg", "jfif_unit_cm.jpg"),
    *("sugarshack.mpo", "truncated_exif_dpi.jpg"),
}
REJECTED = {
    "broken.png": "not an image that Pillow knows; the file begins with b'\\x89PNG",
    "broken_data_stream.png": "unrecognized data stream",
    **{"decompression_bomb.gif": "too large: Image size (4364696535 pixels)", "monkey12.jpg": "12-bit JPEG (SOF1)"},
    **{"png_decompression_dos.png": "Decompressed data too large", "testimgari.jpg": "arithmetic-coded JPEG (SOF9)"},
    **{"truncated_end_chunk.png": "Truncated", "truncated_image.png": "truncated", "truncated_jpeg.jpg": "truncated"},
    **{"ultrahdr.jpg": "truncated", "zero_width.gif": "not an image that Pillow knows; the file begins with b'GIF89a"},
}


def pixels(stored) -> np.ndarray:
    """As Pillow, which is not what the converter decodes with in the end, sees them."""
    assert isinstance(stored, StoredImage), stored
    with Image.open(io.BytesIO(stored.jpeg)) as image:
        assert image.format in ("JPEG", "MPO") and image.size == (stored.width, stored.height)
        return np.asarray(image.convert("RGB")).astype(int)


def as_array(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB")).astype(int)


def distance(a, b) -> float:
    """Root mean square over pixels of 0 to 255."""
    return float(np.sqrt(np.mean((a - b) ** 2)))


@pytest.fixture(scope="module")
def oddities(data_root):
    """Name -> the file, and its width and height when it is upright."""
    with (data_root / "oddities" / "manifest.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    sizes = {row["file"]: tuple(map(int, row["size"].split("x"))) for row in rows if row["file"] not in REJECTED}
    sizes |= {row["file"]: sizes[row["file"]][::-1] for row in rows if row["exif_orientation"] in list("5678")}
    files = {path.name: path.read_bytes() for path in sorted((data_root / "oddities" / "files").iterdir())}
    assert len(files) == len(rows) == 60 and files.keys() == sizes.keys() | REJECTED.keys()
    return {name: (content, sizes.get(name)) for name, content in files.items()}


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize(
    ("options", "passed_through"),
    [
        (ImageOptions(), PASSED_THROUGH),
        (ImageOptions(pass_through=False), ()),
        (ImageOptions(short_side=60, quality=90), ("icc-after-SOF.jpg", "jfif_unit_cm.jpg")),
    ],
)
def test_every_oddity_has_its_outcome(oddities, capfd, options, passed_through):
    for name, (data, size) in oddities.items():
        outcome = store_image(data, options)
        if name in REJECTED:
            assert isinstance(outcome, Reject) and REJECTED[name] in outcome.reason and "0x" not in outcome.reason
            continue
        assert (outcome.width, outcome.height) == options.fitted(*size)
        assert outcome.passed_through == (outcome.jpeg == data) == (name in passed_through), name
        status, seen = decode(outcome.jpeg, outcome.height, outcome.width)  # as training will
        assert status == 0 and distance(seen, pixels(outcome)) < 3
        with Image.open(io.BytesIO(data)) as image:
            if image.mode in ("RGB", "L", "CMYK") and "transparency" not in image.info:
                upright = ImageOps.exif_transpose(image).convert("RGB")
                expected = upright.resize((outcome.width, outcome.height), Image.Resampling.BICUBIC)
                # Of line art filters differ most.
                limit = 12 if name == "hopper_bad_exif.jpg" and upright.size != expected.size else 6
                assert distance(pixels(outcome), as_array(expected)) < limit, name
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("size", "limits", "expected"),
    [
        ((500, 375), {"short_side": 256}, (341, 256)),  # 341.33
        ((375, 500), {"short_side": 256}, (256, 341)),
        ((500, 375), {"long_side": 256}, (256, 192)),
        ((500, 375), {"short_side": 256, "long_side": 256}, (256, 192)),
        ((500, 375), {"short_side": 100, "long_side": 256}, (133, 100)),
        ((500, 375), {"short_side": 375, "long_side": 500}, (500, 375)),
        ((50, 37), {"short_side": 256, "long_side": 300}, (50, 37)),
        ((1000, 3), {"long_side": 500}, (500, 2)),  # 1.5
        ((10000, 3), {"long_side": 256}, (256, 1)),  # 0.08
        ((3, 10000), {"short_side": 1}, (1, 3333)),
    ],
)
def test_limits_of_sides(size, limits, expected):
    assert ImageOptions(**limits).fitted(*size) == expected
    if max(size) > 5000:
        return
    picture = make_picture(4, size[1], size[0])
    for kind, saved in (("JPEG", {"quality": 95, "subsampling": "4:4:4"}), ("PNG", {})):
        stored = store_image(encoded(picture, kind, **saved), ImageOptions(**limits))
        assert (stored.width, stored.height) == expected
        assert stored.passed_through == (kind == "JPEG" and size == expected)
        assert distance(pixels(stored), as_array(picture.resize(expected, Image.Resampling.BICUBIC))) < 6


def test_limits_hold_for_any_size():
    rng = np.random.default_rng(0)
    for width, height, short, long in rng.integers(1, 3000, (500, 4)).tolist():
        found = ImageOptions(short_side=short, long_side=long).fitted(width, height)
        scale = min(1, short / min(width, height), long / max(width, height))
        assert 1 <= min(found) <= short and max(found) <= long
        expected = max(1, width * scale), max(1, height * scale)
        assert np.abs(np.subtract(found, expected)).max() <= 0.5 + 1e-9


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_reduction_is_antialiased(kind):
    board = Image.fromarray((np.indices((256, 256)).sum(0) % 2 * 255).astype(np.uint8)).convert("RGB")
    found = pixels(store_image(encoded(board, kind, **({"quality": 100} if kind == "JPEG" else {})), ImageOptions(50)))
    assert np.abs(found - 127.5).max() < 4


def test_described_and_refused_options():
    plain = {"jpeg_quality": 95, "jpeg_subsampling": "4:4:4", "pass_through": True}
    assert ImageOptions().described() == plain
    assert ImageOptions(long_side=9, quality=7).described() == {**plain, "jpeg_quality": 7, "long_side": 9}
    for wrong in ({"quality": 0}, {"quality": 101}, {"short_side": 0}, {"long_side": -1}):
        with pytest.raises(RecipeError):
            ImageOptions(**wrong)


def test_without_pass_through_the_quality_decides(photos):
    sizes = [len(store_image(photos[0], ImageOptions(quality=q, pass_through=False)).jpeg) for q in (10, 50, 95)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1] / 2
    stored = store_image(photos[0], ImageOptions(pass_through=False))
    assert not stored.passed_through
    assert distance(pixels(stored), as_array(Image.open(io.BytesIO(photos[0])))) < 2


@pytest.mark.parametrize("kind", ["JPEG", "MPO", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("options", [ImageOptions(), ImageOptions(long_side=20)])
def test_orientations(kind, options):
    picture = make_picture(8, 32, 48)
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = encoded(picture, kind, exif=exif, quality=95)
        with Image.open(io.BytesIO(data)) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
        expected = upright.resize(options.fitted(*upright.size), Image.Resampling.BICUBIC)
        assert distance(pixels(store_image(data, options)), as_array(expected)) < 5, orientation


GRAY = make_picture(9, 40, 50).convert("L")
KINDS = {
    "bilevel fax": (GRAY.convert("1"), "TIFF", {"compression": "group4"}),
    "bilevel PNG": (GRAY.convert("1"), "PNG", {}),
    "gray TIFF": (GRAY, "TIFF", {"compression": "tiff_lzw"}),
    "JPEG in TIFF": (make_picture(9, 40, 50), "TIFF", {"compression": "jpeg", "quality": 95}),
    "CMYK TIFF": (make_picture(9, 40, 50).convert("CMYK"), "TIFF", {}),
    "palette BMP": (make_picture(9, 40, 50).quantize(64), "BMP", {}),
    "progressive gray JPEG": (GRAY, "JPEG", {"progressive": True, "quality": 95}),
    "JPEG of RGB": (make_picture(9, 40, 50), "JPEG", {"keep_rgb": True, "quality": 95}),
    "CMYK JPEG": (make_picture(9, 40, 50).convert("CMYK"), "JPEG", {"quality": 95}),
    "JPEG 2000": (make_picture(9, 40, 50), "JPEG2000", {}),
    "TGA": (make_picture(9, 40, 50), "TGA", {}),
    "ICO": (make_picture(9, 48, 48), "ICO", {"sizes": [(48, 48)]}),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_files(name):
    picture, kind, options = KINDS[name]
    stored = store_image(encoded(picture, kind, **options))
    assert stored.passed_through == (name in ("progressive gray JPEG", "JPEG of RGB"))
    assert distance(pixels(stored), as_array(picture)) < 6
    assert distance(decode(stored.jpeg, stored.height, stored.width)[1], pixels(stored)) < 3


def test_cmyk_without_its_marker_is_taken_for_adobes(photos):
    data = encoded(make_picture(3, 24, 24).convert("CMYK"), quality=95)
    marker = data.index(b"\xff\xee\x00\x0eAdobe")
    assert distance(pixels(store_image(data[:marker] + data[marker + 16 :])), pixels(store_image(data))) < 1


def test_alpha_becomes_white():
    picture = make_picture(0, 40, 40).convert("RGBA")
    picture.paste((255, 0, 0, 0), (0, 0, 20, 40))
    kinds = {"PNG": {}, "WEBP": {"lossless": True, "exact": True}, "TIFF": {}, "AVIF": {"quality": 95}}
    for kind, options in kinds.items():
        found = pixels(store_image(encoded(picture, kind, **options)))
        assert found[:, :12].min() > 245
        assert distance(found[:, 28:], as_array(picture)[:, 28:]) < 4
    assert pixels(store_image(encoded(picture.convert("LA"), "PNG")))[:, :12].min() > 245
    palette = make_picture(0, 40, 40).quantize(16)
    palette.paste(3, (0, 0, 20, 40))
    for kind in ("PNG", "GIF"):
        assert pixels(store_image(encoded(palette, kind, transparency=3)))[:, :12].min() > 245


def test_sixteen_bits_are_scaled():
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(32, 0)
    for kind in ("PNG", "TIFF", "PPM"):
        found = pixels(store_image(encoded(Image.fromarray(ramp), kind)))
        assert np.abs(found[:, :, 0] - np.arange(256)).max() <= 3
    picture = np.asarray(make_picture(1, 20, 30))
    png = cv2.imencode(".png", picture[..., ::-1].astype(np.uint16) * 257)[1].tobytes()
    assert distance(pixels(store_image(png)), picture) < 4


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF", "AVIF"])
def test_first_frame_of_several(kind):
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("blue", "red", "lime")]
    found = pixels(store_image(encoded(frames[0], kind, save_all=True, append_images=frames[1:])))
    assert np.abs(found - (0, 0, 255)).max() < 12


def test_transcoding_is_deterministic_and_carries_no_metadata():
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 3, "private note"
    source = encoded(make_picture(1, 30, 40), exif=exif, comment=b"private note", icc_profile=b"profile" * 10)
    for options in (ImageOptions(), ImageOptions(long_side=20)):
        stored = store_image(source, options)
        assert stored == store_image(source, options)
        assert b"private note" not in stored.jpeg and b"profileprofile" not in stored.jpeg
        with Image.open(io.BytesIO(stored.jpeg)) as image:
            assert image.getexif() == {} and image.layer[0][1:3] == (1, 1)  # 4:4:4


def test_passes_through_only_what_the_decoder_takes(photos):
    photo = photos[0]
    shown = np.asarray(Image.open(io.BytesIO(photo)), np.int16)
    for file in (photo, photo + b"trailing garbage"):
        stored = store_image(file)
        assert stored == StoredImage(file, 40, 64, True, stored.pixels)
        assert np.abs(stored.pixels - shown).mean() < 2  # Pillow decodes more exactly
    for options in (ImageOptions(), ImageOptions(long_side=10), ImageOptions(pass_through=False)):
        for size in (len(photo) // 2, len(photo) - 2):
            assert "truncated" in store_image(photo[:size], options).reason


def test_limits(monkeypatch):
    assert store_image(b"") == Reject("empty file (0 bytes)")
    monkeypatch.setattr(images, "MAX_PIXELS", 99)
    assert store_image(encoded(Image.new("RGB", (10, 10)), "PNG")) == Reject("10 x 10 pixels; at most 99 are accepted")
    monkeypatch.undo()
    assert "floating-point" in store_image(encoded(Image.new("F", (4, 4)), "TIFF")).reason
    assert "32-bit" in store_image(encoded(Image.new("I", (4, 4), 70000), "TIFF")).reason
    too_long = encoded(Image.new("L", (65501, 1)), "PNG")
    assert store_image(too_long) == Reject("65501 x 1 pixels; a side must have 1 to 65500")
    assert store_image(too_long, ImageOptions(long_side=300)).width == 300


def test_pillows_own_limits_raise_nothing(monkeypatch):
    data = encoded(Image.new("RGB", (30, 10)), "PNG")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200)  # warns
        assert isinstance(store_image(data), StoredImage)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
        assert store_image(data).reason.startswith("too large: Image size (300 pixels)")
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
        assert isinstance(store_image(data), StoredImage)


def test_random_damage_never_raises():
    rng = np.random.default_rng(0)
    for kind in ("JPEG", "PNG", "GIF", "TIFF", "WEBP", "BMP"):
        data = encoded(make_picture(3, 20, 20), kind)
        for _ in range(40):
            damaged = bytearray(data)
            for position in rng.integers(0, len(data), 8):
                damaged[position] = rng.integers(256)
            damaged = bytes(damaged[: rng.integers(1, len(data) + 1)])
            for options in (ImageOptions(), ImageOptions(long_side=10)):
                assert isinstance(store_image(damaged, options), StoredImage | Reject)


REPOSITORY = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
        (b"\0\0\0\x20ftypisom", "a video"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
        (b"<?xml version='1.0'?>\n<!-- drawn -->\n<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG drawing"),
        (b"\xef\xbb\xbf\r\n<!DOCTYPE html><html><body>404", "a web page"),
        (b"<HTML><HEAD>", "a web page"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code>", 'text, not an image; the file begins with b"<?xml'),
        (b'{"error": "quota"}', "text, not an image; the file begins with b'{\"error"),
        (b"%PDF-1.7", "a PDF document"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (bytes(5000), "nothing but zero bytes"),
        (b"PK\x03\x04", "a zip archive"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", "a drawing (EPS)"),
        (b"\xff\xd8\xff", "not an image that Pillow knows; the file begins with b'\\xff\\xd8\\xff'"),
    ],
)
def test_files_that_are_no_images_are_named(data, reason):
    stored = store_image(data)
    assert isinstance(stored, Reject) and reason in stored.reason


def test_a_machine_that_cannot_decode_ends_a_conversion(image_folder, tmp_path):
    """The images are not at fault: none may be counted as unreadable, however many a conversion may reject."""
    for package in ("vitscale", "data_tools"):
        shutil.copytree(REPOSITORY / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    done = run(image_folder, tmp_path / "out", "--max-reject-rate", 1, cwd=tmp_path)
    assert done.returncode == 2 and "not compiled" in done.stderr, done.stderr
    assert not (tmp_path / "out" / "manifest.json").exists()
