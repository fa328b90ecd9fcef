"""From a recipe to its model."""

from vitscale.architectures import ResNetShape
from vitscale.models.resnet import ResNet
from vitscale.models.vit import ViT
from vitscale.recipe import Recipe

Model = ViT | ResNet


def build_model(recipe: Recipe, num_classes: int) -> Model:
    """The recipe's model, its values unset, on whatever device and dtype the context makes tensors."""
    settings = recipe.model
    shape = settings.shape()
    head_bias = initial_head_bias(recipe)
    checkpoint_every = recipe.parallelism.activation_checkpointing
    if isinstance(shape, ResNetShape):
        return ResNet(
            shape,
            image_size=recipe.data.image_size,
            num_classes=num_classes,
            head_bias=head_bias,
            checkpoint_every=checkpoint_every,
        )
    return ViT(
        shape,
        image_size=recipe.data.image_size,
        num_classes=num_classes,
        pool=settings.pool_or_default(),
        head=settings.head,
        head_bias=head_bias,
        dropout=settings.dropout,
        position=settings.position.kind,
        position_at=settings.position.at,
        checkpoint_every=checkpoint_every,
    )


def initial_head_bias(recipe: Recipe) -> float:
    """-10 where the sigmoid loss meets the pre-training head, unless the recipe says otherwise; softmax cannot tell."""
    if recipe.model.head_bias is not None:
        return recipe.model.head_bias
    return -10.0 if recipe.model.head == "pretrain" and recipe.objective.loss == "sigmoid" else 0.0
