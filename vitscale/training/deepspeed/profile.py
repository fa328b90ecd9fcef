"""Where the time of a step goes: seconds a step, waiting for data and of this rank's own work; a trace of some steps.

The trainer marks the parts of a step by `part`; torch's own profiler sees what is computed in each.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function

from vitscale.data.batch import Batch
from vitscale.ground.files.durable import write_text

# Steps of a process that are left out: in them it compiles, allocates, and learns which parameters are used when.
_STEPS_BEFORE = 3
_PREFIX = "vitscale: "
_MOST_OPERATIONS = 20


def part(name: str) -> contextlib.AbstractContextManager[Any]:
    """A context that marks one part of a step. Costs microseconds while nobody profiles."""
    return record_function(f"{_PREFIX}{name}")


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


class StepProfiler:
    """Profiles `steps` steps of this process, or none, and writes what it found into the run directory."""

    def __init__(self, steps: int, run_dir: Path, device: torch.device, say: Callable[[str], None]) -> None:
        self._steps, self._folder, self._device, self._say = steps, run_dir / "profile", device, say
        self._seen = 0
        self._began = 0.0
        self._profiler: Any = None

    def step_ends(self, step: int) -> None:
        """Note that `step` updates are done; begins or writes the profile when its time has come."""
        self._seen += 1
        if self._steps and self._seen == _STEPS_BEFORE:
            self._begin()
        elif self._profiler is not None and self._seen == _STEPS_BEFORE + self._steps:
            self._say(self._write(step))

    def end(self) -> None:
        """Say so if the process had too few steps for a profile."""
        before, needed = _STEPS_BEFORE, _STEPS_BEFORE + self._steps
        if self._steps and self._seen < needed:
            self._say(f"no profile: {self._steps} steps after the first {before} need {needed}, not {self._seen}")

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()
        self._began = time.perf_counter()

    def _write(self, step: int) -> str:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - self._began) / self._steps
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        name = f"step-{step:08d}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            aside = self._folder / f".{name}.pt.trace.json.gz"
            profiler.export_chrome_trace(str(aside))
            aside.rename(self._folder / f"{name}.pt.trace.json.gz")
            write_text(self._folder / f"{name}.txt", self._table(profiler.key_averages(), step, seconds))
        except OSError as error:
            return f"WARNING: the profile cannot be written: {error}"
        return f"profiled {self._steps} steps: {self._folder / name}.txt, and a trace beside it"

    def _table(self, averages: Any, step: int, seconds: float) -> str:
        """Seconds of a step by its parts, and by the operations that took most, with their share."""
        kind = "cuda" if self._device.type == "cuda" else "cpu"

        def line(name: str, taken: float, calls: float) -> str:
            return f"{taken:10.5f} {taken / seconds:7.1%} {calls:9,.1f}  {name}\n"

        def own(one: Any) -> float:
            return (one.self_device_time_total if kind == "cuda" else one.self_cpu_time_total) / 1e6 / self._steps

        # On CUDA the parts appear once more, as spans of its stream, and operations beside their kernels.
        on_host = [one for one in averages if one.device_type == DeviceType.CPU]
        on_device = [one for one in averages if one.device_type != DeviceType.CPU and not one.is_user_annotation]
        parts = [one for one in on_host if one.key.startswith(_PREFIX)]
        rows = [(one.key.removeprefix(_PREFIX), one.cpu_time_total / 1e6 / self._steps, one.count) for one in parts]
        rows.append(("everything else", seconds - sum(taken for _, taken, _ in rows), self._steps))
        text = f"Steps {step - self._steps + 1:,} to {step:,} of rank 0: {seconds:.5f} s each, with the profiler on\n"
        text += "\n   seconds   share     calls  part of a step, as the host sees it\n"
        text += "".join(line(name, taken, calls / self._steps) for name, taken, calls in rows)

        computed = on_device if kind == "cuda" else on_host
        operations = sorted((one for one in computed if not one.key.startswith(_PREFIX)), key=own, reverse=True)
        shown, left = operations[:_MOST_OPERATIONS], operations[_MOST_OPERATIONS:]
        text += f"\n   seconds   share     calls  operation, itself, on the {kind}\n"
        text += "".join(line(one.key, own(one), one.count / self._steps) for one in shown)
        return text + line("all others", sum(map(own, left)), sum(one.count for one in left) / self._steps)
