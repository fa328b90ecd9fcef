"""The `evaluation` and `selection` blocks of a recipe: what training measures, and how to choose by it."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from vitscale.ground.block import Block, gone
from vitscale.ground.extensions import by_kind
from vitscale.recipe.data import EvalCrop
from vitscale.recipe.durations import Interval

_Name = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]{1,200}$")]


class FewShotTask(Block):
    """One data set of the few-shot evaluation."""

    name: _Name = Field(description="its name in metrics")
    train: str = Field(description="a dataset, as data.train")
    test: str = Field(description="a dataset, as data.train")


class FewShot(Block):
    """Closed-form few-shot evaluation on the representation (section 4.1)."""

    tasks: list[FewShotTask] = Field(min_length=1, description="the data sets")
    shots: list[Annotated[int, Field(ge=1)]] = Field([1, 5, 10, 25], min_length=1)
    """training images per class"""
    seeds: int = Field(3, ge=1, description="number of random draws of training samples to average over")
    l2: Annotated[float, Field(gt=0)] | Literal["shared"] = 2.0**10
    """ridge penalty; shared: as in the paper, one per number of shots, chosen by its mean rank over all tasks"""
    crop: EvalCrop = EvalCrop(kind="square")

    def _contradictions(self) -> Iterator[str]:
        names = [task.name for task in self.tasks]
        if len(set(names)) != len(names):
            yield f"two tasks have one name: {names}"


class KNN(Block):
    """Nearest neighbours on the representation, as DINO measures (Caron et al., 2021): the training samples with the
    highest cosine similarity vote for their classes, with weight exp(similarity / 0.07).
    """

    train: str
    """a dataset, as data.train, whose samples vote; a part of data.train is enough (`vitscale shards split`)"""
    test: str = Field(description="a dataset, as data.train, that is classified")
    k: list[Annotated[int, Field(ge=1)]] = Field([20], min_length=1, description="numbers of neighbours")
    crop: EvalCrop = EvalCrop()

    def _contradictions(self) -> Iterator[str]:
        if len(set(self.k)) != len(self.k):
            yield f"k {self.k}: a number stands there twice"


class Evaluator(Block):
    """An evaluator beside those above: `linear`, `attentive`, or one of another package."""

    # `module:class` of the `vitscale.evaluation.Evaluator` that measures.
    implementation: ClassVar[str]

    kind: str = Field(description="dotted path of its block")
    name: _Name = Field(description="its name in metrics")

    def metrics(self) -> Sequence[str]:
        """The names of the metrics that it yields, which `selection` can choose by."""
        return ()

    def on_smoke_data(self, train: str, test: str) -> dict[str, Any]:
        """The keys that make it use a smoke run's datasets instead of its own."""
        return {}

    def splits(self) -> tuple[str, str, EvalCrop] | None:
        """The dataset that it learns from, the one that it is tested on, and the crop of both; None if it has none."""
        return None


class LinearHeads(Evaluator):
    """Linear heads on the representation, as DINOv2 measures (Oquab et al., 2023): the learning rate, one of 13, is
    chosen on a tenth of the training samples; its head is trained again on all of them, and tested.
    """

    implementation: ClassVar[str] = "vitscale.evaluation.linear:LinearHeads"

    kind: Literal["linear"] = Field(description="chooses this evaluator")
    name: _Name = Field("linear", description="its name in metrics")
    train: str
    """a dataset, as data.train, that heads learn from; a part of data.train is enough (`vitscale shards split`)"""
    test: str = Field(description="a dataset, as data.train, that is classified")
    steps: int | None = Field(None, ge=1, lt=2**31)
    """number of updates of each head, with batches of 256; default: 10 epochs, at least 1,250"""
    crop: EvalCrop = EvalCrop()

    def metrics(self) -> Sequence[str]:
        return ("top1", "lr")

    def on_smoke_data(self, train: str, test: str) -> dict[str, Any]:
        return {"train": train, "test": test, "steps": 10}

    def splits(self) -> tuple[str, str, EvalCrop]:
        return self.train, self.test, self.crop


class AttentiveHeads(LinearHeads):
    """Attentive heads on the patches' tokens, as CAPI measures (Darcet et al., 2025): a learned query attends to them,
    and a linear layer follows. All else is as for linear heads.
    """

    implementation: ClassVar[str] = "vitscale.evaluation.linear:AttentiveHeads"

    kind: Literal["attentive"] = Field(description="chooses this evaluator")  # type: ignore[assignment]
    name: _Name = Field("attentive", description="its name in metrics")
    limit_gb: float = Field(16.0, gt=0, lt=1e6)
    """host memory of rank 0 that tokens of both datasets may take, 4 bytes a number; more is an error"""


class Evaluation(Block):
    """What is evaluated during training, and when; always at the end as well."""

    _later_keys: ClassVar[tuple[str, ...]] = ("knn", "at_start")

    every: Interval | None = Field(None, description="how often to evaluate; default: only at the end")
    at_start: bool = False
    """whether to evaluate the weights that the run begins with, too, before the first update; selection does not choose
    them"""
    validation: str | None = Field(None, description="a dataset, as data.train: top-1, top-5 and loss")
    fewshot: FewShot | None = None
    knn: KNN | None = None
    evaluators: list[
        Annotated[
            Annotated[SerializeAsAny[LinearHeads | AttentiveHeads], Field(discriminator="kind")],
            by_kind(Evaluator, "evaluation.evaluators.N"),
        ]
    ] = Field([])
    """linear and attentive heads, and evaluators of other packages: `kind` is then the dotted path of a block, such as
    my_package.Calibration, whose keys are written beside it"""
    batch: int = Field(64, ge=1, description="images per rank and forward pass")
    overlap: Literal["refuse", "allow"] = "refuse"
    """evaluated samples that are training samples: refuse: an error; allow: a warning"""
    inspect: Annotated[
        None, BeforeValidator(gone(None, "leave it out; `vitscale inspect RUN` draws what it drew, after training"))
    ] = Field(None, description="of earlier recipes: `vitscale inspect` draws what it drew")

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_runs(cls, content: Any) -> Any:
        # A run's recipe has every default written out: such a one may have drawn while it trained.
        is_resolved = isinstance(content, dict) and content.keys() >= cls.model_fields.keys() - {*cls._later_keys}
        return content | {"inspect": None} if is_resolved else content

    def _contradictions(self) -> Iterator[str]:
        for number, name in enumerate(each.name for each in self.evaluators):
            if "/" in name or name in ("validation", "fewshot", "knn"):
                yield f"evaluators.{number}.name {name!r}: expected one without /, and not validation, fewshot or knn"

    @property
    def measures(self) -> bool:
        """Whether there is anything to evaluate."""
        return bool(self.validation or self.fewshot or self.knn or self.evaluators)


class Selection(Block):
    """Keeps the best checkpoint by a metric; with `patience`, stops after that many evaluations without improvement."""

    metric: str = Field("validation/top1", description="name as in metrics.jsonl, without eval/")
    mode: Literal["max", "min"] = Field("max", description="whether higher or lower is better")
    patience: int | None = Field(None, ge=1)
    """number of evaluations without improvement after which the run ends"""
