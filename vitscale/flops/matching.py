"""Which of the paper's results belong to a recipe: by what the recipe is, not by the name of its file.

The model, the images and how often they are seen, and the optimizer decide. Its learning rate, the batch and
regularisation do not.
"""

from vitscale.architectures import architecture
from vitscale.flops.published import (
    PositionEmbedding,
    Scaling,
    StateOfTheArt,
    Transfer,
    table_2,
    table_5,
    table_6,
    table_7,
    table_8,
)
from vitscale.flops.training_set import PAPER_SAMPLES
from vitscale.recipe import Recipe
from vitscale.recipe.schema import Model, Position

_CLASSES = {"jft300m": 18_291, "imagenet21k": 21_843, "imagenet": 1_000}
# Table 5 does not say for how many epochs; Table 3 does, with two lengths for the large models on ImageNet-21k.
_TABLE_5_EPOCHS = {"imagenet": (300,), "imagenet21k": (90,)}
_TABLE_5_EPOCHS_LARGE = {"imagenet": (300,), "imagenet21k": (30, 90)}
# Tables 7 and 8 are of runs of 7 epochs.
_ABLATION_EPOCHS = 7


def scaling_row(recipe: Recipe, images: int | None) -> Scaling | None:
    """The row of Table 6 that this recipe repeats on `images` training images."""
    for row in table_6():
        if _is_run(recipe, images, row.model, "jft300m", (row.epochs,)):
            return row
    return None


def transfer_row(recipe: Recipe, images: int | None) -> tuple[int, Transfer] | None:
    """(number of the table, row) of the fine-tuning results that the paper prints for this recipe."""
    if (scaling := scaling_row(recipe, images)) is not None:
        return 6, scaling
    for choice in table_7():
        if _is_run(recipe, images, choice.model, "jft300m", (_ABLATION_EPOCHS,), choice.optimizer):
            return 7, choice
    for size in table_5():
        epochs = _TABLE_5_EPOCHS_LARGE if size.model.startswith("ViT-L") else _TABLE_5_EPOCHS
        if _is_run(recipe, images, size.model, size.pretraining, epochs.get(size.pretraining, ())):
            return 5, size
    return None


def position_row(recipe: Recipe, images: int | None) -> PositionEmbedding | None:
    """The row of Table 8 that this recipe repeats."""
    for row in table_8():
        position = recipe.model.position
        if (position.kind, position.at) == (row.position, row.at):
            plain = recipe.model_copy(update={"model": recipe.model.model_copy(update={"position": Position()})})
            return row if _is_run(plain, images, "ViT-B/16", "jft300m", (_ABLATION_EPOCHS,)) else None
    return None


def state_of_the_art_row(recipe: Recipe) -> StateOfTheArt | None:
    """The column of Table 2 whose model and data these are. The table does not say for how many epochs."""
    for row in table_2():
        if row.pretraining in _CLASSES and _is_pretraining(recipe, row.model, row.pretraining):
            return row
    return None


def _is_run(
    recipe: Recipe, images: int | None, model: str, pretraining: str, epochs: tuple[int, ...], optimizer: str = "adamw"
) -> bool:
    lengths = [count * PAPER_SAMPLES[f"{pretraining}/train"] for count in epochs]
    return images in lengths and recipe.optimizer.name == optimizer and _is_pretraining(recipe, model, pretraining)


def _is_pretraining(recipe: Recipe, name: str, pretraining: str) -> bool:
    """Whether the recipe pre-trains the paper's model of that name, unchanged, on one of its data sets."""
    if recipe.data.train != f"{pretraining}/train" or recipe.data.image_size != 224:
        return False
    if recipe.model.num_classes != _CLASSES[pretraining]:
        return False
    try:
        shape = architecture(name)
    except ValueError:
        return False  # Noisy Student's EfficientNet
    plain, model = Model(name=name), recipe.model
    return (
        model.shape() == shape
        and (model.head, model.position) == (plain.head, plain.position)
        and model.pool_or_default() == plain.pool_or_default()
    )
