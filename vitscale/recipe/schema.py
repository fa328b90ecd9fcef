"""The schema of a recipe: typed, strict, frozen. Every field says what it means."""

import itertools
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, model_validator

from vitscale.block import Block, Contradictions
from vitscale.errors import RecipeError
from vitscale.extensions import by_kind
from vitscale.families import ModelBlock
from vitscale.recipe.datasets import find_dataset
from vitscale.recipe.distillation import Distillation
from vitscale.recipe.evaluators import Evaluator
from vitscale.recipe.image_operations import AnyOperation, ImageOperation
from vitscale.recipe.masked_patches import MaskedPatches
from vitscale.recipe.normalise import Normalise
from vitscale.recipe.objectives import Classification, Objective, with_kind
from vitscale.recipe.optimizers import WHOLE_TENSOR_OPTIMIZERS, Optimizer
from vitscale.storage import is_url

CACHE_VARIABLE = "VITSCALE_CACHE"


class Duration(Block):
    """A length of training in exactly one unit: `{steps: n}`, `{epochs: x}` or `{examples: n}`."""

    steps: int | None = Field(None, ge=0, lt=2**53, description="updates of the weights")
    epochs: float | None = Field(None, ge=0, lt=1e9, description="passes over the training data")
    examples: int | None = Field(None, ge=0, lt=2**53, description="training images")

    @model_validator(mode="after")
    def _one_unit(self) -> "Duration":
        if sum(value is not None for value in (self.steps, self.epochs, self.examples)) != 1:
            raise ValueError("give exactly one of steps, epochs, examples, e.g. {epochs: 7}")
        return self

    def describe(self) -> str:
        """In words, for messages."""
        return ", ".join(f"{value:g} {unit}" for unit, value in self if value is not None)

    def to_steps(self, train_samples: int, global_batch: int) -> int:
        """Steps of `global_batch` samples; an epoch has train_samples // global_batch."""
        if self.steps is not None:
            return self.steps
        if self.examples is not None:
            return self.examples // global_batch
        assert self.epochs is not None
        return int(self.epochs * (train_samples // global_batch))


def _is_above_zero(duration: Duration) -> Duration:
    if not any(value for _, value in duration if value is not None):
        raise ValueError(f"{duration.describe()}: expected more than 0")
    return duration


Interval = Annotated[Duration, AfterValidator(_is_above_zero)]
"""A duration above zero."""


class Crop(Block):
    """Random crop for training.

    `inception` is the paper's: part of the area, aspect ratio width / height, both [low, high]. `resize` is BiT's:
    the picture becomes a square, of which a square with `fraction` of its sides is cut (128 / 160 for small pictures).
    """

    kind: Literal["inception", "resize"] = Field("inception", description="which of the two")
    area: list[float] = Field([0.05, 1.0], description="of inception: lowest and highest part of the picture's area")
    aspect: list[float] = Field([3 / 4, 4 / 3], description="of inception: lowest and highest width / height")
    fraction: float = Field(480 / 512, gt=0, le=1, description="of resize: side of the crop / side of the square")

    @model_validator(mode="after")
    def _ranges(self) -> "Crop":
        found = []
        for name, (bounds, ceiling) in {"area": (self.area, 1.0), "aspect": (self.aspect, float("inf"))}.items():
            if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1] <= ceiling:
                limit = " <= 1" if ceiling == 1.0 else ""
                found.append(f"{name} must be [low, high] with 0 < low <= high{limit}, not {bounds}")
        for key, owner in (("area", "inception"), ("aspect", "inception"), ("fraction", "resize")):
            # A dumped recipe sets every field, so that a default is no sign of intent.
            if getattr(self, key) != type(self).model_fields[key].default and self.kind != owner:
                found.append(f"{key} belongs to kind: {owner}, and kind is {self.kind}")
        if found:
            raise Contradictions(found)
        return self


class EvalCrop(Block):
    """What evaluation sees: the central `fraction` of the short side (`central`), or of each side (`square`)."""

    kind: Literal["central", "square"] = Field("central", description="which of the two")
    fraction: float = Field(224 / 256, gt=0, le=1, description="part of the side or sides that is seen")
    resize: Literal["area", "tf_bilinear", "pil_bilinear", "pil_bicubic"] = Field(
        "area",
        description="how that becomes image_size: by the mean over areas; between neighbours without antialiasing, as "
        "TensorFlow and the authors' code do; or as Pillow does, antialiased. All but area decode at full size",
    )


class Cache(Block):
    """Where shards of datasets at a URL are kept on each machine, and what else is kept of data between runs."""

    dir: str | None = Field(
        None, description=f"a folder on each machine; default: ${CACHE_VARIABLE} or ~/.cache/vitscale"
    )
    limit_gb: float = Field(
        100.0, gt=0, le=1e9, description="gigabytes (10**9) that the shards of all runs on a machine may take"
    )

    def folder(self) -> Path:
        """The folder on this machine, absolute; it need not be there. Raises `RecipeError`."""
        place = self.dir or os.environ.get(CACHE_VARIABLE)
        try:
            if place:
                return Path(place).expanduser().absolute()
            return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "vitscale"
        except RuntimeError as error:  # a container's user need not have a home
            raise RecipeError(f"data.cache.dir: {error} Set a folder with --set data.cache.dir=DIR") from None

    @model_validator(mode="after")
    def _on_this_machine(self) -> "Cache":
        if self.dir is not None and is_url(self.dir):
            raise ValueError(f"dir {self.dir!r}: expected a folder of each machine, no URL")
        return self


class Data(Block):
    """The training data and how it is read."""

    train: str = Field(description="a dataset: NAME or NAME/SPLIT under data.root, a path, or a URL")
    root: str | None = Field(
        None,
        description="the folder or URL that holds the datasets; default: datasets.yaml or $VITSCALE_DATA_ROOT says",
    )
    image_size: int = Field(224, ge=1, le=8192, description="side in pixels of what the model sees")
    crop: Crop = Crop()
    flip: float = Field(0.5, ge=0, le=1, description="probability of a horizontal flip")
    repeats: int = Field(
        1,
        ge=1,
        le=1024,
        description="views of each sample in a global batch, which then has as many times fewer samples (repeated "
        "augmentation); epochs go on counting images",
    )
    operations: list[
        Annotated[
            Annotated[SerializeAsAny[AnyOperation], Field(discriminator="kind")],
            by_kind(ImageOperation, "data.operations.N"),
        ]
    ] = Field(
        [],
        description="what happens to training images behind crop and flip, in this order: first what the loader does "
        "(ours on uint8 pixels), then on the device other packages' operations on uint8 pixels, then all on floats",
    )
    normalise: Normalise = Normalise()
    eval_crop: EvalCrop = EvalCrop()
    threads: int | None = Field(
        None,
        ge=1,
        le=256,
        description="threads of a rank that decode; default: 2, and beside a GPU the rank's part of the cores less "
        "one, at most 16",
    )
    prefetch: int = Field(2, ge=1, le=64, description="batches decoded ahead")
    dct_scaling: bool = Field(
        False, description="decode at 1/2, 1/4 or 1/8 where that leaves image_size; faster, other pixels"
    )
    verify_shards: bool = Field(True, description="compare each shard with its digest when a machine first opens it")
    check_rate: float = Field(1.0, ge=0, le=1, description="share of images whose checksum is compared on each read")
    bad_samples: Literal["error", "substitute", "mask"] = Field(
        "error", description="a damaged image ends the run, is replaced by another of its shard, or weighs nothing"
    )
    stall_s: float = Field(300.0, gt=0, description="seconds after which a read that has not returned ends the run")
    cache: Cache = Cache()

    @model_validator(mode="after")
    def _uint8_first(self) -> "Data":
        places = ("in the loader", "on the device's uint8 pixels", "on floats")
        for operation, next_one in itertools.pairwise(self.operations):
            if operation.place > next_one.place:
                raise ValueError(
                    f"operations: {next_one.kind} works {places[next_one.place]}, and {operation.kind} before it "
                    f"{places[operation.place]}; put it before all of those"
                )
        return self


class Batch(Block):
    """The global batch is the experiment; micro-batch and accumulation follow from it and the world size."""

    # `global` is a word of Python's, hence the alias.
    global_size: Annotated[
        int, Field(ge=1, le=2**31, alias="global", description="images of one update, over all ranks")
    ]
    micro_max: int = Field(128, ge=1, description="largest micro-batch a rank computes at once")

    def split(self, world_size: int) -> tuple[int, int]:
        """(micro-batch, accumulation steps) of each rank; their product times the world is the global batch."""
        per_rank, rest = divmod(self.global_size, world_size)
        if rest:
            raise RecipeError(
                f"batch.global {self.global_size} does not divide by the {world_size} ranks of this launch; "
                f"use a world size that divides it"
            )
        micro = max(size for size in range(1, min(per_rank, self.micro_max) + 1) if per_rank % size == 0)
        return micro, per_rank // micro


class Init(Block):
    """The weights that a run begins with, in place of random ones; or, with `continue`, all of another run's state.

    They are read once, when the run begins: one that is resumed reads its own checkpoints, and no longer needs them.
    """

    # `from` is a word of Python's, hence the alias.
    source: Annotated[
        str,
        Field(
            min_length=1,
            alias="from",
            description="a run's directory (its newest checkpoint), the folder of one checkpoint, or weights in any "
            "format that `vitscale export` reads; the average of the weights where the run keeps one",
        ),
    ]
    head: Literal["zero", "keep", "initial"] = Field(
        "zero",
        description="the output layer: weights and bias zero, as the paper fine-tunes; kept, for the same classes; or "
        "as without init. The first and the last leave pre_logits out where model.head: linear has no place for it",
    )
    positions: Literal["resample", "keep"] = Field(
        "resample",
        description="position embeddings of another resolution are interpolated (section 3.2), or an error",
    )
    step: int | None = Field(None, ge=1, lt=2**53, description="the checkpoint of a run; default: its newest")
    # `continue` is a word of Python's, too.
    continues: Annotated[
        bool,
        Field(
            alias="continue",
            description="a branch: the run goes on after `step` of the other one, its trunk, with its optimizer, "
            "averages and position in the data; only the schedule, and what is free when a run is resumed, may differ; "
            "data.train may be a view of the trunk's",
        ),
    ] = False

    @model_validator(mode="after")
    def _on_this_machine(self) -> "Init":
        if is_url(self.source):
            raise ValueError(f"from {self.source!r}: expected a path; fetch the weights first")
        if self.continues and self.step is None:
            raise ValueError("continue: true needs step, the one of the other run that this run goes on after")
        for key in ("head", "positions"):
            # A dumped recipe sets every field, so that a default is no sign of intent.
            if self.continues and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is of runs that begin at step 0; with continue: true everything is taken")
        return self


class Course(Block):
    """A figure of the optimizer that changes with the step: from the optimizer's own value to another one."""

    to: float = Field(ge=0, description="the value that it reaches, and keeps")
    over: Interval | None = Field(None, description="how long it takes, from the first step on; default: the whole run")
    shape: Literal["linear", "cosine"] = Field("cosine", description="cosine begins and ends slowly")


_OWNERS = {
    "end_lr": ("linear",),
    "boundaries": ("stairs",),
    "factor": ("stairs",),
    "cooldown": ("wsd", "rsqrt"),
    "cooldown_shape": ("wsd",),
    "timescale": ("rsqrt",),
    "cycle": ("restarts",),
    "cycle_factor": ("restarts",),
    "restart_factor": ("restarts",),
}
"""Field of a schedule -> the kinds of decay that it belongs to."""
_NEEDED = {"stairs": "boundaries", "wsd": "cooldown", "restarts": "cycle"}
"""Kind of decay -> the field that it cannot do without."""


class Schedule(Block):
    """How long to train, and the learning rate over the steps, as in the authors' code."""

    duration: Interval = Field(description="how long to train")
    warmup: Duration = Field(Duration(steps=0), description="the learning rate rises from 0 to optimizer.lr")
    decay: Literal["linear", "cosine", "stairs", "constant", "wsd", "rsqrt", "restarts"] = Field(
        "linear",
        description="from the end of the warmup: to end_lr, to 0, by factor at each of boundaries, or not at all; wsd: "
        "not at all until the cooldown (warmup, stable, decay); rsqrt: by 1 / sqrt(1 + t / timescale) after t steps, "
        "as big_vision's; restarts: to 0 by a cosine, and again from the top after each cycle (SGDR)",
    )
    end_lr: float = Field(1e-5, ge=0, description="where decay: linear ends; no effect on the others")
    boundaries: list[Duration] = Field([], description="where decay: stairs multiplies the rate by factor")
    factor: float = Field(0.1, gt=0, lt=1, description="of decay: stairs; no effect on the others")
    cooldown: Duration = Field(
        Duration(steps=0), description="of decay: wsd and rsqrt: at the end of the run, the rate falls to 0"
    )
    cooldown_shape: Literal["linear", "1-sqrt"] = Field(
        "linear",
        description="of decay: wsd: after a part x of the cooldown, the rate is multiplied by 1 - x or by 1 - sqrt(x)",
    )
    timescale: Interval = Field(Duration(steps=10_000), description="of decay: rsqrt")
    cycle: Interval | None = Field(None, description="of decay: restarts: from the end of the warmup to the first one")
    cycle_factor: float = Field(
        1.0, ge=1, le=1e6, description="of decay: restarts: each cycle is longer than the one before by this factor"
    )
    restart_factor: float = Field(
        1.0, gt=0, le=1, description="of decay: restarts: each begins at the last one's rate times this"
    )
    weight_decay: Course | None = Field(
        None, description="changes optimizer.weight_decay, and that of its groups by the same factor"
    )
    momentum: Course | None = Field(None, description="changes optimizer.momentum, or the first of optimizer.betas")

    @model_validator(mode="after")
    def _of_one_kind(self) -> "Schedule":
        found = []
        for key, owners in _OWNERS.items():
            # A dumped recipe sets every field, so that a default is no sign of intent.
            is_set = getattr(self, key) != type(self).model_fields[key].default
            if is_set and self.decay not in owners:
                found.append(f"{key} belongs to decay: {' or '.join(owners)}, and decay is {self.decay}")
            if not is_set and _NEEDED.get(self.decay) == key:
                found.append(f"decay: {self.decay} needs {key}")
        if self.momentum is not None and not 0 < self.momentum.to < 1:
            found.append(f"momentum.to {self.momentum.to:g}: expected a number above 0 and below 1")
        if found:
            raise Contradictions(found)
        return self

    def check_optimizer(self, optimizer: Optimizer) -> Iterator[str]:
        """Lines on what is to change and is not there."""
        if self.weight_decay is not None and optimizer.weight_decay == 0:
            yield "schedule.weight_decay changes optimizer.weight_decay by a factor, and that is 0"
        if self.momentum is not None and optimizer.first_momentum == 0:
            yield f"schedule.momentum: optimizer {optimizer.name} has none at the beginning"


class Parallelism(Block):
    """How the run is spread over devices; nothing here changes what is computed, but for rounding."""

    zero_stage: int = Field(
        1, ge=0, le=3, description="what ranks share out: 1 optimizer state, 2 gradients too, 3 weights too; 0 nothing"
    )
    activation_checkpointing: int = Field(
        0, ge=0, le=2**31, description="recompute every k-th block's activations in the backward pass; 0: keep all"
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field("fp32", description="in which gradients are summed over the ranks")
    offload: Literal["none", "optimizer"] = Field("none", description="optimizer: keep its state in host memory")
    compile: bool = Field(False, description="compile each block by torch.compile; evaluation stays as it is")
    overlap: bool = Field(
        False, description="send gradients and weights while computing, in stages 1 and 2 half as much of gradients"
    )

    @model_validator(mode="after")
    def _possible(self) -> "Parallelism":
        if self.overlap and (self.zero_stage == 0 or self.offload != "none"):
            raise ValueError("overlap: true needs zero_stage 1, 2 or 3, and offload: none")
        # One at most: of stages 0 and 3.
        if self.offload == "optimizer" and self.zero_stage == 0:
            raise ValueError("offload: optimizer needs zero_stage 1, 2 or 3")
        if self.compile and self.zero_stage == 3:
            raise ValueError("compile: true needs zero_stage 0, 1 or 2: stage 3 gathers weights within a block")
        return self


class FewShotTask(Block):
    """One data set of the few-shot evaluation."""

    name: str = Field(min_length=1, description="what metrics call it")
    train: str = Field(description="a dataset, as data.train")
    test: str = Field(description="a dataset, as data.train")


class FewShot(Block):
    """Closed-form few-shot evaluation on the representation (section 4.1)."""

    tasks: list[FewShotTask] = Field(min_length=1, description="the data sets")
    shots: list[Annotated[int, Field(ge=1)]] = Field(
        [1, 5, 10, 25], min_length=1, description="training images a class"
    )
    seeds: int = Field(3, ge=1, description="draws of training samples that are averaged")
    l2: Annotated[float, Field(gt=0)] | Literal["shared"] = Field(
        2.0**10,
        description="weight of the ridge penalty; shared: the paper's way, one a shot for all tasks by its mean rank "
        "on them",
    )
    crop: EvalCrop = EvalCrop(kind="square")

    @model_validator(mode="after")
    def _names(self) -> "FewShot":
        names = [task.name for task in self.tasks]
        if len(set(names)) != len(names):
            raise ValueError(f"two tasks have one name: {names}")
        return self


class Inspect(Block):
    """Figures of what the model does inside, drawn into the trackers: attention distance and entropy, norms of tokens,
    filters.
    """

    every: Interval = Field(description="how often")
    images: str = Field(description="a dataset, as data.train: the model sees its first images")
    count: int = Field(128, ge=1, le=10_000, description="images, rounded up to whole batches of all ranks")


class Evaluation(Block):
    """What is measured during training, and when; always at the end as well."""

    every: Interval | None = Field(None, description="default: at the end only")
    validation: str | None = Field(None, description="a dataset, as data.train: top-1, top-5 and loss")
    fewshot: FewShot | None = None
    evaluators: list[Annotated[SerializeAsAny[Evaluator], by_kind(Evaluator, "evaluation.evaluators.N")]] = Field(
        [], description="evaluators of other packages"
    )
    batch: int = Field(64, ge=1, description="images a rank forwards at once")
    overlap: Literal["refuse", "allow"] = Field(
        "refuse", description="evaluated samples that are among the training samples: an error, or told"
    )
    inspect: Inspect | None = None


class Selection(Block):
    """Keep the best checkpoint by a metric; with `patience`, stop after so many evaluations without a better one."""

    metric: str = Field("validation/top1", description="as metrics.jsonl has it, without eval/")
    mode: Literal["max", "min"] = Field("max", description="whether high or low is good")
    patience: int | None = Field(None, ge=1, description="evaluations without a better one that end the run")


class Checkpoint(Block):
    """When and where to save, and what to keep."""

    default_every_s: ClassVar[float] = 600.0

    every: Interval | None = Field(None, description="default: every 10 minutes; at the end in any case")
    keep: int = Field(2, ge=1, description="newest checkpoints kept, and besides the best one by `selection`")
    keep_every: Interval | None = Field(None, description="checkpoints of these steps are kept for good")
    dir: str | None = Field(
        None, description="a folder or URL, below which each run has one of its name; default: in the run directory"
    )
    background: bool = Field(True, description="training goes on while files are written, from a copy in host memory")
    max_failures: int = Field(2, ge=0, description="saves in a row that may fail before the run ends")


class Ema(Block):
    """Exponential moving average of the weights, which evaluation and export then use (Polyak and Juditsky, Table 4).

    After the t-th update the average moves by 1 - d towards the fp32 weights; d is `decay`, and with `warmup` at most
    (1 + t) / (10 + t). It begins with the weights that the run begins with.
    """

    decay: float = Field(0.9999, gt=0, lt=1, description="part of the average that an update keeps")
    warmup: bool = Field(True, description="less of it at the beginning")


Policy = Literal["stop", "skip", "rewind"]
"""What becomes of a batch that must not be trained on.

`stop` ends the run; `skip` leaves the batch out, and the next one takes its step; `rewind` goes back to the last
checkpoint and leaves out all batches since then.
"""


class Spike(Block):
    """A loss above the median of the last `window` by `factor` times their median absolute deviation x 1.4826.

    The deviation counts as a thousandth of the median at least.
    """

    policy: Policy = Field("stop", description="what becomes of its batch")
    window: int = Field(100, ge=5, le=10_000, description="steps that it is compared with")
    factor: float = Field(10.0, gt=0, description="deviations above the median")


class Anomalies(Block):
    """What becomes of a step with a loss or gradient that is not finite, and of one whose loss leaps."""

    non_finite: Policy = Field(
        "stop",
        description="stop ends the run; skip leaves the batch out; rewind goes back to the last checkpoint and leaves "
        "out all batches since then",
    )
    spike: Spike | None = None
    limit: int = Field(10, ge=1, description="times that the run may skip or rewind before it ends")


class Check(Block):
    """Looking for devices that compute wrongly and ranks that hang."""

    replicas_every: int | None = Field(
        1000, ge=1, description="steps between comparisons of the ranks' weights; zero_stage 3 has no replicas"
    )
    recompute_every: int | None = Field(
        None, ge=1, description="steps between micro-batches that all ranks compute, whose bits are compared"
    )
    audit_every: int | None = Field(
        1000,
        ge=1,
        description="steps between audits, which see that the gradient that is applied is that of the batch, and that "
        "weights and optimizer state follow from it",
    )
    audit: Literal["stop", "warn"] = Field(
        "stop", description="what an audit does that finds something wrong: end the run (exit code 75), or say it"
    )
    step_timeout_s: float = Field(
        600.0, gt=0, le=86400, description="seconds without progress after which a rank ends the run"
    )


Tracker = Literal["tensorboard", "wandb", "mlflow", "comet_ml", "trackio", "swanlab", "aim", "clearml"]


class Logging(Block):
    """What is written while training, and who else gets it."""

    most_s: ClassVar[float] = 30.0

    every: int = Field(
        50,
        ge=1,
        description="steps between lines of metrics.jsonl; also a line after 30 s without one, at the first step of a "
        "process, and at every step that is evaluated or saved",
    )
    trackers: list[Tracker] = Field(
        ["tensorboard"], description="what else gets the figures; each needs its package, and its own set-up"
    )
    batch_digest: bool = Field(False, description="a checksum over every pixel of each global batch")

    @model_validator(mode="before")
    @classmethod
    def _older_form(cls, content: Any) -> Any:
        """`tensorboard: true` or `false`, as recipes said before there were other trackers."""
        if not isinstance(content, dict) or not isinstance(content.get("tensorboard"), bool):
            return content
        trackers = content.get("trackers", cls.model_fields["trackers"].default)
        if isinstance(trackers, list):
            others = [name for name in trackers if name != "tensorboard"]
            trackers = ["tensorboard", *others] if content["tensorboard"] else others
        return {key: value for key, value in content.items() if key != "tensorboard"} | {"trackers": trackers}

    @model_validator(mode="after")
    def _each_once(self) -> "Logging":
        if len(set(self.trackers)) != len(self.trackers):
            raise ValueError(f"trackers: {self.trackers} has one twice")
        return self


class Profile(Block):
    """Where the time of some steps goes: a trace and a table in the run directory."""

    steps: int = Field(0, ge=0, le=100, description="how many, from the fourth step of a process on; 0: none")


def _complaint(check: Callable[[], None]) -> Iterator[str]:
    """The line of a check that raises ValueError."""
    try:
        check()
    except ValueError as error:
        yield str(error)


class Recipe(Block):
    """One run."""

    model: ModelBlock = Field(description="the architecture, by name or by its dimensions")
    data: Data
    batch: Batch
    objective: Annotated[
        Annotated[
            SerializeAsAny[Classification | Distillation | MaskedPatches],
            Field(discriminator="kind", description="what is learned"),
        ],
        by_kind(Objective, "objective"),
        BeforeValidator(with_kind),
    ] = Classification()
    init: Init | None = None
    optimizer: Annotated[Optimizer, Field(discriminator="name", description="how weights are updated")]
    schedule: Schedule
    precision: Literal["auto", "bf16", "fp32", "fp8"] = Field(
        "auto",
        description="auto: bf16 where the device computes it, else fp32, and a run keeps what it began with; "
        "fp8: as bf16, but for the blocks' dense layers while they train; needs torchao",
    )
    parallelism: Parallelism = Parallelism()
    evaluation: Evaluation = Evaluation()
    selection: Selection | None = None
    checkpoint: Checkpoint = Checkpoint()
    ema: Ema | None = None
    anomalies: Anomalies = Anomalies()
    check: Check = Check()
    logging: Logging = Logging()
    profile: Profile = Profile()
    seed: int = Field(0, ge=0, lt=2**63, description="of initial weights, order, crops, flips and dropout")
    deepspeed: dict[str, Any] = Field(
        {}, description="additions to the DeepSpeed configuration that follows from the recipe"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        if found := list(self.contradictions()):
            raise Contradictions(found)
        return self

    def contradictions(self, broken: Collection[str] = ()) -> Iterator[str]:
        """Lines on what does not go together, but for what depends on `broken` fields, which need not be there."""

        def known(*fields: str) -> bool:
            return not any(field in broken for field in fields)

        if known("model", "data"):
            size = self.data.image_size
            for line in _complaint(lambda: self.model.check_image_size(size)):
                yield f"data.image_size {size}: {line}"
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
            and isinstance(self.optimizer, WHOLE_TENSOR_OPTIMIZERS)
        ):
            yield (
                f"parallelism.offload keeps the state of adamw and sgd on the host, and this is {self.optimizer.name}, "
                f"which needs whole tensors; leave it at none, and use a higher zero_stage"
            )
        if known("evaluation"):
            measured = self.evaluation.validation or self.evaluation.fewshot or self.evaluation.evaluators
            if self.evaluation.every is not None and not measured:
                yield "evaluation.every is set, and none of evaluation.validation, .fewshot and .evaluators"
        if known("evaluation", "logging") and self.evaluation.inspect is not None and not self.logging.trackers:
            yield "evaluation.inspect draws into trackers, and logging.trackers is empty"
        if known("selection", "evaluation") and self.selection is not None:
            yield from self._check_selection(self.selection)
        init = self.init if known("init", "model") else None
        if init is not None and not init.continues and init.head != "initial" and self.model.head_bias is not None:
            yield f"model.head_bias belongs to init.head: initial, and that is {init.head}"
        if known("schedule", "optimizer"):
            yield from self.schedule.check_optimizer(self.optimizer)
        if not broken:  # which fields it looks at is the objective's own business
            yield from _complaint(lambda: self.objective.check(self))

    def _check_selection(self, selection: Selection) -> Iterator[str]:
        offered = [f"validation/{metric}" for metric in ("top1", "top5", "loss") if self.evaluation.validation]
        if self.evaluation.fewshot is not None:
            tasks, shots = self.evaluation.fewshot.tasks, self.evaluation.fewshot.shots
            offered += [f"fewshot/{task.name}/{count}shot" for task in tasks for count in shots]
        for evaluator in self.evaluation.evaluators:
            offered += [f"{evaluator.name}/{metric}" for metric in evaluator.metrics()]
        if selection.metric not in offered:
            yield f"selection.metric {selection.metric!r} is not evaluated; offered: {offered or 'none'}"
        if self.evaluation.every is None:
            yield "selection needs evaluation.every"

    @property
    def first_step(self) -> int:
        """The updates that a branch's trunk has done before it; 0 of other runs."""
        return self.init.step or 0 if self.init is not None and self.init.continues else 0

    def split(self, world_size: int) -> tuple[int, int]:
        """As `Batch.split`. Raises `RecipeError`, too, where it parts images that the objective mixes."""
        micro, accumulation = self.batch.split(world_size)
        together, per_rank = self.objective.together, micro * accumulation
        if micro % together == 0:
            return micro, accumulation
        possible = [size for size in range(together, per_rank + 1, together) if per_rank % size == 0]
        near = max((size for size in possible if size <= micro), default=min(possible, default=None))
        remedy = (
            f"set batch.micro_max to {near}"
            if near is not None
            else f"use a batch.global that is a multiple of {together} x {world_size}, or another number of ranks"
        )
        raise RecipeError(
            f"batch.global {self.batch.global_size} on {world_size} ranks makes micro-batches of {micro}, which part "
            f"images that the objective computes together, {together} at a time; {remedy}"
        )

    def dump(self) -> dict[str, Any]:
        """Plain data of the whole recipe, defaults included, by the names that stand in YAML."""
        return self.model_dump(mode="json", by_alias=True)

    def describe_border(self) -> str | None:
        """What of its images the model does not see, in words; None where it sees all."""
        return self.model.describe_border(self.data.image_size)

    def dataset_path(self, dataset: str) -> str:
        """Path or URL of the dataset `NAME[/SPLIT] | PATH | URL`: see `datasets.find_dataset`."""
        return find_dataset(dataset, self.data.root)
