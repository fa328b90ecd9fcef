import os
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from processes import children

from data_tools.worker_processes import run_in_processes
from vitscale.ground.errors import DataError, RecipeError


@dataclass(frozen=True)
class Job:
    """A task that meets `fate` at the third image; every time, or until the file `once` exists."""

    number: int
    fate: str = ""
    once: Path | None = None
    refused: dict[int, str] = field(default_factory=dict)
    can_refuse: bool = True

    @property
    def name(self) -> str:
        return f"job {self.number}"

    def describe(self, position: int) -> str:
        return f"image {position}"

    def without(self, position: int, reason: str) -> "Job | None":
        return replace(self, refused=self.refused | {position: reason}) if self.can_refuse else None

    def run(self, progress) -> tuple[int, dict[int, str]]:
        for position in range(5):
            if self.fate and position == 2 and position not in self.refused and not (self.once and self.once.exists()):
                if self.once is not None:
                    self.once.touch()
                FATES[self.fate]()
            progress.advance(rejected=position in self.refused)
        return self.number, self.refused


def fail(error: Exception) -> None:
    raise error


FATES = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda: os._exit(7),
    "stall": lambda: time.sleep(3600),
    "bad data": lambda: fail(DataError("the disk is full")),
    "bug": lambda: fail(ZeroDivisionError("a bug")),
}


def run(*jobs: Job, workers: int = 2, stall_seconds: float = 60.0):
    ticks: list[tuple[int, int]] = []
    results = dict(run_in_processes(jobs, workers, lambda *counts: ticks.append(counts), stall_seconds))
    return results, ticks[-1]


def workers_of(process: int) -> list[int]:
    return [pid for pid in children(process) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_all_tasks_are_done_and_counted():
    results, last = run(*(Job(i) for i in range(7)))
    assert results == {i: {} for i in range(7)} and last == (35, 0)
    assert not workers_of(os.getpid())


def test_a_task_whose_worker_dies_once_is_done_by_another(tmp_path):
    results, last = run(Job(0), *(Job(i, fate, once=tmp_path / fate) for i, fate in ((1, "killed"), (2, "exit"))))
    assert results == {0: {}, 1: {}, 2: {}} and last == (15, 0)


@pytest.mark.parametrize(
    "reasons",
    [{"crash": "killed by SIGSEGV", "killed": "killed by SIGKILL (is the mem"}, {"stall": "without progress for 3 s"}],
)
def test_an_image_that_workers_die_on_is_rejected(reasons):
    jobs = [Job(i, fate) for i, fate in enumerate(reasons, 1)]
    results, last = run(Job(0), *jobs, stall_seconds=3.0)  # a worker imports this file first
    assert results.pop(0) == {} and last == (5 * len(jobs) + 5, len(jobs))
    for rejects, reason in zip(map(results.get, range(1, 9)), reasons.values(), strict=False):
        assert list(rejects) == [2] and reason in rejects[2] and "2 workers died on it" in rejects[2]


def test_a_task_that_cannot_do_without_is_given_up():
    with pytest.raises(DataError, match=r"job 1\b.*\b3 workers\b.*\bimage 2\b.*\b7\b"):
        run(Job(0), Job(1, "exit", can_refuse=False))
    assert not workers_of(os.getpid())


def test_errors_of_tasks_arrive():
    with pytest.raises(DataError, match="the disk is full"):
        run(Job(0), Job(1, "bad data"))
    with pytest.raises(RuntimeError, match=r"(?s)job 1\b.*ZeroDivisionError"):
        run(Job(0), Job(1, "bug"))
    assert not workers_of(os.getpid())


def test_tasks_are_made_when_they_are_needed():
    """A hundred thousand shards are not in memory at once."""
    made = 0

    def jobs():
        nonlocal made
        for i in range(6):
            made += 1
            yield Job(i)

    seen = [(number, made) for number, _ in run_in_processes(jobs(), 1, lambda *_: None)]
    assert seen == [(i, i + 1) for i in range(6)]


def test_an_error_in_making_tasks_ends_the_workers():
    def jobs():
        yield Job(0)
        raise RecipeError("no more")

    with pytest.raises(RecipeError, match="no more"):
        list(run_in_processes(jobs(), 2, lambda *_: None))
    assert not workers_of(os.getpid())
