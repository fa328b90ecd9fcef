"""What is measured and seen of a finished model, as the commands of these names do it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import get_args

from vitscale.api.dataset import Dataset
from vitscale.api.model import Images, Model, opened
from vitscale.api.shown import Results
from vitscale.evaluation.build import samples_expected
from vitscale.evaluation.features import Features, extract_features
from vitscale.evaluation.finished import evaluate_finished
from vitscale.evaluation.inspection.figures import inspection_figures
from vitscale.evaluation.inspection.looking import Findings, Part, first_of, inspect_model, pictures_from
from vitscale.evaluation.representation import PAPERS_L2, Measuring, Method, default_counts, measure
from vitscale.evaluation.scoring import scores
from vitscale.evaluation.splits import Overlap
from vitscale.ground.errors import RecipeError, check_numbers
from vitscale.ground.page import Plot, fragment
from vitscale.runs.run import Run

Source = Model | Run | str | os.PathLike[str]
"""A model, or what `load` opens."""
Data = Dataset | str | os.PathLike[str]
"""A dataset, or what `Dataset` opens."""


def evaluate(model: Source, data: Data | None = None) -> Results:
    """The metrics of a model, as `vitscale evaluate` has them.

    Args:
        model: the model.
        data: a labelled dataset of its classes; by default, what a run's recipe says.

    Returns numbers by metric: "top1", ... of `data`; by default by evaluator, "validation/top1", ... Raises `DataError`
    if the dataset's classes are not the model's, `RecipeError` if there is nothing to evaluate on.
    """
    with opened(model).evaluating() as finished:
        return Results(evaluate_finished(finished)) if data is None else Results(scores(finished, _place(data))[0])


def features(model: Source, data: Data) -> Features:
    """The representations of a dataset's samples, fp32 (N, D), labels and uids, int64 (N,), sorted by uid, on the CPU.

    Raises `DataError` for a dataset that is missing or damaged.
    """
    with opened(model).evaluating() as finished:
        manifest = finished.dataset(_place(data))
        found = extract_features(
            finished.loader(manifest), finished.predict, samples_expected(finished.recipe, manifest)
        )
    assert found is not None, "a dataset without samples has no loader"
    return found


def fewshot(
    model: Source,
    train: Data,
    test: Data,
    *,
    method: Method = "ridge",
    shots: Sequence[int | None] | None = None,
    seeds: int = 3,
    l2: float = PAPERS_L2,
    overlap: Overlap | None = None,
) -> Results:
    """The accuracy of a simple classifier on a model's representation, as `vitscale fewshot` has it.

    Args:
        model: the model.
        train, test: datasets of the same classes.
        method: the paper's "ridge" regression, "knn", "logistic", linear "heads" or "attentive" ones.
        shots: numbers of training samples per class, None for all; by default 1, 5, 10 and 25 for ridge, else all.
        seeds: the number of draws of training samples.
        l2: the strength of ridge regression; by default 1024, that of the authors' newer code.
        overlap: "allow" test samples that are among the training samples; by default a run's `evaluation.overlap`.

    Returns `train_samples`, `test_samples`, and for each number of shots ("5shot", "all"; of "knn" by neighbours,
    "all/20nn") a mapping: `mean` and `std`, the standard deviation, of the accuracy over the `draws`; what the method
    was given or chose (`l2`, `k`, `C`, `lr`); and `scarce_classes`, if some have fewer samples than shots. Raises
    `RecipeError` for arguments that cannot be, and `DataError` if the classes differ, or test samples are among the
    training samples.
    """
    for name, value, known in (("method", method, get_args(Method)), ("overlap", overlap, (None, *get_args(Overlap)))):
        if value not in known:
            raise RecipeError(f"{name}={value!r}: expected one of {', '.join(map(repr, known))}")
    if isinstance(shots, int):
        raise RecipeError(f"shots={shots}: expected a list of numbers")
    counts = default_counts(method) if shots is None else list(shots)
    check_numbers(1, seeds=seeds)
    for count in counts:
        check_numbers(1, shots=count)
    if not l2 > 0 or not counts:
        raise RecipeError(f"shots={shots}, l2={l2}: expected numbers above 0")
    with opened(model).evaluating() as finished:
        how = Measuring(method, counts, seeds, l2, overlap)
        found = measure(finished, [(_place(train), _place(test))], how)
    (task,) = found["tasks"].values()
    return Results(task)


@dataclass(frozen=True)
class Inspection:
    """What a model does while it sees pictures.

    Attributes:
        findings: the numbers.
    """

    findings: Findings = field(repr=False)

    @cached_property
    def figures(self) -> dict[str, Plot]:
        """All figures by name: "attention_maps", ... They need matplotlib."""
        return {each.key: each for each in inspection_figures({"model": self.findings})}

    def _repr_html_(self) -> str:
        return fragment([figure.drawing for figure in self.figures.values()])


def inspect(
    model: Source, images: Dataset | Images, *, show: Sequence[Part] | None = None, count: int = 32, pictures: int = 6
) -> Inspection:
    """Look inside a model, as `vitscale inspect` does.

    Args:
        model: the model.
        images: a dataset, a folder, or pictures as `Model.predict` takes them.
        show: some of filters, positions, attention, rollout, alignment, norms and colours; by default what it has.
        count: the most pictures taken of a dataset or folder (`vitscale inspect` takes 128 by default).
        pictures: the number of pictures for which maps are made.

    Raises `RecipeError` for parts that the model does not have, `DataError` for what is not an image.
    """
    check_numbers(1, count=count, pictures=pictures)
    if isinstance(show, str):
        raise RecipeError(f"show={show!r}: expected a list")
    module = opened(model)
    with module.evaluating() as finished:
        if isinstance(images, Dataset):
            seen = first_of(finished, images.where, count)
        elif isinstance(images, str | os.PathLike) and os.path.isdir(images):  # noqa: PTH112
            seen = pictures_from(finished, os.fspath(images), count)
        else:
            seen = module.views(images)
        return Inspection(inspect_model(finished, seen, show, pictures=pictures))


def _place(data: Data) -> str:
    """As the commands take it: a name is looked up where a run's recipe says."""
    return data.where if isinstance(data, Dataset) else os.fspath(data)
