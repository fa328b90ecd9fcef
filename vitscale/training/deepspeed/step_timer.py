"""Times the steps: seconds a step, seconds waiting for data, seconds of this rank's own work."""

import contextlib
import time
from collections.abc import Iterable, Iterator

import torch

from vitscale.data.batch import Batch
from vitscale.training.deepspeed.profile import part


class StepTimer:
    """Seconds a step takes and waits for data, between two lines of metrics; evaluations and checkpoints left out."""

    def __init__(self, step: int) -> None:
        self._start_interval(step)

    def _start_interval(self, step: int) -> None:
        self._step, self._began, self._waited, self._paused = step, time.perf_counter(), 0.0, 0.0

    def timed(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The loader's batches; counts the time waiting for each."""
        batches = iter(loader)
        while True:
            asked = time.perf_counter()
            with part("waiting for data"):
                batch = next(batches, None)
            self._waited += time.perf_counter() - asked
            if batch is None:
                return
            yield batch

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time counts for no step."""
        began = time.perf_counter()
        yield
        self._paused += time.perf_counter() - began

    def per_step(self, step: int) -> tuple[float, float]:
        """(seconds, seconds waited for data) a step since the last call."""
        steps = max(1, step - self._step)
        seconds = (time.perf_counter() - self._began - self._paused) / steps
        waited = self._waited / steps
        self._start_interval(step)
        return seconds, waited


class OwnWork:
    """Measures the seconds of this rank's forward passes, in which it waits for no other rank (except under ZeRO 3).

    A whole step takes all ranks equally long, since they wait for the slowest one when gradients are summed.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """A context in which computing counts."""
        if self._is_cuda:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            yield
            events[1].record()
            self._events.append(events)
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    def take(self) -> float:
        """Seconds since the last call. Waits until the device has done what was counted."""
        for first, last in self._events:
            last.synchronize()
            self._seconds += first.elapsed_time(last) / 1000
        self._events.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds
