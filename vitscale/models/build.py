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
        head_bias=initial_head_bias(recipe),
        dropout=settings.dropout,
        checkpoint_every=recipe.parallelism.activation_checkpointing,
    )


def initial_head_bias(recipe: Recipe) -> float:
    """-10 where the sigmoid loss meets the pre-training head, unless the recipe says otherwise; softmax cannot tell."""
    if recipe.model.head_bias is not None:
        return recipe.model.head_bias
    return -10.0 if recipe.model.head == "pretrain" and recipe.objective.loss == "sigmoid" else 0.0
