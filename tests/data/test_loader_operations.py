"""Operations that the loader does, and what a recipe says of them."""

import numpy as np
import pytest
import torch
import xxhash
from damage import flip_byte
from loaders import read
from picture_shards import write_pictures
from PIL import Image, ImageFilter, ImageOps

from vitscale import recipe
from vitscale.data.draws import operation_keys, uniform
from vitscale.data.image_operations import TrainingInput, to_model_input
from vitscale.ground.errors import RecipeError
from vitscale.recipe import Recipe, load_recipe

SHARDS, BATCH, SIDE, STEPS = [40, 33, 40, 7, 25], 16, 24, 12  # nine steps an epoch
AUGMENTED = (
    recipe.RandAugment(kind="randaugment", set="timm_increasing", m=9, std=0.5),
    recipe.ThreeAugment(kind="three_augment"),
    recipe.RandomErasing(kind="random_erasing"),  # the device's, and not the loader's
)


def train(manifest, operations=AUGMENTED, stop=STEPS, **options):
    return read(manifest, operations=operations, side=SIDE, stop=stop, **options)


@pytest.fixture(scope="module")
def plain(manifest):
    return train(manifest, ())


def test_the_digest_is_of_the_pixels_that_come(manifest, plain):
    for batch in (*plain, *train(manifest)):
        pairs = zip(batch.images.numpy(), batch.uids.tolist(), strict=True)
        assert batch.digest == sum(xxhash.xxh3_64_intdigest(pixels, seed=uid) for pixels, uid in pairs) % 2**64


def test_what_is_done_is_pillows_behind_crop_and_flip(manifest, plain):
    blocks = (
        recipe.Solarize(kind="solarize", probability=0.5, threshold=100),
        recipe.Gray(kind="gray", probability=0.5),
        recipe.GaussianBlur(kind="gaussian_blur", probability=0.5, radius=[1.3, 1.3]),
    )
    seen = set()
    for before, after in zip(plain, train(manifest, blocks), strict=True):
        assert all(
            torch.equal(getattr(after, name), getattr(before, name)) for name in ("labels", "uids", "keys", "mask")
        )
        keys = before.keys.numpy().view(np.uint64)
        done = [uniform(operation_keys(keys, index), 0) < 0.5 for index in range(3)]
        for row, (solarized, grayed, blurred) in enumerate(zip(*done, strict=True)):
            image = Image.fromarray(before.images[row].numpy())
            if solarized:
                image = ImageOps.solarize(image, 100)
            if grayed:
                image = image.convert("L").convert("RGB")
            if blurred:
                image = image.filter(ImageFilter.GaussianBlur(1.3))
            assert np.array_equal(after.images[row].numpy(), np.asarray(image))
            seen.add((bool(solarized), bool(grayed), bool(blurred)))
    assert len(seen) == 8


def test_a_sample_that_stands_in_is_changed_by_its_own_key(manifest, tmp_path):
    """As it looks where it stands for itself in the same epoch."""
    folder = write_pictures(tmp_path / "data", SHARDS)
    damaged = flip_byte(folder, 2, [7, 8])
    sound = {(batch.epoch, uid): image for batch in train(manifest, stop=18) for uid, image in _samples(batch)}
    replaced = 0
    for batch in train(damaged, stop=18, bad_samples="substitute", verify_shards=False):
        replaced += batch.bad_samples
        for uid, image in _samples(batch):
            if (batch.epoch, uid) in sound:
                assert torch.equal(image, sound[batch.epoch, uid])
    assert replaced >= 3


def _samples(batch):
    return zip(batch.uids.tolist(), batch.images, strict=True)


def with_operations(operations: str) -> Recipe:
    return load_recipe("b16_i1k", [f"data.operations={operations}"])


def test_on_the_device_only_the_others_are_done():
    images, device = torch.arange(3 * 16 * 16 * 3).view(3, 16, 16, 3).to(torch.uint8), torch.device("cpu")
    keys = torch.arange(3)
    for operations, erased in (("[{kind: solarize, probability: 1}]", 0), ("[{kind: gray}, ERASE]", 3)):
        erase = "{kind: random_erasing, probability: 1, mode: mean}"
        prepare = TrainingInput(with_operations(operations.replace("ERASE", erase)))
        found = prepare(images, keys, device, torch.float32)
        differs = (found != to_model_input(images, device, torch.float32)).any(dim=(1, 2, 3))
        assert int(differs.sum()) == erased


@pytest.mark.parametrize(
    ("operations", "key", "told"),
    [
        ("[{kind: randaugment}]", "data.operations.0.set", "missing"),
        ("[{kind: randaugment, set: torchvision}]", "data.operations.0.set", "big_vision"),
        ("[{kind: randaugment, set: timm, m: 15}]", "data.operations.0", "10"),
        ("[{kind: randaugment, set: timm, fill: [1, 2, 256]}]", "data.operations.0.fill.2", "255"),
        ("[{kind: gaussian_blur, radius: [2, 1]}]", "data.operations.0", "[2.0, 1.0]"),
        ("[{kind: three_augment, jitter: 2}]", "data.operations.0.jitter", "1"),
        ("[{kind: random_erasing}, {kind: gray}]", "data", "random_erasing"),
    ],
)
def test_a_mistake_is_an_error_that_names_it(operations, key, told):
    with pytest.raises(RecipeError) as error:
        with_operations(operations)
    (line,) = str(error.value).splitlines()[1:]
    assert line.strip().startswith(f"{key}:") and told in line
