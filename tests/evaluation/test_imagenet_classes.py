"""ImageNet's classes: their order against other libraries', and datasets joined by id, whatever their order."""

import json
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from commands import command
from models.weights.exported import TINY, described, valued, write

from vitscale.data.shards import Manifest
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.evaluation.finished import FinishedModel, OfWeights
from vitscale.evaluation.metrics import columns_of, imagenet_synsets
from vitscale.ground.errors import DataError

# The thousand have two cranes, and two swimsuits, which torchvision tells apart by words of its own.
SAID_OTHERWISE = {"crane bird": "crane", "maillot tank suit": "maillot"}


def package(name: str) -> Path:
    """A peer's folder; its files are read, since importing it takes seconds."""
    found = find_spec(name)
    if found is None or found.origin is None:
        pytest.skip(f"no {name} here")
    return Path(found.origin).parent


def test_the_order_is_that_of_timm_and_of_torchvision():
    names = runpy.run_path(str(package("torchvision") / "models" / "_meta.py"))["_IMAGENET_CATEGORIES"]
    about = package("timm") / "data" / "_info"
    assert imagenet_synsets() == tuple((about / "imagenet_synsets.txt").read_text().split())
    words = dict(line.split("\t") for line in (about / "imagenet_synset_to_lemma.txt").read_text().splitlines())
    assert len(imagenet_synsets()) == len(names) == 1000
    for synset, name in zip(imagenet_synsets(), names, strict=True):
        lemmas = [word.strip().lower() for word in words[synset].split(",")]
        assert SAID_OTHERWISE.get(name, name).lower() in lemmas, (synset, name)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Of a thousand outputs, whose names the file does not say; its most probable classes are a few of the first."""
    description = described(TINY, 64, 1000)
    model = valued(description)
    with torch.no_grad():
        model.head.bias[8:] -= 1e4
    return write(model, description, "safetensors", tmp_path_factory.mktemp("weights"))


def data(folder, names) -> Manifest:
    """A dataset of 37 pictures with these names of its seven classes."""
    manifest = write_generated_dataset(folder, [13, 24], seed=2)
    manifest.model_copy(update={"class_names": tuple(names)}).save(folder)
    return Manifest.load(folder)


def test_folders_are_joined_by_their_ids(weights, tmp_path):
    numbers = [7, 1, 3, 999, 0, 5, 2]  # of the classes, in the dataset's own order
    manifest = data(tmp_path / "data", [imagenet_synsets()[number] for number in numbers])
    code, said = command("evaluate", weights, "--data", tmp_path / "data", "--json").answer
    assert code == 0
    found = json.loads(said)
    assert found["policy"]["classes"] == "7 of 1000, by WordNet id" and found["samples"] == 37
    model = FinishedModel(weights, weights=OfWeights())
    right = 0
    for batch in model.loader(manifest)():
        logits = model.predict(batch.images).logits
        best = logits[:, numbers].argmax(dim=1)  # of the classes that the dataset has
        right += int((best == batch.labels)[batch.mask].sum())
    assert 0 < right < 37 and found["top1"] == right / 37
    # The same by the file of names that people write, and by the word for it.
    (tmp_path / "names.txt").write_text("\n".join(imagenet_synsets()))
    for names in (tmp_path / "names.txt", "imagenet"):
        code, said = command("evaluate", weights, "--data", tmp_path / "data", "--class-names", names, "--json").answer
        assert code == 0 and json.loads(said)["top1"] == found["top1"]


def test_all_thousand_in_another_order_are_not_joined_by_position(tmp_path):
    manifest = write_generated_dataset(tmp_path / "data", [14], seed=0)
    backwards = manifest.model_copy(update={"class_names": imagenet_synsets()[::-1]})
    columns, how = columns_of(backwards, None, 1000)
    assert columns.tolist() == list(range(999, -1, -1)) and how == "1000 of 1000, by WordNet id"
    in_order = manifest.model_copy(update={"class_names": imagenet_synsets()})
    assert columns_of(in_order, None, 1000) == (None, "same, by WordNet id")
    # Names that are no ids say nothing: a thousand of them are taken in their order, as before.
    others = manifest.model_copy(update={"class_names": tuple(map(str, range(1000)))})
    assert columns_of(others, None, 1000)[0] is None


def test_ids_that_are_none_of_the_thousand_are_told(tmp_path):
    manifest = write_generated_dataset(tmp_path / "data", [14], seed=0)
    mixed = manifest.model_copy(update={"class_names": (*imagenet_synsets()[:3], "n00004475")})
    with pytest.raises(DataError, match=r"\b1 of\b.*\b4\b.*'n00004475'"):
        columns_of(mixed, None, 1000)
    with pytest.raises(DataError, match="--class-names imagenet"):
        columns_of(mixed, [f"word {number}" for number in range(1000)], 1000)
    with pytest.raises(DataError, match="--class-names FILE"):
        columns_of(mixed, None, 10)
