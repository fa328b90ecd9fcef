"""Where the time of a step goes: a trace of some steps, and a table of them.

The trainer names the parts of a step by `part`; what torch computes in each of them, its own profiler sees.
"""

import contextlib
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from vitscale.durable import write_text

PROFILE_DIR = "profile"
_STEPS_BEFORE = 3  # of a process, in which it compiles, allocates, and learns which parameters are used when
_PREFIX = "vitscale: "
_REST = "the rest"
_MOST_OPERATIONS = 20


def part(name: str) -> contextlib.AbstractContextManager[Any]:
    """What is done in here is one part of a step. Costs microseconds while nobody profiles."""
    return record_function(f"{_PREFIX}{name}")


class StepProfiler:
    """Profiles some steps of this process, a few after it began, and writes what it found into the run directory.

    Args:
        steps: how many; 0 for none.
    """

    def __init__(self, steps: int, run_dir: Path, device: torch.device) -> None:
        self._steps, self._folder, self._device = steps, run_dir / PROFILE_DIR, device
        self._seen = 0
        self._began = 0.0
        self._profiler: Any = None

    def step_ends(self, step: int) -> Path | None:
        """`step` updates are done. Returns where the table is, once it is written. Raises OSError."""
        if self._steps == 0:
            return None
        self._seen += 1
        if self._seen == _STEPS_BEFORE:
            self._begin()
        elif self._seen == _STEPS_BEFORE + self._steps:
            return self._end(step)
        return None

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()
        self._began = time.perf_counter()

    def _end(self, step: int) -> Path:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - self._began) / self._steps
        self._profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"step-{step:08d}"
        aside = self._folder / f".{name}.pt.trace.json.gz"
        self._profiler.export_chrome_trace(str(aside))
        aside.rename(self._folder / f"{name}.pt.trace.json.gz")
        table = self._folder / f"{name}.txt"
        write_text(table, self._table(step, seconds))
        self._profiler = None
        return table

    def _table(self, step: int, seconds: float) -> str:
        """Seconds of a step by its parts, and by the operations that took most, with their share."""
        averages = self._profiler.key_averages()
        is_cuda = self._device.type == "cuda"

        def line(name: str, taken: float, calls: float) -> str:
            return f"{taken:10.5f} {taken / seconds:7.1%} {calls:9,.1f}  {name}\n"

        parts = [one for one in averages if one.key.startswith(_PREFIX)]
        rows = [(one.key.removeprefix(_PREFIX), one.cpu_time_total / 1e6 / self._steps, one.count) for one in parts]
        rows.append((_REST, seconds - sum(taken for _, taken, _ in rows), self._steps))
        text = f"Steps {step - self._steps + 1:,} to {step:,} of this rank: {seconds:.5f} s each, while profiled\n\n"
        text += "   seconds   share     calls  part of a step" + (", as the host sees it" if is_cuda else "") + "\n"
        text += "".join(line(name, taken, calls / self._steps) for name, taken, calls in rows)

        def own(one: Any) -> float:
            return (one.self_device_time_total if is_cuda else one.self_cpu_time_total) / 1e6 / self._steps

        operations = sorted((one for one in averages if not one.key.startswith(_PREFIX)), key=own, reverse=True)
        text += f"\n   seconds   share     calls  operation, itself, on the {self._device.type}\n"
        text += "".join(line(one.key, own(one), one.count / self._steps) for one in operations[:_MOST_OPERATIONS])
        left = operations[_MOST_OPERATIONS:]
        return text + line("all others", sum(map(own, left)), sum(one.count for one in left) / self._steps)
