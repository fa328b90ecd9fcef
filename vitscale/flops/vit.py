"""Multiply-adds (MACs) of a Vision Transformer's forward pass (paper section 3.1)."""

from vitscale.recipe import Recipe


def vit_macs(
    *,
    image_size: int,
    patch_size: int,
    width: int,
    depth: int,
    mlp_dim: int,
    num_classes: int,
    class_token: bool = True,
    pre_logits: bool = True,
    channels: int = 3,
) -> dict[str, int]:
    """MACs of one image by part of the model; their sum is the whole forward pass.

    Counted: all dense layers and both products of attention (`scores` holds queries times keys and weights times
    values). Not counted: biases, norms, softmax, activations, pooling, residual sums. The number of heads does not
    enter.

    Args:
        image_size: side of the square input in pixels. Pixels beyond the last whole patch are not seen: ViT-H/14 at
            384 has 27 x 27 patches.
        patch_size: side P of a patch in pixels.
        width, depth, mlp_dim: D, the number of blocks, the hidden size of the MLP.
        num_classes: K, outputs of the last layer.
        class_token: False for mean pooling, which has one token less.
        pre_logits: whether there is the D x D layer before the head (pre-training; fine-tuning drops it).
        channels: of the input image.
    """
    patches = (image_size // patch_size) ** 2
    tokens = patches + class_token
    return {
        "patch_embedding": patches * patch_size**2 * channels * width,
        "qkv": depth * tokens * 3 * width**2,
        "scores": depth * 2 * tokens**2 * width,
        "out": depth * tokens * width**2,
        "mlp": depth * tokens * 2 * width * mlp_dim,
        "pre_logits": width**2 if pre_logits else 0,
        "head": width * num_classes,
    }


def recipe_macs(recipe: Recipe, num_classes: int) -> dict[str, int]:
    """MACs of one image through a recipe's model, by part."""
    shape = recipe.model.shape()
    return vit_macs(
        image_size=recipe.data.image_size,
        patch_size=shape.patch_size,
        width=shape.width,
        depth=shape.depth,
        mlp_dim=shape.mlp_dim,
        num_classes=num_classes,
        class_token=recipe.model.pool == "cls",
        pre_logits=recipe.model.head == "pretrain",
    )
