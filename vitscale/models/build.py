"""From a recipe to its model."""

from vitscale import recipe as recipes
from vitscale.architectures import ResNetShape
from vitscale.models.resnet import ResNet
from vitscale.models.vit import ViT

Model = ViT | ResNet


def build_model(recipe: recipes.Recipe, num_classes: int) -> Model:
    """The recipe's model, its values unset, on whatever device and dtype the context makes tensors."""
    return build_of_block(
        recipe.model,
        image_size=recipe.data.image_size,
        num_classes=num_classes,
        head_bias=initial_head_bias(recipe),
        checkpoint_every=recipe.parallelism.activation_checkpointing,
    )


def build_of_block(
    block: recipes.Model, *, image_size: int, num_classes: int, head_bias: float = 0.0, checkpoint_every: int = 0
) -> Model:
    """The model of a recipe's `model` block."""
    shape = block.shape()
    if isinstance(shape, ResNetShape):
        return ResNet(
            shape,
            image_size=image_size,
            num_classes=num_classes,
            head_bias=head_bias,
            checkpoint_every=checkpoint_every,
        )
    return ViT(
        shape,
        image_size=image_size,
        num_classes=num_classes,
        pool=block.pool_or_default(),
        head=block.head,
        head_bias=head_bias,
        dropout=block.dropout,
        position=block.position.kind,
        position_at=block.position.at,
        checkpoint_every=checkpoint_every,
    )


def initial_head_bias(recipe: recipes.Recipe) -> float:
    """-10 where the sigmoid loss meets the pre-training head, unless the recipe says otherwise; softmax cannot tell."""
    if recipe.model.head_bias is not None:
        return recipe.model.head_bias
    return -10.0 if recipe.model.head == "pretrain" and recipe.objective.loss == "sigmoid" else 0.0
