"""Our exports in the libraries they are for: strict keys, and logits within 1e-4 of ours from the same weights."""

import logging
import warnings

import pytest
import torch
from models.small_models import images, with_large_kernels
from models.weights.exported import (
    NAMES,
    TINY,
    assert_equal_logits,
    described,
    differing,
    loaded,
    randomised,
    transformers_config,
    valued,
    written,
)

from vitscale.ground.errors import CheckpointError, RecipeError
from vitscale.models.weights import describe, load_weights, open_weights

timm = pytest.importorskip("timm")
SIZE, CLASSES = 64, 7


def prepared(block: dict):
    """Our model with every parameter random."""
    description = described(block, SIZE, CLASSES)
    return description, with_large_kernels(valued(description))


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


@pytest.mark.parametrize(
    ("block", "size"),
    [
        *((TINY, 64), (TINY, 60)),  # no multiple of 8: transformers is given the pixels that we see
        (TINY | {"mlp": "exact_gelu", "norm_eps": 1e-3}, 64),
        *((TINY | {"position": {"kind": "sincos", "table": table}}, 64) for table in ("mae", "big_vision")),
    ],
)
def test_transformers_opens_our_folder_and_computes_our_logits(block, size, complaints, tmp_path):
    folder, model, description = written(tmp_path, "hf", block, size, class_names=NAMES)
    peer = opened_by_transformers(folder, complaints)
    assert [peer.config.id2label[i] for i in range(CLASSES)] == NAMES and peer.config.label2id["kind 3"] == 3
    assert peer.config.image_size == size // 8 * 8
    assert_equal_logits(model, peer, size)
    notes: list[str] = []
    assert differing(model, loaded(description, folder, notes)) == [] and notes == []


def test_a_pretraining_head_leaves_transformers_the_representation_alone(complaints, tmp_path):
    block = TINY | {"head": "pretrain"}
    with pytest.raises(RecipeError, match=r"pre_logits.weight.*--drop-head"):
        written(tmp_path, "hf", block)
    folder, model, _ = written(tmp_path, "hf", block, drop_head=True)
    with torch.no_grad():
        found = opened_by_transformers(folder, complaints)(images(SIZE).permute(0, 3, 1, 2)).logits
        assert (found - model(images(SIZE)).tokens[:, 0]).abs().max() < 1e-4  # its classifier is the identity


@pytest.mark.parametrize("how", ["in shards", "modules' names"])
def test_what_transformers_writes_is_read(how, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = valued(described(TINY))
    labels = {"id2label": dict(enumerate(NAMES)), "label2id": {name: i for i, name in enumerate(NAMES)}}
    peer = randomised(transformers.ViTForImageClassification(transformers_config(**labels)))
    path = tmp_path / "folder"
    if how == "modules' names":
        torch.save(peer.state_dict(), path := tmp_path / "state.bin")
    else:
        peer.save_pretrained(path, max_shard_size="40KB")
        assert len(list(path.glob("*.safetensors"))) > 1
        assert describe(open_weights(path), TINY).class_names == NAMES
    notes: list[str] = []
    load_weights(model, open_weights(path), report=notes.append)
    assert notes == []
    assert_equal_logits(model, peer)


def test_the_headless_model_of_transformers(tmp_path):
    """Its names have no `vit.` before them, and its pooler is the dense layer of a pre-training head."""
    transformers = pytest.importorskip("transformers")
    transformers.ViTModel(transformers_config()).save_pretrained(tmp_path / "folder")
    source = open_weights(tmp_path / "folder")
    assert any("pooler" in note for note in source.notes)
    with pytest.raises(CheckpointError, match=r"classifier\.weight(.|\n)*--drop-head"):
        load_weights(valued(described(TINY)), source)
