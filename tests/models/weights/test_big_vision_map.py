"""big_vision's attention pooling in `.npz`: its names and shapes, and its formula in NumPy from the arrays."""

import numpy as np
import pytest
import torch
from models.small_models import images
from models.weights.exported import TINY, described, differing, valued, write

from vitscale.models.weights import describe, load_weights, open_weights

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
