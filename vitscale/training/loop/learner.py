"""The objective under DeepSpeed: updates, predictions, and what checkpoints hold of them.

This module and those of `training.deepspeed` are all that knows DeepSpeed. The learner keeps no step count: the loop
passes the step in.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import xxhash
from torch import Tensor

from vitscale.data.batch import Batch
from vitscale.data.image_operations import TrainingInput, to_model_input
from vitscale.ground.errors import DataError
from vitscale.ground.ranks import Sums, gather, gather_numbers, sum_integers
from vitscale.models import Outputs, compile_blocks, initial_value, weight_dtype
from vitscale.objectives import Losses, Objective, build_objective
from vitscale.objectives.objective import Agreed, Plan, Rows, all_rows, dealt, joined
from vitscale.runs.checkpoint import EMA, CheckpointReader, Fragment, average_kind
from vitscale.training.beginning.initial_weights import check_same_teacher, initial_source, load_teacher
from vitscale.training.beginning.run_plan import RunPlan
from vitscale.training.deepspeed.config import is_plain
from vitscale.training.deepspeed.distributed import World
from vitscale.training.deepspeed.engine import Engine, WeightAverage
from vitscale.training.deepspeed.fragments import in_pieces
from vitscale.training.deepspeed.lean_deepspeed import deepspeed
from vitscale.training.deepspeed.profile import OwnWork, part
from vitscale.training.optimizers.schedule import Rates
from vitscale.training.watching import replicas
from vitscale.training.watching.anomalies import Anomaly, Kind, Suspects
from vitscale.training.watching.audit import Audit, Discrepancy


@dataclass
class Update:
    """The figures of one step's update."""

    samples: int  # that count, over all ranks
    rate: float  # the learning rate
    loss_sum: Tensor  # of this rank's losses, () on its device
    shown: dict[str, Tensor] = field(default_factory=dict)  # other figures of the objective, summed in the same way
    losses: list[Tensor] = field(default_factory=list)  # this rank's, by sample, one tensor for each micro-batch
    mean_loss: float | None = None  # over the global batch, if there is a limit
    gradient_norm: float = math.nan  # of the global mean gradient, before clipping
    anomaly: Kind | None = None  # why the update was not made; None if it was
    findings: list[Discrepancy] = field(default_factory=list)  # of an audit, on all ranks

    def add(self, losses: Losses, counts: Tensor | None) -> Tensor:
        """Add a micro-batch's losses. Returns them, with 0 for those that do not count (where `counts` is False)."""
        per_sample = losses.per_sample if counts is None else torch.where(counts, losses.per_sample, 0.0)
        self.losses.append(per_sample.detach())
        self.loss_sum.add_(per_sample.detach().sum())
        for name, values in losses.shown.items():
            total = (values if counts is None else torch.where(counts, values, 0.0)).sum()
            self.shown[name] = self.shown[name] + total if name in self.shown else total
        return per_sample


class Learner:
    """Trains an objective under DeepSpeed. All ranks make one and call its methods together."""

    def __init__(self, plan: RunPlan, world: World, say: Callable[[str], None]) -> None:
        self._recipe, self._plan, self._world, self._say = plan.recipe, plan, world, say
        self._dtype = weight_dtype(plan.recipe)
        self.objective = self._make_objective()
        self.engine = Engine(plan.recipe, self.objective, plan.config)
        is_compiled = plan.recipe.parallelism.compiles
        normalise = torch.compile(to_model_input, fullgraph=True, dynamic=False) if is_compiled else to_model_input
        self._to_input = TrainingInput(plan.recipe, normalise)
        self.own_work = OwnWork(world.device)
        # What identifies the weights that it began with, if the recipe has an `init`, and those of its teacher, if any.
        self.began_with: dict[str, Any] | None = None
        self._averages: dict[str, WeightAverage] = {}  # by name
        teacher, self.learns_from = load_teacher(plan.recipe, list(plan.manifest.class_names), world, say)
        if teacher is not None:
            self.objective.learn_from(teacher)

    def _make_objective(self) -> Objective:
        if self._recipe.parallelism.zero_stage == 3:
            # Each parameter is divided among the ranks as it is made: no rank ever holds the whole model.
            with deepspeed.zero.Init(config_dict_or_path=self._plan.config):
                return build_objective(self._recipe, self._plan.num_classes)
        with torch.device("meta"):
            objective = build_objective(self._recipe, self._plan.num_classes)
        objective = objective.to(self._dtype).to_empty(device=self._world.device)
        if self._recipe.precision == "fp8":
            from vitscale.models.float8 import train_in_float8  # only those who ask for it need torchao

            layers = train_in_float8(torch.nn.ModuleList(objective.units()), self._world.device)
            self._say(f"{layers} dense layers train in float8")
        if self._recipe.parallelism.compiles:
            compile_blocks(objective.units(), activation_budget=self._recipe.parallelism.activation_budget)
        return objective

    def load(self, reader: CheckpointReader | None) -> None:
        """Load a checkpoint, or begin with initial weights. Raises `CheckpointError`, and `RecipeError` for `init`."""
        if reader is None:
            shapes, seed = self.engine.shapes, self._recipe.seed
            initial = in_pieces(lambda name: initial_value(self.objective, name, torch.Size(shapes[name]), seed))
            class_names = list(self._plan.manifest.class_names)
            source, self.began_with = initial_source(self._recipe, class_names, initial, self._world, self._say)
            self.engine.load(source, optimizer_steps=0)
        else:
            self.began_with = reader.index.data.get("init")
            check_same_teacher(self.learns_from, reader.index.data.get("teacher"))
            reader.check_shapes(self.engine.shapes)
            self.engine.load(reader.read, optimizer_steps=reader.index.optimizer_steps)
        self._averages = {}  # frees the old averages before new ones are allocated
        for average in self._recipe.all_averages:
            made = WeightAverage(self.engine, None if average.of is None else self._averages[average.of])
            self._averages[average.name] = made
            if reader is not None:
                self.engine.load_average(made.values, reader.read, average_kind(average.name))

    def fragments(self) -> list[Fragment]:
        """What this rank saves; the tensors are views."""
        averages = {average_kind(name): average.values for name, average in self._averages.items()}
        return self.engine.owned(self._world.rank, self._world.size, averages)

    def update(self, batch: Batch, step: int, loss_limit: float | None = None, audited: bool = False) -> Update:
        """Learn from one global batch, unless its gradient is not finite or its loss is above the limit.

        Args:
            step: updates done before.
            loss_limit: the mean loss above which the step is an anomaly; None not to check it.
            audited: whether to check that the update is the one that the batch calls for.

        Raises `DataError` for a batch that cannot be learned from.
        """
        self.objective.check(batch)
        plan = self.objective.plan(batch.keys.numpy(), batch.position)
        engine, rates = self.engine.deepspeed, self._plan.rates(step)
        self.engine.set_rates(rates)
        self.objective.scalars = rates.scalars
        self.objective.choose_stretches(self._recipe.seed, batch.position)
        loss_sum = torch.zeros((), device=self._world.device)
        update = Update(self._valid_samples(batch, step), rates.learning_rate, loss_sum)
        is_whole, leaps = bool(batch.mask.all()), False
        # DeepSpeed averages over ranks and micro-batches: with this factor the gradient is that of the global mean.
        scale = self._world.size * self._plan.accumulation / update.samples
        skipped_before = engine.skipped_steps
        agreed = Agreed(()) if self._recipe.objective.prepares is None else self._agreed(batch, plan, rates)
        # From here on: in the first pass the weights may be those of the average.
        audit = Audit(self.engine, self._recipe, self._world, rates, self.fragments) if audited else None
        plans = dealt((*plan, *agreed.rows), self._plan.accumulation)
        for micro_step, rows in enumerate(self._micro_batches()):
            is_last = micro_step == self._plan.accumulation - 1
            labels, *planned = map(self._to_device, (batch.labels[rows], *plans[micro_step], *agreed.shared))
            self._seed_dropout(step, micro_step, batch, rows)
            with self.own_work.counted(), part("forward"):
                losses = engine(self._views(batch, rows), labels, tuple(planned))
            if audit is not None:
                audit.watch(losses.per_sample)
            per_sample = update.add(losses, None if is_whole else self._to_device(batch.mask[rows]))
            if is_last and loss_limit is not None:
                update.mean_loss = self.mean_loss(update)
                leaps = loss_limit < update.mean_loss < math.inf
            # DeepSpeed drops an update whose gradient is not finite, in every stage, with all that it has accumulated.
            # A loss that is not finite may have a finite gradient: adding zero times the loss to the factor makes it
            # NaN, and no device has to wait.
            with part("backward"):
                engine.backward(per_sample.sum() * (math.nan if leaps else scale + 0.0 * update.loss_sum))
            with part("update"):
                if is_plain(self._recipe) and is_last:
                    update.gradient_norm = self._clip_plain()
                engine.step()
        if not is_plain(self._recipe):
            update.gradient_norm = float(engine.get_global_grad_norm())
        if leaps:
            update.anomaly = "spike"
        elif engine.skipped_steps > skipped_before or not math.isfinite(update.gradient_norm):
            update.anomaly = "non-finite"
        if audit is not None:
            norm, was_made = update.gradient_norm, update.anomaly is None
            update.findings = audit.end(samples=update.samples, gradient_norm=norm, was_made=was_made)
        if update.anomaly is not None:
            self.engine.forget_gradients()
        else:
            for name, average in self._averages.items():
                average.update(rates.averages[name])
        return update

    def _micro_batches(self) -> list[slice]:
        """The rows of each micro-batch of this rank's part of a global batch."""
        size = self._plan.micro_batch
        return [slice(number * size, (number + 1) * size) for number in range(self._plan.accumulation)]

    def _views(self, batch: Batch, rows: slice, kinds: Sequence[int] | None = None) -> tuple[Tensor, ...]:
        """The model's input for some rows, by kind of views: of some kinds, or of all."""
        pixels, keys = ([each[rows] for each in every] for every in (batch.views, batch.view_keys))
        return self._to_input.of_views(pixels, keys, self._world.device, self._dtype, kinds)

    def _agreed(self, batch: Batch, plan: Plan, rates: Rates) -> Agreed:
        """What the objective has to know of the whole global batch, by passes over all of it."""
        settings = self._recipe.objective
        averaging = self._averaging() if settings.prepares == "average" else contextlib.nullcontext()
        with torch.no_grad(), averaging:
            passes = [self._prepared(batch, plan, rates.updates)]
            weights = self._copies(settings.reads)
        for name in settings.besides:
            if name not in rates.unmade:
                with torch.no_grad(), self._averaging(name):
                    passes.append(self._prepared(batch, plan, rates.updates, name))
        sums = Sums(self._world.rank, self._world.size)
        return self.objective.agree(all_rows(passes), self._to_device(batch.labels), sums, weights)

    def _prepared(self, batch: Batch, plan: Plan, step: int, average: str | None = None) -> Rows:
        """What the objective computes in a pass over the whole global batch, by what is in place of the weights."""
        plans, prepared = dealt(plan, self._plan.accumulation), []
        kinds = self.objective.prepared_kinds(len(batch.views))
        with self.engine.first_pass():
            for micro_step, rows in enumerate(self._micro_batches()):
                self._seed_dropout(step, micro_step, batch, rows)  # the same dropout as in the pass that learns
                with self.own_work.counted(), part("forward"):
                    planned = tuple(map(self._to_device, plans[micro_step]))
                    prepared.append(self.engine.deepspeed(self._views(batch, rows, kinds), None, planned, average))
        return joined(prepared)

    def _copies(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Whole copies of parameters as the engine computes with them."""
        known = dict(self.objective.named_weights())
        parameters = [known[name] for name in names]
        with self._whole(parameters):
            return {name: each.clone() for name, each in zip(names, parameters, strict=True)}

    def anomaly(self, update: Update, batch: Batch, step: int) -> Anomaly:
        """The reason why the update after `step` updates was not made, with the samples of all ranks."""
        assert update.anomaly is not None
        here = Suspects(batch.uids.tolist(), torch.cat(update.losses).float().tolist())
        ranks = [Suspects(*of_rank) for of_rank in gather(here)]
        mean, norm = self.mean_loss(update), update.gradient_norm
        return Anomaly(update.anomaly, step + 1, batch.position, mean, update.rate, norm, ranks)

    def mean_loss(self, update: Update) -> float:
        return gather_numbers([update.loss_sum.item()], self._world.device).sum().item() / update.samples

    def _to_device(self, rows: Tensor) -> Tensor:
        return rows.to(self._world.device, non_blocking=True)

    def _valid_samples(self, batch: Batch, step: int) -> int:
        """Samples of the global batch that count: all, unless damaged ones are left out."""
        if self._recipe.data.bad_samples != "mask":
            return self._recipe.batch.global_size
        samples = sum_integers(int(batch.mask.sum()), self._world.device)
        if samples == 0:
            raise DataError(f"step {step + 1}: every sample of the batch is damaged").on_all_ranks()
        return samples

    def _clip_plain(self) -> float:
        """Check and clip the averaged gradients where DeepSpeed does not: stage 0 in fp32. Returns their norm."""
        limit = self._recipe.optimizer.clip_norm or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.objective.parameters(), limit))
        if not math.isfinite(norm):
            self.engine.optimizer.zero_grad(set_to_none=True)  # torch's optimizers leave out what has no gradient
        return norm

    def _seed_dropout(self, step: int, micro_step: int, batch: Batch, rows: slice) -> None:
        """Dropout is a function of (seed, step, rank, micro-step), so that it needs no state in a checkpoint; drop path
        is one of the views' keys, as crops are.
        """
        self.objective.choose_paths([keys[rows] for keys in batch.view_keys], self._world.device)
        if self._recipe.model.draws:
            key = f"{self._recipe.seed}:{step}:{self._world.rank}:{micro_step}"
            torch.manual_seed(xxhash.xxh64_intdigest(key.encode()) >> 1)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context in which `predict` uses the average of the weights, if there is one, and dropout is off."""
        with self._averaging(), self.eager():  # batches of other sizes would each be compiled anew
            yield

    @contextlib.contextmanager
    def _averaging(self, name: str = EMA) -> Iterator[None]:
        """A context in which the average, if there is one, is in place of the weights, and dropout is off."""
        average = self._averages.get(name)
        averaged = contextlib.nullcontext() if average is None else average.in_place_of_weights()
        self.engine.deepspeed.eval()
        try:
            with averaged:
                yield
        finally:
            self.engine.deepspeed.train()

    @torch.no_grad()
    def predict(self, images: Tensor) -> Outputs:
        """Outputs of images uint8 (B, S, S, 3)."""
        return cast(Outputs, self.engine.deepspeed(self._normalised(images)))

    def _normalised(self, images: Tensor) -> Tensor:
        return to_model_input(images, self._world.device, self._dtype, self._recipe.data.normalise)

    def reading(self, modules: Sequence[torch.nn.Module]) -> contextlib.AbstractContextManager[None]:
        """A context in which the parameters of `modules` are whole on every rank."""
        return self._whole([parameter for module in modules for parameter in module.parameters()])

    def _whole(self, parameters: Sequence[torch.nn.Parameter]) -> contextlib.AbstractContextManager[None]:
        if self._recipe.parallelism.zero_stage < 3:
            self.engine.settle_weights()
            return contextlib.nullcontext()
        return cast(contextlib.AbstractContextManager[None], deepspeed.zero.GatheredParameters(parameters))

    def compare_replicas(self, step: int) -> None:
        """Check that all ranks hold the same weights; stage 3 has no replicas. Raises `ReplicaError`."""
        if self._recipe.parallelism.zero_stage < 3:
            self.engine.settle_weights()
            replicas.compare_weights(self.objective, step)

    def compare_computation(self, batch: Batch, step: int) -> None:
        """Check that all ranks compute the same. Raises `ReplicaError`."""
        images, zero = batch.images[: self._plan.micro_batch], self._recipe.parallelism.zero_stage
        with self.eager():  # what is compiled by several processes may differ in its last bits
            replicas.compare_computation(self.engine.deepspeed, images, self._world, self._normalised, step, zero)

    def eager(self) -> contextlib.AbstractContextManager[None]:
        """A context in which blocks run uncompiled."""
        is_compiled = self._recipe.parallelism.compiles
        return torch.compiler.set_stance("force_eager") if is_compiled else contextlib.nullcontext()
