"""`vitscale fewshot --masks`: the probe against scikit-learn and by hand, and masks as strangers make them."""

import json
import os
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import command
from models.weights.exported import TINY, described, valued, write
from PIL import Image
from torch.nn import functional as F

import vitscale as vs
from vitscale.data.shards import Manifest
from vitscale.evaluation.masks import Masks, read_mask
from vitscale.evaluation.probes import Solution, statistics
from vitscale.evaluation.segmentation import STRENGTHS, Confusion, fit, label_of_patches, predicted_classes
from vitscale.ground.errors import DataError
from vitscale.models import Model
from vitscale.models.vit import ViT

TRAIN, TEST = 20, 8
COLOURS = np.array([[200, 30, 30], [30, 160, 40], [40, 40, 220]], np.uint8)


def picture(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Three coloured parts of a picture, and the number of each pixel's colour."""
    random = np.random.default_rng(seed)
    height, width = random.integers(60, 100, 2)
    mask = np.zeros((height, width), np.uint8)
    mask[:, random.integers(20, width - 20) :] = 1
    mask[random.integers(20, height - 20) :] = 2
    noise = random.integers(0, 30, (height, width, 3), dtype=np.uint8)
    return COLOURS[mask] + noise, mask


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Two converted datasets of such pictures, their masks in folders as theirs, and a model's weights."""
    root = tmp_path_factory.mktemp("masks")
    for split, seeds in (("train", range(TRAIN)), ("test", range(TRAIN, TRAIN + TEST))):
        for seed in seeds:
            image, mask = picture(seed)
            for where, pixels in (("images", image), ("masks", mask)):
                (root / where / split / "kind").mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(root / where / split / "kind" / f"{seed}.png")
        vs.convert(root / "images" / split, root / split, workers=1)
    description = described(TINY)
    write(valued(description), description, "safetensors", root)
    return root


@pytest.fixture
def masks(place, tmp_path) -> Path:
    shutil.copytree(place / "masks", tmp_path / "masks")
    return tmp_path / "masks"


def probed(place: Path, masks: Path, *more: object):
    both = ["--train", place / "train", "--test", place / "test"]
    return command("fewshot", place / "safetensors.safetensors", *both, "--masks", masks, "--json", *more)


def png(width: int, height: int, bits: int, kind: int, rows: bytes) -> bytes:
    """A PNG file with these lines of pixels, each after the byte of its filter."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    palette = chunk(b"PLTE", bytes(48)) if kind == 3 else b""
    chunks = chunk(b"IHDR", header) + palette + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def test_the_mean_of_a_small_example_is_that_by_hand():
    """Class 0: 2 of 4, class 1: 1 of 3, class 2 is nowhere, class 3 only predicted: 0 of 1. 9 has no class."""
    confusion = Confusion(4)
    confusion.add(np.array([[0, 0, 9], [0, 1, 1]]), np.array([[0, 0, 2], [1, 1, 3]]), 9)
    assert confusion.measures() == {
        "mean": pytest.approx((2 / 3 + 1 / 3 + 0) / 3),
        "pixel_accuracy": pytest.approx(3 / 5),
        "by_class": [pytest.approx(2 / 3), pytest.approx(1 / 3), None, 0.0],
    }
    with pytest.raises(DataError):
        Confusion(2).measures()


def test_a_patch_has_the_class_of_most_of_its_pixels():
    mask = np.array([[3, 3, 255, 255], [3, 1, 255, 2], [1, 2, 255, 4], [2, 1, 255, 4]])
    assert label_of_patches(mask, 2, 255).tolist() == [[3, -1], [1, 4]]


def test_the_classifier_is_scikit_learns():
    linear_model = pytest.importorskip("sklearn.linear_model")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 12, generator=generator, dtype=torch.float64)
    y = (
        x @ torch.randn(12, 5, generator=generator, dtype=torch.float64) + torch.randn(400, 5, generator=generator) * 2
    ).argmax(1)
    development = torch.arange(400) % 7 == 3
    mean, std = statistics(x)
    x = (x - mean) / std

    def theirs(strength, rows):
        peer = linear_model.LogisticRegression(C=strength, tol=1e-10, max_iter=10_000)
        return peer.fit(x[rows].numpy(), y[rows].numpy())

    solution, strength = fit(x, y, development, 5)
    scores = [theirs(each, ~development).score(x[development], y[development]) for each in STRENGTHS]
    assert strength == STRENGTHS[int(np.argmax(scores))]
    peer = theirs(strength, slice(None))
    torch.testing.assert_close(solution.weight, torch.from_numpy(peer.coef_), rtol=0, atol=1e-3)
    logits = F.linear(x, solution.weight, solution.bias).softmax(dim=1)
    torch.testing.assert_close(logits, torch.from_numpy(peer.predict_proba(x)), rtol=0, atol=1e-3)


def test_logits_are_interpolated_between_the_middles_of_patches():
    solution = Solution(torch.tensor([[1.0], [-1.0]]).double(), torch.zeros(2).double())
    tokens = torch.tensor([3.0, -1.0]).double().view(1, 1, 2, 1)
    across = predicted_classes(tokens, solution, 8)[0, 0].tolist()
    assert across == [0] * 5 + [1] * 3  # from 3 at 1.5 pixels to -1 at 5.5: zero at 4.5


def test_the_command_segments_colours_by_random_weights_up_to_their_borders(place):
    done = probed(place, place / "masks")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (task,) = found["tasks"].values()
    assert (task["train_samples"], task["test_samples"]) == (TRAIN, TEST)
    assert task["miou"]["mean"] > 0.8 and task["miou"]["pixel_accuracy"] > 0.9
    assert task["miou"]["mean"] == pytest.approx(np.mean(task["miou"]["by_class"]))
    assert task["miou"]["tokens"] == TRAIN * 64 and found["policy"]["crop_fraction"] == 1
    assert probed(place, place / "masks").stdout == done.stdout


def test_other_forms_of_the_same_masks_give_the_same(place, masks):
    """A palette, 16 bits, twice the size, and names alone, in one folder."""
    expected = probed(place, place / "masks").stdout
    for number, path in enumerate(sorted(masks.rglob("*.png"))):
        image = Image.open(path)
        image.load()
        if number % 3 == 0:
            image.putpalette([value for colour in COLOURS for value in colour.tolist()])
        elif number % 3 == 1:
            image = Image.fromarray(np.asarray(image).astype(np.uint16))
        else:
            image = image.resize((image.width * 3, image.height * 3), Image.Resampling.NEAREST)
        path.unlink()
        image.save(masks / path.name)
    assert probed(place, masks).stdout == expected


def test_masks_in_linked_folders_are_found_once(place, masks, tmp_path):
    linked = tmp_path / "linked"
    linked.mkdir()
    for folder in masks.iterdir():
        (linked / folder.name).symlink_to(folder)
    (linked / "again").symlink_to(linked)
    expected, found = (Masks.of(folder, Manifest.load(place / "train")).files for folder in (masks, linked))
    assert found.keys() == expected.keys()
    assert all(path.resolve() == expected[uid][0].resolve() for uid, (path, *_) in found.items())


@pytest.mark.parametrize(("bits", "values"), [(1, [0, 1, 1, 0]), (2, [0, 3, 2, 1]), (4, [9, 15, 0, 3])])
@pytest.mark.parametrize("kind", [0, 3], ids=["gray", "palette"])
def test_numbers_of_few_bits_are_what_they_are(bits, values, kind, tmp_path):
    packed = sum(value << (8 * -(-4 * bits // 8) - bits * (at + 1)) for at, value in enumerate(values))
    (tmp_path / "m.png").write_bytes(png(4, 1, bits, kind, b"\0" + packed.to_bytes(-(-4 * bits // 8), "big")))
    assert read_mask(tmp_path / "m.png").tolist() == [values]


def flipped(path: Path) -> None:
    """One bit of a pixel, which zlib lets pass where the pixels end before its checksum is read."""
    content = bytearray(path.read_bytes())
    content[content.index(b"IDAT") + 24] ^= 1
    path.write_bytes(content)


def animated(path: Path) -> None:
    image = Image.open(path)
    image.save(path, save_all=True, append_images=[Image.fromarray(255 - np.asarray(image))])


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def another_shape(path: Path) -> None:
    image = Image.open(path)
    image.resize((image.width + 40, image.height)).save(path)


def filled(path: Path, value: int, kind: type = np.uint8) -> None:
    Image.fromarray(np.full(Image.open(path).size[::-1], value, kind)).save(path)


def twice(path: Path) -> None:
    for folder in ("a", "b"):
        (path.parents[2] / folder).mkdir()
        shutil.copy(path, path.parents[2] / folder / path.name)
    path.unlink()


def nothing(path: Path) -> None:
    shutil.rmtree(path.parents[2])
    path.parents[2].mkdir()


@pytest.mark.parametrize(
    ("damage", "split", "named"),
    [
        (lambda path: Image.open(path).convert("RGB").save(path), "train", "RGB"),
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), "test", "decoded"),
        (lambda path: path.write_bytes(png(12_000, 12_000, 8, 0, bytes(1000))), "train", "12000 x 12000"),
        (
            lambda path: path.write_bytes(png(8, 8, 8, 0, b"")[:33] + png(8, 8, 8, 2, bytes(200))[8:]),
            "train",
            "headers",
        ),
        (lambda path: Image.open(path).save(path, "TIFF"), "test", "no PNG"),
        (lambda path: filled(path, 9), "test", "class 9"),
        (lambda path: filled(path, 60_000, np.uint16), "train", "class 60000"),
        *((flipped, "train", "decoded"), (animated, "train", "animated"), (pipe, "train", "regular")),
        *((another_shape, "train", "same shape"), (twice, "train", "two masks"), (nothing, "train", "no PNG")),
        (Path.unlink, "test", "no mask for 1 of the 8 images"),
        (lambda path: shutil.rmtree(path.parents[2]), "train", "no such folder"),
    ],
)
def test_wrong_masks_are_refused_by_name(damage, split, named, place, masks):
    path = sorted(masks.joinpath(split).rglob("*.png"))[0]
    damage(path)
    done = probed(place, masks)
    assert done.returncode == 3 and named in done.message
    assert path.name in done.message or damage is nothing or named == "no such folder"


def test_two_images_do_not_share_a_mask(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / "images" / folder).mkdir(parents=True)
        Image.fromarray(picture(1)[0]).save(tmp_path / "images" / folder / "1.png")
    (tmp_path / "masks").mkdir()
    Image.fromarray(picture(1)[1]).save(tmp_path / "masks" / "1.png")
    data = vs.convert(tmp_path / "images", tmp_path / "data", workers=1)
    with pytest.raises(DataError, match="two images"):
        Masks.of(tmp_path / "masks", data.manifest)


def test_what_is_no_class_counts_nowhere(place, masks):
    """All of a training mask, and a stripe of a test mask that would be wrong."""
    for path in sorted(masks.rglob("*.png"))[:2]:
        filled(path, 255)
    done = json.loads(probed(place, masks, "--mask-classes", 3).stdout)
    (task,) = done["tasks"].values()
    assert task["miou"]["mean"] > 0.8
    assert probed(place, masks, "--mask-classes", 2).returncode == 3
    assert probed(place, masks, "--mask-classes", 2, "--ignore", 2).returncode == 3  # 255 is a class now


def test_masks_need_a_model_with_patches_images_with_names_and_no_other_classifier(place, home, monkeypatch):
    for more in (["--shots", "5"], ["--method", "knn"], ["--l2", "3"]):
        assert probed(place, place / "masks", *more).returncode == 2
    both = ["--train", home / "data/train", "--test", home / "data/test", "--masks", place / "masks"]
    assert command("fewshot", *both).returncode == 2
    assert command("fewshot", home / "safetensors.safetensors", *both).returncode == 3
    assert command("fewshot", home / "run", *both[:4], "--ignore", 3).returncode == 2
    monkeypatch.setattr(ViT, "anatomy", Model.anatomy)  # a model that says nothing of its patches
    assert probed(place, place / "masks").returncode == 2
