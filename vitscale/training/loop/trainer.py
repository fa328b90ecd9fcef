"""The trainer: one recipe, one run directory, from the first step or the last checkpoint to the end.

It is the loop and reads from top to bottom: set-up, checkpoints, loop, anomalies, evaluation, end. Around it, the
learner computes (learner.py), the state says where the run is (state.py), saves are written beside training (saves.py),
and the report prints and records (reporting.py). The step is the only clock: what is due is a function of it
(run_plan.py).
"""

import contextlib
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

from vitscale.data.batch import Batch
from vitscale.data.loader import on_device
from vitscale.evaluation import evaluate
from vitscale.ground.errors import CheckpointError, PeerLostError, PreemptedError, StorageError, VitscaleError
from vitscale.ground.interruption import Interruption
from vitscale.ground.ranks import agreed, write_on_rank_zero
from vitscale.models import Outputs
from vitscale.runs.checkpoint import CheckpointReader
from vitscale.training.beginning.run_plan import RunPlan, open_loader
from vitscale.training.deepspeed import distributed
from vitscale.training.deepspeed.attention import Attention
from vitscale.training.deepspeed.profile import StepProfiler, StepTimer, part
from vitscale.training.loop.learner import Learner, Update
from vitscale.training.loop.reporting import Report
from vitscale.training.loop.resuming import Claim, checkpoint_to_resume, newest_checkpoint, trunk_checkpoint
from vitscale.training.loop.saves import Saves, StepBorder
from vitscale.training.loop.state import RunState, make_index
from vitscale.training.watching import audit
from vitscale.training.watching.preflight import preflight


class Trainer:
    """One run. Construct it on every rank, then `run`. `alive` is called with the updates done and each phase's name.

    Raises `RecipeError`, `DataError`, `CheckpointError`, `NonFiniteError`, `ReplicaError`, `AuditError` or
    `PreemptedError` for what a person can mend.
    """

    def __init__(
        self,
        plan: RunPlan,
        run_dir: Path,
        world: distributed.World,
        alive: Callable[[int, str], None] = lambda step, phase: None,
        interruption: Interruption | None = None,
    ) -> None:
        self.recipe, self.plan, self.run_dir, self.world = plan.recipe, plan, run_dir, world
        self.interruption = interruption
        self._alive = alive
        self.state = RunState()
        self.report = Report(plan, run_dir, world)
        say = self.report.say
        for warning in plan.warnings:
            say(f"WARNING: {warning}")
        self._profiler = StepProfiler(self.recipe.profile.steps if world.is_main else 0, run_dir, world.device, say)
        self.claim = Claim(run_dir, self.recipe)
        for line in preflight(plan, run_dir, world):
            say(line)
        self._attention = Attention(world.device, self.recipe)
        self._begin("making the model")
        self.learner = Learner(plan, world, say)
        self._border = StepBorder(plan, self.report)
        distributed.set_timeout_everywhere(self.recipe.check.step_timeout_s)
        self.saves = Saves(plan, run_dir, world, say, self._forget_best)
        self._values: dict[str, float] = {}  # of the last evaluation
        self._last = plan.total_steps  # of this process
        self._begin("verifying checkpoints")
        reader = checkpoint_to_resume(plan, run_dir, self.saves.store, say)
        self._load(reader)
        if reader is not None:
            say(f"resumed from {reader.folder} at step {self.state.step:,} of {plan.total_steps:,}")

    def _begin(self, phase: str) -> None:
        self._alive(self.state.step, phase)

    # ---- Checkpoints -------------------------------------------------------------------------------------------------

    def _load(self, reader: CheckpointReader | None) -> None:
        """Take the state of a checkpoint; without one, that of a branch's trunk, or begin at step 0."""
        self._begin("loading weights")
        self._compared_step = -1
        self._saved_step = self.saves.newest = 0 if reader is None else reader.index.step
        if reader is None and self.recipe.first_step:
            reader = trunk_checkpoint(self.plan, self.world, self.report.say)
        self.learner.load(reader)
        self.state = RunState() if reader is None else RunState.of(reader.index)
        self.report.logged_step = self.state.step

    def save(self) -> None:
        """Hand a checkpoint of this step over to be written."""
        self._begin("saving")
        self.saves.wait()  # whether the best checkpoint was lost decides which ones are kept
        if self.recipe.check.replicas_every is not None:
            self._compare_replicas()  # what is saved must be right
        index = make_index(self.state, self.plan, self.learner, self.world.size)
        self._renew_run_dir()
        self.saves.begin(index, self.learner.fragments(), best=self.state.selection.best_step)
        self._saved_step = self.state.step
        self._border.saved()

    def _compare_replicas(self) -> None:
        """Check that all ranks hold the same weights, once a step."""
        if self._compared_step != self.state.step:
            self.learner.compare_replicas(self.state.step)
            self._compared_step = self.state.step

    def _renew_run_dir(self) -> None:
        if self.world.is_main and self.claim.renew():
            self.report.go_on_in_new_directory(self.state.step)

    # ---- Loop --------------------------------------------------------------------------------------------------------

    def run(self, stop_at: int | None = None) -> None:
        """Train to the end, or until `stop_at` updates are done; leaves a checkpoint either way.

        Raises `PreemptedError` on all ranks if the run was interrupted, with a checkpoint of that step, and
        `RecipeError` if the ranks were told to stop at different steps.
        """
        self._last = min(agreed(stop_at, "--stop-at") or self.plan.total_steps, self.plan.total_steps)
        past = f" (the run is already beyond step {self._last:,})" if self.state.step > self._last else ""
        self.report.begin_at(self.state.step)
        if self.interruption is not None:
            self.interruption.save_first()
        self._border.begin()
        with self.report.progress(self.state.step), self._attention.preferred():
            try:
                self._train()
                self._finish(past)
            except _Interrupted:
                self._end_early()
            except PeerLostError:
                raise
            except VitscaleError:
                # Earlier saves were right, and the next start continues from them. The other ranks write their parts
                # too, whether or not they know of the error.
                self._begin("ending")
                self.saves.saver.wait(self.recipe.check.step_timeout_s / 2)
                raise
            finally:
                self.report.close()
        self.claim.close()

    def _train(self) -> None:
        step = self.state.step
        if step > 0 and self.plan.due(step, self._last).evaluate and self.state.selection.evaluated != step:
            self._evaluate_and_select()  # the process that took this step ended before it could evaluate
        if step == 0 and self.recipe.evaluation.at_start:
            self.report.evaluation(0, self._evaluate())
        while self.state.step < self._last and not self._is_out_of_patience():
            start, border = self.state.anomalies.skipped.next_stretch(self.state.position)
            stop = start + self._last - self.state.step
            with open_loader(self.plan, self.world, start, min(stop, border or stop)) as loader:
                pace = StepTimer(self.state.step)
                self._begin("waiting for data")
                for batch in pace.timed(on_device(loader, self.world.device)):
                    if not self.take_step(batch, pace):
                        break

    def take_step(self, batch: Batch, pace: StepTimer) -> bool:
        """Learn from a batch and do what is due then. Returns whether to go on with the loader's next batch."""
        began = time.monotonic()
        self._begin("training")
        limit = self.state.anomalies.limit(self.recipe.anomalies)
        audited = self.plan.due(self.state.step + 1, self._last).audit
        update = self.learner.update(batch, self.state.step, limit, audited)
        if update.anomaly == "non-finite" and (other := self._attention.without_cudnn()) is not None:
            # cuDNN's attention has had gradients that were not finite. Nothing was updated: the step is taken again.
            self.report.say(f"WARNING: step {self.state.step + 1:,}: the gradient is not finite; again without cuDNN")
            with other, self.learner.eager():
                update = self.learner.update(batch, self.state.step, limit, audited)
        if update.anomaly is not None:
            self._handle_anomaly(update, batch)
            return False
        if update.findings:  # an audit found the update just made wrong
            if self.recipe.check.audit == "stop":
                raise audit.error(update.findings, self.state.step + 1)
            self.report.say(f"WARNING: {audit.describe(update.findings, self.state.step + 1)}")
        anomalies = self.state.anomalies.after(update.mean_loss, self.recipe.anomalies)
        self.state = replace(self.state.after(batch), anomalies=anomalies)
        step, due = self.state.step, self.plan.due(self.state.step, self._last)
        saves = due.save or self._border.save_is_overdue
        with part("metrics"):
            self.report.advance(step, batch)
            # The records have a line for every step that is saved or evaluated.
            if due.log or self._border.line_is_overdue or saves or due.evaluate:
                self._log(batch, update, pace)
        with pace.paused(), part("checks, saving and evaluation"):
            if due.compare_replicas:
                self._compare_replicas()
            if due.compare_computation:
                self.learner.compare_computation(batch, step)
            if saves:  # before evaluating: whatever is wrong with the test data, the weights are safe
                self.save()
            if due.evaluate:
                self._evaluate_and_select()
                if self._is_out_of_patience():
                    return False
        if self.recipe.profile.steps:
            with pace.paused():
                self._begin("profiling")
                self._profiler.step_ends(step)
        if step < self._last and self._is_interrupted(time.monotonic() - began):
            if self.report.logged_step != step:
                self._log(batch, update, pace)
            raise _Interrupted
        self._begin("waiting for data")
        return True

    def _log(self, batch: Batch, update: Update, pace: StepTimer) -> None:
        self._border.line_is_overdue = False
        if not gc.isenabled():  # on CUDA: see distributed.start
            gc.collect()
        self.report.log(self.state, batch, update, pace, self.learner.own_work.take(), self.saves.stalled_s())

    def _is_interrupted(self, step_s: float = 0.0) -> bool:
        return self._border.is_end(self.interruption is not None and self.interruption.pending, self.saves, step_s)

    # ---- Anomalies ---------------------------------------------------------------------------------------------------

    def _handle_anomaly(self, update: Update, batch: Batch) -> None:
        """Do what the recipe asks for a batch that must not be trained on; all ranks call it together."""
        settings, known = self.recipe.anomalies, self.state.anomalies
        anomaly = self.learner.anomaly(update, batch, self.state.step)
        policy = known.policy(anomaly.kind, settings)
        message = anomaly.describe(policy)
        if self.world.is_main:
            message += anomaly.write(self.run_dir, policy)
        if policy == "stop":
            self._begin("ending")
            with contextlib.suppress(CheckpointError):  # already reported, and not why the run ends
                self.saves.wait()  # what is being written was right
            raise anomaly.error(message, self.saves.newest, known.count, settings.limit).on_all_ranks()
        known = replace(known, count=known.count + 1)
        self.report.say(f"WARNING: {message} ({known.count} of anomalies.limit {settings.limit})")
        self.state = replace(self.state, position=batch.position)
        if policy == "rewind":
            self._rewind()
            known = self.state.anomalies.knowing(known)
        self.state = replace(self.state, anomalies=known.leaving_out(self.state.position, batch.position + 1))

    def _rewind(self) -> None:
        self._begin("writing the checkpoint")
        self.saves.wait()
        self._begin("verifying checkpoints")
        self._load(newest_checkpoint(self.recipe, self.run_dir, self.saves.store, self.report.say))
        self.learner.own_work.take()  # drop the time of steps that are done again
        self.report.begin_at(self.state.step)
        self.report.say(f"went back to step {self.state.step:,}")

    # ---- Evaluation --------------------------------------------------------------------------------------------------

    def _evaluate(self) -> dict[str, float]:
        """Metrics of the weights, or of their average if the recipe has one. Raises `_Interrupted`."""
        if not self.plan.evaluators:
            return {}
        with self.learner.evaluating():
            return evaluate(self.plan.evaluators, self._predict)

    def _predict(self, images: torch.Tensor) -> Outputs:
        self._begin("evaluating")
        if self._is_interrupted():
            raise _Interrupted
        return self.learner.predict(images)

    def _evaluate_and_select(self) -> None:
        """Evaluate this step, and save it if it is the best so far or the run ends here out of patience."""
        step = self.state.step
        self._values = self._evaluate()
        self.report.evaluation(step, self._values)
        selection = self.state.selection.after(self.recipe.selection, step, self._values)
        self.state = replace(self.state, selection=selection)
        if self._saved_step == step:
            self.saves.saver.amend(step, selection.state())
        elif self._is_out_of_patience() or selection.best_step == step:
            self.save()

    def _forget_best(self, step: int) -> None:
        self.state = replace(self.state, selection=self.state.selection.without(step))

    def _is_out_of_patience(self) -> bool:
        return self.state.selection.is_out_of_patience(self.recipe.selection)

    def _end_early(self) -> NoReturn:
        """Leave a checkpoint of this step, and raise the reason why the run ends, or that there is no checkpoint."""
        assert self.interruption is not None
        reason, step = self.interruption.reason, self.state.step
        try:
            if self._saved_step != step:
                self.save()
            self.saves.finish(step)
        except CheckpointError as error:
            # The directory may be available again when the run continues.
            unsaved = StorageError(f"{reason}: ending without a checkpoint of step {step:,}: {error}")
            raise unsaved.on_all_ranks() from None
        where = f"saved at step {step:,} of {self.plan.total_steps:,} in {self.saves.store.root}"
        if step == 0:  # in the evaluation before the first update
            where = "there was no update yet"
        raise PreemptedError(f"{reason}: {where}; repeat the command to continue").on_all_ranks()

    def _finish(self, past: str) -> None:
        """Leave a checkpoint of this step and, if the run is done, the file that says so."""
        self._profiler.end()
        step, stopped_early = self.state.step, self._is_out_of_patience()
        is_done = stopped_early or step == self.plan.total_steps
        if self._saved_step != step:
            self.save()
        if is_done and not self._values:
            self._values = self._evaluate()  # again: the process that took the last step ended before it wrote DONE
        self._begin("writing the checkpoint")
        self.saves.finish(step)
        if not is_done:
            self.report.say(f"stopped at step {step:,}, as --stop-at asks{past}; repeat the command to continue")
            return

        def write_done() -> None:
            self._renew_run_dir()
            self.report.done(self.state, self._values, stopped_early=stopped_early)

        write_on_rank_zero(write_done, self.run_dir)


class _Interrupted(Exception):
    """Raised on all ranks when any rank was asked to end early."""
