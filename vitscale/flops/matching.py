"""Finds the paper's results that belong to a recipe, by what the recipe is, not by the name of its file.

The model, the images and how often they are seen, and the optimizer decide. The learning rate, the batch,
regularisation and what is evaluated on the way do not.
"""

from typing import Any

from vitscale.flops import published
from vitscale.flops.published import PAPER_SETS, DataSize, PositionEmbedding, Scaling, Transfer
from vitscale.recipe import Recipe
from vitscale.recipe.families import model_of

# Tables 7 and 8 report runs of 7 epochs.
_ABLATION_EPOCHS = 7


def possible_epochs(row: DataSize) -> tuple[int, ...]:
    """The epochs that a row may be of, since its table does not say: those that Table 3 has."""
    if row.pretraining == "jft300m":
        return tuple(scaling.epochs for scaling in published.table_6() if scaling.model == row.model)
    if row.pretraining == "imagenet21k" and row.model.startswith("ViT-L"):
        return 30, 90
    return {"imagenet21k": (90,), "imagenet": (300,)}.get(row.pretraining, ())


def scaling_row(recipe: Recipe, images: int | None) -> Scaling | None:
    """The row of Table 6 that this recipe repeats on `images` training images."""
    rows = published.table_6()
    return next((row for row in rows if _is_run(recipe, images, row.model, "jft300m", (row.epochs,))), None)


def transfer_row(recipe: Recipe, images: int | None) -> tuple[int, Transfer] | None:
    """(number of the table, row) of the fine-tuning results that the paper prints for this recipe."""
    if (scaling := scaling_row(recipe, images)) is not None:
        return 6, scaling
    for choice in published.table_7():
        if _is_run(recipe, images, choice.model, "jft300m", (_ABLATION_EPOCHS,), choice.optimizer):
            return 7, choice
    for size in published.table_5():
        if _is_run(recipe, images, size.model, size.pretraining, possible_epochs(size)):
            return 5, size
    return None


def position_row(recipe: Recipe, images: int | None) -> PositionEmbedding | None:
    """The row of Table 8 that this recipe repeats."""
    run = recipe, images, "ViT-B/16", "jft300m", (_ABLATION_EPOCHS,)
    rows = (row for row in published.table_8() if _is_run(*run, position={"kind": row.position, "at": row.at}))
    return next(rows, None)


def _is_run(
    recipe: Recipe,
    images: int | None,
    model: str,
    pretraining: str,
    epochs: tuple[int, ...],
    optimizer: str = "adamw",
    **changed: Any,
) -> bool:
    """Whether it pre-trains the paper's model of that name, but for some keys, on its data for one of its lengths."""
    name = f"{pretraining}/train"
    if recipe.data.train != name or recipe.data.image_size != 224 or recipe.optimizer.name != optimizer:
        return False
    data = PAPER_SETS.get(name)
    if (
        data is None
        or recipe.model.num_classes != data.num_classes
        or not recipe.objective.has_classes
        or images not in [count * data.samples for count in epochs]
    ):
        return False
    papers, mine = model_of(name=model, **changed), recipe.model
    return (mine.facts(), mine.head) == (papers.facts(), papers.head)
