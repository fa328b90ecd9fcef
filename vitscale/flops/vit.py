"""Operations of a Vision Transformer, its hybrids and variants (section 3.1, appendices D.3 and D.5).

Shape legend: n patches along one side, N patches, T tokens (N, or N + 1 with a class token), D width, K classes.
"""

from typing import Literal

from vitscale.architectures import ViTShape
from vitscale.flops.resnet import feature_operations
from vitscale.operations import Operation, block_of, dense, parameters, product


def vit_operations(
    shape: ViTShape,
    *,
    image_size: int,
    num_classes: int | None,
    pool: Literal["cls", "mean"],
    head: Literal["pretrain", "linear"],
    position: Literal["none", "1d", "2d", "relative"],
    position_at: Literal["stem", "every_layer", "shared"],
    dropout: bool = False,
) -> list[Operation]:
    """The operations on one image, in order; the options are those of `models.ViT`.

    Both products of attention are `scores`, products with embeddings of offsets `relative`. The number of heads does
    not enter.
    """
    D, n, T = shape.width, shape.grid(image_size), num_tokens(shape, image_size, pool)
    operations = [] if shape.stem is None else feature_operations(shape.stem, image_size)
    operations.append(dense("patch_embedding", n**2, shape.patch_dim, D, input_gradient=shape.stem is not None))
    class_token = D if pool == "cls" else 0
    if class_token:
        operations.append(parameters("class_token", class_token))
    if position in ("1d", "2d"):
        once = T * D if position == "1d" else 2 * n * (D // 2) + class_token
        operations.append(parameters("positions", once * (shape.depth if position_at == "every_layer" else 1)))
    relative = position == "relative"
    if shape.attention == "axial":
        block = 2 * _block(shape, sequences=n, T=n, relative=relative)
    else:
        block = _block(shape, sequences=1, T=T, relative=relative)
    for index in range(shape.depth):
        # A block ends with the output of its MLP, which only dropout's mask is drawn behind.
        operations += block_of(block, index, needs_output=dropout)
    operations.append(parameters("norms", 2 * D))
    if num_classes is None:
        return operations
    if head == "pretrain":
        operations.append(dense("pre_logits", 1, D, D))
    operations.append(dense("head", 1, D, num_classes))
    return operations


def num_tokens(shape: ViTShape, image_size: int, pool: Literal["cls", "mean"]) -> int:
    """T: the patches of a square image, and the class token where there is one."""
    return shape.grid(image_size) ** 2 + (pool == "cls")


def _block(shape: ViTShape, *, sequences: int, T: int, relative: bool) -> list[Operation]:
    """One encoder block over independent sequences of T tokens: the whole image, or its rows or columns."""
    D, offsets = shape.width, 2 * T - 1
    told = [product("relative", sequences * T * offsets * D, params=offsets * D)] if relative else []
    return [
        parameters("norms", 4 * D),
        dense("qkv", sequences * T, D, 3 * D),
        product("scores", 2 * sequences * T**2 * D),
        *told,
        dense("out", sequences * T, D, D),
        dense("mlp", sequences * T, D, shape.mlp_dim),
        dense("mlp", sequences * T, shape.mlp_dim, D),
    ]
