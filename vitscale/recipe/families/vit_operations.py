"""The operations and parameters of the parts of a Vision Transformer. T tokens, D width."""

from vitscale.ground.operations import Operation, dense, parameters, product
from vitscale.recipe.families.vit_shape import ViTShape


def block_operations(shape: ViTShape, *, sequences: int, T: int, relative: bool) -> list[Operation]:
    """One encoder block over independent sequences of T tokens: the whole image, or its rows or columns."""
    D, offsets = shape.width, 2 * T - 1
    told = [product("relative", sequences * T * offsets * D, params=offsets * D)] if relative else []
    scales = [] if shape.layer_scale is None else [parameters("layer_scale", 2 * D)]
    of_heads = 2 * norm_parameters(shape, shape.head_dim) if shape.qk_norm else 0
    biases = {"all": 3, "no_key": 2, "none": 0}[shape.qkv_bias]
    of_attention = norm_parameters(shape, D) if shape.sub_norm == "all" else 0
    return [
        parameters("norms", 2 * norm_parameters(shape, D) + of_heads + of_attention + _mlp_norm(shape)),
        dense("qkv", sequences * T, D, 3 * D, bias=False),
        parameters("qkv", biases * D),
        product("scores", 2 * sequences * T**2 * D),
        *told,
        dense("out", sequences * T, D, D),
        *scales,
        dense("mlp", sequences * T, D, shape.fc1_dim),
        dense("mlp", sequences * T, shape.mlp_dim, D),
    ]


def norm_parameters(shape: ViTShape, width: int) -> int:
    """The number of parameters of a norm: a factor per channel, and for layer norm a bias, too."""
    return width if shape.norm == "rms" else 2 * width


def _mlp_norm(shape: ViTShape) -> int:
    """The number of parameters of the norm inside an MLP."""
    return 0 if shape.sub_norm == "none" else norm_parameters(shape, shape.mlp_dim)


def map_operations(shape: ViTShape, T: int) -> list[Operation]:
    """Pooling by attention of one learned query over T tokens, and the MLP after it."""
    D = shape.width
    return [
        parameters("pool", D + norm_parameters(shape, D) + _mlp_norm(shape)),
        dense("pool", 1, D, D),
        dense("pool", T, D, 2 * D),
        product("pool", 2 * T * D),
        dense("pool", 1, D, D),
        dense("pool", 1, D, shape.fc1_dim),
        dense("pool", 1, shape.mlp_dim, D),
    ]
