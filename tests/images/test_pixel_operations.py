"""Operations on pixels against Pillow's own, at every magnitude; and as the same bits from another compilation."""

import ctypes
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torchvision.transforms.functional as pillow_functions
from pictures import make_picture
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vitscale.data.pixel_programs import kernel_weights
from vitscale.ground import native
from vitscale.ground.images import INSTRUCTION, OK, REFUSED, Code, Interpolation, operate

FOLDER = Path(native.__file__).parent
FILL = (124, 116, 104)
RESAMPLING = {
    Interpolation.NEAREST: Image.Resampling.NEAREST,
    Interpolation.BILINEAR: Image.Resampling.BILINEAR,
    Interpolation.BICUBIC: Image.Resampling.BICUBIC,
}


def pictures(side: int) -> list[np.ndarray]:
    """A photo-like one, noise, a narrow range of values, one colour, and two values."""
    rng = np.random.default_rng(side)
    noise = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
    flat = np.full((side, side, 3), (200, 3, 255), np.uint8)
    halves = flat.copy()
    halves[: side // 2] = (10, 3, 254)
    photo = np.asarray(make_picture(side, side, side).convert("RGB"))
    return [photo, noise, 40 + noise // 3, flat, halves]


def program(code: Code, *values: float, interpolation: Interpolation = Interpolation.NEAREST, fill=FILL) -> np.ndarray:
    found = np.zeros((), INSTRUCTION)
    found["code"], found["interpolation"], found["fill"] = code, interpolation, fill
    found["values"][: len(values)] = values
    return found


def changed(picture: np.ndarray, *instructions: np.ndarray) -> np.ndarray:
    batch = picture[None].copy()
    operate(batch, np.stack(instructions)[None], np.full(1, OK, np.int32))
    return batch[0]


def difference(found: np.ndarray, expected: Image.Image) -> int:
    return int(np.abs(found.astype(int) - np.asarray(expected).astype(int)).max())


def solarize_added(image: Image.Image, added: int) -> Image.Image:
    return image.point([min(255, value + added) if value < 128 else value for value in range(256)] * 3)


@pytest.mark.parametrize("side", [1, 2, 3, 31, 64])
def test_operations_on_values(side):
    for picture in pictures(side):
        image = Image.fromarray(picture)
        cases = [
            ((Code.NOTHING,), image),
            ((Code.INVERT,), ImageOps.invert(image)),
            ((Code.AUTOCONTRAST,), ImageOps.autocontrast(image)),
            ((Code.EQUALIZE,), ImageOps.equalize(image)),
            ((Code.POSTERIZE, 0), Image.new("RGB", image.size)),
            ((Code.POSTERIZE, 12), image),
        ]
        cases += [((Code.SOLARIZE, at), ImageOps.solarize(image, at)) for at in (*range(0, 257, 5), 256, 300, 768)]
        cases += [((Code.SOLARIZE_ADD, n), solarize_added(image, n)) for n in (*range(0, 129, 7), 110, 128, 330)]
        cases += [((Code.POSTERIZE, bits), ImageOps.posterize(image, bits)) for bits in range(1, 9)]
        for instruction, expected in cases:
            assert difference(changed(picture, program(*instruction)), expected) == 0, instruction


@pytest.mark.parametrize(
    ("code", "enhance"),
    [
        (Code.COLOR, ImageEnhance.Color),
        (Code.CONTRAST, ImageEnhance.Contrast),
        (Code.BRIGHTNESS, ImageEnhance.Brightness),
        (Code.SHARPNESS, ImageEnhance.Sharpness),
    ],
)
@pytest.mark.parametrize("side", [3, 31, 64])
def test_enhancements_by_any_factor(code, enhance, side):
    for picture in pictures(side):
        enhancer = enhance(Image.fromarray(picture))
        for factor in (*np.arange(0, 2.01, 0.03), 0.1, 1.0, 1.72, 1.9, 3.7, 5.5):
            assert difference(changed(picture, program(code, factor)), enhancer.enhance(float(factor))) == 0, factor


@pytest.mark.parametrize("side", [8, 31, 64])
def test_a_blur_of_any_radius(side):
    for picture in pictures(side):
        image = Image.fromarray(picture)
        for radius in (*np.arange(0.1, 2.05, 0.1), 3.0, 5.0, 10.0, 30.0):
            expected = image.filter(ImageFilter.GaussianBlur(float(radius)))
            assert difference(changed(picture, program(Code.BLUR, radius)), expected) == 0, radius


@pytest.mark.parametrize("hue", [0.1, -0.3, 0.5])
def test_hues_are_turned_as_torchvision_turns_them(hue):
    """On 300,000 colours here; of all 2^24 none differs (docs/LOG.md)."""
    colours = np.random.default_rng(0).integers(0, 256, (548, 548, 3), np.uint8)
    colours[0, :256] = np.arange(256)[:, None]
    expected = pillow_functions.adjust_hue(Image.fromarray(colours), hue)
    assert difference(changed(colours, program(Code.HUE, np.trunc(hue * 255) % 256)), expected) == 0


@pytest.mark.parametrize("kernel", [3, 9])
@pytest.mark.parametrize("deviation", [0.1, 0.7, 2.0])
def test_a_kernel_blurs_as_torchvisions(kernel, deviation):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    weights = kernel_weights(np.array([deviation]), kernel // 2)[0]
    expected = pillow_functions.gaussian_blur(Image.fromarray(pixels), [kernel] * 2, [deviation] * 2)
    found = changed(pixels, program(Code.KERNEL, kernel // 2, *weights))
    assert difference(found, expected) <= 1 and (found != np.asarray(expected)).mean() < 0.05


def rotation(degrees: float, side: int) -> tuple[float, ...]:
    """As Image.rotate works it out."""
    cosine, sine = math.cos(math.radians(-degrees)), math.sin(math.radians(-degrees))
    middle = side / 2
    return (
        *(cosine, sine, middle - cosine * middle - sine * middle),
        *(-sine, cosine, middle + sine * middle - cosine * middle),
    )


@pytest.mark.parametrize("interpolation", list(Interpolation))
@pytest.mark.parametrize("side", [8, 31, 64, 224])
def test_geometry_at_any_magnitude(side, interpolation):
    levels = [*np.arange(-10, 10.1, 1 if side < 224 else 6), 0.01, 4.7, -23, 300]  # the last two far outside
    nearest = interpolation == Interpolation.NEAREST
    for number, picture in enumerate(pictures(side)):
        image = Image.fromarray(picture)
        moved = {"resample": RESAMPLING[interpolation], "fillcolor": FILL}
        for level in levels:
            shear, pixels, degrees = 0.03 * level, 0.045 * level * side, 3 * level
            for name, matrix in {
                "shear_x": (1, shear, 0, 0, 1, 0),
                "shear_y": (1, 0, 0, shear, 1, 0),
                "translate_x": (1, 0, pixels, 0, 1, 0),
                "translate_y": (1, 0, 0, 0, 1, pixels),
                "rotate": rotation(degrees, side),
                "whatever": (0.7, shear, pixels, -shear, 1.2, 3.3),
            }.items():
                expected = (
                    image.rotate(degrees, **moved)
                    if name == "rotate"
                    else image.transform(image.size, Image.Transform.AFFINE, matrix, **moved)
                )
                found = changed(picture, program(Code.AFFINE, *matrix, interpolation=interpolation))
                assert difference(found, expected) <= (0 if nearest else 1), (number, name, level)


def test_a_cutout_is_filled_and_the_rest_is_intact():
    picture = pictures(31)[1]
    found = changed(picture, program(Code.CUTOUT, 3, 20, 9, 31))
    expected = picture.copy()
    expected[3:9, 20:31] = FILL
    assert np.array_equal(found, expected)


def test_one_after_the_other_each_picture_by_its_own_program():
    batch = np.stack(pictures(64))
    programs = np.zeros((5, 2), INSTRUCTION)
    programs[0] = np.stack([program(Code.INVERT), program(Code.POSTERIZE, 2)])
    programs[1] = np.stack([program(Code.NOTHING), program(Code.EQUALIZE)])
    programs[3] = np.stack([program(Code.INVERT), program(Code.INVERT)])
    status = np.array([OK, OK, OK, REFUSED, OK], np.int32)
    found = batch.copy()
    operate(found, programs, status)
    images = [Image.fromarray(picture) for picture in batch]
    assert difference(found[0], ImageOps.posterize(ImageOps.invert(images[0]), 2)) == 0
    assert difference(found[1], ImageOps.equalize(images[1])) == 0
    assert np.array_equal(found[2:], batch[2:])


@pytest.mark.parametrize(
    "unknown",
    [
        *(program(code) for code in (-1, max(Code) + 1, 2**31 - 1)),
        *(program(Code.INVERT, interpolation=kind) for kind in (-1, 3)),
        *(program(Code.AFFINE, *[0] * 5, far) for far in (math.nan, math.inf, -math.inf, 32768.0, -32768.0, 1e300)),
        program(Code.SOLARIZE, -1.0),
        *(program(Code.KERNEL, *at) for at in ((5, 4096), (40, 4096), (-1, 4096), (1, 4000, 96), (1, 5000, -452))),
    ],
    ids=str,
)
def test_no_program_but_a_known_one_is_performed(unknown):
    pixels = np.arange(2 * 9 * 9 * 3, dtype=np.uint8).reshape(2, 9, 9, 3)
    before, programs = pixels.copy(), np.zeros((2, 3), INSTRUCTION)
    programs["code"] = Code.INVERT
    programs[1, 2] = unknown
    with pytest.raises(ValueError):
        operate(pixels, programs, np.zeros(2, np.int32))
    assert np.array_equal(pixels, before)


def test_every_compilation_gives_the_same_bits(tmp_path):
    """Without wide vectors, and without optimisation."""
    rng = np.random.default_rng(0)
    batch = np.stack([picture for _ in range(40) for picture in pictures(61)])
    programs = np.zeros((len(batch), 3), INSTRUCTION)
    programs["code"] = rng.integers(0, len(Code), programs.shape)
    programs["interpolation"], programs["fill"] = rng.integers(0, 3, programs.shape), FILL
    programs["values"] = rng.uniform(0, 2, (*programs.shape, 6))
    is_matrix = programs["code"] == Code.AFFINE
    matrices = rng.uniform((0.8, -0.3, -30, -0.3, 0.8, -30), (1.2, 0.3, 30, 0.3, 1.2, 30), (is_matrix.sum(), 6))
    matrices[::3] = np.where(rng.random(matrices[::3].shape) < 0.6, (1, 0, 0, 0, 1, 0), matrices[::3])
    programs["values"][is_matrix] = matrices
    expected, status = batch.copy(), np.full(len(batch), OK, np.int32)
    operate(expected, programs, status)
    assert not np.array_equal(expected, batch)
    for number, options in enumerate((["-O0"], ["-O3"])):
        library = tmp_path / f"{number}.so"
        # A plain C program takes no clones for other processors.
        command = ["gcc", "-shared", "-fPIC", "-std=gnu11", "-ffp-contract=off", "-D__SANITIZE_ADDRESS__", *options]
        subprocess.run([*command, f"-I{FOLDER}", FOLDER / "operations.c", "-lm", "-o", library], check=True)
        found = batch.copy()
        addresses = (found.ctypes.data, len(found), 61, programs.ctypes.data, 3, status.ctypes.data)
        call = ctypes.CDLL(str(library)).vitscale_operate
        call.argtypes = native.load().vitscale_operate.argtypes
        assert call(*addresses) == OK
        assert np.array_equal(found, expected)
