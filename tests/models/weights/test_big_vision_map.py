"""big_vision's attention pooling and fixed positions in `.npz`: its names and shapes, and its formula in NumPy from the
arrays."""

import numpy as np
import pytest
import torch
from messages import refusal
from models.small_models import images
from models.weights.exported import TINY, described, differing, valued, write

from vitscale.ground.errors import CheckpointError, RecipeError
from vitscale.models.weights import describe, load_weights, open_weights
from vitscale.models.weights.foreign import table, their_shapes

D, HEADS, MLP = TINY["width"], TINY["num_heads"], TINY["mlp_dim"]
d = D // HEADS
ATTENTION = "MultiHeadDotProductAttention_0"
SHAPES = {
    "probe": (1, 1, D),
    **{f"{ATTENTION}/{part}/kernel": (D, HEADS, d) for part in ("query", "key", "value")},
    **{f"{ATTENTION}/{part}/bias": (HEADS, d) for part in ("query", "key", "value")},
    f"{ATTENTION}/out/kernel": (HEADS, d, D),
    f"{ATTENTION}/out/bias": (D,),
    "LayerNorm_0/scale": (D,),
    "LayerNorm_0/bias": (D,),
    "MlpBlock_0/Dense_0/kernel": (D, MLP),
    "MlpBlock_0/Dense_0/bias": (MLP,),
    "MlpBlock_0/Dense_1/kernel": (MLP, D),
    "MlpBlock_0/Dense_1/bias": (D,),
}


def pooled(tokens: np.ndarray, head: dict[str, np.ndarray]) -> np.ndarray:
    """(B, T, D) -> (B, D)"""
    query, key, value = (
        np.einsum("btd,dhk->bthk", x, head[f"{ATTENTION}/{part}/kernel"]) + head[f"{ATTENTION}/{part}/bias"]
        for part, x in (("query", np.repeat(head["probe"], len(tokens), 0)), ("key", tokens), ("value", tokens))
    )
    scores = np.exp(np.einsum("bqhk,bthk->bhqt", query, key) / np.sqrt(d))
    mixed = np.einsum("bhqt,bthk->bqhk", scores / scores.sum(-1, keepdims=True), value)
    x = np.einsum("bqhk,hkd->bqd", mixed, head[f"{ATTENTION}/out/kernel"]) + head[f"{ATTENTION}/out/bias"]
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    y = y * head["LayerNorm_0/scale"] + head["LayerNorm_0/bias"]
    y = y @ head["MlpBlock_0/Dense_0/kernel"] + head["MlpBlock_0/Dense_0/bias"]
    y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    return (x + y @ head["MlpBlock_0/Dense_1/kernel"] + head["MlpBlock_0/Dense_1/bias"])[:, 0]


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
    for image_size in (64, 96):
        larger = valued(described(TINY | SINCOS, image_size), seed=1)
        load_weights(larger, source)
        assert differing(model, larger) == []
        # The embeddings that a patch is told apart by are of its own grid.
        n, pixels = image_size // 8, images(image_size)
        intermediates: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            larger(pixels, intermediates=intermediates)
        patches = pixels.numpy().reshape(2, n, 8, n, 8, 3).transpose(0, 1, 3, 2, 4, 5).reshape(2, n * n, -1)
        embedded = patches @ arrays["embedding/kernel"].reshape(-1, D) + arrays["embedding/bias"]
        y, x = np.mgrid[:n, :n]
        omega = 1 / 10_000 ** (np.arange(D // 4) / (D // 4 - 1))
        by_row, by_column = np.outer(y, omega), np.outer(x, omega)
        positions = np.concatenate([np.sin(by_column), np.cos(by_column), np.sin(by_row), np.cos(by_row)], 1)
        assert np.abs(intermediates["embedded"].numpy() - embedded - positions).max() < 1e-5
    with pytest.raises(CheckpointError, match="Transformer/posembed_input/pos_embedding"):
        load_weights(valued(described(TINY | {"pool": "map"})), source)


def test_fixed_positions_of_another_table_have_no_place(tmp_path):
    description = described(TINY | {"position": {"kind": "sincos", "table": "mae"}})
    with refusal(RecipeError, "weights", "fixed positions of MAE as npz"):
        write(valued(description), description, "npz", tmp_path)


@pytest.mark.parametrize("prefix", ["", "params/"])
def test_the_head_by_its_names(prefix, tmp_path):
    description = described(TINY | {"pool": "map"})
    model = valued(description)
    path = write(model, description, "npz", tmp_path)
    with np.load(path) as file:
        arrays = {key: file[key] for key in file.files}
    head = {key.removeprefix("MAPHead_0/"): value for key, value in arrays.items() if key.startswith("MAPHead_0/")}
    assert {key: value.shape for key, value in head.items()} == SHAPES
    assert "cls" not in arrays and arrays["Transformer/posembed_input/pos_embedding"].shape == (1, 64, D)
    with torch.no_grad():
        found = model(images(64))
    expected = pooled(found.tokens.double().numpy(), head)
    assert np.abs(found.pooled.numpy() - expected).max() < 1e-4
    # And as big_vision itself names the rest.
    positions = arrays.pop("Transformer/posembed_input/pos_embedding")
    np.savez(
        tmp_path / "theirs.npz",
        **{f"{prefix}{key}": each for key, each in arrays.items()},
        **{f"{prefix}pos_embedding": positions},
    )
    again = valued(description, seed=1)
    source = open_weights(tmp_path / "theirs.npz")
    load_weights(again, source)
    assert differing(model, again) == []
    assert describe(source, TINY | {"pool": "map"}).image_size == 64
