"""From a recipe to its model."""

from vitscale.models.vit import ViT
from vitscale.recipe import Recipe


def build_model(recipe: Recipe, num_classes: int) -> ViT:
    """The recipe's model, its values unset, on whatever device and dtype the context makes tensors."""
    settings = recipe.model
    return ViT(
        settings.shape(),
        image_size=recipe.data.image_size,
        num_classes=num_classes,
        pool=settings.pool,
        head=settings.head,
        head_bias=settings.head_bias,
        dropout=settings.dropout,
        checkpoint_every=recipe.parallelism.activation_checkpointing,
    )
