"""Attempt after attempt until a run is done, is told to end, or does not get any further."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from vitscale.errors import EXIT_DONE, PeerLostError, VitscaleError
from vitscale.launch.ends import EXIT_PREEMPTED, EXIT_RETRY, FINAL, End, cause
from vitscale.launch.journal import Journal
from vitscale.launch.rank import RankCommand
from vitscale.launch.supervisor import Supervisor, say
from vitscale.run_directory import DONE_FILE, LAUNCH_FILE, newest_checkpoint_step

_LONGEST_PAUSE_SECONDS = 60.0


class Verdict(NamedTuple):
    """What follows from the ends of all ranks: the launch's exit code, whether to try again instead, and why."""

    code: int
    may_restart: bool
    why: str


class Launch:
    """One run on this machine.

    Args:
        run_dir: of the run; DONE in it says that the run is finished.
        prepare: the ranks of an attempt, counted from 0. Raises `VitscaleError` where there is nothing to start.
        supervisor: starts and watches them.
        max_restarts: how often in a row to restart without a new checkpoint in between.
        stops_early: the ranks are to end with 0 before the run is done.
        first_pause_s: before a restart; doubled for each further one in a row, up to a minute.
    """

    def __init__(
        self,
        run_dir: Path,
        prepare: Callable[[int], Sequence[RankCommand]],
        supervisor: Supervisor,
        *,
        max_restarts: int = 3,
        stops_early: bool = False,
        first_pause_s: float = 1.0,
    ) -> None:
        self._run_dir, self._prepare, self._supervisor = run_dir, prepare, supervisor
        self._max_restarts, self._stops_early, self._first_pause = max_restarts, stops_early, first_pause_s
        self._journal = Journal(run_dir / LAUNCH_FILE)
        self._was_done = self._is_done()

    def run(self) -> int:
        """The exit code of the launch. Raises what `prepare` raises."""
        began = time.monotonic()
        furthest = self._progress()
        in_a_row = 0
        try:
            while True:
                verdict = self._attempt()
                if self._progress() > furthest:
                    furthest, in_a_row = self._progress(), 0
                if not verdict.may_restart:
                    break
                if in_a_row >= self._max_restarts:
                    say(f"not restarted: the last {in_a_row} restart(s) brought no new checkpoint")
                    break
                in_a_row += 1
                self._pause(verdict, in_a_row)
        except VitscaleError as error:
            self._journal.write("finished", exit_code=error.exit_code, cause=str(error))
            raise
        self._journal.write("finished", exit_code=verdict.code, cause=verdict.why, step=self._supervisor.highest_step)
        seconds, attempts = time.monotonic() - began, self._journal.attempt
        say(f"exit code {verdict.code} after {seconds:,.0f} s and {attempts} attempt(s): {verdict.why}")
        return verdict.code

    def _attempt(self) -> Verdict:
        ranks = self._prepare(self._journal.attempt)
        if self._supervisor.told is not None:
            return Verdict(EXIT_PREEMPTED, False, f"told to end by {self._supervisor.told.name} while no rank ran")
        self._journal.attempt += 1
        self._journal.write("started", world_size=len(ranks), checkpoint=newest_checkpoint_step(self._run_dir))
        try:
            ends = self._supervisor.run(ranks)
        except OSError as error:
            raise PeerLostError(f"a rank cannot be started: {error}") from None
        for end in ends:
            self._journal.write(
                "rank ended",
                world_size=len(ranks),
                step=end.step,
                rank=end.rank,
                pid=end.pid,
                returncode=end.returncode,
                what=end.describe(),
            )
        return self._judge(ends)

    def _judge(self, ends: Sequence[End]) -> Verdict:
        told = self._supervisor.told
        culprit = cause(ends)
        if self._is_done() and not (self._was_done and culprit):
            if culprit:
                say(f"the run is done all the same: {self._run_dir / DONE_FILE} was written before")
            return Verdict(EXIT_DONE, False, "done")
        if self._supervisor.unkillable:
            return Verdict(EXIT_RETRY, False, "a rank does not die of SIGKILL")
        if culprit is None:
            if ends and all(end.is_done for end in ends):
                if self._stops_early:
                    return Verdict(EXIT_DONE, False, "stopped early, as asked")
                say(f"all ranks ended with exit code 0, but there is no {self._run_dir / DONE_FILE}")
                return Verdict(EXIT_RETRY, told is None, "all ranks ended with 0 before the run was done")
            return Verdict(EXIT_PREEMPTED, False, f"told to end by {told.name}" if told else "told to end")
        may_restart = culprit.code not in FINAL and told is None
        return Verdict(culprit.code, may_restart, culprit.describe())

    def _pause(self, verdict: Verdict, in_a_row: int) -> None:
        pause = min(_LONGEST_PAUSE_SECONDS, self._first_pause * 2 ** min(in_a_row - 1, 10))
        say(
            f"restart in {pause:g} s, number {in_a_row} of at most {self._max_restarts} without a new checkpoint. "
            f"Cause: {verdict.why}"
        )
        self._journal.write("restart", step=self._supervisor.highest_step, cause=verdict.why, pause_s=pause)
        self._supervisor.wait(pause)

    def _is_done(self) -> bool:
        return (self._run_dir / DONE_FILE).exists()

    def _progress(self) -> tuple[int, int]:
        """How far the run has come for good. Checkpoints elsewhere cannot be seen: there the steps taken have to do."""
        saved = newest_checkpoint_step(self._run_dir)
        return saved, 0 if saved else self._supervisor.highest_step
