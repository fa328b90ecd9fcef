"""One rule of a converter: a parameter of ours, what it is called elsewhere, and how its values are laid out there.

A rule works in both directions, so that one table serves import and export. Applied to meta tensors it gives shapes.

Shape legend: D width, H heads, d = D / H, P patch size, C channels, K classes, O I outputs and inputs of a layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, cat, full_like

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Rule:
    """Our parameter `ours` is `theirs`: one array or several.

    `split` takes our tensor to theirs, in the order of `theirs`; `join` is its inverse. Where `renames` is set they are
    the same tensor under another name. Where `compares` is set, `theirs` holds values that are no parameter of ours and
    always the same: `join` raises `CheckpointError` for others.
    """

    ours: str
    theirs: tuple[str, ...]
    split: Callable[[Tensor], Tensors]
    join: Callable[[Tensors], Tensor]
    renames: bool = False
    compares: bool = False


def same(ours: str, theirs: str) -> Rule:
    """A rule that only renames."""
    return Rule(ours, (theirs,), lambda value: (value,), lambda values: values[0], renames=True)


def renamed(ours: str, theirs: str) -> list[Rule]:
    """A layer with weight and bias under another name."""
    return [same(f"{ours}.{kind}", f"{theirs}.{kind}") for kind in ("weight", "bias")]


def with_constant(rule: Rule, theirs: str, value: float) -> Rule:
    """A rule whose first array of theirs is followed by `theirs`, of its shape, which is no parameter of ours."""
    return replace(
        rule,
        theirs=(rule.theirs[0], theirs, *rule.theirs[1:]),
        split=lambda own: (*(parts := rule.split(own))[:1], full_like(parts[0], value), *parts[1:]),
        join=lambda values: rule.join((values[0], *values[2:])),
        renames=False,
    )


def flax_dense(ours: str, theirs: str) -> list[Rule]:
    """weight (O, I) <-> kernel (I, O)."""
    return [_one(f"{ours}.weight", f"{theirs}/kernel", Tensor.t, Tensor.t), same(f"{ours}.bias", f"{theirs}/bias")]


def flax_conv(ours: str, theirs: str) -> Rule:
    """weight (O, I, h, w) <-> kernel (h, w, I, O)."""
    return _one(
        f"{ours}.weight",
        f"{theirs}/kernel",
        lambda value: value.permute(2, 3, 1, 0),
        lambda value: value.permute(3, 2, 0, 1),
    )


def flax_norm(ours: str, theirs: str, scale: str = "scale", bias: str = "bias") -> list[Rule]:
    """weight and bias <-> scale and bias, or what else they are called."""
    return [same(f"{ours}.weight", f"{theirs}/{scale}"), same(f"{ours}.bias", f"{theirs}/{bias}")]


def flax_patches(ours: str, theirs: str, patch_size: int) -> list[Rule]:
    """weight (D, P*P*C) in height-width-channel order <-> kernel (P, P, C, D)."""
    P = patch_size
    kernel = _one(
        f"{ours}.weight",
        f"{theirs}/kernel",
        lambda value: value.T.reshape(P, P, -1, len(value)),
        lambda value: value.reshape(-1, value.shape[-1]).T,
    )
    return [kernel, same(f"{ours}.bias", f"{theirs}/bias")]


def flax_attention(ours: str, theirs: str, num_heads: int) -> list[Rule]:
    """qkv (3D, D) and out (D, D) <-> query, key and value (D, H, d), out (H, d, D), and their biases."""
    parts = [f"{theirs}/{word}" for word in ("query", "key", "value")]
    return [*flax_heads(f"{ours}.qkv", parts, num_heads), *flax_out(f"{ours}.out", f"{theirs}/out", num_heads)]


def flax_heads(ours: str, theirs: Sequence[str], num_heads: int) -> list[Rule]:
    """A layer of stacked parts, weight (k D, D) and bias <-> of each part kernel (D, H, d) and bias (H, d)."""
    weight = Rule(
        f"{ours}.weight",
        tuple(f"{part}/kernel" for part in theirs),
        lambda value: tuple(part.T.reshape(part.shape[1], num_heads, -1) for part in value.chunk(len(theirs))),
        lambda values: cat([value.flatten(1).T for value in values]),
    )
    bias = Rule(
        f"{ours}.bias",
        tuple(f"{part}/bias" for part in theirs),
        lambda value: tuple(part.view(num_heads, -1) for part in value.chunk(len(theirs))),
        lambda values: cat([value.flatten() for value in values]),
    )
    return [weight, bias]


def flax_out(ours: str, theirs: str, num_heads: int) -> list[Rule]:
    """weight (D, D) and bias <-> kernel (H, d, D) and bias, of the layer after the attention heads."""
    kernel = _one(
        f"{ours}.weight",
        f"{theirs}/kernel",
        lambda value: value.T.reshape(num_heads, -1, len(value)),
        lambda value: value.flatten(0, 1).T,
    )
    return [kernel, same(f"{ours}.bias", f"{theirs}/bias")]


def torch_patches(ours: str, theirs: str, patch_size: int) -> list[Rule]:
    """weight (D, P*P*C) in height-width-channel order <-> weight (D, C, P, P)."""
    P = patch_size
    weight = _one(
        f"{ours}.weight",
        f"{theirs}.weight",
        lambda value: value.view(len(value), P, P, -1).permute(0, 3, 1, 2),
        lambda value: value.permute(0, 2, 3, 1).flatten(1),
    )
    return [weight, same(f"{ours}.bias", f"{theirs}.bias")]


def stacked(ours: str, theirs: Sequence[str], kinds: Sequence[str] = ("weight", "bias")) -> list[Rule]:
    """A layer of stacked parts <-> one layer for each part."""
    return [
        Rule(f"{ours}.{kind}", tuple(f"{name}.{kind}" for name in theirs), lambda value: value.chunk(len(theirs)), cat)
        for kind in kinds
    ]


def as_conv(ours: str, theirs: str) -> list[Rule]:
    """weight (O, I) <-> weight (O, I, 1, 1)."""
    weight = _one(
        f"{ours}.weight", f"{theirs}.weight", lambda value: value[:, :, None, None], lambda value: value.flatten(1)
    )
    return [weight, same(f"{ours}.bias", f"{theirs}.bias")]


def as_flax_conv(ours: str, theirs: str) -> list[Rule]:
    """weight (O, I) <-> kernel (1, 1, I, O)."""
    kernel = _one(
        f"{ours}.weight", f"{theirs}/kernel", lambda value: value.T[None, None], lambda value: value.flatten(0, 2).T
    )
    return [kernel, same(f"{ours}.bias", f"{theirs}/bias")]


def _one(ours: str, theirs: str, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Rule:
    return Rule(ours, (theirs,), lambda value: (there(value),), lambda values: back(values[0]))
