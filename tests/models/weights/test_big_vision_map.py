"""big_vision's attention pooling and fixed positions in `.npz`: its names and shapes, and what timm reads there."""

import numpy as np
import pytest
from messages import refusal
from models.weights.exported import TINY, assert_equal_logits, described, differing, valued, write

from vitscale.ground.errors import CheckpointError, RecipeError
from vitscale.models.weights import describe, load_weights, open_weights
from vitscale.models.weights.foreign import table, their_shapes

D = TINY["width"]
ATTENTION = "MultiHeadDotProductAttention_0"
SINCOS = {"pool": "map", "position": {"kind": "sincos"}}
# big_vision's variants: width, depth, mlp, heads.
VARIANTS = {"Ti": (192, 12, 768, 3), "S": (384, 12, 1536, 6), "B": (768, 12, 3072, 12), "L": (1024, 24, 4096, 16)}


def shapes_of(width: int, depth: int, mlp_dim: int, heads: int) -> dict[str, tuple[int, ...]]:
    """Every array of a model with 1,000 classes, by the names of big_vision's modules."""

    def dense(name: str, of: tuple[int, ...], to: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {f"{name}/kernel": of + to, f"{name}/bias": to}

    def norm(name: str) -> dict[str, tuple[int, ...]]:
        return {f"{name}/scale": (width,), f"{name}/bias": (width,)}

    def attention_and_mlp(name: str) -> dict[str, tuple[int, ...]]:
        of_heads = (heads, width // heads)
        parts = (dense(f"{name}/{ATTENTION}/{part}", (width,), of_heads) for part in ("query", "key", "value"))
        return {
            **{key: shape for part in parts for key, shape in part.items()},
            **dense(f"{name}/{ATTENTION}/out", of_heads, (width,)),
            **norm(f"{name}/LayerNorm_0"),
            **dense(f"{name}/MlpBlock_0/Dense_0", (width,), (mlp_dim,)),
            **dense(f"{name}/MlpBlock_0/Dense_1", (mlp_dim,), (width,)),
        }

    blocks: dict[str, tuple[int, ...]] = {}
    for block in (f"Transformer/encoderblock_{i}" for i in range(depth)):
        blocks |= attention_and_mlp(block) | norm(f"{block}/LayerNorm_1")
    return {
        **dense("embedding", (16, 16, 3), (width,)),
        **blocks,
        **norm("Transformer/encoder_norm"),
        **attention_and_mlp("MAPHead_0") | {"MAPHead_0/probe": (1, 1, width)},
        **dense("head", (width,), (1000,)),
    }


def in_their_words(arrays: dict) -> dict:
    """By big_vision's names: flax counts the modules of a class, where the authors' code counted all of them."""
    renames = {"MultiHeadDotProductAttention_1": ATTENTION, "LayerNorm_2": "LayerNorm_1", "MlpBlock_3": "MlpBlock_0"}
    return {"/".join(renames.get(part, part) for part in key.split("/")): value for key, value in arrays.items()}


@pytest.mark.parametrize("size", VARIANTS)
def test_the_arrays_of_a_variant_with_fixed_positions(size):
    model = described({"name": f"ViT-{size}/16", **SINCOS}, 224, 1000).build()
    found = their_shapes(model, table(model, "npz"))
    assert in_their_words(found) == shapes_of(*VARIANTS[size])


def test_fixed_positions_are_no_array(tmp_path):
    description = described(TINY | SINCOS)
    model = valued(description)
    with np.load(write(model, description, "npz", tmp_path)) as file:
        arrays = in_their_words({key: file[key] for key in file.files})
    assert [key for key in arrays if "pos" in key] == []
    np.savez(tmp_path / "theirs.npz", **arrays)
    source = open_weights(tmp_path / "theirs.npz")
    for image_size in (64, 96):  # positions are those of the grid
        larger = valued(described(TINY | SINCOS, image_size), seed=1)
        load_weights(larger, source)
        assert differing(model, larger) == []
    with pytest.raises(CheckpointError, match="Transformer/posembed_input/pos_embedding"):
        load_weights(valued(described(TINY | {"pool": "map"})), source)


def test_fixed_positions_of_another_table_have_no_place(tmp_path):
    description = described(TINY | {"position": {"kind": "sincos", "table": "mae"}})
    with refusal(RecipeError, "weights", "fixed positions of MAE as npz"):
        write(valued(description), description, "npz", tmp_path)


@pytest.mark.parametrize("prefix", ["", "params/"])
def test_the_head_is_read_by_timm_and_read_again(prefix, tmp_path):
    """As we write it, and as big_vision itself names the positions."""
    timm = pytest.importorskip("timm")
    description = described(TINY | {"pool": "map"})
    model = valued(description)
    path = write(model, description, "npz", tmp_path)
    if prefix:
        with np.load(path) as file:
            arrays = in_their_words({key: file[key] for key in file.files})
        arrays["pos_embedding"] = arrays.pop("Transformer/posembed_input/pos_embedding")
        path = tmp_path / "theirs.npz"
        np.savez(path, **{f"{prefix}{key}": each for key, each in arrays.items()})
    sizes = {"img_size": 64, "patch_size": 8, "embed_dim": D, "depth": 2, "num_heads": 3, "mlp_ratio": 2}
    head = {"num_classes": 7, "act_layer": "gelu_tanh", "global_pool": "map", "class_token": False}
    peer = timm.create_model("vit_tiny_patch16_224", **sizes, **head).eval()
    peer.load_pretrained(str(path))
    assert_equal_logits(model, peer)
    again = valued(description, seed=1)
    source = open_weights(path)
    load_weights(again, source)
    assert differing(model, again) == []
    assert describe(source, TINY | {"pool": "map"}).image_size == 64
