"""Saving while training goes on: the state is copied to host memory, and a thread writes the copy."""

import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from vitscale.checkpoint.format import Fragment
from vitscale.checkpoint.store import CheckpointStore
from vitscale.errors import VitscaleError
from vitscale.runs.index import Index


class Outcome(NamedTuple):
    """What became of a save.

    Attributes:
        step: of the checkpoint.
        error: what went wrong, in words; None if nothing did.
    """

    step: int
    error: str | None


class BackgroundSaver:
    """Saves checkpoints of a run, one after the other, in a thread of its own. A context manager, which closes it.

    What fails is an outcome, no exception. All ranks call `save` and `amend` in the same order; then their outcomes are
    the same, though some ranks may have them earlier than others.

    Args:
        store: whose `gather` nobody else uses: it is called from the thread.
        keep, keep_every: of `CheckpointStore.retain`, which follows each save that went well.
        background: False: `save` and `amend` themselves do the work, without a copy.
    """

    def __init__(
        self, store: CheckpointStore, *, keep: int, keep_every: int | None = None, background: bool = True
    ) -> None:
        self._store, self._keep, self._keep_every = store, keep, keep_every
        self._buffer: Tensor | None = None
        self._failed_step: int | None = None  # of the last save
        self._outcomes: list[Outcome] = []
        self._unfinished = 0
        self._changed = threading.Condition()  # guards the two above
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if background:
            # A daemon: a process may end though a file system or a network never answers.
            self._thread = threading.Thread(target=self._work, name="checkpoint", daemon=True)
            self._thread.start()

    def save(self, index: Index, fragments: list[Fragment], best: int | None) -> float:
        """Save what this rank owns, and then keep `best` and as many others as was said.

        The tensors may change as soon as this returns. It waits for a save that is still going on, whose memory it
        needs.

        Returns:
            Seconds for which the caller had to wait.
        """
        begin = time.monotonic()
        if self._thread is not None:
            self.wait()
            fragments = self._copy(fragments)

        def work() -> None:
            self._failed_step = index.step
            self._store.save(index, fragments)
            self._failed_step = None
            self._store.retain(self._keep, best, self._keep_every)

        self._do(lambda: self._attempt(index.step, work, is_save=True))
        return time.monotonic() - begin

    def amend(self, step: int, selection: dict[str, Any]) -> None:
        """Replace the state of the selection in the index of a checkpoint, after what was queued before.

        There is an outcome of it only where it fails. It does nothing where the save of this step has failed.
        """

        def work() -> None:
            if step != self._failed_step:
                self._store.amend(step, selection)

        self._do(lambda: self._attempt(step, work, is_save=False))

    def finished(self) -> int:
        """How many outcomes are to be had on this rank: the ranks may agree on the fewest."""
        with self._changed:
            return len(self._outcomes)

    def outcomes(self, count: int | None = None) -> list[Outcome]:
        """The next `count` outcomes, or all that there are, in the order of the calls; each is given once."""
        with self._changed:
            given = self._outcomes[:count]
            del self._outcomes[: len(given)]
        return given

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is queued or under way; False if that is not so after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._unfinished == 0, timeout_s)

    def close(self) -> None:
        """Finish what is queued and end the thread. Nothing can be saved afterwards; outcomes can still be had."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:  # else other ranks may be gone, and the thread would wait for them
            self.close()

    def _do(self, attempt: Callable[[], None]) -> None:
        with self._changed:
            self._unfinished += 1
        if self._thread is None:
            attempt()
        else:
            self._queue.put(attempt)

    def _work(self) -> None:
        while (attempt := self._queue.get()) is not None:
            attempt()

    def _attempt(self, step: int, work: Callable[[], None], *, is_save: bool) -> None:
        error = None
        try:
            work()
        except KeyboardInterrupt:  # in the caller's thread
            raise
        except BaseException as caught:
            error = str(caught) if isinstance(caught, VitscaleError) else f"{type(caught).__name__}: {caught}"
        finally:
            with self._changed:
                if is_save or error is not None:
                    self._outcomes.append(Outcome(step, error))
                self._unfinished -= 1
                self._changed.notify_all()

    def _copy(self, fragments: list[Fragment]) -> list[Fragment]:
        """The fragments in host memory, which is the same each time; pinned if they are on a device."""
        tensors = [tensor.detach() for fragment in fragments for tensor in fragment.tensors.values()]
        sizes = [tensor.numel() for tensor in tensors]
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        if self._buffer is None or len(self._buffer) != sum(sizes):
            self._buffer = None  # its memory is given back before more is taken
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
