"""What goes wrong in a rank, and what a test does by hand: each a context manager around a trainer that then runs.

DeepSpeed, the loader, the files and the processes stay real. Jobs name a fault with its arguments by `partial`, which
travels to the ranks' processes.
"""

import json
import math
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitscale.data.batch import Batch
from vitscale.ground.errors import DataError
from vitscale.runs.checkpoint.directory import LocalDirectory


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute has another value in here."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


class Wrapped:
    """A learner, or another part of a trainer, of which some methods are replaced."""

    def __init__(self, real: Any, **methods: Callable[..., Any]) -> None:
        self._real, self._methods = real, methods

    def __getattr__(self, name: str) -> Any:
        return self._methods[name] if name in self._methods else getattr(self._real, name)


@dataclass
class _Poisoned:
    """A cross-entropy that makes something of the loss of one row of a rank's batch."""

    real: Any
    how: str | float | None = None
    row: int = 0
    rows_seen: int = field(default=0)

    def check_labels(self, labels: Tensor, num_classes: int) -> None:
        self.real.check_labels(labels, num_classes)

    def per_sample_loss(self, logits: Tensor, labels: Tensor, *mixed: Any) -> Tensor:
        losses = self.real.per_sample_loss(logits, labels, *mixed)
        is_bad = torch.arange(self.rows_seen, self.rows_seen + len(losses)) == self.row
        self.rows_seen += len(losses)
        match self.how:
            case None:
                return losses
            case "gradient":  # of no finite value, though the loss is
                losses.register_hook(lambda gradient: torch.where(is_bad, math.nan, gradient))
                return losses
            case "value":  # of a finite gradient, though the loss is not
                return losses + torch.where(is_bad, math.inf, 0.0)
            case factor:
                return torch.where(is_bad, losses * float(factor), losses)


@contextmanager
def poison(trainer: Any, positions: dict[int, str | float], rank: int = 1, row: int = 5) -> Iterator[None]:
    """At these positions of the order, the loss of one row of one rank's batch is multiplied by a number, or by "nan"
    or "inf"; or it has a "gradient" that is not finite; or itself is not, and its gradient is: "value".
    """
    learner, objective = trainer.learner, trainer.learner.objective
    poisoned = _Poisoned(objective.cross_entropy, row=row)

    def update(batch: Batch, *arguments: Any) -> Any:
        poisoned.rows_seen = 0
        poisoned.how = positions.get(batch.position) if trainer.world.rank == rank else None
        return learner.update(batch, *arguments)

    with replaced(objective, "cross_entropy", poisoned), replaced(trainer, "learner", Wrapped(learner, update=update)):
        yield


@contextmanager
def leave_out(trainer: Any, ranges: list[tuple[int, int]]) -> Iterator[None]:
    """The run is told beforehand what not to train on."""
    for start, stop in ranges:
        trainer.state = replace(trainer.state, anomalies=trainer.state.anomalies.leaving_out(start, stop))
    yield


@contextmanager
def log_samples(trainer: Any, file: str) -> Iterator[None]:
    """Each rank keeps a log of its own: a line of the step and its uids for each update that was made."""
    take_step = trainer.take_step

    def logged(batch: Batch, *arguments: Any) -> Any:
        before, uids = trainer.state.step, batch.uids.tolist()
        done = take_step(batch, *arguments)
        if trainer.state.step > before:
            with Path(f"{file}-{trainer.world.rank}").open("a") as log:
                log.write(json.dumps([before + 1, uids]) + "\n")
        return done

    with replaced(trainer, "take_step", logged):
        yield


@contextmanager
def flip_bit(trainer: Any, step: int, rank: int) -> Iterator[None]:
    """After the update of `step`, the lowest bit of one weight of one rank is another."""
    learner = trainer.learner

    def update(batch: Batch, before: int, *arguments: Any) -> Any:
        done = learner.update(batch, before, *arguments)
        if before + 1 == step and trainer.world.rank == rank:
            weights = list(learner.engine.module.parameters())[2].detach().view(-1)
            bits = weights.view(torch.int16 if weights.element_size() == 2 else torch.int32)
            bits[7] ^= 1
        return done

    with replaced(trainer, "learner", Wrapped(learner, update=update)):
        yield


@contextmanager
def wrong_layer(trainer: Any, step: int, rank: int, layer: str) -> Iterator[None]:
    """From the update of `step` on, one number that one layer of one rank computes is off by one bit."""

    def make_wrong(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        if trainer.state.step < step or trainer.world.rank != rank:
            return output
        wrong = torch.zeros_like(output)
        largest = output.detach().abs().argmax()  # whose last bit is not lost when others are added
        value = output.detach().view(-1)[largest]
        wrong.view(-1)[largest] = torch.nextafter(value, torch.zeros_like(value)) - value
        return output + wrong

    hook = trainer.learner.objective.backbone.get_submodule(layer).register_forward_hook(make_wrong)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def fail_writing(trainer: Any, steps: list[int], rank: int = 1) -> Iterator[None]:
    """In saves of these steps the kernel lets one rank write 4 kB into a file and no more."""
    real_write = LocalDirectory.write

    def write(directory: LocalDirectory, step: int, name: str, fragments: list) -> Any:
        if step not in steps or trainer.world.rank != rank:
            return real_write(directory, step, name, fragments)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            return real_write(directory, step, name, fragments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with replaced(LocalDirectory, "write", write):
        yield


@contextmanager
def write_slowly(trainer: Any, seconds: float) -> Iterator[None]:
    """Each rank takes so much longer to write its part of a checkpoint."""
    real_write = LocalDirectory.write

    def write(directory: LocalDirectory, step: int, name: str, fragments: list) -> Any:
        time.sleep(seconds)
        return real_write(directory, step, name, fragments)

    with replaced(LocalDirectory, "write", write):
        yield


@contextmanager
def before_step(trainer: Any, step: int, act: Callable[[Path], None]) -> Iterator[None]:
    """Rank 0 does something to the run directory when `step` updates are done and nothing is being written."""
    learner = trainer.learner

    def update(batch: Batch, before: int, *arguments: Any) -> Any:
        if before == step:
            trainer.saves.saver.wait(60.0)
            torch.distributed.barrier()
            if trainer.world.is_main:
                act(trainer.run_dir)
            torch.distributed.barrier()
        return learner.update(batch, before, *arguments)

    with replaced(trainer, "learner", Wrapped(learner, update=update)):
        yield


def delete(run_dir: Path) -> None:
    """The whole run directory."""
    shutil.rmtree(run_dir)


def put_a_file_in_its_place(run_dir: Path) -> None:
    """Where the checkpoints are to be is a file; they stay beside it."""
    (run_dir / "checkpoints").rename(run_dir / "checkpoints-before")
    (run_dir / "checkpoints").write_text("")


def take_the_file_away(run_dir: Path) -> None:
    """As it was before."""
    (run_dir / "checkpoints").unlink()
    (run_dir / "checkpoints-before").rename(run_dir / "checkpoints")


@contextmanager
def note_set_up(trainer: Any) -> Iterator[None]:
    """What only the process can tell is left beside the run: its groups' time-outs, what would be compiled."""
    import deepspeed
    from torch.distributed import distributed_c10d

    yield
    backends = [group._get_backend(torch.device("cpu")) for group in distributed_c10d._world.pg_map]
    found = {
        "timeouts": [backend.options._timeout.total_seconds() for backend in backends],
        "shm_op": deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"],
    }
    (trainer.run_dir.parent / f"set-up-{trainer.world.rank}.json").write_text(json.dumps(found))


@contextmanager
def save_at_once(trainer: Any) -> Iterator[None]:
    """What was loaded is saved again before anything else, over the same step."""
    trainer.save()
    yield


@contextmanager
def end_in_evaluation(trainer: Any, step: int) -> Iterator[None]:
    """The evaluation of one step ends the run on all ranks, after its first batch."""
    learner = trainer.learner

    def predict(images: Tensor) -> Any:
        outputs = learner.predict(images)
        if trainer.state.step == step:
            raise DataError("the evaluation is cut short").on_all_ranks()
        return outputs

    with replaced(trainer, "learner", Wrapped(learner, predict=predict)):
        yield


@contextmanager
def signal_in_evaluation(trainer: Any, step: int) -> Iterator[None]:
    """Rank 1 receives SIGTERM in the evaluation of one step."""
    from vitscale.ground.interruption import Interruption

    learner = trainer.learner

    def predict(images: Tensor) -> Any:
        outputs = learner.predict(images)
        if trainer.state.step == step and trainer.world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            while not interruption.pending:
                time.sleep(0.01)
        return outputs

    wrapped = Wrapped(learner, predict=predict)
    with Interruption() as interruption, replaced(trainer, "interruption", interruption):
        trainer.learner = wrapped
        yield
