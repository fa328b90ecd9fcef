"""A loader of a small dataset of four shards; without a last step, it goes round for ever."""

from vitscale.data.augmentation import TrainTransform
from vitscale.data.loader import Loader
from vitscale.data.order import TrainOrder
from vitscale.data.settings import Reading

SHARDS = [40, 33, 40, 7]


def endless(manifest, *, order=None, stop_step=None, rank=0, world=1, side=8, **reading):
    return Loader(
        manifest,
        order or TrainOrder(SHARDS, 16, 0),
        image_size=side,
        transform=TrainTransform(),
        rank=rank,
        world=world,
        stop_step=stop_step,
        reading=Reading(**reading),
        digest=True,
    )
