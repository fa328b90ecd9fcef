"""Saving while training continues: the state is copied to host memory, and a thread writes the copy."""

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitscale.ground.errors import VitscaleError
from vitscale.runs.checkpoint.format import Fragment
from vitscale.runs.checkpoint.store import CheckpointStore
from vitscale.runs.checkpoint_index import CheckpointIndex


class SaveOutcome(NamedTuple):
    """The result of saving the checkpoint of a step: what went wrong, in words, or None."""

    step: int
    error: str | None


class BackgroundSaver(AbstractContextManager["BackgroundSaver"]):
    """Saves a run's checkpoints one after another in its own thread. A context manager, which closes it.

    A failure becomes an outcome, not an exception. All ranks must call `save` and `amend` in the same order; their
    outcomes are then the same, though some ranks may have them earlier than others.

    Args:
        store: the run's checkpoints; its `gather` is called from the thread, so nothing else may use it.
        keep, keep_every, tail: the arguments of `CheckpointStore.retain`, which follows each successful save.
        background: if False, `save` and `amend` do the work themselves, without a copy.
    """

    first: Callable[[], None] | None = None  # called before each save and amendment, where these are done

    def __init__(
        self,
        store: CheckpointStore,
        *,
        keep: int,
        keep_every: int | None = None,
        tail: int | None = None,
        background: bool = True,
    ) -> None:
        self._store, self._keep, self._keep_every, self._tail = store, keep, keep_every, tail
        self._buffer: Tensor | None = None
        self._failed_step: int | None = None  # the last save's step if it failed
        self._outcomes: list[SaveOutcome] = []
        self._unfinished = 0
        self._changed = threading.Condition()  # guards the two above
        self._queue: queue.SimpleQueue[tuple[int, Callable[[], None], bool] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if background:
            # A daemon, so that the process can end even if a file system or a network never answers.
            self._thread = threading.Thread(target=self._work, name="checkpoint", daemon=True)
            self._thread.start()

    def save(self, index: CheckpointIndex, fragments: list[Fragment], best: int | None) -> float:
        """Save what this rank owns, then delete old checkpoints. Returns the seconds that the caller had to wait.

        The tensors may change as soon as this returns. It first waits for an unfinished save, because it reuses that
        save's memory.
        """
        begin = time.monotonic()
        if self._thread is not None:
            self.wait()
            fragments = self._copy(fragments)

        def work() -> None:
            self._failed_step = index.step
            self._store.save(index, fragments)
            self._failed_step = None
            self._store.retain(self._keep, best, self._keep_every, self._tail)

        self._do(index.step, work, is_save=True)
        return time.monotonic() - begin

    def amend(self, step: int, selection: dict[str, Any]) -> None:
        """Replace the selection's state in a checkpoint's index, after everything queued before.

        It has an outcome only if it fails. It does nothing if the save of this step has failed.
        """

        def work() -> None:
            if step != self._failed_step:
                self._store.amend(step, selection)

        self._do(step, work, is_save=False)

    def finished(self) -> int:
        """The number of outcomes available on this rank; the ranks can agree on the smallest of these numbers."""
        with self._changed:
            return len(self._outcomes)

    def outcomes(self, count: int | None = None) -> list[SaveOutcome]:
        """The next `count` outcomes, or all available ones, in the order of the calls; each is returned once."""
        with self._changed:
            first = self._outcomes[:count]
            del self._outcomes[: len(first)]
        return first

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is queued or in progress; returns False if that takes longer than `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._unfinished == 0, timeout_s)

    def close(self) -> None:
        """Finish what is queued and end the thread. After this nothing can be saved; outcomes can still be read."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # after an error other ranks may be gone, and the thread would wait for them
            self.close()

    def _do(self, step: int, work: Callable[[], None], *, is_save: bool) -> None:
        with self._changed:
            self._unfinished += 1
        if self._thread is None:
            self._attempt(step, work, is_save)
        else:
            self._queue.put((step, work, is_save))

    def _work(self) -> None:
        while (attempt := self._queue.get()) is not None:
            self._attempt(*attempt)

    def _attempt(self, step: int, work: Callable[[], None], is_save: bool) -> None:
        error = None
        try:
            if self.first is not None:
                self.first()
            work()
        except KeyboardInterrupt:  # in the caller's thread
            raise
        except BaseException as caught:
            error = str(caught) if isinstance(caught, VitscaleError) else f"{type(caught).__name__}: {caught}"
        finally:
            with self._changed:
                if is_save or error is not None:
                    self._outcomes.append(SaveOutcome(step, error))
                self._unfinished -= 1
                self._changed.notify_all()

    def _copy(self, fragments: list[Fragment]) -> list[Fragment]:
        """Copy the fragments into a host buffer that every save reuses; it is pinned if they are on a device."""
        tensors = [tensor.detach() for fragment in fragments for tensor in fragment.tensors.values()]
        sizes = [tensor.numel() for tensor in tensors]
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        if self._buffer is None or len(self._buffer) != sum(sizes):
            self._buffer = None  # free the old buffer before allocating a new one
            self._buffer = torch.empty(sum(sizes), dtype=torch.float32, pin_memory=bool(devices))
        copies = self._buffer.split(sizes)
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        for device in devices:
            torch.cuda.synchronize(device)
        rest = iter(copies)
        return [
            Fragment(fragment.name, fragment.start, {kind: next(rest) for kind in fragment.tensors})
            for fragment in fragments
        ]
