"""Attention of a plain Vision Transformer in NumPy: what tests compare inspection with."""

import numpy as np


def attention_of_blocks(model, hidden) -> list[np.ndarray]:
    """(B, A, T, T) of each block with layer norm and biases, from its input (B, T, D)."""
    found = []
    for block, x in zip(model.blocks, hidden, strict=True):
        values = {name: value.detach().double().numpy() for name, value in block.named_parameters()}
        x = x.double().numpy()
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + block.norm1.eps)
        x = x * values["norm1.weight"] + values["norm1.bias"]
        B, T, D = x.shape
        A = block.attention.num_heads
        qkv = x @ values["attention.qkv.weight"].T + values["attention.qkv.bias"]
        query, key, _ = qkv.reshape(B, T, 3, A, D // A).transpose(2, 0, 3, 1, 4)
        logits = np.exp(query @ key.swapaxes(-1, -2) / np.sqrt(D // A))
        found.append(logits / logits.sum(-1, keepdims=True))
    return found


def attention_distance(attention: np.ndarray, grid: int, stride: int, before: int) -> np.ndarray:
    """Pixels (B, A): the mean over asking patches of the distance to patches, by attention to patches."""
    row, column = np.divmod(np.arange(grid**2), grid)
    apart = stride * np.hypot(row[:, None] - row, column[:, None] - column)
    patches = attention[:, :, before:, before:]
    return ((patches * apart).sum(-1) / patches.sum(-1)).mean(-1)


def rollout(attention: list[np.ndarray], before: int) -> np.ndarray:
    """(B, N): the class token's row of the product over layers (Abnar and Zuidema, 2020; appendix D.7)."""
    identity = np.eye(attention[0].shape[-1])
    joint = identity
    for weights in attention:
        mixed = weights.mean(axis=1) + identity
        joint = (mixed / mixed.sum(-1, keepdims=True)) @ joint
    return joint[:, 0, before:]
