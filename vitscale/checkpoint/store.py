"""The folder of a run's checkpoints: saving, finding the newest that verifies, keeping a few."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitscale.checkpoint.format import (
    FileEntry,
    Fragment,
    Index,
    file_problem,
    read_index,
    step_folder,
    write_index,
    write_rank_file,
)
from vitscale.checkpoint.reader import CheckpointReader
from vitscale.durable import write_text
from vitscale.errors import CheckpointError

Gather = Callable[[object], list]
"""Collects one object of every rank, in rank order, on every rank; also a barrier."""


def alone(value: object) -> list:
    """The `Gather` of a world of one."""
    return [value]


class CheckpointStore:
    """Checkpoints under `root`. All ranks call every method together; `gather` connects them.

    A checkpoint is built under a temporary name and renamed when it is whole, so that under its final name there are
    complete ones only; `index.json` verifies them again, on file systems where a rename is not atomic too.
    """

    def __init__(self, root: Path, *, rank: int = 0, gather: Gather = alone) -> None:
        self.root = root
        self.rank = rank
        self.gather = gather

    def steps(self) -> list[int]:
        """Steps of which there is a folder, oldest first; not yet verified."""
        names = (path.name for path in self.root.glob("step-*") if path.is_dir())
        return sorted(int(name[5:]) for name in names if name[5:].isdigit())

    def save(self, index: Index, fragments: list[Fragment]) -> Path:
        """Write one checkpoint; every rank gives the fragments that it owns.

        Raises `CheckpointError` on every rank when any rank could not write; older checkpoints are untouched.
        """
        final = self.root / step_folder(index.step)
        building = self.root / f".building-{final.name}"
        self._together(lambda: self._prepare(building))
        entries = self._together(lambda: write_rank_file(building, self.rank, fragments))
        files = [entry for entry in entries if isinstance(entry, FileEntry)]
        self._together(lambda: self._commit(building, final, replace(index, files=files)))
        return final

    def _prepare(self, building: Path) -> None:
        if self.rank == 0:
            for left in self.root.glob(".building-*"):  # by a process that was killed while it saved
                shutil.rmtree(left, ignore_errors=True)
            building.mkdir(parents=True)

    def _commit(self, building: Path, final: Path, index: Index) -> None:
        if self.rank == 0:
            write_index(building, index)
            self._discard(final)
            building.rename(final)
            write_text(self.root / "latest", final.name + "\n")  # also makes the rename survive a power cut
            for step in self.steps():
                if step > index.step:  # unusable, or this run would not have come from before them
                    folder = self.root / step_folder(step)
                    aside = folder.with_name(f".unusable-{folder.name}")
                    shutil.rmtree(aside, ignore_errors=True)
                    folder.rename(aside)

    def _together(self, work: Callable[[], object]) -> list:
        """Run `work` on every rank; a failure on any of them is an error on all of them, and never a hang."""
        try:
            outcome: object = work()
        except Exception as error:
            outcome = _Failure(f"rank {self.rank}: {type(error).__name__}: {error}")
        outcomes = self.gather(outcome)
        failures = [str(outcome) for outcome in outcomes if isinstance(outcome, _Failure)]
        if failures:
            raise CheckpointError(
                f"{self.root}: saving failed; earlier checkpoints are untouched. " + "; ".join(failures)
            ).on_all_ranks()
        return outcomes

    def newest(self, report: Callable[[str], None]) -> CheckpointReader | None:
        """The newest checkpoint of which every byte verifies; None where the folder holds none at all.

        Each rank hashes its share of the files. A damaged checkpoint is passed over and `report`ed.

        Raises `CheckpointError` where there are checkpoints and none can be read: a run is never started over silently.
        """
        problems: list[str] = []
        steps = self.gather(self.steps())[0]  # one rank's view, so that a slow file system cannot split the ranks
        for step in reversed(steps):
            folder = self.root / step_folder(step)
            found = self._verify(folder)
            if not found:
                if problems:
                    report(f"falling back to the checkpoint of step {step}")
                return CheckpointReader(folder)
            for problem in found:
                report(f"checkpoint of step {step} is unusable: {problem}")
            problems += found
        if problems:
            raise CheckpointError(
                f"{self.root}: none of the {len(steps)} checkpoints can be read; the newest fails with: {problems[0]}. "
                f"Restore one, or start over in another --run-dir"
            ).on_all_ranks()
        return None

    def open(self, step: int) -> CheckpointReader:
        """The checkpoint of one step, verified. Raises `CheckpointError` where it is missing or damaged."""
        folder = self.root / step_folder(step)
        problems = self._verify(folder)
        if problems:
            raise CheckpointError("; ".join(problems))
        return CheckpointReader(folder)

    def _verify(self, folder: Path) -> list[str]:
        problems: list[str] = []
        ranks = len(self.gather(None))
        try:
            index = read_index(folder)
            own = index.files[self.rank :: ranks]
            problems = [problem for entry in own if (problem := file_problem(folder, entry))]
            if not problems and self.rank == 0:
                CheckpointReader(folder)
        except CheckpointError as error:
            problems = [str(error)]
        merged = [problem for of_rank in self.gather(problems) for problem in of_rank]
        return list(dict.fromkeys(merged))

    def amend(self, step: int, selection: dict[str, Any]) -> None:
        """Replace the state of the selection in the index of a checkpoint. Raises as `save` does."""

        def write() -> None:
            if self.rank == 0:
                folder = self.root / step_folder(step)
                write_index(folder, replace(read_index(folder), selection=selection))

        self._together(write)

    def retain(self, keep: int, best: int | None) -> None:
        """Delete all but the newest `keep` checkpoints and that of step `best`. Raises as `save` does."""

        def delete() -> None:
            if self.rank == 0:
                for step in self.steps()[:-keep]:
                    if step != best:
                        self._discard(self.root / step_folder(step))

        self._together(delete)

    def _discard(self, folder: Path) -> None:
        if folder.exists():
            # Renamed first: a deletion that is cut short must not look like a damaged checkpoint.
            trash = folder.with_name(f".deleting-{folder.name}")
            shutil.rmtree(trash, ignore_errors=True)
            folder.rename(trash)
            shutil.rmtree(trash, ignore_errors=True)


class _Failure(str):
    """What went wrong on one rank, as an outcome that travels to the others."""
