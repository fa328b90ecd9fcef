"""A split in shards, three of its samples damaged, for the toy model to be evaluated on."""

from pathlib import Path

from damaged_dataset import write_damaged
from toy_split import SIDE

from vitscale.data.augmentation import EvalTransform
from vitscale.data.loader import Loader
from vitscale.data.order import EvalOrder
from vitscale.data.settings import Reading
from vitscale.data.shards import Manifest
from vitscale.data.shards.generated import CLASS_NAMES
from vitscale.evaluation import FewShot, Validation
from vitscale.objectives.classification import CrossEntropy

SHARDS = [30, 21, 11]
DAMAGED = {0: [0], 1: [7, 20]}
"""Slot 0 of shard 0 is the one that fillers repeat."""


def write(root: Path) -> None:
    """`sound`, `damaged` and `without`: samples of seven classes."""
    write_damaged(root, SHARDS, DAMAGED)


def loader(folder: Path, policy: str, rank: int = 0, world: int = 1):
    """A function that begins a pass; eight samples a rank at a time."""
    manifest = Manifest.load(folder)
    order = EvalOrder([entry.num_selected for entry in manifest.shards], 8 * world)
    options = {"image_size": SIDE, "transform": EvalTransform(), "rank": rank, "world": world}
    reading = Reading(bad_samples=policy).for_evaluation()
    return lambda: Loader(manifest, order, reading=reading, **options)


def evaluators(folder: Path, policies: tuple[str, str], rank: int = 0, world: int = 1) -> list:
    """Of both kinds, a policy each; the few-shot one draws from the split and is tested on it."""
    whole, drawn = (loader(folder, policy, rank, world) for policy in policies)
    few = FewShot("stored-few", drawn, drawn, CLASS_NAMES, shots=(1, 5), l2=1.0)
    return [Validation("stored", whole, CrossEntropy("sigmoid", 0.9, 0.01).per_sample_loss), few]
