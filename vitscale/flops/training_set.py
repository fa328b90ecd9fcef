"""Works out how many images a run trains on, and how many classes its model tells apart.

The paper's data sets have the paper's sizes, so that figures of the grid are the same everywhere. A recipe that says
where its data are, or has other classes than the paper's, means the user's own data set, whatever it is called: its
manifest is read, like any other's.
"""

from dataclasses import dataclass

from vitscale.ground.errors import DataError, VitscaleError
from vitscale.recipe import Recipe


@dataclass(frozen=True)
class PaperSet:
    """A training set of the paper: samples and classes."""

    samples: int
    num_classes: int


PAPER_SETS = {
    "jft300m/train": PaperSet(303_000_000, 18_291),
    "jft300m/train-90m": PaperSet(90_000_000, 18_291),
    "jft300m/train-30m": PaperSet(30_000_000, 18_291),
    "jft300m/train-9m": PaperSet(9_000_000, 18_291),
    "imagenet21k/train": PaperSet(14_197_122 - 102_400, 21_843),  # the authors validate on the rest
    "imagenet/train": PaperSet(1_281_167, 1_000),
}


@dataclass(frozen=True)
class TrainingSet:
    """Training samples and classes (0 if they play no part), None if not known, and then why not."""

    samples: int | None
    num_classes: int | None
    problem: VitscaleError | None = None


def training_set(recipe: Recipe, samples: int | None = None) -> TrainingSet:
    """The training data of a recipe; `samples` overrides how many there are."""
    has_classes = recipe.objective.has_classes
    num_classes = recipe.model.num_classes if has_classes else 0
    paper = PAPER_SETS.get(recipe.data.train)
    if samples is None and paper is not None and not recipe.data.root and num_classes in (paper.num_classes, 0):
        samples = paper.samples
    counts_epochs = recipe.schedule.duration.epochs is not None
    if num_classes is not None and (samples is not None or not counts_epochs):
        return TrainingSet(samples, num_classes)
    # Imported here: it takes longer than the rest of a report, and the paper's grid needs no manifest.
    from vitscale.data.shards import Manifest

    try:
        manifest = Manifest.load(recipe.dataset_path(recipe.data.train))
    except VitscaleError as error:
        return TrainingSet(samples, num_classes, error)
    samples = manifest.num_samples if samples is None else samples
    if not has_classes:
        return TrainingSet(samples, 0)
    num_classes = num_classes or len(manifest.class_names) or None
    return TrainingSet(samples, num_classes, None if num_classes else DataError(f"{manifest.where} names no classes"))


def images_of(recipe: Recipe, samples: int | None) -> int | None:
    """Images that the whole run trains on; None if its length is in epochs and the samples are not known.

    As many as training takes: whole batches. But epochs of the paper's data sets are counted whole, samples times
    epochs, as in the paper's accounting. An early stop is not taken into account.
    """
    duration, batch = recipe.schedule.duration, recipe.batch.global_size
    if duration.epochs is not None:
        if samples is None:
            return None
        paper = PAPER_SETS.get(recipe.data.train)
        if paper is not None and samples == paper.samples:
            return round(samples * duration.epochs)
    return duration.to_steps(samples or 0, batch) * batch
