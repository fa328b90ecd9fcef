"""What a recipe trains on: the order of its samples and their loader, the same ones whenever they are asked for."""

from vitscale.data.augmentation import train_transform
from vitscale.data.loader import Loader
from vitscale.data.order import TrainOrder
from vitscale.data.settings import Reading
from vitscale.data.shards import Manifest
from vitscale.recipe import Recipe


def training_order(recipe: Recipe, manifest: Manifest) -> TrainOrder:
    """A recipe's order of a dataset. Raises `RecipeError` if it has fewer samples than one global batch."""
    samples = [shard.num_selected for shard in manifest.shards]
    return TrainOrder(samples, recipe.batch.global_size, recipe.seed, recipe.data.repeats)


def training_loader(
    recipe: Recipe,
    manifest: Manifest,
    order: TrainOrder,
    *,
    rank: int,
    world: int,
    start: int,
    stop: int,
    pinned: bool = False,
    digest: bool,
) -> Loader:
    """A rank's batches of steps [start, stop) of the order. Raises as `Loader` and `Reading.of` do.

    Args:
        recipe, manifest: the recipe and the manifest of its training set.
        order: their `training_order`.
        rank, world, digest: as in `Loader`.
        start, stop: the range of the order's steps, from 0.
        pinned: as in `Reading`.
    """
    data = recipe.data
    return Loader(
        manifest,
        order,
        image_size=data.image_size,
        transform=train_transform(data.crop, data.flip),
        operations=data.operations,
        rank=rank,
        world=world,
        seed=recipe.seed,
        reading=Reading.of(data, pinned=pinned),
        start_step=start,
        stop_step=stop,
        digest=digest,
    )
