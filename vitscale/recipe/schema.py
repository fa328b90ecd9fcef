"""The recipe as a whole, and its smaller blocks: typed, strict, frozen. Every field says what it means."""

from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from vitscale.ground.block import Block, gone, has_default
from vitscale.ground.errors import RecipeError
from vitscale.ground.extensions import by_kind
from vitscale.ground.storage import is_url
from vitscale.recipe.data import Batch, Data, EvalCrop
from vitscale.recipe.datasets import find_dataset
from vitscale.recipe.decoders import IJEPA, MAE
from vitscale.recipe.dino import Dino
from vitscale.recipe.durations import Duration, Interval
from vitscale.recipe.evaluation import Evaluation, Selection
from vitscale.recipe.families import ModelBlock
from vitscale.recipe.joint_embedding import Contrastive, LeJEPA
from vitscale.recipe.masked_patches import MaskedPatches
from vitscale.recipe.objectives import Classification, Context, Distillation, Objective, with_kind
from vitscale.recipe.optimizers import AnyOptimizer, Kept, Optimizer, Shape
from vitscale.recipe.schedule import Schedule
from vitscale.recipe.watching import Anomalies, Check, Logging, Profile

_MOST_AVERAGES = 8


class Init(Block):
    """The initial weights of a run, instead of random ones; or, with `continue`, the full state of another run.

    They are read once, when the run begins: a resumed run reads its own checkpoints, and no longer needs them.
    """

    key: ClassVar[str] = "init"  # where a recipe has it

    # `from` is a Python keyword, hence the alias.
    source: Annotated[str, Field(min_length=1, alias="from")]
    """a run's directory (its newest checkpoint), the folder of one checkpoint, or weights in any format that `vitscale
    export` reads; uses the averaged weights if the run has them"""
    head: Literal["zero", "keep", "initial"] = "zero"
    """the output layer: zero: weights and bias zero, as the paper fine-tunes; keep: from the weights, for the same
    classes; initial: as without init. zero and initial drop pre_logits if model.head is linear"""
    positions: Literal["resample", "keep"] = "resample"
    """position embeddings of another resolution are interpolated (resample, section 3.2) or an error (keep)"""
    step: int | None = Field(None, ge=1, lt=2**53, description="step of the run's checkpoint; default: its newest")
    # `continue` is a Python keyword, too.
    continues: Annotated[bool, Field(alias="continue")] = False
    """a branch: the run continues after `step` of another run, its trunk, with its optimizer, averages and position in
    the data; only the schedule, and fields that may change on resume, may differ; data.train may be a view of the
    trunk's"""

    def _contradictions(self) -> Iterator[str]:
        if is_url(self.source):
            yield f"from {self.source!r}: expected a path; fetch the weights first"
        if self.continues and self.step is None:
            yield "continue: true needs step, the step of the other run after which this run continues"
        for key in ("head", "positions"):
            if self.continues and not has_default(self, key):
                yield f"{key} applies to runs that begin at step 0; continue: true takes over everything"


class Parallelism(Block):
    """How the run is distributed over devices; nothing here changes the results, except by rounding."""

    zero_stage: int = Field(1, ge=0, le=3)
    """what is partitioned among ranks: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights"""
    activation_checkpointing: int = Field(0, ge=0, le=2**31)
    """recompute every k-th block's activations in the backward pass; 0: keep all"""
    reduce_dtype: Literal["fp32", "bf16"] = Field("fp32", description="data type of gradient sums over the ranks")
    offload: Literal["none", "optimizer"] = Field("none", description="optimizer: keep its state in host memory")
    compile: bool | Literal["auto"] = "auto"
    """compile each block with torch.compile; evaluation stays eager. auto: on CUDA below stage 3 where there is a
    compiler"""
    overlap: bool | Literal["auto"] = "auto"
    """overlap sending of gradients and weights with computation; halves gradient traffic in stages 1 and 2. auto: in
    these, on CUDA"""
    attention: Literal["auto", "flash", "cudnn", "efficient", "math"] = "auto"
    """torch's implementation of attention on CUDA; auto: cuDNN's on Hopper where it is known to be right, else flash"""
    fused_gelu: Annotated[
        Literal[False],
        BeforeValidator(gone(False, "leave it out, compiled blocks (parallelism.compile) compute the same")),
    ] = Field(False, description="of earlier recipes")
    activation_budget: float | None = Field(None, gt=0, le=1)
    """with compile: share of a block's activations that may be kept for the backward pass; what is cheapest is
    recomputed. null: torch's choice; memory plans do not count what this saves"""
    hpz_size: int = Field(1, ge=1)
    """ranks, as many as a node has, that keep a copy of all weights between them during a step of stage 3, so that each
    weight crosses the network once a step (hpZ of ZeRO++); 1: none"""

    def _contradictions(self) -> Iterator[str]:
        if self.overlaps and (self.zero_stage == 0 or self.offload != "none"):
            yield "overlap: true needs zero_stage 1, 2 or 3, and offload: none"
        if self.hpz_size > 1 and (self.zero_stage != 3 or self.offload != "none"):
            yield f"hpz_size: {self.hpz_size} needs zero_stage 3, and offload: none"
        # One at most: of stages 0 and 3.
        if self.offload == "optimizer" and self.zero_stage == 0:
            yield "offload: optimizer needs zero_stage 1, 2 or 3"
        if self.compiles and self.zero_stage == 3:
            yield "compile: true needs zero_stage 0, 1 or 2: stage 3 gathers weights within a block"
        if self.activation_budget is not None and not self.compile:
            yield f"activation_budget: {self.activation_budget:g} needs compile: true, which applies it"

    @property
    def compiles(self) -> bool:
        """Whether blocks are compiled; where that is left to the device: see beginning/automatic.py."""
        return self.compile is True

    @property
    def overlaps(self) -> bool:
        """Whether sending overlaps with computing; where that is left to the device: see beginning/automatic.py."""
        return self.overlap is True

    @property
    def exchanges(self) -> bool:
        """Whether several ranks send by training/deepspeed/exchange.py, and not by DeepSpeed."""
        return self.overlaps and self.zero_stage in (1, 2)

    def hpz_ranks(self, world_size: int) -> int:
        """How many of so many ranks keep a copy of the weights between them; 1 if none do, or it would be all.

        Raises `RecipeError` if `hpz_size` does not divide more ranks than that.
        """
        if world_size <= self.hpz_size:
            return 1
        if world_size % self.hpz_size:
            raise RecipeError(
                f"parallelism.hpz_size: {self.hpz_size} does not divide the {world_size} ranks of the run; set it to "
                f"the number of ranks on each node, or to 1"
            )
        return self.hpz_size


class Checkpoint(Block):
    """When and where to save, and what to keep."""

    _later_keys: ClassVar[tuple[str, ...]] = ("tail",)
    default_every_s: ClassVar[float] = 600.0

    every: Interval | None = Field(None, description="how often to save; default: every 10 minutes; always at the end")
    keep: int = Field(2, ge=1, description="number of newest checkpoints kept, besides the best one by `selection`")
    keep_every: Interval | None = Field(None, description="checkpoints at multiples of this are kept permanently")
    tail: Interval | None = Duration(steps=50)
    """if no other checkpoint falls into the last stretch of this length, one is saved at its start and kept, so that
    `vitscale verify` can recompute the steps that lead to the result; null: none"""
    dir: str | None = None
    """a folder or URL with one subfolder per run, named after it; default: in the run directory"""
    background: bool = Field(True, description="write files while training continues, from a copy in host memory")
    max_failures: int = Field(2, ge=0, description="consecutive failed saves tolerated before the run ends")


class Ema(Block):
    """Exponential moving average of the weights, used by evaluation and export (Polyak and Juditsky, Table 4).

    The t-th update moves the average by 1 - d towards the fp32 weights; d is `decay`, and with `warmup` at most (1 + t)
    / (10 + t). It starts from the run's initial weights.
    """

    decay: float = Field(0.9999, gt=0, lt=1, description="share of the average kept at each update")
    warmup: bool = Field(True, description="use a lower decay at the beginning")


class Average(Block):
    """An average of the weights by name, with a share that changes with the step; or a copy made now and then.

    Each update moves it by 1 - d towards the fp32 weights. It starts from the run's initial weights, after `init`.
    """

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,30}$")]
    """ema is the one that evaluation, export and objectives with a teacher use"""
    decay: float | None = Field(None, ge=0, le=1, description="d, the share of the average kept at each update")
    to: float | None = Field(None, ge=0, le=1, description="d at the end of its change; default: as decay")
    over: Interval | None = None
    """length of the change of d, from the first step on; default: the whole run"""
    shape: Literal["linear", "cosine"] = "cosine"
    """shape of the change of d; cosine begins and ends slowly"""
    warmup: bool = Field(False, description="d is at most (1 + t) / (10 + t) at update t")
    every: Interval | None = None
    """instead of decay: every so often the average becomes a copy, and stays as it is in between"""
    # `from` is a Python keyword, hence the alias.
    start: Annotated[Duration, Field(alias="from")] = Duration(steps=0)
    """with every: when the first copy is made"""
    of: str | None = Field(None, description="the average before this one that it is made of; default: the weights")

    def _contradictions(self) -> Iterator[str]:
        if (self.decay is None) == (self.every is None):
            yield f"{self.name}: give one of decay and every"
        for key, owner in {"to": "decay", "over": "to", "shape": "to", "warmup": "decay", "start": "every"}.items():
            if not has_default(self, key) and getattr(self, owner) is None:
                yield f"{self.name}: {'from' if key == 'start' else key} belongs to {owner}"


def _complaint(check: Callable[[], None]) -> Iterator[str]:
    """Yield the message of a check that raises ValueError."""
    try:
        check()
    except ValueError as error:
        yield str(error)


class Recipe(Block):
    """One run."""

    _reports_all: ClassVar[bool] = True
    _later_keys: ClassVar[tuple[str, ...]] = ("averages",)

    model: ModelBlock = Field(description="the architecture, by name or by its dimensions")
    data: Data
    batch: Batch
    objective: Annotated[
        Annotated[
            SerializeAsAny[Classification | Contrastive | Dino | Distillation | IJEPA | LeJEPA | MaskedPatches | MAE],
            Field(discriminator="kind"),
        ],
        by_kind(Objective, "objective"),
        BeforeValidator(with_kind),
    ] = Classification()
    """what is learned"""
    init: Init | None = None
    optimizer: Annotated[AnyOptimizer, by_kind(Optimizer, "optimizer", "name")]
    schedule: Schedule
    precision: Literal["auto", "bf16", "fp32", "fp8"] = "auto"
    """auto: bf16 if the device computes in it, else fp32, chosen once when the run begins; fp8: as bf16, with the
    blocks' dense layers in float8 during training; needs torchao"""
    parallelism: Parallelism = Parallelism()
    evaluation: Evaluation = Evaluation()
    selection: Selection | None = None
    checkpoint: Checkpoint = Checkpoint()
    ema: Ema | None = None
    averages: list[Average] = Field([], max_length=_MOST_AVERAGES)
    """averages of the weights on schedules; ema above is short for one of that name. A later one may be made of an
    earlier one"""
    anomalies: Anomalies = Anomalies()
    check: Check = Check()
    logging: Logging = Logging()
    profile: Profile = Profile()
    seed: int = Field(0, ge=0, lt=2**63, description="determines initial weights, order, crops, flips and dropout")
    deepspeed: dict[str, Any] = Field({})
    """additions to the DeepSpeed configuration derived from the recipe"""

    def _contradictions(self) -> Iterator[str]:
        return self.contradictions()

    def contradictions(self, broken: Collection[str] = ()) -> Iterator[str]:
        """Yield a line for each contradiction between fields; checks that need a `broken` field are left out."""

        def known(*fields: str) -> bool:
            return not any(field in broken for field in fields)

        if known("model", "data"):
            size = self.data.image_size
            for line in _complaint(lambda: self.model.check_image_size(size)):
                yield f"data.image_size {size}: {line}"
            for view in self.data.views:
                for line in _complaint(lambda side=view.size or size: self.model.check_image_size(side)):  # type: ignore[misc]
                    yield f"data.views: {view.name} of {view.size or size} pixels: {line}"
        if known("data", "batch") and self.data.repeats > self.batch.global_size:
            yield f"data.repeats {self.data.repeats}: batch.global {self.batch.global_size} has not as many views"
        if known("model", "optimizer") and self.optimizer.layer_decay is not None and self.model.num_blocks == 0:
            yield (
                f"optimizer.layer_decay counts Transformer blocks, and a {self.model.title} has none; "
                f"give its stages a lr_factor in optimizer.groups"
            )
        if known("model", "precision") and self.precision == "fp8" and self.model.num_blocks == 0:
            yield f"precision: fp8 is for the dense layers of Transformer blocks, and a {self.model.title} has none"
        if known("precision", "parallelism"):
            if self.precision == "fp8" and self.parallelism.zero_stage == 3:
                yield "precision: fp8 needs parallelism.zero_stage 0, 1 or 2"
            if self.precision == "fp32" and self.parallelism.reduce_dtype == "bf16":
                yield "parallelism.reduce_dtype: bf16 belongs to precision: bf16, and precision is fp32"
        if (
            known("parallelism", "optimizer")
            and self.parallelism.offload != "none"
            and self.optimizer.needs_whole_tensors
        ):
            yield (
                f"parallelism.offload keeps the state of adamw and sgd on the host, and this is {self.optimizer.name}, "
                f"which needs whole tensors; leave it at none, and use a higher zero_stage"
            )
        evaluated = [key for key in ("every", "at_start") if known("evaluation") and getattr(self.evaluation, key)]
        if evaluated and not self.evaluation.measures:
            yield f"evaluation.{evaluated[0]} is set, and none of evaluation.validation, .fewshot, .knn and .evaluators"
        if known("evaluation", "objective") and self.evaluation.validation and not self.objective.has_classes:
            yield (
                f"evaluation.validation measures classes, and objective.kind: {self.objective.kind} has none; use "
                f"evaluation.fewshot or .knn"
            )
        if known("selection", "evaluation") and self.selection is not None:
            yield from self._check_selection(self.selection)
        init = self.init if known("init", "model") else None
        if init is not None and not init.continues and init.head != "initial" and self.model.head_bias is not None:
            yield f"model.head_bias belongs to init.head: initial, and that is {init.head}"
        if known("schedule", "optimizer"):
            yield from self.schedule.check_optimizer(self.optimizer)
        if known("data", "objective") and self.data.views and not self.objective.compares_views:
            yield (
                f"data.views: objective.kind: {self.objective.kind} looks at one view of each image; leave views out, "
                f"or use objective.kind: contrastive. data.repeats has several views learned from one by one"
            )
        if known("ema", "averages"):
            yield from self._check_averages()
        if known("ema", "averages", "objective", "parallelism") and self.objective.prepares == "average":
            if not any(average.name == "ema" for average in self.all_averages):
                yield (
                    f"objective.kind: {self.objective.kind} learns from the average of the weights, and there is none; "
                    f"set for example averages: [{{name: ema, decay: 0.996, to: 1.0}}]"
                )
            if self.parallelism.offload != "none":
                yield (
                    f"parallelism.offload: {self.parallelism.offload} keeps the average on the host, from where "
                    f"objective.kind: {self.objective.kind} would fetch it at every step; use a higher zero_stage"
                )
            names = [average.name for average in self.all_averages]
            if missing := next((name for name in self.objective.besides if name not in names), None):
                yield (
                    f"averages: the objective learns from one called {missing}, and there is none; set for example "
                    f"averages: [{{name: ema, decay: 0.999}}, {{name: {missing}, every: {{steps: 10000}}, of: ema}}]"
                )
        if not broken:  # which fields the check looks at depends on the objective
            yield from _complaint(lambda: self.objective.check(self.context))

    def _check_averages(self) -> Iterator[str]:
        names = [average.name for average in self.all_averages]
        if twice := next((name for number, name in enumerate(names) if name in names[:number]), None):
            short = "; ema is short for an average of that name" if twice == "ema" and self.ema is not None else ""
            yield f"averages: two are called {twice}{short}"
        for number, average in enumerate(self.all_averages):
            if average.of is not None and average.of not in names[:number]:
                before = ", ".join(names[:number]) or "none"
                yield f"averages: {average.name} is made of {average.of}, and those before it are: {before}"

    def _check_selection(self, selection: Selection) -> Iterator[str]:
        offered = [f"validation/{metric}" for metric in ("top1", "top5", "loss") if self.evaluation.validation]
        if self.evaluation.fewshot is not None:
            tasks, shots = self.evaluation.fewshot.tasks, self.evaluation.fewshot.shots
            offered += [f"fewshot/{task.name}/{count}shot" for task in tasks for count in shots]
        if self.evaluation.knn is not None:
            offered += [f"knn/{count}nn" for count in self.evaluation.knn.k]
        for evaluator in self.evaluation.evaluators:
            offered += [f"{evaluator.name}/{metric}" for metric in evaluator.metrics()]
        if selection.metric not in offered:
            yield f"selection.metric {selection.metric!r} is not evaluated; offered: {offered or 'none'}"
        if self.evaluation.every is None:
            yield "selection needs evaluation.every"

    @property
    def context(self) -> Context:
        """What the objective's block may look at."""
        return Context(self.model, self.data, self.batch, self.evaluation)

    @property
    def all_averages(self) -> tuple[Average, ...]:
        """The averages of the weights in the order in which they move; `ema` is the first, if it is set."""
        short = [] if self.ema is None else [Average(name="ema", decay=self.ema.decay, warmup=self.ema.warmup)]
        return (*short, *self.averages)

    @property
    def first_step(self) -> int:
        """The number of updates that a branch's trunk did before it; 0 for other runs."""
        return self.init.step or 0 if self.init is not None and self.init.continues else 0

    def split(self, world_size: int) -> tuple[int, int]:
        """As `Batch.split`. Also raises `RecipeError` if it separates images that the objective mixes."""
        micro, accumulation = self.batch.split(world_size)
        together = self.objective.together
        if micro % together == 0:
            return micro, accumulation
        possible = self.micro_batches(world_size)
        near = max((size for size in possible if size <= micro), default=min(possible, default=None))
        if near is not None and self.batch.micro_max == "auto":
            return near, self.batch.global_size // world_size // near
        remedy = (
            f"set batch.micro_max to {near}"
            if near is not None
            else f"use a batch.global that is a multiple of {together} x {world_size}, or another number of ranks"
        )
        raise RecipeError(
            f"batch.global {self.batch.global_size} on {world_size} ranks makes micro-batches of {micro}, which part "
            f"images that the objective computes together, {together} at a time; {remedy}"
        )

    def micro_batches(self, world_size: int) -> list[int]:
        """All divisors of a rank's part of the global batch that separate no images that the objective mixes."""
        per_rank, together = self.batch.global_size // world_size, self.objective.together
        return [size for size in range(together, per_rank + 1, together) if per_rank % size == 0]

    def axes(self, name: str, shape: Shape) -> Shape:
        """A parameter's shape as the optimizer sees it: for Adafactor `by_head` with all axes apart."""
        if not self.optimizer.sees_heads:
            return shape
        return self.objective.axes(name, shape) if self.objective.owns(name) else self.model.axes(name, shape)

    def kept(self, name: str, shape: Shape) -> Kept:
        """What the optimizer keeps of a parameter besides its value: kind, as in checkpoints -> shape."""
        axes = self.axes(name, shape)
        return {kind: shape if each == axes else each for kind, each in self.optimizer.kept(name, axes).items()}

    def dump(self) -> dict[str, Any]:
        """The whole recipe as plain data, including defaults, with the keys of its YAML."""
        return self.model_dump(mode="json", by_alias=True)

    def describe_border(self) -> str | None:
        """Describe the border of the images that the model does not see; None if it sees everything."""
        return self.model.describe_border(self.data.image_size)

    def measured_on(self, metric: str) -> tuple[str, EvalCrop] | tuple[None, None]:
        """The dataset that a metric belongs to, and the crop; (None, None) for another package's evaluator."""
        validation, fewshot = self.evaluation.validation, self.evaluation.fewshot
        if metric.startswith("validation/") and validation is not None:
            return validation, self.data.eval_crop
        if metric.startswith("knn/") and self.evaluation.knn is not None:
            return self.evaluation.knn.test, self.evaluation.knn.crop
        for evaluator in self.evaluation.evaluators:
            if metric.startswith(f"{evaluator.name}/") and (splits := evaluator.splits()) is not None:
                return splits[1:]
        for task in fewshot.tasks if fewshot is not None else ():
            if fewshot is not None and metric.startswith(f"fewshot/{task.name}/"):
                return task.test, fewshot.crop
        return None, None

    def dataset_path(self, dataset: str) -> str:
        """The path or URL of the dataset `NAME[/SPLIT] | PATH | URL`: see `datasets.find_dataset`."""
        return find_dataset(dataset, self.data.root)
