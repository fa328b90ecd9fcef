"""A recipe's estimate: its work, the images it trains on, the FLOPs of that, and what the paper says about it."""

from dataclasses import dataclass
from functools import cached_property

from vitscale.flops.accounting import FORWARD_PASSES_PER_TRAINING_STEP, exaflops
from vitscale.flops.matching import scaling_row
from vitscale.flops.published import Scaling
from vitscale.flops.training_set import images_of, training_set
from vitscale.flops.work import Work, recipe_work
from vitscale.ground.errors import VitscaleError
from vitscale.recipe import Recipe


@dataclass(frozen=True)
class Estimate:
    """One recipe's figures; `problem` says why something is None.

    Attributes:
        work: the work for one image; None if nothing says how many classes the model has.
        samples: the number of samples in the training set.
        images: the number of images that the whole run trains on.
    """

    name: str
    recipe: Recipe
    work: Work | None
    samples: int | None
    images: int | None
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

    @property
    def model_name(self) -> str:
        """The model's name with what is changed in it, or its dimensions."""
        return self.recipe.model.describe()


def estimate(name: str, recipe: Recipe, samples: int | None = None) -> Estimate:
    """Work out a recipe; `samples` overrides the size of its training set."""
    data = training_set(recipe, samples)
    work = None if data.num_classes is None else recipe_work(recipe, data.num_classes)
    return Estimate(name, recipe, work, data.samples, images_of(recipe, data.samples), data.problem)
