"""A finished model of any source answers alike, wherever its weights lie and however many processes share images."""

import pytest
import torch
from finished_runs import evaluate_run
from models.weights.exported import LINEAR, TINY, described, finished_run, valued

from vitscale.data.shards.generated import CLASS_NAMES, write_generated_dataset
from vitscale.evaluation.finished import FinishedModel, OfWeights
from vitscale.evaluation.placing import join, place
from vitscale.ground.errors import DataError, RecipeError
from vitscale.models import Outputs
from vitscale.models.weights import describe, open_weights, write_weights
from vitscale.recipe import Normalise

IMAGENET = Normalise(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])


def images(count: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (count, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def are_equal(ours: Outputs, theirs: Outputs) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(one is other is None or torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("source", ["npz.npz", "timm.safetensors", "hf", "safetensors.safetensors"])
def test_weights_answer_as_the_run_that_they_are_of(home, source):
    expected = FinishedModel(home / "run").predict(images())
    of = OfWeights(model=None if source.startswith("safetensors") else TINY)
    model = FinishedModel(home / source, weights=of)
    found = model.predict(images())
    assert are_equal(found, expected)
    names = None if source == "npz.npz" else list(CLASS_NAMES)
    assert (model.class_names, model.num_classes, model.image_size) == (names, len(CLASS_NAMES), 64)


def test_pixels_are_normalised_as_the_weights_ask(home, tmp_path):
    source = open_weights(home / "safetensors.safetensors")
    description = describe(source)
    other = type(description)(**{**vars(description), "normalise": IMAGENET})
    write_weights(tmp_path / "hf", "hf", other, lambda name: source.entries[name].read(), False)
    model = FinishedModel(tmp_path / "hf", weights=OfWeights(TINY))
    assert model.normalise == IMAGENET and model.policy()["mean"] == IMAGENET.mean
    pixels = (images() / 255 - torch.tensor(IMAGENET.mean)) / torch.tensor(IMAGENET.std)
    expected = valued(described(TINY, 64, len(CLASS_NAMES)))(pixels).logits
    torch.testing.assert_close(model.predict(images()).logits, expected)


@pytest.mark.parametrize("source", ["npz.npz", "timm.safetensors", "hf", "safetensors.safetensors"])
def test_the_rule_of_the_weights_origin_is_in_the_policy(home, source):
    """Ours is the authors'; timm and transformers would resample otherwise, and a result says so."""
    model = None if source.startswith("safetensors") else TINY
    resampled = FinishedModel(home / source, weights=OfWeights(model, image_size=96))
    policy = resampled.policy()
    assert resampled.image_size == 96 and policy["positions"] != "as trained"
    assert (policy["positions"] == policy["positions_of_origin"]) == (source in ("npz.npz", "safetensors.safetensors"))
    as_it_is = FinishedModel(home / source, weights=OfWeights(model)).policy()
    assert as_it_is["positions"] == as_it_is["positions_of_origin"] == "as trained"


def test_weights_without_a_head_have_representations(home, tmp_path):
    source = open_weights(home / "safetensors.safetensors")
    headless = tmp_path / "headless.safetensors"
    write_weights(headless, "safetensors", describe(source), lambda name: source.entries[name].read(), True)
    model = FinishedModel(headless)
    assert model.num_classes is None and model.class_names is None
    found, expected = model.predict(images()), FinishedModel(home / "run").predict(images())
    assert found.logits is None and torch.equal(found.pooled, expected.pooled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [{}, {"registers": 2, "layer_scale": 0.1, "depth": 4}, {"pool": "map"}])
def test_a_model_larger_than_its_device_is_spread(parts, dtype):
    description = described(TINY | parts)
    values = {name: value.detach().clone for name, value in valued(description).named_parameters()}
    pixels = torch.rand(3, 64, 64, 3, dtype=dtype)
    whole = place(description.build(), values, dtype, join())
    size = sum(value().numel() for value in values.values()) * dtype.itemsize
    spread = place(description.build(), values, dtype, join(), max_memory_gb=0.6 * size / 1e9)
    assert {"cpu", "disk"} == set(spread.hf_device_map.values())
    assert any(parameter.is_meta for parameter in spread.parameters())
    with torch.no_grad():
        assert are_equal(spread(pixels), whole(pixels))
        assert torch.equal(spread.block_tokens(pixels, 4).tokens, whole.block_tokens(pixels, 4).tokens)


def test_class_names_that_do_not_fit(home):
    with pytest.raises(RecipeError, match=r"\b2 class"):
        FinishedModel(home / "timm.safetensors", weights=OfWeights(TINY, class_names=["a", "b"]))


def test_its_data_are_found_from_another_folder_than_the_run_began_in(tmp_path, monkeypatch):
    """Or it says where it looked."""
    monkeypatch.delenv("VITSCALE_DATA_ROOT", raising=False)
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    write_generated_dataset(project / "DATA" / "test", [13], seed=1)
    elsewhere.mkdir()
    settings = {"data": {"root": "DATA"}, "evaluation": {"validation": "test"}, "precision": "fp32"}
    model = valued(described(TINY, 64, len(CLASS_NAMES)))
    run = finished_run(project / "run", model, LINEAR, names=CLASS_NAMES, **settings)
    monkeypatch.chdir(project)
    there = evaluate_run(run)
    model = FinishedModel(run)  # as for --data: a name below data.root, or else a folder here
    assert model.dataset("DATA/test").sha256 == model.dataset("test").sha256
    with pytest.raises(DataError, match="DATA/DATA/absent"):
        model.dataset("DATA/absent")
    monkeypatch.chdir(elsewhere)
    assert evaluate_run(run) == there
    with pytest.raises(DataError, match=f"{elsewhere}/NONE/test"):
        evaluate_run(run, ["data.root=NONE"])
    (project / "DATA").rename(project / "moved")
    with pytest.raises(DataError, match=rf"{elsewhere}/DATA/test"):
        evaluate_run(run)
    assert evaluate_run(run, [f"data.root={project}/moved"]) == there
    (elsewhere / "DATA").symlink_to(project / "moved")
    assert evaluate_run(run) == there
