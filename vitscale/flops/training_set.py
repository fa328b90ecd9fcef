"""How many images a run trains on, and how many classes its model tells apart.

The paper's data sets have the paper's sizes, whatever lies on this machine under their names: figures of the grid are
the same everywhere. Any other data set is asked for its manifest.
"""

from dataclasses import dataclass

from vitscale.errors import VitscaleError
from vitscale.recipe import Recipe

PAPER_SAMPLES = {
    "jft300m/train": 303_000_000,
    "jft300m/train-90m": 90_000_000,
    "jft300m/train-30m": 30_000_000,
    "jft300m/train-9m": 9_000_000,
    "imagenet21k/train": 14_197_122 - 102_400,  # the authors validate on the rest
    "imagenet/train": 1_281_167,
}


@dataclass(frozen=True)
class TrainingSet:
    """Training samples and classes, None where they are not known, and then why not."""

    samples: int | None
    num_classes: int | None
    problem: VitscaleError | None = None


def training_set(recipe: Recipe, samples: int | None = None) -> TrainingSet:
    """The training data of a recipe; `samples` overrules how many there are."""
    samples = samples or PAPER_SAMPLES.get(recipe.data.train)
    num_classes = recipe.model.num_classes
    counts_epochs = recipe.schedule.duration.epochs is not None
    if num_classes is not None and (samples is not None or not counts_epochs):
        return TrainingSet(samples, num_classes)
    # Imported here: it takes longer than the rest of a report, and the paper's grid needs no manifest.
    from vitscale.shards import Manifest

    try:
        manifest = Manifest.load(recipe.dataset_path(recipe.data.train))
    except VitscaleError as error:
        return TrainingSet(samples, num_classes, error)
    return TrainingSet(samples or manifest.num_samples, num_classes or len(manifest.class_names) or None)


def images_of(recipe: Recipe, samples: int | None) -> int | None:
    """Images that the whole run trains on; None where its length is in epochs and the samples are not known.

    Epochs are counted whole, samples times epochs, as in the paper's accounting. Training leaves out the remainder of
    an epoch that fills no batch, less than one batch of each epoch; an early stop is not foreseen.
    """
    duration, batch = recipe.schedule.duration, recipe.batch.global_size
    if duration.epochs is not None:
        return None if samples is None else round(samples * duration.epochs)
    return duration.to_steps(0, batch) * batch
