"""What a recipe trains on: the order of its samples, and their loader. Whoever asks later gets the same."""

from vitscale.data.augmentation import train_transform
from vitscale.data.loader import Loader
from vitscale.data.order import TrainOrder
from vitscale.data.settings import Reading
from vitscale.recipe import Recipe
from vitscale.shards import Manifest


def training_order(recipe: Recipe, manifest: Manifest) -> TrainOrder:
    """The order of a recipe on a dataset. Raises `RecipeError` for fewer samples than one global batch."""
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
    """A rank's batches at positions [start, stop) of the order. Raises as `Loader`.

    Args:
        recipe, manifest, order: as of `training_order`.
        rank, world, pinned, digest: as of `Loader` and `Reading`.
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
