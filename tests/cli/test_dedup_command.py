"""`vitscale dedup` as a person runs it: what it prints, what it writes, and how it ends."""

import json
from functools import partial

import fsspec
import pytest
from commands import run
from dedup_data import build_here, make_photo
from messages import refusal
from pictures import encoded
from small_files import write_files, write_tar

from data_tools.conversion import convert
from data_tools.request import Request
from vitscale.data.shards import Manifest
from vitscale.ground.errors import DataError, RecipeError

URL = "memory://dedup-command/train"  # the training set for this process, which then needs no workers


dedup = partial(run, "dedup")


def photo(seed, quality=90):
    return encoded(make_photo(seed, 140, 140), quality=quality)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """20 training images; three are in the test set `pets`, one of these anew compressed."""
    place = tmp_path_factory.mktemp("dedup-command")
    write_files(place / "pets", ("broken.jpg", b"\xff\xd8\xff no image"), *((f"{i}.jpg", photo(i)) for i in range(5)))
    copies = ("x.jpg", photo(0)), ("y.jpg", photo(1)), ("z.jpg", photo(2, quality=50))
    write_files(place / "images" / "all", *copies, *((f"{i}.jpg", photo(i + 100)) for i in range(17)))
    arguments = ("index", f"Pets={place / 'pets'}", "--out", place / "index", "--workers", 1)
    with pytest.MonkeyPatch.context() as patch:
        build_here(patch)
        code, text = dedup(*arguments)
    assert code == 0
    line = next(line for line in text.splitlines() if line.startswith("│ Pets "))
    assert " 6 " in line and " photo " in line and "<= 31 bits" in line
    assert "chosen by the size" in text and "1 image of Pets cannot be decoded" in text
    convert(Request(str(place / "images"), shard_samples=8), URL)
    fsspec.filesystem("memory").get(f"{URL}/", f"{place / 'train'}/", recursive=True)
    return place


@pytest.fixture(scope="module")
def found(place):
    code, text = dedup("find", URL, place / "index", "--out", place / "found")
    assert code == 0 and "nothing was removed yet: vitscale dedup apply" in text and "Pets" in text
    assert json.loads((place / "found" / "found.json").read_text())["removed"] == 3
    return place / "found"


def test_find_as_json(place, tmp_path):
    code, text = dedup("find", URL, place / "index", "--out", tmp_path / "found", "--json")
    facts = json.loads(text)
    assert code == 0 and facts["out"] == str(tmp_path / "found") and "dedup.parquet" in facts["files"]
    assert json.loads((tmp_path / "found" / "found.json").read_text())["removed"] == 3


def test_dry_run_and_view(place, found, tmp_path):
    code, text = dedup("apply", place / "train", found, tmp_path / "out", "--dry-run")
    assert code == 0 and "a dry run: nothing was written" in text and "17 of 20 samples, without 3 copies" in text
    assert not (tmp_path / "out").exists()
    code, text = dedup("apply", place / "train", found, tmp_path / "view")
    assert code == 0 and "17 of 20 samples, without 3 copies" in text and "a dry run" not in text
    manifest = Manifest.load(tmp_path / "view")
    assert (manifest.num_samples, manifest.num_removed) == (17, 3)


@pytest.mark.parametrize(
    "src",
    [
        "pets",
        "pets.tar.gz",
        "pets.tar",
        "s3://bucket/pets.parquet",
        "a/pets/manifest.json",
        "pets/test",
        "a/pets/Val.tar.xz",
        "pets/test_dev.tar",
        "pets/test-clean",
    ],
)
def test_names_of_test_sets(place, src):
    """The last part that names no split, without suffixes, which two cannot have: told before anything is opened."""
    with pytest.raises(RecipeError, match=f"'pets'.*NAME={src}"):
        dedup("index", src, place / "pets", "--out", place / "never")
    with pytest.raises(RecipeError, match="'cats'"):
        dedup("index", f"cats={src}", f"cats={place / 'pets'}", "--out", place / "never")


def test_a_test_set_among_training_images_is_refused(place, tmp_path):
    """All of them in an index would take the training images out of the training set."""
    for split in ("train", "test"):
        write_tar(tmp_path / f"{split}.tar", "all/1.jpg")
    with pytest.raises(RecipeError, match=r"\bsplits\b"):
        dedup("index", tmp_path, "--out", tmp_path / "index")


def test_mistakes(place, found, tmp_path):
    pets, out = place / "pets", ("--out", tmp_path / "index")
    for arguments, kind in (
        (["index", pets, pets, *out], RecipeError),
        (["index", "/", *out], RecipeError),
        (["index", tmp_path / "no", *out], RecipeError),
        (["index", pets, *out, "--distance", 20], RecipeError),
        (["index", pets, *out, "--preset", "exact", "--min-quality", 9], RecipeError),
        (["index", pets, *out, "--preset", "photo", "--distance", 85], RecipeError),
        (["index", pets, *out, "--cosine", 0.5], RecipeError),
        (["index", pets, *out, "--format", "zip"], RecipeError),
        (["find", place / "train", tmp_path, *out], DataError),
        (["find", tmp_path, place / "index", *out], DataError),
        (["apply", place / "train", tmp_path, tmp_path / "out"], DataError),
        (["apply", place / "train", found, place / "train"], RecipeError),
    ):
        cause = " ".join(map(str, arguments))
        with refusal(kind, "dedup", cause, {place: "PLACE", found: "FOUND", tmp_path: "FOLDER"}):
            dedup(*arguments)
    assert not list(tmp_path.iterdir())
