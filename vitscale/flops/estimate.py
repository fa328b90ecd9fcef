"""A recipe's estimate: its work, the images it trains on, the FLOPs of that, and what the paper says about it."""

from dataclasses import dataclass
from functools import cached_property

from vitscale.flops.accounting import FORWARD_PASSES_PER_TRAINING_STEP, exaflops
from vitscale.flops.matching import scaling_row
from vitscale.flops.published import PAPER_SETS, Scaling
from vitscale.flops.work import Work, recipe_work
from vitscale.ground.errors import DataError, VitscaleError
from vitscale.recipe import Recipe


@dataclass(frozen=True)
class Estimate:
    """One recipe's figures; `problem` says why something is None."""

    name: str
    recipe: Recipe
    samples: int | None  # of the training set
    num_classes: int | None  # of the training set; 0 if they play no part
    work: Work | None  # for one image; None if nothing says how many classes the model has
    images: int | None  # that the whole run trains on
    problem: VitscaleError | None

    @property
    def epochs(self) -> float | None:
        """Epochs as the recipe says, or images by samples."""
        if self.recipe.schedule.duration.epochs is not None:
            return self.recipe.schedule.duration.epochs
        return None if not self.samples or self.images is None else self.images / self.samples

    @property
    def own_images(self) -> int | None:
        """Images that a branch itself trains on, after those of its trunk; all images of other runs."""
        before = self.recipe.first_step * self.recipe.batch.global_size
        return None if self.images is None else max(0, self.images - before)

    @property
    def own_steps(self) -> int | None:
        """Updates that the run itself makes; of an epoch as many as have whole batches."""
        if self.images is None:
            return None
        steps = self.recipe.schedule.duration.to_steps(self.samples or 0, self.recipe.batch.global_size)
        return max(0, steps - self.recipe.first_step)

    @cached_property
    def exaflops(self) -> float | None:
        """Model FLOPs of the whole run, in the paper's accounting."""
        return self.exaflops_of(self.work)

    def exaflops_of(self, work: Work | None) -> float | None:
        """Model FLOPs of a part of the model over the whole run, in exaFLOPs."""
        return None if work is None or self.images is None else exaflops(work.accounting_macs, self.images)

    @property
    def own_exaflops(self) -> float | None:
        """exaFLOPs of training on `own_images`."""
        images = self.own_images
        return None if self.work is None or images is None else exaflops(self.work.accounting_macs, images)

    @property
    def tokens(self) -> int | None:
        """The tokens of one image in training, of all its views; None for a model with a feature map."""
        views = self.recipe.data.training_views()
        found = [(self.recipe.model.num_tokens(side), view.count) for view, side in views]
        return None if found[0][0] is None else sum((tokens or 0) * count for tokens, count in found)

    @cached_property
    def recomputed(self) -> Work:
        """What activation checkpointing computes a second time: forward passes that model FLOPs do not count."""
        return Work(()) if self.work is None else self.work.recomputed(self.recipe.parallelism.activation_checkpointing)

    @property
    def recomputed_exaflops(self) -> float | None:
        """exaFLOPs that `recomputed` adds over the whole run: one pass, of the three that training has."""
        trained = self.exaflops_of(self.recomputed)
        return None if trained is None else trained / FORWARD_PASSES_PER_TRAINING_STEP

    @property
    def hardware_exaflops(self) -> float | None:
        """exaFLOPs that the devices compute: model FLOPs and what is recomputed."""
        return None if self.exaflops is None else self.exaflops + (self.recomputed_exaflops or 0.0)

    @cached_property
    def published(self) -> Scaling | None:
        """The row of Table 6 that this recipe repeats."""
        return scaling_row(self.recipe, self.images)

    @property
    def deviation(self) -> float | None:
        """The deviation from the corrected table, as a fraction of its value."""
        if self.published is None or self.exaflops is None:
            return None
        return self.exaflops / self.published.exaflops - 1


def estimate(name: str, recipe: Recipe, samples: int | None = None) -> Estimate:
    """Work out a recipe; `samples` overrides the size of its training set."""
    samples, num_classes, problem = _training_set(recipe, samples)
    work = None if num_classes is None else recipe_work(recipe, num_classes)
    return Estimate(name, recipe, samples, num_classes, work, _images(recipe, samples), problem)


def _training_set(recipe: Recipe, samples: int | None) -> tuple[int | None, int | None, VitscaleError | None]:
    """(samples, classes, why one of them is not known); `samples` overrides how many there are.

    The paper's data sets have the paper's sizes, so that figures of the grid are the same everywhere. A recipe that
    says where its data are, or has other classes than the paper's, means the user's own data set, whatever it is
    called: its manifest is read, like any other's.
    """
    has_classes = recipe.objective.has_classes
    num_classes = recipe.model.num_classes if has_classes else 0
    paper = PAPER_SETS.get(recipe.data.train)
    if samples is None and paper is not None and not recipe.data.root and num_classes in (paper.num_classes, 0):
        samples = paper.samples
    counts_epochs = recipe.schedule.duration.epochs is not None
    if num_classes is not None and (samples is not None or not counts_epochs):
        return samples, num_classes, None
    # Imported here: it takes longer than the rest of a report, and the paper's grid needs no manifest.
    from vitscale.data.shards import Manifest

    try:
        manifest = Manifest.load(recipe.dataset_path(recipe.data.train))
    except VitscaleError as error:
        return samples, num_classes, error
    samples = manifest.num_samples if samples is None else samples
    if not has_classes:
        return samples, 0, None
    num_classes = num_classes or len(manifest.class_names) or None
    return samples, num_classes, None if num_classes else DataError(f"{manifest.where} names no classes")


def _images(recipe: Recipe, samples: int | None) -> int | None:
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
