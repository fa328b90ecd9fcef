"""Our exports in the libraries they are for: strict keys, and logits within 1e-4 of ours from the same weights."""

import logging
import warnings

import numpy as np
import pytest
import torch
from models.small_models import images
from models.weights.exported import (
    NAMES,
    TINY,
    assert_equal_logits,
    described,
    randomised,
    transformers_config,
    valued,
    write,
    written,
)
from PIL import Image

from vitscale.ground.errors import CheckpointError, RecipeError
from vitscale.models.weights import HEAD, describe, load_weights, open_weights

timm = pytest.importorskip("timm")
SIZE, CLASSES = 64, 7


def prepared(block: dict):
    """Our model with every parameter random; weights large enough that nobody's eps matters."""
    description = described(block, SIZE, CLASSES)
    model = valued(description)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 4:
                parameter.mul_(parameter[0].numel() ** 0.5)
    return description, model


@pytest.fixture
def complaints():
    """What transformers and Python complain of, as a list that fills."""
    transformers = pytest.importorskip("transformers")
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Keep(logging.WARNING)
    transformers.utils.logging.get_logger("transformers").addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
        found += [str(warning.message) for warning in caught]
    transformers.utils.logging.get_logger("transformers").removeHandler(handler)


def opened_by_transformers(folder, complaints: list[str]) -> torch.nn.Module:
    from transformers import ViTForImageClassification

    peer, info = ViTForImageClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert complaints == []
    return peer.eval()


# 60 is no multiple of 8: the last pixels are not seen, and transformers is given the ones that are.
@pytest.mark.parametrize("size", [64, 60])
def test_transformers_opens_our_folder_and_computes_our_logits(size, complaints, tmp_path):
    folder, model, _ = written(tmp_path, "hf", TINY, size, class_names=NAMES)
    peer = opened_by_transformers(folder, complaints)
    assert [peer.config.id2label[i] for i in range(CLASSES)] == NAMES and peer.config.label2id["kind 3"] == 3
    assert peer.config.image_size == size // 8 * 8
    assert_equal_logits(model, peer, size)


def test_the_pipeline_of_transformers_prepares_images_as_we_do(complaints, tmp_path):
    from transformers import pipeline

    folder, model, _ = written(tmp_path, "hf", class_names=NAMES)
    classify = pipeline("image-classification", model=str(folder), device="cpu")
    picture = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    answers = {answer["label"]: answer["score"] for answer in classify(Image.fromarray(picture), top_k=CLASSES)}
    with torch.no_grad():
        pixels = torch.from_numpy(picture)[None].float() / 127.5 - 1
        expected = model(pixels).logits.softmax(-1)[0]
    assert answers == pytest.approx(dict(zip(NAMES, expected.tolist(), strict=True)), abs=1e-4)


def test_a_pretraining_head_leaves_transformers_the_representation_alone(complaints, tmp_path):
    description = described(TINY | {"head": "pretrain"}, SIZE, CLASSES)
    model = valued(description)
    with pytest.raises(RecipeError, match=r"pre_logits.weight.*--drop-head"):
        write(model, description, "hf", tmp_path)
    peer = opened_by_transformers(write(model, description, "hf", tmp_path, drop_head=True), complaints)
    with torch.no_grad():
        pixels = images(SIZE)
        tokens = model(pixels).tokens
        output = peer(pixels.permute(0, 3, 1, 2), output_hidden_states=True)
    assert (output.logits - tokens[:, 0]).abs().max() < 1e-4  # its classifier is the identity


@pytest.mark.parametrize("how", ["saved", "in shards", "modules' names"])
def test_what_transformers_writes_is_read(how, tmp_path):
    import transformers

    _, model = prepared(TINY)
    labels = {"id2label": dict(enumerate(NAMES)), "label2id": {name: i for i, name in enumerate(NAMES)}}
    peer = randomised(transformers.ViTForImageClassification(transformers_config(**labels)))
    path = tmp_path / "folder"
    if how == "modules' names":
        torch.save(peer.state_dict(), path := tmp_path / "state.bin")
    else:
        peer.save_pretrained(path, max_shard_size="40KB" if how == "in shards" else "1GB")
        assert (len(list(path.glob("*.safetensors"))) > 1) == (how == "in shards")
        assert describe(open_weights(path), TINY).class_names == NAMES
    notes: list[str] = []
    load_weights(model, open_weights(path), report=notes.append)
    assert notes == []
    assert_equal_logits(model, peer)


def test_the_headless_model_of_transformers(tmp_path):
    """Its names have no `vit.` before them, and its pooler is the dense layer of a pre-training head."""
    import transformers

    peer = transformers.ViTModel(transformers_config()).eval()
    peer.save_pretrained(tmp_path / "folder")
    source = open_weights(tmp_path / "folder")
    _, model = prepared(TINY)
    assert any("pooler" in note for note in source.notes)
    with pytest.raises(CheckpointError, match=r"classifier\.weight(.|\n)*--drop-head"):
        load_weights(model, source)
    load_weights(model, source, drop=HEAD)
    with torch.no_grad():
        tokens = model(images(SIZE)).tokens
        expected = peer(images(SIZE).permute(0, 3, 1, 2)).last_hidden_state
    assert (tokens - expected).abs().max() < 1e-4
